"""`splitpoint advise`: text or data of what the advisor says; and the operators' guide about it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coordinator import admin_call, cli
from coordinator.config import load
from coordinator.pools.advisor_config import AdvisorSettings
from protos.splitpoint.v1 import admin_pb2

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md").read_text()
MOVES = [
    admin_pb2.AdvisorMove(pool="prefill", current_replicas=1, replicas=2),
    admin_pb2.AdvisorMove(pool="decode", current_replicas=3, replicas=2),
]
ADVICE = admin_pb2.AdvisorStatus(
    enabled=True,
    action="propose",
    reason="prefill 1 to 2, decode 3 to 2 by relabel",
    mode="split",
    goodput_per_s=1.0,
    rate_per_s=4.0,
    ttft_goal_s=1.0,
    tpot_goal_s=0.05,
    prompt_tokens=1000,
    output_tokens=100,
    proposal=admin_pb2.AdvisorProposal(
        pools=MOVES, mode="split", how="relabel", goodput_now_per_s=1.0, goodput_then_per_s=3.5, goodput_meanwhile_per_s=0.5,
        cost_s=1.5, cost_requests=0.75, gain_requests=4496.0,
    ),
    pending=MOVES,
    dwell_left_s=120.0,
    costs=[
        admin_pb2.AdvisorCost(how="relabel", cost_s=1.5, measured_changes=2),
        admin_pb2.AdvisorCost(how="restart", cost_s=300),
    ],
    evidence=["prefill: 1 workers, 4 legs/s, 25.0% in time"],
)  # fmt: skip


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> admin_pb2.AdvisorStatus:
    """What the system says; a test may change it."""
    advice = admin_pb2.AdvisorStatus()
    advice.CopyFrom(ADVICE)

    def call(address: str, method: str, request: Any, timeout_s: float = 30.0) -> Any:
        assert method == "GetStatus"
        return admin_pb2.GetStatusResponse(advisor=advice)

    monkeypatch.setattr(admin_call, "call", call)
    return advice


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "300"})


def test_the_proposal_with_gain_cost_and_dwell(advised: admin_pb2.AdvisorStatus) -> None:
    text = run("advise").output
    for said in (
        "propose: prefill 1 to 2, decode 3 to 2 by relabel",
        "split, proposes only",
        "goodput 1 of 4 requests/s (TTFT 1 s, TPOT 0.05 s)",
        "goodput 1 becomes 3.5 requests/s",
        "costs 0.75 requests (0.5/s for 1.5 s), gains 4.5e+03 until the horizon",
        "not judged yet: prefill 1 to 2, decode 3 to 2",
        "dwell: 120 s left",
    ):
        assert said in text, text
    assert "back-off" not in text
    assert "25.0% in time" not in text
    wide = run("advise", "-o", "wide").output
    assert "25.0% in time" in wide
    assert "a relabel takes 1.5 s, the longest of 2 measured" in wide
    assert "a restart takes 300.0 s, as configured" in wide


def test_every_field_as_data(advised: admin_pb2.AdvisorStatus) -> None:
    as_json, as_yaml = (run("advise", "-o", form).output for form in ("json", "yaml"))
    assert yaml.safe_load(as_yaml) == json.loads(as_json)
    assert json.loads(as_json)["proposal"]["pools"][0] == {"pool": "prefill", "current_replicas": 1, "replicas": 2}


def test_one_that_does_not_look_says_how_to_make_it(advised: admin_pb2.AdvisorStatus) -> None:
    advised.Clear()
    done = run("advise")
    assert done.exit_code == 1
    assert "set advisor.enabled = true" in done.output
    advised.enabled = True
    assert "nothing decided yet" in run("advise").output


def test_the_commands_and_the_configuration_of_the_guide_are_understood(advised: admin_pb2.AdvisorStatus, tmp_path: Path) -> None:
    shown = [line for line in GUIDE.splitlines() if line.startswith("splitpoint advise")]
    assert len(shown) >= 2
    for line in shown:
        done = run(*shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, (line, done.output)
    (block,) = re.findall(r"```toml\n(\[advisor\].*?)```", GUIDE, re.DOTALL)
    file = tmp_path / "splitpoint.toml"
    file.write_text(block)
    assert load(file, environment={}).advisor.enabled
    (rows,) = re.findall(r"^\| `\[advisor\]` field .*\n\|[-|]+\|\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    defaults = AdvisorSettings()
    named = dict(re.findall(r"`(\w+)` \(([\w.]+)\)", rows))
    assert set(named) == set(AdvisorSettings.model_fields) - {"ttft_goal_s", "tpot_goal_s"}
    for name, value in named.items():
        default = getattr(defaults, name)
        assert value == (str(default).lower() if isinstance(default, bool) else f"{default:g}"), name
