"""The proof through simulated engines: virtual time that repeats itself, arms that do what is planted, counts that are right."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

from coordinator.compare import cli, faults
from coordinator.compare.load import ArmTarget, Probe, Slo, run_probe
from coordinator.compare.proof import engine_record, engine_truth
from coordinator.compare.proof.engine_arms import Stall, Wander
from coordinator.compare.proof.engine_cells import CELLS, FAULTS, TRUTHS, result, true_verdict
from coordinator.compare.proof.engine_experiment import TURN_S, plan
from coordinator.compare.proof.engine_record import EngineProof, EngineProofError, criteria, prove
from coordinator.compare.proof.engine_table import show
from coordinator.compare.proof.engine_table import truths as table
from coordinator.compare.proof.engine_truth import Truth
from coordinator.compare.proof.engine_world import EngineCell, pool_name, workload, world
from coordinator.compare.proof.virtual_time import Hang, VirtualLoop, run_virtual
from coordinator.compare.verdict import Verdict

COVERED = "in every cell the 99 % interval of the coverage contains 95% (1 of 1 run again, 4 times as large)"

pytestmark = pytest.mark.timeout(120)


def probe(cell: EngineCell, arm: str, chunk: int = 32, rate: float = 3.0, requests: int = 40, seed: int = 1) -> Probe:
    """One probe of one arm in a world of its own."""

    async def work() -> Probe:
        made = world(cell, seed)
        made.client.know(arm, ArmTarget(arm, (pool_name(arm, chunk),)))
        async with made.client:
            return await run_probe(
                made.client, workload(seed, requests), path=arm, rate_per_s=rate, deadline_s=60.0, slo=Slo(1.3, 1.0), now=made.now
            )

    return run_virtual(work(), TURN_S)


class TestVirtualTime:
    def test_a_polled_moment_comes(self) -> None:
        async def poll() -> float:
            loop = asyncio.get_running_loop()
            begin = loop.time()
            while loop.time() < begin + 1.0:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return loop.time() - begin

        assert run_virtual(poll(), turn_s=0.25) == pytest.approx(1.0)

    def test_waiting_costs_what_was_waited(self) -> None:
        async def wait() -> float:
            loop = asyncio.get_running_loop()
            begin = loop.time()
            await asyncio.sleep(3600)
            assert isinstance(loop, VirtualLoop)
            loop.stand_still(5.0)
            return loop.time() - begin

        assert run_virtual(wait()) == pytest.approx(3605.0)

    def test_nothing_to_wait_for_is_a_hang(self) -> None:
        async def forever() -> None:
            await asyncio.Event().wait()

        with pytest.raises(Hang):
            run_virtual(forever(), turn_s=0.001)

    def test_threads_are_not_needed(self) -> None:
        async def thread() -> int:
            return await asyncio.to_thread(lambda: 7)

        assert run_virtual(thread(), turn_s=0.001) == 7


class TestArms:
    def test_the_same_seed_gives_the_same_probe(self) -> None:
        one, two = (probe(EngineCell(name="c"), "split") for _ in range(2))
        other = probe(EngineCell(name="c"), "split", seed=2)
        assert one == two
        assert [each.e2e_s for each in one.outcomes] != [each.e2e_s for each in other.outcomes]

    @pytest.mark.parametrize("kind", ["colocated", "split"])
    def test_every_request_gets_its_tokens_on_time(self, kind: Any) -> None:
        found = probe(EngineCell(name="c", kind=kind), "split")
        assert [each.failure for each in found.outcomes] == [""] * 40
        assert [each.tokens for each in found.outcomes] == [each.output_tokens for each in workload(1, 40).requests]
        assert not found.void
        assert sum(each.cached_tokens for each in found.outcomes) == 0

    def test_a_faster_arm_is_faster_by_its_speed(self) -> None:
        """Alone with its requests far apart, every duration shrinks alike."""
        slow, fast = (probe(EngineCell(name="c", speed=speed), "split", rate=0.2, requests=8) for speed in (1.0, 2.0))
        ratios = [a.e2e_s / b.e2e_s for a, b in zip(slow.outcomes, fast.outcomes, strict=True) if a.e2e_s and b.e2e_s]
        assert ratios == pytest.approx([2.0] * 8, rel=0.06)

    def test_prefill_and_decode_pay_for_the_link(self) -> None:
        """Unloaded: the second token comes later by the transfer, the others do not."""
        together, apart = (
            probe(EngineCell(name="c", kind=kind), "split", chunk=8192, rate=0.2, requests=8) for kind in ("colocated", "split")
        )
        first = [b.gaps_s[0] - a.gaps_s[0] for a, b in zip(together.outcomes, apart.outcomes, strict=True)]
        assert all(0.005 < each < 0.2 for each in first)

    def test_a_stall_moves_what_it_hits(self) -> None:
        stall = Stall(lasts_s=0.5, every_s=2.0, phase_s=1.0)
        assert stall.end(1.6, 0.1) == pytest.approx(1.7)
        assert stall.end(1.2, 0.1) == pytest.approx(1.6)
        assert stall.end(2.9, 0.2) == pytest.approx(3.6)
        assert stall.end(2.9, 2.0) == pytest.approx(5.9)

    def test_what_wanders_comes_back(self) -> None:
        wander = Wander(0.01, 60.0, "a")
        values = np.array([wander.at(5.0 * n) for n in range(20_000)])
        assert values.std() == pytest.approx(0.01, rel=0.1)
        assert np.corrcoef(values[:-12], values[12:])[0, 1] == pytest.approx(math.exp(-1), abs=0.06)


class TestPlanted:
    def test_losses_fail_requests_of_one_arm(self) -> None:
        cell = EngineCell(name="c", losses=0.2)
        assert sum(bool(each.failure) for each in probe(cell, "split", rate=4.0).outcomes) > 2
        assert not any(each.failure for each in probe(cell, "colocated", rate=4.0).outcomes)

    def test_a_client_that_stands_still_voids_its_probe(self) -> None:
        assert "fell behind" in probe(EngineCell(name="c", pause_s=0.3), "split").void

    def test_every_cell_has_its_place(self) -> None:
        assert len(CELLS) == len(TRUTHS) + len(FAULTS)
        assert {cell.fault for cell in FAULTS} == {
            faults.MISTUNED, faults.STALL, faults.LOSSY, faults.LATE_CLIENT, faults.CARRY_OVER,
        }  # fmt: skip
        assert not any(cell.fault for cell in TRUTHS)
        for cell in CELLS.values():
            assert tuple(plan(cell, 1).arms) == ("colocated", "split")


def test_a_cell_of_two_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole comparisons by the runner, in processes; a second call has nothing left to do; the record and the table hold it."""
    monkeypatch.setattr(engine_record, "SEEDS", 2)
    path = tmp_path / "proof.json"
    found = prove(2, 7, names=["stall every 2 s"], path=path, told=lambda text, share: None)
    again = prove(2, 7, names=["stall every 2 s"], path=path, told=lambda text, share: None)
    assert again.rows == json.loads(json.dumps(found.rows))
    assert again.truths == found.truths
    assert all(len(row["floor"]) >= 2 for row in found.rows["stall every 2 s"])
    assert found.rows["stall every 2 s"][0]["rates_per_s"] != found.rows["stall every 2 s"][1]["rates_per_s"]
    (cell,) = found.results()
    assert cell.caught is not None
    assert cell.caught.count == 2
    assert "split stands still for about" in cell.example
    with pytest.raises(EngineProofError, match="2 experiments a cell, seed 7"):
        prove(2, 8, path=path, told=lambda text, share: None)
    console = Console(width=200, record=True, file=io.StringIO())
    show(found, console)
    text = console.export_text()
    assert "2 of 2" in text
    assert "not run yet: identical" in text


