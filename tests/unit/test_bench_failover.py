"""`splitpoint bench failover`: what a replay with a loss counts, and that the command runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.bench.failover import arms, arrivals, judged, measure, planned_rate, table
from coordinator.bench.failover_groups import Groups, Outcome, Request
from coordinator.bench.failover_spec import FailoverSpec
from coordinator.cli import app
from coordinator.compare.traces import Row, WorkloadError
from coordinator.config import Settings
from coordinator.pools.fleet import rules_of
from coordinator.pools.records import SpareKind

TRACE = Path(__file__).resolve().parents[2] / "deploy" / "workloads" / "traces" / "azure-2023-conv-200.csv"
ROWS = [Row(number * 0.5, 3000 if number % 3 else 9000, 60) for number in range(50)]
SPEC = FailoverSpec(
    groups=2, duration_s=900.0, seeds=(1,), prefill_tokens_per_s=3000.0, decode_tokens_per_s=600.0, ttft_s=10.0
)  # fmt: skip


def test_the_load_rises_to_what_is_planned_and_falls_again() -> None:
    one_per_s, peak_per_s = planned_rate(ROWS, SPEC)
    assert one_per_s == pytest.approx(1 / (sum(r.input_tokens for r in ROWS) / len(ROWS) / 3000 + 60 / 600))
    assert peak_per_s == pytest.approx(2 * 0.7 * one_per_s)
    timed = arrivals(ROWS, SPEC, 1)
    assert [row.arrival_s for row in timed] == sorted(row.arrival_s for row in timed)

    def rate_per_s(begin_s: float) -> float:
        return sum(begin_s <= row.arrival_s < begin_s + 60 for row in timed) / 60

    assert rate_per_s(420.0) == pytest.approx(peak_per_s, rel=0.05)
    assert rate_per_s(0.0) == pytest.approx(0.55 * peak_per_s, rel=0.1)
    assert rate_per_s(840.0) == pytest.approx(0.55 * peak_per_s, rel=0.1)
    assert arrivals(ROWS, SPEC, 2)[0] != timed[0], "another seed begins at another row"


def test_a_trace_without_gaps_is_refused() -> None:
    with pytest.raises(WorkloadError, match="all requests of the trace arrive at once"):
        arrivals([Row(0.0, 10, 1), Row(0.0, 10, 1)], SPEC, 1)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return measure(ROWS, SPEC)


class TestReplay:
    def run(self, record: dict[str, Any], loss: str, arm: int) -> dict[str, Any]:
        name = arms(SPEC)[arm].name
        (found,) = [r for r in record["runs"] if (r["loss"], r["arm"]) == (loss, name)]
        return dict(found)

    def test_the_plan_is_that_of_plan_capacity(self, record: dict[str, Any]) -> None:
        assert (record["plan"]["replicas"], record["plan"]["spares"]) == (2, 1)

    def test_a_warm_spare_is_there_at_once_a_placed_one_when_it_has_loaded(self, record: dict[str, Any]) -> None:
        none, placed, warm, more = (self.run(record, "process", arm) for arm in range(4))
        assert warm["capacity_back_s"] == 0.0
        assert placed["capacity_back_s"] == SPEC.start_s
        assert SPEC.start_s < none["capacity_back_s"] < SPEC.start_s + 10
        assert more["capacity_back_s"] == none["capacity_back_s"]

    def test_a_silent_node_is_given_its_grace_time_first(self, record: dict[str, Any]) -> None:
        none, placed, warm, _ = (self.run(record, "node", arm) for arm in range(4))
        assert 20.0 <= warm["capacity_back_s"] <= 25.0
        assert placed["capacity_back_s"] == warm["capacity_back_s"] + SPEC.start_s
        assert none["capacity_back_s"] is None, "its accelerators are away for longer than the run"

    def test_the_more_stands_by_the_more_is_kept(self, record: dict[str, Any]) -> None:
        for loss in ("process", "node"):
            none, placed, warm, _ = (self.run(record, loss, arm) for arm in range(4))
            # But for those that came just before the loss, a spare takes no part.
            assert none["before"] == pytest.approx(warm["before"], abs=0.01)
            assert none["after"] <= placed["after"] <= warm["after"]
            assert none["after"] < warm["after"]

    def test_a_silent_node_gets_nothing_new_once_a_probe_has_failed(self) -> None:
        """In whatever phase of the probes' round it is lost: just before one, the probe tells; just after it, the heartbeats."""
        rows, last_s = arrivals(ROWS, SPEC, 1), []
        for phase_s in (0.0, 0.1, 1.0, 2.3, 3.5, 4.9, 5.9):
            lost_s = SPEC.duration_s / 2 + phase_s
            outcome = Groups(SPEC, 2, 1, SpareKind.WARM, "node", 1, lost_s=lost_s).run(rows)
            last_s.append(max(r.arrival_s - lost_s for r in outcome.requests if r.attempts > 1 and r.arrival_s >= lost_s))
        # 3 s until its heartbeat is missed, a second at most until that is seen, 2 s for the probe; the keep-alive takes 15.
        assert max(last_s) <= 6.0
        assert max(last_s) > 2.5, "the phases are not all the best one"
        assert min(last_s) < 2.5

    def test_the_seeds_are_phases_of_a_whole_round_of_probes(self, record: dict[str, Any]) -> None:
        rules = rules_of(Settings())
        assert rules.probe_interval_s + rules.heartbeat_interval_s <= SPEC.phase_s
        phases = sorted(SPEC.lost_s(seed) - SPEC.duration_s / 2 for seed in FailoverSpec().seeds)
        gaps = [after - before for before, after in pairwise([*phases, phases[0] + SPEC.phase_s])]
        assert len(phases) == 6
        assert max(gaps) < 0.3 * SPEC.phase_s
        assert {run["lost_s"] for run in record["runs"]} == {SPEC.lost_s(1)}

    def test_who_was_on_the_lost_group_is_retried_and_nobody_fails_with_its_process(self, record: dict[str, Any]) -> None:
        for arm in range(4):
            run = self.run(record, "process", arm)
            assert run["failed"] == 0
            assert run["retried"] > 0

    def test_it_is_shown(self, record: dict[str, Any]) -> None:
        text = table(record)
        assert "2 + 1 spare" in text
        assert f"\n{'':<26}{SPEC.lost_s(1) - 450.0:>8.1f}\n" in text
        for words in (
            "1 of 1",
            "(mean)",
            "a process is lost",
            "a node is lost",
            "2, no spare",
            "2 + 1 placed",
            "2 + 1 warm",
            "3, all serve",
            "not",
        ):
            assert words in text

    def test_the_same_seed_is_the_same_run(self, record: dict[str, Any]) -> None:
        again = Groups(SPEC, 2, 1, SpareKind.WARM, "process", 1).run(arrivals(ROWS, SPEC, 1))
        assert judged(again, SPEC, 2) == {k: v for k, v in self.run(record, "process", 2).items() if k in judged(again, SPEC, 2)}


