"""Planned looks against published boundaries, and blocks that a drift costs all arms alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from coordinator.compare.blocks import block, schedule
from coordinator.compare.looks import boundaries, confidences, spent


@pytest.mark.parametrize(
    "published",
    [
        (1.9600,),
        (2.9626, 1.9686),
        (3.7103, 2.5114, 1.9930),
        (4.3326, 2.9631, 2.3590, 2.0141),
        (4.8769, 3.3569, 2.6803, 2.2898, 2.0310),
    ],
)
def test_boundaries_of_equal_looks_are_the_published_ones(published: tuple[float, ...]) -> None:
    """Lan and DeMets' O'Brien-Fleming type spending, two-sided 5 %, one to five equal looks."""
    fractions = tuple((k + 1) / len(published) for k in range(len(published)))
    assert boundaries(fractions) == pytest.approx(published, abs=2e-4)


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_spending_rises_to_the_whole(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert 0 <= spent(low) <= spent(high) <= spent(1.0) == pytest.approx(0.05)


def test_all_looks_together_err_as_planned() -> None:
    """Random walks without a drift cross the boundaries in 5 % of 200,000 cases."""
    fractions = (3 / 8, 5 / 8, 1.0)
    limits = np.array(boundaries(fractions))
    steps = np.sqrt(np.diff(np.array((0.0, *fractions))))
    walk = np.cumsum(np.random.default_rng(1).standard_normal((200_000, 3)) * steps, axis=1) / np.sqrt(fractions)
    assert np.mean((np.abs(walk) > limits).any(axis=1)) == pytest.approx(0.05, abs=0.002)


def test_confidences_belong_to_numbers_of_seeds() -> None:
    found = confidences((3, 5, 8))
    assert list(found) == [3, 5, 8]
    assert found[3] > found[5] > found[8] > 0.95
    assert confidences((6,)) == {6: pytest.approx(0.95)}
    (limit, _) = boundaries((0.5, 1.0))
    assert confidences((4, 8))[4] == pytest.approx(1 - 2 * scipy_stats.norm.sf(limit))


@pytest.mark.parametrize("looks", [(), (1, 3), (5, 5), (8, 3)])
def test_looks_that_are_no_plan(looks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="planned looks"):
        confidences(looks)


@pytest.mark.parametrize("fractions", [(), (0.5,), (0.6, 0.5, 1.0), (0.0, 1.0)])
def test_shares_that_do_not_rise_to_one(fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares of seeds"):
        boundaries(fractions)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_spending_outside_the_plan(fraction: float) -> None:
    with pytest.raises(ValueError, match="share of seeds"):
        spent(fraction)


class TestBlocks:
    def test_two_arms_are_abba(self) -> None:
        assert block(("a", "b")) == (("a", 0), ("b", 0), ("b", 1), ("a", 1))
        assert block(("a", "b"), 1) == (("b", 0), ("a", 0), ("a", 1), ("b", 1))

    @given(st.integers(2, 6), st.integers(0, 20))
    def test_a_steady_drift_costs_every_arm_the_same(self, count: int, first: int) -> None:
        arms = [str(i) for i in range(count)]
        cost = dict.fromkeys(arms, 0)
        for place, (arm, _) in enumerate(block(arms, first)):
            cost[arm] += place
        assert len(set(cost.values())) == 1

    def test_every_arm_runs_twice_per_seed_and_rate_and_seeds_stay_whole(self) -> None:
        made = schedule(("a", "b", "c"), (7, 8), (1.0, 2.0))
        assert [turn.seed for turn in made] == [7] * 12 + [8] * 12
        for _, turns in itertools.groupby(made, key=lambda turn: (turn.seed, turn.rate_per_s)):
            assert sorted((turn.arm, turn.half) for turn in turns) == [(arm, half) for arm in "abc" for half in (0, 1)]
        assert {made[0].arm, made[12].arm} == {"a", "b"}

    @pytest.mark.parametrize("arms", [(), ("a",), ("a", "a")])
    def test_what_is_no_comparison(self, arms: tuple[str, ...]) -> None:
        with pytest.raises(ValueError, match="two arms"):
            block(arms)

    @pytest.mark.parametrize(("seeds", "rates"), [((), (1.0,)), ((1,), ()), ((1,), (0.0,))])
    def test_what_is_no_schedule(self, seeds: tuple[int, ...], rates: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="seeds and positive rates"):
            schedule(("a", "b"), seeds, rates)
