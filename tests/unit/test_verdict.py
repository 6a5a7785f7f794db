"""The four verdicts and the gates before them."""

from __future__ import annotations

import math
import random

import pytest

from coordinator.compare.verdict import MIN_SEEDS, Verdict, judge, judge_family

QUIET_FLOOR = [0.004, -0.004, 0.002, -0.002]


def around(ratio: float, *, count: int = 6, spread: float = 0.01) -> list[float]:
    """Log ratios with this mean and a spread of alternating sign."""
    return [math.log(ratio) + spread * (1 if i % 2 else -1) for i in range(count)]


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.3, Verdict.SPLIT), (0.75, Verdict.COLOCATE), (1.0, Verdict.EQUIVALENT), (1.05, Verdict.UNDECIDED)],
)
def test_the_four_verdicts(ratio: float, verdict: Verdict) -> None:
    judgement = judge(around(ratio), QUIET_FLOOR)
    assert judgement.verdict is verdict
    assert judgement.ratio == pytest.approx(ratio)
    assert judgement.low is not None
    assert judgement.high is not None
    assert judgement.low < ratio < judgement.high


def test_a_difference_below_the_margin_is_no_win() -> None:
    """Surely above 1, and as surely inside 5 %: equivalent."""
    judgement = judge(around(1.02, spread=0.001), QUIET_FLOOR)
    assert judgement.low is not None
    assert judgement.low > 1
    assert judgement.verdict is Verdict.EQUIVALENT


@pytest.mark.parametrize("count", range(MIN_SEEDS))
def test_fewer_than_three_seeds_never_decide(count: int) -> None:
    judgement = judge(around(3.0, count=count, spread=0.0001), QUIET_FLOOR)
    assert judgement.verdict is Verdict.UNDECIDED
    assert "never decide" in judgement.reason
    assert judgement.seeds == count
    assert judgement.seeds_needed == MIN_SEEDS
    assert f"{MIN_SEEDS - count} more" in judgement.sentence()


@pytest.mark.parametrize(
    ("floor", "why"),
    [
        ([], "not measured against itself"),
        ([0.01], "not measured against itself"),
        ([0.03, 0.031, 0.029], "differs from itself"),
        ([0.3, -0.3, 0.1], "wider than the margin"),
    ],
)
def test_an_unfit_rig_decides_nothing(floor: list[float], why: str) -> None:
    judgement = judge(around(2.0), floor)
    assert judgement.verdict is Verdict.UNDECIDED
    assert judgement.reason.startswith("rig unfit")
    assert why in judgement.reason


def test_undecided_says_how_many_more_seeds() -> None:
    judgement = judge([0.02, 0.16, 0.12], QUIET_FLOOR)
    assert judgement.verdict is Verdict.UNDECIDED
    assert judgement.seeds_needed is not None
    assert judgement.seeds_needed > 3
    assert f"about {judgement.seeds_needed - 3} more" in judgement.sentence()


def test_seeds_narrow_a_wide_baseline_and_mend_no_rig() -> None:
    wide = judge(around(2.0), [0.1, -0.1, 0.03])
    assert wide.seeds_needed is not None
    assert wide.seeds_needed > 10
    assert wide.sentence().endswith("more would settle it if they look like these, or fewer with more requests a probe")
    assert judge(around(2.0), [0.3, 0.31, 0.32]).seeds_needed is None, "it differs from itself"
    assert judge(around(2.0), [0.1, -0.1, 0.03], faults=["the client fell behind"]).seeds_needed is None


def test_verdict_mirrors_when_the_arms_change_places() -> None:
    source = random.Random(5)
    mirror = {Verdict.SPLIT: Verdict.COLOCATE, Verdict.COLOCATE: Verdict.SPLIT}
    for _ in range(200):
        differences = [source.gauss(source.choice([-0.2, 0.0, 0.2]), 0.02) for _ in range(5)]
        there = judge(differences, QUIET_FLOOR, bootstrap=False).verdict
        back = judge([-d for d in differences], QUIET_FLOOR, bootstrap=False).verdict
        assert back is mirror.get(there, there)