def test_a_request_counts_as_kept_within_both_objectives_only() -> None:
    def request(first_s: float | None, last_s: float | None, **known: Any) -> Request:
        return Request(440.0, 10, 11, first_s=first_s, last_s=last_s, **known)

    quick, late, slow = request(441.0, 441.5), request(451.0, 451.5), request(441.0, 442.0)
    lost, failed = request(None, None), request(441.0, 441.5, failed=True, attempts=3)
    assert [r.kept(SPEC) for r in (quick, late, slow, lost, failed)] == [True, False, False, False, False]
    after = Request(460.0, 10, 11, attempts=2, first_s=471.0, last_s=471.5)
    found = judged(Outcome([quick, late, slow, failed, after], [(0.0, 2), (450.0, 1), (480.0, 2)], 450.0), SPEC, 2)
    assert (found["before"], found["after"], found["rest"]) == (0.25, 0.0, 1.0)
    assert (found["failed"], found["retried"], found["capacity_back_s"], found["last_late_s"]) == (1, 1, 30.0, 10.0)
    assert not found["holds"]
    assert found["bins"] == [{"from_s": -10.0, "came": 4, "kept": 1}, {"from_s": 10.0, "came": 1, "kept": 0}]
    earlier = judged(Outcome([quick, late, slow, failed, after], [(0.0, 2), (435.0, 1), (480.0, 2)], 435.0), SPEC, 2)
    assert (earlier["before"], earlier["after"], earlier["last_late_s"]) == (1.0, 0.2, 25.0), "by when it was lost"
    assert [bin_["from_s"] for bin_ in earlier["bins"]] == [0.0, 20.0]


def test_the_command_prints_and_writes_its_record(tmp_path: Path) -> None:
    out, drawn = tmp_path / "record.json", tmp_path / "drawn.png"
    options = ["--groups", "1", "--minutes", "12", "--headroom", "0.05", "--seed", "1"]
    ran = CliRunner().invoke(
        app, ["bench", "failover", "--trace", str(TRACE), *options, "--json", str(out), "--plot", str(drawn)]
    )
    assert ran.exit_code == 0, ran.output
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "200 rows of a trace" in ran.output
    assert json.loads(out.read_text())["kind"] == "bench-failover"
    for name, said in (("drawn.doc", "has to end in one of"), ("nowhere/drawn.png", "there is no folder")):
        refused = CliRunner().invoke(app, ["bench", "failover", "--trace", "unread.csv", "--plot", str(tmp_path / name)])
        assert refused.exit_code == 2
        assert said in refused.output, "before the run"
    missing = CliRunner().invoke(app, ["bench", "failover", "--trace", str(tmp_path / "none.csv")])
    assert missing.exit_code == 1
    assert "none.csv" in missing.output
