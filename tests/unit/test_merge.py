"""Records of one experiment add up; records of two do not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.compare import cli
from coordinator.compare.faults import CARRY_OVER, Fault
from coordinator.compare.load import Slo
from coordinator.compare.merge import MergeError, merge
from coordinator.compare.read import load, read
from coordinator.compare.record import Record, write
from coordinator.compare.verdict import Verdict
from tests.support.records import VOID, comparison


def run(seeds: tuple[int, ...], ratio: float = 1.3, **changes: Any) -> Record:
    """One run's record: its seeds' knees with this ratio, a little apart, and probes that bear those seeds."""
    knees = []
    for seed in seeds:
        own = 2.0 * (1 + 0.01 * (seed % 3))
        knees.append(
            {
                "seed": seed,
                "split": {"rate_per_s": own * ratio, "why": ""},
                "colocated": {"rate_per_s": own, "why": ""},
                "colocated_first": {"rate_per_s": own * (1 + 0.002 * (seed % 2)), "why": ""},
                "colocated_second": {"rate_per_s": own * (1 + 0.002 * ((seed + 1) % 2)), "why": ""},
            }
        )
    base = comparison()
    probes = [dataclasses.replace(probe, seed=seeds[0]) for probe in base.probes]
    digests = {str(seed): f"digest {seed}" for seed in seeds}
    return dataclasses.replace(base, knees=knees, probes=probes, workload_digests=digests, **changes)


def test_seeds_of_all_runs_are_judged_together() -> None:
    one, two = run((1, 2)), run((3, 4, 5), started_at="2025-12-31T00:00:00+00:00")
    found = merge([one, two])
    assert found.kind == "merged"
    assert found.judgement.seeds == 5
    assert found.judgement.verdict is Verdict.SPLIT
    assert found.judgement.ratio == pytest.approx(1.3)
    assert [entry["seed"] for entry in found.knees] == [1, 2, 3, 4, 5]
    assert set(found.workload_digests) == {"1", "2", "3", "4", "5"}
    assert len(found.probes) == len(one.probes) + len(two.probes)
    assert found.loaded[0].offered == 2 * one.loaded[0].offered
    assert found.started_at == two.started_at
    assert found.wall_s == one.wall_s + two.wall_s
    assert "merged from 2 records" in found.notes[0]


def test_planned_looks_hold_for_the_whole() -> None:
    parts = [run((1, 2)), run((3, 4, 5))]
    early = merge(parts, looks=[5, 10])
    assert early.judgement.confidence > merge(parts).judgement.confidence
    assert merge(parts, looks=[6, 10]).judgement.verdict is Verdict.UNDECIDED
    with pytest.raises(ValueError, match="planned looks"):
        merge(parts, looks=[5, 3])


def test_a_machine_lent_again_is_the_same_machine() -> None:
    first, second = (run((seed,), manifest={"hardware": {"host": host, "cores": 2}}) for seed, host in ((1, "a"), (2, "b")))
    assert merge([first, second]).judgement.seeds == 2
    with pytest.raises(MergeError, match="hardware"):
        merge([first, run((3,), manifest={"hardware": {"host": "a", "cores": 4}})])


def test_a_merged_record_merges_again() -> None:
    assert merge([merge([run((1,)), run((2,))]), run((3,))]).judgement.seeds == 3


def test_a_seed_without_a_goodput_is_kept_and_not_counted() -> None:
    part = run((1, 2, 3))
    part.knees[0]["split"] = {"rate_per_s": None, "why": "above the highest rate tried"}
    found = merge([part, run((4,))])
    assert found.judgement.seeds == 3
    assert len(found.knees) == 4


def test_a_fault_of_one_run_leaves_nothing_to_judge() -> None:
    fault = Fault(CARRY_OVER, "caches carry over", True)
    found = merge([run((1, 2)), run((3, 4), faults=[fault])])
    assert found.judgement.reason == "rig unfit: caches carry over"
    assert found.faults == [fault]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "other"}, "the models differ"),
        ({"slo": Slo(ttft_s=0.6, tpot_s=0.05)}, "the objectives differ.*absolute --slo"),
        ({"source": {"kind": "synthetic"}}, "the workloads differ"),
        ({"manifest": {"versions": {"splitpoint": "1"}}}, "the manifests differ in versions"),
    ],
)
def test_other_experiments_are_refused_by_what_differs(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(MergeError, match=why):
        merge([run((1,)), run((2,), **changes)])


def test_a_seed_belongs_to_one_run() -> None:
    with pytest.raises(MergeError, match=r"seed 2 is in two records.*--first-seed"):
        merge([run((1, 2)), run((2, 3))])
    with pytest.raises(MergeError, match="a record at least"):
        merge([])


def test_the_command_merges_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, seeds in (("a", (1, 2)), ("b", (3, 4))):
        paths.append(tmp_path / f"{name}.json")
        write(run(seeds), paths[-1])
    assert load(paths[0]) == run((1, 2))
    out = tmp_path / "all.json"
    assert cli.main(["merge", *map(str, paths), "--out", str(out)]) == 0
    assert "split: splitting serves more" in capsys.readouterr().out
    assert read(out)["judgement"]["seeds"] == 4
    assert json.loads(out.read_text())["kind"] == "merged"
    assert any(probe["void"] == VOID for probe in read(out)["probes"])
    assert cli.main(["merge", str(paths[0]), str(paths[0]), "--out", str(out)]) == 1
    assert "seed 1 is in two" in capsys.readouterr().err
    assert cli.main(["merge", *map(str, paths), "--out", str(out), "--looks", "soon"]) == 2
    assert cli.main(["merge", *map(str, paths), "--out", str(out), "--looks", "8,4"]) == 2
    assert cli.main(["merge", str(tmp_path / "none.json"), str(paths[0]), "--out", str(out)]) == 1
