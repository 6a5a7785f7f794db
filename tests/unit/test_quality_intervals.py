"""The quality gate's statistics against scipy, by exact enumeration, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from coordinator.compare.quality.intervals import bootstrap, drop_interval, mcnemar_p, questions_needed, share_interval

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(("right", "asked"), [(0, 10), (3, 10), (10, 10), (96, 96), (50, 96)])
def test_a_share_is_clopper_and_pearsons_by_the_beta_distribution(right: int, asked: int) -> None:
    low = stats.beta.ppf(0.025, right, asked - right + 1) if right else 0.0
    high = stats.beta.ppf(0.975, right + 1, asked - right) if right < asked else 1.0
    assert share_interval(right, asked) == pytest.approx((low, high))


def test_nothing_asked_says_nothing() -> None:
    assert share_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="k"):
        share_interval(3, 2)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (5, 0), (1, 9), (7, 7), (3, 8)])
def test_mcnemar_doubles_the_smaller_tail_of_a_fair_coin(first: int, second: int) -> None:
    total = first + second
    tail = stats.binom.cdf(min(first, second), total, 0.5)
    assert mcnemar_p(first, second) == pytest.approx(min(1.0, 2 * tail))


def test_equal_answers_bound_the_drop_by_their_number() -> None:
    """With no discordant pair Tango's bounds are z^2 / (n + z^2)."""
    square = stats.norm.ppf(0.975) ** 2
    for asked in (10, 73, 96, 1000):
        low, high = drop_interval(0, 0, asked)
        assert high == pytest.approx(square / (asked + square), rel=1e-4)
        assert low == pytest.approx(-high)


@pytest.mark.parametrize(("first", "second", "asked"), [(0, 1, 44), (6, 4, 96), (20, 3, 60), (44, 0, 44), (1, 1, 2)])
def test_a_bound_is_where_the_score_statistic_is_at_its_quantile(first: int, second: int, asked: int) -> None:
    """The restricted likelihood is maximised numerically here, not by the closed form."""
    z = stats.norm.ppf(0.975)
    for drop in drop_interval(first, second, asked):
        assert -1 <= drop <= 1
        if abs(drop) > 1 - 1e-6:
            continue
        grid = np.linspace(max(0.0, -drop), (1 - drop) / 2, 400001)
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = 1 - 2 * grid - drop
            terms = [
                k * np.log(p) if k else 0 * p for k, p in ((first, grid + drop), (second, grid), (asked - first - second, rest))
            ]
        likelihood = np.where((grid + drop >= 0) & (rest >= 0), sum(terms), -np.inf)
        best = grid[int(np.nanargmax(likelihood))]
        variance = asked * (2 * best + drop * (1 - drop))
        assert abs(first - second - asked * drop) / math.sqrt(variance) == pytest.approx(z, rel=2e-3)


def test_swapped_arms_swap_the_bounds() -> None:
    low, high = drop_interval(9, 2, 50)
    assert drop_interval(2, 9, 50) == pytest.approx((-high, -low), abs=1e-6)


@pytest.mark.parametrize(("gain", "drop"), [(0.0, 0.05), (0.02, 0.05), (0.1, 0.05), (0.05, 0.0), (0.0, 0.2)])
def test_it_covers_the_truth_and_rarely_passes_what_is_on_the_limit(gain: float, drop: float) -> None:
    """Every outcome of 60 questions with its probability: no simulation. A score interval keeps its level on average, so a
    point may lie a little below it."""
    asked = 60
    covered = below = 0.0
    for first in range(asked + 1):
        for second in range(asked + 1 - first):
            weight = stats.multinomial.pmf(
                (first, second, asked - first - second), asked, (gain + drop, gain, 1 - 2 * gain - drop)
            )
            if weight < 1e-9:
                continue
            low, high = drop_interval(first, second, asked)
            covered += weight * (low <= drop + 1e-9 <= high + 2e-9)
            below += weight * (high < drop)
    assert covered >= 0.93
    assert below <= 0.05, "an arm that loses exactly what is allowed"


def test_counts_that_cannot_be_are_refused() -> None:
    for counts in ((-1, 0, 5), (3, 3, 5), (0, 0, 0)):
        with pytest.raises(ValueError, match="discordant"):
            drop_interval(*counts)


@pytest.mark.parametrize("allowed", [0.02, 0.05, 0.2])
def test_so_many_equal_answers_settle_it_and_one_less_does_not(allowed: float) -> None:
    needed = questions_needed(allowed)
    assert drop_interval(0, 0, needed)[1] <= allowed < drop_interval(0, 0, needed - 1)[1]


def test_whole_questions_are_drawn() -> None:
    """Ten questions of a hundred equal tokens are ten values: scipy's bootstrap of the ten agrees."""
    values = np.asarray([0.1, 0.4, 0.2, 0.9, 0.3, 0.3, 0.7, 0.5, 0.2, 0.6])

    def mean(drawn: np.ndarray) -> float:
        return float(np.repeat(values[drawn], 100).mean())

    low, high = bootstrap(range(10), mean)
    reference = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=9999, rng=np.random.default_rng(1))
    assert (low, high) == pytest.approx(tuple(reference.confidence_interval), abs=0.02)
    assert bootstrap(range(10), mean) == (low, high), "the same seed, the same interval"


def test_one_question_has_no_interval() -> None:
    assert all(math.isnan(bound) for bound in bootstrap([0], lambda drawn: 1.0))
