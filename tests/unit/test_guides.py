"""The tables and lists of the guides say what the code says."""

from __future__ import annotations

import json
import re

import pytest

from coordinator.compare.plan import ORDER, RATE_STEPS, SEEDS
from coordinator.compare.run import CALIBRATION_REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS
from coordinator.compare.slo import TPOT_MULTIPLE, TTFT_MULTIPLE
from coordinator.compare.verdict import MARGIN, Verdict
from coordinator.gateway.http_errors import error_event
from coordinator.gateway.ledger import STAGES
from coordinator.gateway.openai_fields import UNSUPPORTED
from protos.errors import TABLE, Code, SplitpointError
from protos.splitpoint.v1 import common_pb2
from scripts.cross_figures import DEFINITIONS, METRICS, OURS, TOLERANCE
from scripts.guide import ADMIN, CLIENTS, GRPC, HTTP, MODEL, ROOT, console_commands, localise, programs

GUIDE = CLIENTS.read_text()
RESEARCHERS = (ROOT / "docs" / "guide-researchers.md").read_text()


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table whose first column is headed `head`, code marks removed."""
    table = re.search(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, head
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


class TestClients:
    def test_the_errors_are_those_of_the_table(self) -> None:
        shown = [(reason, status, int(http)) for reason, status, http, _ in rows(GUIDE, "reason")]
        assert shown == [(code.value, status.grpc.name, status.http) for code, status in TABLE.items()]

    def test_what_is_worth_a_second_try_is_what_the_http_front_says(self) -> None:
        """`Retry-After` goes with 429 and 503; a broken stream has no headers left to carry it."""
        for reason, _, http, again in rows(GUIDE, "reason"):
            delayed = int(http) in (429, 503) and reason != Code.STREAM_BROKEN
            assert (again == "after the delay") == delayed, reason
            if TABLE[Code(reason)].client_fault and not delayed:
                assert again == "no", reason

    def test_the_unsupported_fields_are_all_named(self) -> None:
        quoted = "".join(line for line in GUIDE.splitlines() if line.startswith(">"))
        assert sorted(re.findall(r"`(\w+)`", quoted)) == sorted(UNSUPPORTED)

    def test_the_broken_stream_looks_like_that(self) -> None:
        shown = re.search(r"```text\n(event: error\n.*?)```", GUIDE, re.DOTALL)
        assert shown is not None
        error = SplitpointError(Code.STREAM_BROKEN, "worker decode-1 is lost", tokens_sent=7)
        assert shown[1] + "\n" == error_event(error).decode()
        assert json.loads(shown[1].splitlines()[1].removeprefix("data: "))["error"]["tokens_sent"] == 7

    def test_the_programs_have_names_and_the_default_addresses(self) -> None:
        found = programs(GUIDE)
        assert list(found) == ["ask_openai.py", "ask_grpc.py", "ask_by_reflection.py", "careful_grpc.py"]
        for name, program in found.items():
            compile(program, name, "exec")
            assert HTTP in program or GRPC in program
        assert len([line for line in found["ask_grpc.py"].splitlines() if line]) <= 11, "ten lines and a name"

    def test_they_are_pointed_elsewhere_without_a_trace(self) -> None:
        whole = localise(GUIDE, http="h:1", grpc="g:2", model="other")
        for default in (HTTP, GRPC, MODEL):
            assert default not in whole
        assert len(console_commands(whole, "curl")) == 3
        assert len(console_commands(whole, "grpcurl")) == 1

    def test_the_defaults_are_the_gateways(self) -> None:
        from coordinator.gateway.config import GatewaySettings

        settings = GatewaySettings()
        assert f"{settings.http_host}:{settings.http_port}" == HTTP
        assert f"{settings.grpc_host}:{settings.grpc_port}" == GRPC
        assert f"{settings.admin_host}:{settings.admin_port}" == ADMIN
        assert f"Silence of {settings.sse_keepalive_s:g} s" in GUIDE

    @pytest.mark.parametrize("text", ["```python\nprint()\n```\n", "```python\n# a.py\n```\n```python\n# a.py\n```\n"])
    def test_a_program_needs_a_name_of_its_own(self, text: str) -> None:
        with pytest.raises(ValueError, match="names it"):
            programs(text)


class TestResearchers:
    def test_the_stages_are_those_of_the_ledger_in_their_order(self) -> None:
        assert [stage for stage, _ in rows(RESEARCHERS, "stage")] == [*STAGES, "residual"]

    def test_every_field_of_the_ledger_is_explained(self) -> None:
        named = set(re.findall(r"`(\w+)`", RESEARCHERS))
        fields = {field.name.removesuffix("_s") for field in common_pb2.StageLedger.DESCRIPTOR.fields}
        assert fields - named == {"prefill_worker", "decode_worker"}, "'the workers' in words"

    def test_the_verdicts_are_all_there(self) -> None:
        assert [verdict for verdict, _ in rows(RESEARCHERS, "verdict")] == [verdict.value for verdict in Verdict]

    def test_what_other_tools_mean_is_what_the_cross_check_takes_them_to_mean(self) -> None:
        shown = {metric: meanings for metric, *meanings in rows(RESEARCHERS, "metric")}
        tools = (OURS, DEFINITIONS["guidellm"], DEFINITIONS["vllm bench serve"])
        assert shown == {metric: [definitions[metric][0] for definitions in tools] for metric in METRICS}
        assert f"more than {TOLERANCE:.0%}".replace("%", " %") in RESEARCHERS

    def test_the_figures_are_the_programs(self) -> None:
        plain = " ".join(RESEARCHERS.split())
        for said in (
            f"prompts of {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens, outputs of {OUTPUT_TOKENS[0]} to {OUTPUT_TOKENS[1]}",
            f"TTFT at most {TTFT_MULTIPLE:g} times, TPOT at most {TPOT_MULTIPLE:g} times",
            f"seeds at two rates, {RATE_STEPS[0]:g} and {RATE_STEPS[1]:g} times what one-at-a-time serving reaches",
            f"the order {', '.join(ORDER)}:",
            f"a margin fixed beforehand, {MARGIN:.0%}",
        ):
            assert said in plain
        assert (CALIBRATION_REQUESTS, SEEDS) == (4, 3), "in words: four requests per path, three seeds"