class TestCounts:
    ROW: ClassVar[dict[str, Any]] = {
        "verdict": "equivalent",
        "without": "equivalent",
        "reason": "",
        "low": 0.98,
        "high": 1.02,
        "faults": [],
        "chosen": ["chunk 32", "chunk 32"],
    }

    def test_rows_are_counted(self) -> None:
        wrong = {**self.ROW, "verdict": "split", "low": 1.06, "high": 1.2, "faults": [{"kind": "stall", "text": "t"}]}
        found = result(TRUTHS[0], [self.ROW, self.ROW, wrong], {"chunk 32": Truth(1.0, 0.999, 1.001, 30, 1.0)})
        assert found.covered is not None
        assert (found.covered.count, found.wrong.count, found.verdicts["split"].count) == (2, 1, 1)
        assert found.alarms is not None
        assert found.alarms.count == 1
        assert found.right is not None
        assert found.right.count == 2

    def test_an_experiment_is_about_the_candidate_that_it_chose(self) -> None:
        other = {**self.ROW, "chosen": ["chunk 32", "chunk 8192"]}
        truths = {"chunk 32": Truth(1.0, 0.999, 1.001, 30, 1.0), "chunk 8192": Truth(1.1, 1.09, 1.11, 30, 1.1)}
        found = result(TRUTHS[-1], [self.ROW, other, {**self.ROW, "chosen": ["chunk 32", "chunk 12"]}], truths)
        assert found.covered is not None
        assert (found.covered.count, found.covered.of) == (1, 3)
        assert found.right is None, "one is equivalent, the other split"
        console = Console(width=240, record=True, file=io.StringIO())
        console.print(table([found], 3))
        assert "chunk 8192: 1.100 (1.090 to 1.110, error 0.0%)" in console.export_text()

    @pytest.mark.parametrize(
        ("truth", "nominal", "real"),
        [
            (Truth(1.0, 0.99, 1.01, 30, 1.0), 1.0, Verdict.EQUIVALENT),
            (Truth(1.052, 1.051, 1.053, 30, 1.0), 1.05, None),
            (Truth(1.06, 1.04, 1.08, 30, 1.0), None, None),
            (Truth(1.1, 1.09, 1.11, 30, 1.0), 1.1, Verdict.SPLIT),
            (Truth(0.9, 0.89, 0.91, 30, 1.0), None, Verdict.COLOCATE),
        ],
    )
    def test_what_is_true(self, truth: Truth, nominal: float | None, real: Verdict | None) -> None:
        assert true_verdict(truth, nominal) is real

    def test_a_missed_fault_fails_the_proof(self) -> None:
        row = {**self.ROW, "faults": [{"kind": FAULTS[0].fault, "text": "t"}]}
        proof = EngineProof(seed=1, experiments=20, rows={FAULTS[0].name: [row] * 18 + [self.ROW] * 2})
        assert [text for text, held in criteria(proof) if not held] == ["every planted fault is caught and named in at least 95%"]


