"""Several workloads judged together."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.compare.cli import app
from coordinator.compare.family import FamilyError, judge_records
from coordinator.compare.goodput import floor
from coordinator.compare.record import Record, write
from coordinator.compare.verdict import Verdict, judge
from tests.support.records import comparison


def record(name: str, differences: list[float], **changes: Any) -> Record:
    """A record of one workload whose seeds have these log ratios, and a baseline that agrees with itself."""
    knees = [
        {
            "seed": seed,
            "colocated": {"rate_per_s": 10.0, "why": ""},
            "split": {"rate_per_s": 10.0 * math.exp(difference), "why": ""},
            "colocated_first": {"rate_per_s": 10.0, "why": ""},
            "colocated_second": {"rate_per_s": 10.0 + 0.02 * (-1) ** seed, "why": ""},
        }
        for seed, difference in enumerate(differences, 1)
    ]
    alone = judge(differences, floor(knees, "colocated"), bootstrap=False)
    return dataclasses.replace(comparison(), knees=knees, judgement=alone, source={"kind": name}, arms=[], verdicts={}, **changes)


CLEAR = [0.50, 0.51, 0.49, 0.505, 0.495]
MARGINAL = [0.10, 0.30, 0.18, 0.12, 0.25]


def test_a_clear_effect_stays_and_a_marginal_one_becomes_undecided_among_many() -> None:
    records = {"clear": record("a", CLEAR), "marginal": record("b", MARGINAL)}
    records |= {f"more-{n}": record(f"m{n}", MARGINAL) for n in range(3)}
    assert {judgement.judgement.verdict for judgement in records.values()} == {Verdict.SPLIT}
    found = judge_records(records)
    assert found["clear"].verdict is Verdict.SPLIT
    assert found["marginal"].verdict is Verdict.UNDECIDED
    assert "Holm" in found["marginal"].reason
    assert all((j.p_adjusted or 0) >= (j.p or 0) for j in found.values())


def test_what_was_undecided_alone_stays_so_with_its_reason() -> None:
    unfit = record("a", CLEAR)
    unfit.judgement = dataclasses.replace(unfit.judgement, verdict=Verdict.UNDECIDED, reason="rig unfit: it stands still")
    found = judge_records({"a": unfit, "b": record("b", CLEAR)})
    assert (found["a"].verdict, found["a"].reason) == (Verdict.UNDECIDED, "rig unfit: it stands still")
    assert found["b"].verdict is Verdict.SPLIT


def test_what_is_no_family_is_refused() -> None:
    one = record("a", CLEAR)
    with pytest.raises(FamilyError, match="two records"):
        judge_records({"a": one})
    with pytest.raises(FamilyError, match="same workload"):
        judge_records({"a": one, "b": one})
    other = record("b", CLEAR)
    other.judgement = dataclasses.replace(other.judgement, margin=0.1)
    with pytest.raises(FamilyError, match="margins differ: 5%, 10%"):
        judge_records({"a": one, "b": other})


def test_the_command(tmp_path: Path) -> None:
    write(record("a", CLEAR), tmp_path / "a.json")
    write(record("b", CLEAR), tmp_path / "b.json.gz")
    done = CliRunner().invoke(app, ["family", str(tmp_path / "a.json"), str(tmp_path / "b.json.gz"), "--json"])
    assert done.exit_code == 0, done.output
    assert {name: found["verdict"] for name, found in json.loads(done.output).items()} == {"a": "split", "b": "split"}
    shown = CliRunner().invoke(app, ["family", str(tmp_path / "a.json"), str(tmp_path / "b.json.gz")])
    assert "p, adjusted" in shown.output
    refused = CliRunner().invoke(app, ["family", str(tmp_path / "a.json"), str(tmp_path / "none.json")])
    assert refused.exit_code == 1
    assert "none.json" in refused.output
