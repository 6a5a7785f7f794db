"""The words of other load tools, taken from our own time stamps: what agrees, what is a matter of definition, what differs."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from coordinator.compare.load import Outcome
from scripts.cross_figures import DEFINITIONS, METRICS, OURS, cells, figures, spreads
from scripts.crosscheck import SIMULATED, CrossCheckError, Found, Run, as_record, prompts, show
from tests.support.gateway import tiny_tokenizer


def outcome(
    index: int, *, due_s: float, lag_s: float = 0.0, ttft_s: float = 0.1, gap_s: float = 0.02, tokens: int = 5
) -> Outcome:
    return Outcome(
        index=index,
        due_s=due_s,
        lag_s=lag_s,
        wanted_tokens=tokens,
        tokens=tokens,
        ttft_s=ttft_s,
        e2e_s=ttft_s + gap_s * (tokens - 1),
        gaps_s=[gap_s] * (tokens - 1),
    )


RUN = [outcome(i, due_s=1.0 + i, lag_s=0.01) for i in range(4)]


def test_every_tool_defines_every_figure() -> None:
    for definitions in (OURS, *DEFINITIONS.values()):
        assert tuple(definitions) == METRICS
        assert all(words for words, _ in definitions.values())


def test_our_own_figures() -> None:
    found = figures(OURS, RUN)
    assert found == pytest.approx({"TTFT ms": 100, "TPOT ms": 20, "ITL ms": 20, "output tokens/s": 20 / 3.18})


def test_a_tool_that_counts_from_send_sees_no_send_lag() -> None:
    assert figures(DEFINITIONS["vllm bench serve"], RUN)["TTFT ms"] == pytest.approx(90)


def test_guidellms_time_per_token_holds_the_first_token() -> None:
    found = figures(DEFINITIONS["guidellm"], RUN)
    assert found["TPOT ms"] == pytest.approx((180 - 10) / 5)
    assert found["ITL ms"] == pytest.approx(20)


def test_vllms_throughput_counts_the_wait_before_the_first_request() -> None:
    assert figures(DEFINITIONS["vllm bench serve"], RUN)["output tokens/s"] == pytest.approx(20 / 4.18)


def test_a_difference_of_words_is_told_from_one_of_figures() -> None:
    theirs = [
        {"TTFT ms": 91, "TPOT ms": 34.2, "ITL ms": 25, "output tokens/s": 6.3},
        {"TTFT ms": 89, "TPOT ms": 33.8, "ITL ms": 25, "output tokens/s": 6.3},
    ]
    found = {cell.metric: cell for cell in cells("guidellm", theirs, [RUN, RUN])}
    assert {metric: cell.verdict for metric, cell in found.items()} == {
        "TTFT ms": "by definition",
        "TPOT ms": "by definition",
        "ITL ms": "differs",
        "output tokens/s": "agrees",
    }
    assert found["TTFT ms"].difference == pytest.approx(-0.1)
    assert found["TTFT ms"].difference_by_definition == pytest.approx(0)
    assert found["ITL ms"].difference == pytest.approx(0.25)


def test_the_spread_of_a_tools_own_blocks_is_a_share_of_their_mean() -> None:
    blocks = [dict.fromkeys(METRICS, 99.0), dict.fromkeys(METRICS, 101.0)]
    assert spreads(blocks) == pytest.approx(dict.fromkeys(METRICS, 0.02))


def test_prompts_have_the_length_that_was_asked_for_and_are_the_same_every_time() -> None:
    tokenizer = tiny_tokenizer().backend
    wanted = Run(requests=3, prompt_tokens=7, output_tokens=2, rate_per_s=1.0)
    found = prompts(wanted, tokenizer)
    assert [len(ids) for _, ids in found] == [7, 7, 7]
    assert all(tokenizer.encode(text).ids == ids for text, ids in found)
    assert prompts(wanted, tokenizer) == found
    assert len({text for text, _ in found}) == 3


def test_a_tokenizer_without_whole_words_is_refused() -> None:
    """The words of its vocabulary do not come back as themselves."""
    with pytest.raises(CrossCheckError, match="5 tokens"):
        prompts(Run(requests=1, prompt_tokens=5, output_tokens=2, rate_per_s=1.0), Tokenizer(models.BPE({"Ġab": 0, "x": 1}, [])))


def test_the_tables_and_the_record_hold_every_tool_and_figure() -> None:
    theirs = [dict.fromkeys(METRICS, 50.0)] * 2
    found = Found([RUN, RUN], dict.fromkeys(DEFINITIONS, theirs))
    console = Console(record=True, width=200, file=io.StringIO())
    show(found, console)
    text = console.export_text()
    for tool, definitions in DEFINITIONS.items():
        assert tool in text
        assert all(words in text for words, _ in definitions.values())
    record = json.loads(json.dumps(as_record(found, SIMULATED, "simulated", {"guidellm": "0"})))
    assert len(record["cells"]) == len(DEFINITIONS) * len(METRICS)
    assert {cell["verdict"] for cell in record["cells"]} <= {"agrees", "by definition", "differs"}
    assert record["run"]["requests"] == SIMULATED.requests
