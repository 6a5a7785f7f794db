"""The table of path `auto` from a record: ratios over seeds, the better path of the tuning seeds, choices and predictions."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coordinator import cli
from coordinator.compare.auto_table import NoAutoError, has_auto, summarise, table
from coordinator.compare.load import ArmTarget, Slo
from coordinator.compare.record import ArmRecord, Record, write
from coordinator.compare.report import show
from coordinator.routing.auto import AUTO, COLOCATED, SPLIT
from tests.support.records import comparison, probe

RATES = {1: (2.0, 1.0, 2.2), 2: (2.0, 1.1, 2.0), 3: (2.2, 1.0, 2.1), 4: (1.9, 0.0, 2.0)}
"""Of whole, pair and either, by seed; 0: no knee."""
NAMES = ("whole", "pair", "either")


def arm(name: str, path: str, *tried: float) -> ArmRecord:
    return ArmRecord(name=name, path=path, candidate="both", tried={"both": list(tried)})


ARMS = [arm("whole", COLOCATED, 2.0, 2.2), arm("pair", SPLIT, 1.1, 1.2), arm("either", AUTO, 2.1)]


def record(**changes: Any) -> Record:
    """Ten of the twenty requests of one probe were decided on, four of them for the split path, one explored."""
    sent = probe("either", 1, 1.0, 0)
    for number, outcome in enumerate(sent.outcomes):
        assert outcome.ledger is not None
        outcome.ledger |= {"path": SPLIT if number < 4 else COLOCATED, "path_reason": "predicted", "ttft_s": outcome.ttft_s}
        outcome.ledger |= {"predicted_ttft_s": (outcome.ttft_s or 0.0) / 1.25, "predicted_tpot_s": 0.04}
        if number == 5:
            outcome.ledger["path_reason"] = "explored"
        if number >= 10:
            outcome.ledger["path_reason"] = ""
    missed = {"rate_per_s": None, "why": "below the lowest rate tried"}
    knees = [
        {"seed": seed} | {n: {"rate_per_s": r, "why": ""} if r else missed for n, r in zip(NAMES, rates, strict=True)}
        for seed, rates in RATES.items()
    ]
    void = dataclasses.replace(sent, void="the client fell behind")
    given: dict[str, Any] = {"arms": ARMS, "knees": knees, "probes": [sent, void], **changes}
    return comparison(**given)


def test_ratios_are_over_the_seeds_that_both_have() -> None:
    found = summarise(record())
    assert found.better == COLOCATED
    assert found.tuned[COLOCATED] == pytest.approx(2.1)
    over_whole, over_pair = found.ratios[COLOCATED], found.ratios[SPLIT]
    assert over_whole is not None
    assert over_pair is not None
    assert (over_whole.count, over_pair.count) == (4, 3)
    logs = [math.log(2.2 / 2.0), 0.0, math.log(2.1 / 2.2), math.log(2.0 / 1.9)]
    assert over_whole.mean == pytest.approx(sum(logs) / 4)
    assert found.held is False, "above in the mean, but the interval reaches below"


def test_the_target_is_held_by_the_lower_bound_alone() -> None:
    knees = [{"seed": s, **{n: {"rate_per_s": r, "why": ""} for n, r in zip(NAMES, (1, 0.5, 1.01), strict=True)}} for s in (1, 2)]
    assert summarise(record(knees=knees)).held is True
    assert summarise(record(knees=knees[:1])).held is None
    assert "no interval from 1 seeds" in table(record(knees=knees[:1]))


def test_choices_and_predictions_are_of_what_was_decided() -> None:
    choices = summarise(record()).choices
    assert (choices.decided, choices.split, choices.explored) == (10, 4, 1)
    assert choices.errors[SPLIT]["TTFT"] == pytest.approx([1.25] * 4)
    assert choices.errors[COLOCATED]["TPOT"] == pytest.approx([0.5] * 6)


def test_the_table_says_all_of_it() -> None:
    lines = table(record()).splitlines()
    assert lines[0] == "requests/s at TTFT 500 ms, TPOT 50 ms"
    assert lines[2].split() == ["tuning", "1.15", "2.10", "2.10", "1.826", "1.000"]
    assert lines[3].split() == ["1", "1.00", "2.00", "2.20", "2.200", "1.100"]
    assert lines[6].split() == ["4", "-", "1.90", "2.00", "-", "1.053"]
    assert lines[7].startswith("auto/split: ")
    assert lines[7].endswith("3 of 4 seeds")
    assert "better fixed path on tuning seeds: colocated; target > 0.98 of it: missed" in lines
    assert "10 decisions: split 40%, explored 10.0%" in lines
    assert "measured over predicted, split: TTFT 1.25 (p10 1.25, p90 1.25, of 4), TPOT 0.50 (p10 0.50, p90 0.50, of 4)" in lines
    out = io.StringIO()
    show(record(), Console(file=out, width=200))
    assert "10 decisions" in out.getvalue()


def test_a_record_without_one_arm_of_each_path_is_refused_by_name() -> None:
    assert not has_auto(comparison())
    with pytest.raises(NoAutoError, match="the record's are: none"):
        table(comparison())
    with pytest.raises(NoAutoError, match=r"whole \(colocated\), either \(auto\)"):
        table(record(arms=[ARMS[0], ARMS[2]]))
    out = io.StringIO()
    show(record(arms=[ARMS[0], ARMS[2]]), Console(file=out, width=200))
    assert "path auto: the table needs one arm of each path" in out.getvalue()


def test_the_command_reads_a_record(tmp_path: Path) -> None:
    write(record(), tmp_path / "auto.json")
    result = CliRunner().invoke(cli.app, ["bench", "auto", "--of", str(tmp_path / "auto.json")])
    assert result.exit_code == 0, result.output
    assert result.output == table(record()) + "\n"
    write(comparison(), tmp_path / "other.json")
    assert CliRunner().invoke(cli.app, ["bench", "auto", "--of", str(tmp_path / "other.json")]).exit_code == 1


def test_the_objective_of_a_request_grows_with_its_prompt() -> None:
    target = ArmTarget(AUTO, ("p", "d"), slo=Slo(ttft_s=0.2, tpot_s=0.05, ttft_s_per_token=0.001))
    assert dict(target.headers(300)) == {
        "x-splitpoint-path": "auto",
        "x-splitpoint-pools": "p,d",
        "x-splitpoint-slo-ttft-ms": "500",
        "x-splitpoint-slo-tpot-ms": "50",
    }