class TestTruth:
    def test_what_is_not_known_of_it_widens_an_interval_as_independent_errors_do(self) -> None:
        known, vague = Truth(1.05, 1.05, 1.05, 400, 1.05), Truth(1.05, 1.0, 1.1, 30, 1.05, error=0.03)
        assert known.within(1.0, 1.06)
        assert not known.within(0.96, 1.04)
        assert vague.within(0.96, 1.04)
        # sqrt(0.04^2 + (1.96 x 0.03)^2) = 0.071 around a mean of 0.
        assert Truth(1.07, 1.0, 1.1, 30, 1.07, error=0.03).within(math.exp(-0.04), math.exp(0.04))
        assert not Truth(1.08, 1.0, 1.1, 30, 1.08, error=0.03).within(math.exp(-0.04), math.exp(0.04))

    def test_its_error_is_that_of_the_mean_over_workloads(self) -> None:
        generator = np.random.default_rng(2)
        rates = np.array(engine_truth.RATES)
        ttft = rates[None, :, None] / np.array([3.1, 3.5, 3.9, 4.2])[:, None, None]
        times = np.stack(
            [ttft * np.exp(0.2 * generator.standard_normal((4, len(rates), 70))), np.full((4, 10, 70), 0.05)], axis=-1
        )
        found = engine_truth.truth(times, times[::-1], 1.0)
        logs = [
            math.log((engine_truth.goodput(a[None]) or 0) / (engine_truth.goodput(b[None]) or 0))
            for a, b in zip(times[::-1], times, strict=True)
        ]
        assert found.error == pytest.approx(np.std(logs, ddof=1) / 2)


