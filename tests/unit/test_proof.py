"""The proof of the instrument: its fast twins equal the instrument, its world scatters as it says, a reduced run holds."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import optimize
from scipy import stats as scipy_stats

from coordinator.compare import cli
from coordinator.compare.proof import cells
from coordinator.compare.proof.cells import Share, experiments, true_verdicts
from coordinator.compare.proof.knees import falling_fit, knees
from coordinator.compare.proof.model import Design, Plant, World, simulate
from coordinator.compare.proof.record import Proof, criteria, prove
from coordinator.compare.proof.table import show
from coordinator.compare.stats import knee
from coordinator.compare.verdict import Verdict

STILL = World(seed_spread=0, seed_arm_spread=0, drift=0, wave=0, search_error=0)


@pytest.fixture(scope="module")
def proof() -> Proof:
    return prove(40, seed=7)


def test_the_fast_knees_are_the_instruments() -> None:
    generator = np.random.default_rng(4)
    rates = np.sort(generator.uniform(0.5, 2.0, (500, 5)), axis=1)
    attained = np.clip(1.1 - 0.25 * rates + 0.15 * generator.standard_normal((500, 5)), 0, 1)
    fast = knees(rates, attained, requests=50)
    bracketed = 0
    for one, curve, found in zip(rates.tolist(), attained.tolist(), fast.tolist(), strict=True):
        slow = knee(one, curve, requests=50).rate_per_s
        assert math.isnan(found) if slow is None else found == pytest.approx(slow)
        bracketed += slow is not None
    assert bracketed > 100


def test_the_fast_fit_is_scipys() -> None:
    values = np.random.default_rng(5).random((200, 6))
    for curve, fitted in zip(values, falling_fit(values), strict=True):
        assert fitted == pytest.approx(optimize.isotonic_regression(curve, increasing=False).x)


class TestWorld:
    DESIGN = Design(name="d", seeds=2, requests=1000, rates=3)

    def test_attainment_scatters_several_times_more_than_independent_requests(self) -> None:
        """At the knee, over experiments: 5 times the binomial deviation."""
        batch = simulate(self.DESIGN, Plant(), STILL, 4000, np.random.default_rng(1))
        at_knee = batch.colocated[:, 0, :, 0][:, 1]
        expected = math.sqrt(0.9 * 0.1 / 1000) * STILL.inflation
        assert float(batch.rates[0, 1]) == pytest.approx(1.0, abs=0.01)
        assert at_knee.std() == pytest.approx(expected, rel=0.15)

    def test_probes_of_a_seed_scatter_together(self) -> None:
        batch = simulate(self.DESIGN, Plant(), STILL, 4000, np.random.default_rng(2))
        first, second, other = batch.colocated[:, 0, 1, 0], batch.split[:, 0, 1, 0], batch.colocated[:, 1, 1, 0]
        assert np.corrcoef(first, second)[0, 1] == pytest.approx(STILL.common, abs=0.08)
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.05

    @pytest.mark.parametrize("ratio", [1.0, 1.1, 1 / 1.3])
    def test_without_scatter_the_truth_is_read_off(self, ratio: float) -> None:
        quiet = World(inflation=1.0, seed_spread=0, seed_arm_spread=0, drift=0, wave=0, search_error=0)
        design = Design(name="d", seeds=3, requests=1_000_000)
        batch = simulate(design, Plant(ratio=ratio), quiet, 3, np.random.default_rng(3))
        for one in experiments(batch, design.requests):
            assert one.differences == pytest.approx([math.log(ratio)] * 3, abs=0.005)
            assert one.floor == pytest.approx([0.0] * 3, abs=0.005)

    def test_a_steady_drift_cancels(self) -> None:
        drifting = World(inflation=1.0, seed_spread=0, seed_arm_spread=0, drift=0.5, wave=0, search_error=0, steepness_split=9.0)
        design = Design(name="d", seeds=8, requests=1_000_000)
        batch = simulate(design, Plant(), drifting, 40, np.random.default_rng(4))
        means = [float(np.mean(one.differences)) for one in experiments(batch, design.requests) if len(one.differences) == 8]
        assert len(means) > 10
        assert max(abs(mean) for mean in means) < 0.004

    def test_second_probes_gain_what_is_planted(self) -> None:
        batch = simulate(cells.STANDARD, Plant(second_probe_gain=1.2), World(), 200, np.random.default_rng(5))
        gains = [gain for one in experiments(batch, cells.STANDARD.requests) for gain in one.gains]
        assert float(np.mean(gains)) == pytest.approx(math.log(1.2), abs=0.02)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (1.0, Verdict.EQUIVALENT),
        (1 / 1.03, Verdict.EQUIVALENT),
        (1.05, None),
        (1 / 1.05, None),
        (1.1, Verdict.SPLIT),
        (0.9, Verdict.COLOCATE),
    ],
)
def test_what_is_true(ratio: float, verdict: Verdict | None) -> None:
    assert true_verdicts(math.log(ratio)) is verdict


def test_a_share_has_the_exact_interval() -> None:
    low, high = Share(count=1900, of=2000).interval
    assert scipy_stats.binom.sf(1899, 2000, low) == pytest.approx(0.005, rel=1e-3)
    assert scipy_stats.binom.cdf(1900, 2000, high) == pytest.approx(0.005, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(120)
class TestReducedRun:
    def test_every_criterion_holds(self, proof: Proof) -> None:
        assert [text for text, held in criteria(proof) if not held] == []

    def test_every_truth_and_every_fault_is_there(self, proof: Proof) -> None:
        assert len(proof.cells) == 2 * len(cells.RATIOS)
        assert len(proof.planted) == 6
        for cell in proof.cells:
            assert sum(share.count for share in cell.verdicts.values()) == 40
        assert all(one.example for one in proof.planted)

    def test_a_large_effect_is_seen_and_identical_arms_are_not_told_apart(self, proof: Proof) -> None:
        by_ratio = {cell.ratio: cell for cell in proof.cells if cell.design == cells.STANDARD.name}
        assert by_ratio[1.3].verdicts["split"].value > 0.8
        assert by_ratio[1 / 1.3].verdicts["colocate"].value > 0.8
        assert by_ratio[1.0].verdicts["equivalent"].value > 0.6
        assert by_ratio[1.0].verdicts["split"].count == by_ratio[1.0].verdicts["colocate"].count == 0

    def test_a_criterion_can_fail(self, proof: Proof) -> None:
        missed = proof.planted[0]
        broken = dataclasses.replace(missed, caught=Share(count=20, of=40))
        found = dataclasses.replace(proof, planted=(broken, *proof.planted[1:]))
        assert [text for text, held in criteria(found) if not held] == ["every planted fault is caught and named in at least 95%"]

    def test_a_cell_that_misses_is_run_again_and_then_counts(self, proof: Proof) -> None:
        missed = dataclasses.replace(proof.cells[0], covered=Share(count=30, of=40))
        found = (missed, *proof.cells[1:])
        (again,) = cells.doubtful(found, 20, World(), 1, lambda text: None)
        assert (again.ratio, again.design, again.wrong.of) == (missed.ratio, missed.design, 80)
        kept = dataclasses.replace(proof, cells=found, again=(again,))
        assert all(held for _, held in criteria(kept))
        broken = dataclasses.replace(proof, cells=found, again=(dataclasses.replace(again, covered=Share(count=60, of=80)),))
        assert not all(held for _, held in criteria(broken))

    def test_it_is_json_and_a_table(self, proof: Proof) -> None:
        said = json.loads(json.dumps(proof.as_dict()))
        assert said["kind"] == "proof"
        assert said["cells"][0]["covered"]["of"] == 40
        assert len(said["criteria"]) == 6
        console = Console(width=200, record=True, file=io.StringIO())
        show(proof, console)
        text = console.export_text()
        for word in ("coverage", "stall every 2 s", "holds: every planted fault"):
            assert word in text

    def test_the_same_seed_gives_the_same_table(self) -> None:
        one, two = (cells.truth_cell(cells.SMALL, 1.1, World(), 20, np.random.default_rng([3, 0])) for _ in range(2))
        assert one == two


def test_the_command_refuses_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["proof", "--experiments", "3"]) == 2
    assert "--experiments" in capsys.readouterr().err


def test_the_committed_record_holds() -> None:
    """The full run in the repository was made by this program and passed."""
    path = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "verdict-proof.json"
    record = json.loads(path.read_text())
    assert record["experiments"] >= 2000
    assert all(record["criteria"].values())