def test_sentence_names_the_verdict_and_its_ground() -> None:
    text = judge(around(1.3), QUIET_FLOOR).sentence()
    assert text.startswith("split: ")
    assert "1.30" in text
    assert "6 seeds" in text
    assert "more would settle" not in text


@pytest.mark.parametrize("margin", [0.0, -0.1, 1.0])
def test_margin_is_checked(margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        judge([], [], margin)


class TestLooks:
    LOOKS = (3, 5, 8)

    def test_an_early_look_needs_more_evidence_than_the_last(self) -> None:
        early = judge(around(1.15, count=5, spread=0.02), QUIET_FLOOR, looks=self.LOOKS)
        alone = judge(around(1.15, count=5, spread=0.02), QUIET_FLOOR)
        assert early.confidence > 0.99 > alone.confidence
        assert early.low is not None
        assert alone.low is not None
        assert early.low < alone.low

    def test_only_planned_numbers_of_seeds_decide(self) -> None:
        between = judge(around(2.0, count=4), QUIET_FLOOR, looks=self.LOOKS)
        assert between.verdict is Verdict.UNDECIDED
        assert "the next is at 5" in between.reason
        assert between.seeds_needed == 5
        after = judge(around(2.0, count=9), QUIET_FLOOR, looks=self.LOOKS)
        assert after.verdict is Verdict.UNDECIDED
        assert "new experiment" in after.reason
        assert "a new experiment of about" in after.sentence()
        assert judge(around(2.0, count=8), QUIET_FLOOR, looks=self.LOOKS).verdict is Verdict.SPLIT

    def test_an_unfit_rig_is_said_first(self) -> None:
        found = judge(around(2.0, count=4), [0.3, -0.3, 0.1], looks=self.LOOKS)
        assert found.reason.startswith("rig unfit")

    def test_what_would_settle_it_is_a_planned_look(self) -> None:
        found = judge([0.02, 0.16, 0.12], QUIET_FLOOR, looks=(3, 50, 100))
        assert found.seeds_needed in (50, 100)


class TestFamily:
    def test_one_workload_needs_no_correction(self) -> None:
        alone = judge(around(1.3), QUIET_FLOOR)
        found = judge_family({"w": (around(1.3), QUIET_FLOOR)})["w"]
        assert found.verdict is alone.verdict
        assert found.p_adjusted == found.p == alone.p

    def test_a_weak_claim_falls_among_many(self) -> None:
        weak = [0.06, 0.12, 0.2, 0.09, 0.15]
        assert judge(weak, QUIET_FLOOR).verdict is Verdict.SPLIT
        undecided = [-0.1, 0.1, -0.2, 0.25, 0.02]
        family = {f"u{i}": (undecided, QUIET_FLOOR) for i in range(4)}
        found = judge_family({"weak": (weak, QUIET_FLOOR), "strong": (around(2.0), QUIET_FLOOR), **family})
        assert found["strong"].verdict is Verdict.SPLIT
        assert found["weak"].verdict is Verdict.UNDECIDED
        assert "Holm" in found["weak"].reason
        assert found["weak"].seeds_needed is None

    def test_workloads_without_seeds_are_not_counted(self) -> None:
        found = judge_family({"none": ([], []), "one": (around(1.3), QUIET_FLOOR)})
        assert found["none"].p_adjusted is None
        assert found["one"].p_adjusted == found["one"].p


def test_the_bootstrap_stands_beside_and_lies_inside() -> None:
    found = judge([0.02, 0.07, 0.05, 0.11, 0.04, 0.06], QUIET_FLOOR)
    assert found.low is not None
    assert found.high is not None
    assert found.bootstrap_low is not None
    assert found.bootstrap_high is not None
    assert found.low < found.bootstrap_low < found.bootstrap_high < found.high
    assert judge([0.02, 0.07, 0.05], QUIET_FLOOR, bootstrap=False).bootstrap_low is None