class TestAgain:
    MISSED: ClassVar[dict[str, Any]] = {**TestCounts.ROW, "low": 1.2, "high": 1.3}

    def proof(self, **more: Any) -> EngineProof:
        cell = TRUTHS[0].name
        rows = [self.MISSED] * 6 + [TestCounts.ROW] * 14
        return EngineProof(
            seed=1, experiments=20, truths={cell: {"chunk 32": Truth(1.0, 1.0, 1.0, 400, 1.0)}}, rows={cell: rows}, **more
        )

    def test_a_cell_that_misses_has_to_be_run_again_and_that_counts(self) -> None:
        first = self.proof()
        assert first.doubtful == [TRUTHS[0].name]
        assert first.missing[-1] == "identical, again"
        assert not dict(criteria(first))[COVERED]
        part = self.proof(again={TRUTHS[0].name: [TestCounts.ROW] * 79})
        assert part.missing[-1] == "identical, again"
        assert not dict(criteria(part))[COVERED]
        whole = self.proof(again={TRUTHS[0].name: [TestCounts.ROW] * 76 + [self.MISSED] * 4})
        assert "identical, again" not in whole.missing
        assert dict(criteria(whole))[COVERED]
        (found,) = whole.results()
        assert found.covered is not None
        assert (found.covered.count, found.covered.of) == (76, 80)
        assert [each["covered"]["of"] for each in whole.as_dict()["first"]] == [20]

    def test_what_is_wrong_misses_again(self) -> None:
        proof = self.proof(again={TRUTHS[0].name: [TestCounts.ROW] * 60 + [self.MISSED] * 20})
        assert not dict(criteria(proof))[COVERED]

    def test_it_is_run_with_seeds_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []

        def row(name: str, seed: int) -> dict[str, Any]:
            asked.append(seed)
            return self.MISSED if seed < engine_record.AGAIN_FIRST_SEED else TestCounts.ROW

        monkeypatch.setattr(engine_record, "row", row)
        monkeypatch.setattr(engine_record, "_begun", lambda path, experiments, seed: self.proof())
        found = prove(20, 3, names=["x 1.03", "identical"], told=lambda text, share: None)
        assert len(set(asked)) == len(asked)
        assert [len(rows) for rows in found.again.values()] == [80]
        assert [seed for seed in asked if seed >= engine_record.AGAIN_FIRST_SEED] == asked[-80:]


class TestLongRuns:
    def test_speed_scales_rate_and_objective_together(self) -> None:
        """Times that grow with the rate: twice as fast an arm with half the objective would serve twice as much."""
        generator = np.random.default_rng(1)
        rates = np.array(engine_truth.RATES)
        ttft = rates[None, :, None] / 3.5 * np.exp(0.2 * generator.standard_normal((20, len(rates), 70)))
        times = np.stack([ttft, np.full_like(ttft, 0.05)], axis=-1)
        base, fast = engine_truth.goodput(times), engine_truth.goodput(times, 1.1)
        assert base is not None
        assert fast is not None
        assert fast / base == pytest.approx(1.1**2, rel=0.02)
        found = engine_truth.truth(times, times, 1.1)
        assert found.low <= 1.21 <= found.high or found.ratio == pytest.approx(1.21, rel=0.01)


def test_the_committed_record_says_what_its_rows_say() -> None:
    """And the page shows what the record holds."""
    folder = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
    record = json.loads((folder / "verdict-proof-engine.json").read_text())
    truths = {cell: {name: Truth(**one) for name, one in own.items()} for cell, own in record["truths"].items()}
    proof = EngineProof(
        seed=record["seed"],
        experiments=record["experiments"],
        truths=truths,
        rows=record["rows"],
        again=record["again"],
    )
    assert proof.missing == []
    assert dict(criteria(proof)) == record["criteria"]
    assert all(record["criteria"].values())
    assert max(truth.error for own in truths.values() for truth in own.values()) < 0.007
    said = (folder / "verdict-proof.md").read_text().split("## Through simulated engines")[1]
    for cell in record["cells"]:
        (line,) = (line for line in said.splitlines() if line.startswith(f"| {cell['cell']['name']} | "))
        share = cell["covered"] or cell["caught"]
        assert f" {share['count']} of {share['of']} |" in line
        for truth in cell["truths"].values():
            assert f"{truth['ratio']:.3f} ({truth['low']:.3f} to {truth['high']:.3f}, {truth['error']:.1%})" in line


def test_the_command_names_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["proof", "--engine", "--cell", "nonsense"]) == 2
    assert "prefill and decode" in capsys.readouterr().err
    assert cli.main(["proof", "--cell", "identical"]) == 2
