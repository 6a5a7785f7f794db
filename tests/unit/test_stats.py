"""The statistics against known values and against scipy's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from coordinator.compare import stats


def test_t_interval_equals_scipys() -> None:
    values = [0.11, 0.07, 0.15, 0.09, 0.12]
    interval = stats.t_interval(values)
    assert interval is not None
    expected = scipy_stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert interval.mean == pytest.approx(np.mean(values))
    assert interval.half_width == pytest.approx((expected.high - expected.low) / 2)


def test_t_interval_of_a_textbook_sample() -> None:
    """Mean 2, deviation 1, n 3: half-width 4.303 / sqrt(3)."""
    interval = stats.t_interval([1.0, 2.0, 3.0])
    assert interval is not None
    assert interval.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("values", [[], [0.3]])
def test_no_interval_from_fewer_than_two(values: list[float]) -> None:
    assert stats.t_interval(values) is None


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20), st.floats(0.01, 0.5))
def test_two_one_sided_tests_agree_with_the_interval(values: list[float], margin: float) -> None:
    """p < 2.5 % exactly when the 95 % interval lies inside the margin."""
    interval = stats.t_interval(values)
    assert interval is not None
    inside = interval.low > -margin and interval.high < margin
    p = stats.equivalence_p(values, margin)
    if abs(p - 0.025) > 1e-6:
        assert (p < 0.025) is inside


def test_equivalence_p_equals_scipys_one_sided_tests() -> None:
    values = [0.01, -0.02, 0.015, 0.0, 0.02, -0.01]
    low = scipy_stats.ttest_1samp(values, -0.05, alternative="greater").pvalue
    high = scipy_stats.ttest_1samp(values, 0.05, alternative="less").pvalue
    assert stats.equivalence_p(values, 0.05) == pytest.approx(max(low, high))


def test_log_ratios_are_paired() -> None:
    assert stats.log_ratios([2.0, 1.0], [1.0, 2.0]) == pytest.approx([math.log(2), -math.log(2)])


@pytest.mark.parametrize(("first", "second"), [([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_log_ratios_refuse(first: list[float], second: list[float]) -> None:
    with pytest.raises(ValueError, match=r"ratio|pairs"):
        stats.log_ratios(first, second)


def test_percentile_is_an_observed_value() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert stats.percentile(values, 0.5) == 3.0
    assert stats.percentile(values, 0.9) == 5.0
    assert stats.percentile(list(range(1, 101)), 0.99) == 99
    with pytest.raises(ValueError, match="percentile"):
        stats.percentile([], 0.5)


def between(low: float, high: float, at_low: float, at_high: float, level: float = 0.9) -> float:
    """Where a line in normal quantiles over log rate crosses the level."""
    first, second, wanted = scipy_stats.norm.ppf([at_low, at_high, level])
    return math.exp(np.interp(wanted, [second, first], [math.log(high), math.log(low)]))


def test_knee_is_where_the_line_crosses() -> None:
    found = stats.knee([1.0, 2.0, 3.0], [1.0, 0.95, 0.75])
    assert found.rate_per_s == pytest.approx(between(2.0, 3.0, 0.95, 0.75))
    assert found.why == ""


@pytest.mark.parametrize("steepness", [5.0, 7.0, 9.0])
@pytest.mark.parametrize("steps", [3, 5, 9])
def test_knee_of_a_bent_curve_is_nearer_the_truth_than_a_straight_line(steps: int, steepness: float) -> None:
    """exp(-rate^s ln(1/0.9)) has its knee at 1 for every s."""
    rates = np.geomspace(0.7, 1.6, steps)
    attained = np.exp(math.log(0.9) * rates**steepness)
    found = stats.knee(rates.tolist(), attained.tolist(), requests=2000).rate_per_s
    assert found is not None
    straight = float(np.interp(-0.9, -attained, rates))
    assert abs(found - 1) < 0.4 * abs(straight - 1)
    assert found == pytest.approx(1.0, abs=0.02)


def test_a_point_is_no_surer_than_half_a_request() -> None:
    few, many = (stats.knee([1.0, 2.0], [1.0, 0.5], requests=count).rate_per_s for count in (20, 2000))
    assert few == pytest.approx(between(1.0, 2.0, 1 - 0.025, 0.5))
    assert many == pytest.approx(between(1.0, 2.0, 1 - 0.00025, 0.5))
    assert stats.knee([1.0, 2.0], [1.0, 0.5], requests=2).rate_per_s == 1.0


def test_knee_of_a_curve_that_rises_is_taken_from_the_monotone_fit() -> None:
    """0.8 then 1.0 is fitted as 0.9, 0.9: the crossing lies after both."""
    found = stats.knee([1.0, 2.0, 3.0], [0.8, 1.0, 0.5])
    assert found.rate_per_s == pytest.approx(2.0)


def test_knee_averages_equal_rates() -> None:
    found = stats.knee([1.0, 1.0, 2.0, 2.0], [1.0, 0.96, 0.9, 0.7]).rate_per_s
    assert found == pytest.approx(between(1.0, 2.0, 0.98, 0.8))


@pytest.mark.parametrize(("attainments", "side"), [([0.5, 0.4], "below the lowest"), ([1.0, 0.95], "above the highest")])
def test_knee_outside_the_rates_is_not_invented(attainments: list[float], side: str) -> None:
    found = stats.knee([1.0, 2.0], attainments)
    assert found.rate_per_s is None
    assert side in found.why


def test_seeds_to_settle_is_the_first_count_that_decides() -> None:
    values = [0.10, 0.30, 0.05]
    margin = math.log1p(0.05)
    needed = stats.seeds_to_settle(values, margin, 3)
    assert needed is not None
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))

    def low(count: int) -> float:
        return mean - scipy_stats.t.ppf(0.975, count - 1) * spread / math.sqrt(count)

    assert low(needed) > margin
    assert low(needed - 1) <= margin


def test_seeds_to_narrow_is_the_first_count_whose_interval_is_so_narrow() -> None:
    values = [0.1, -0.1, 0.03, -0.02]
    spread = float(np.std(values, ddof=1))
    needed = stats.seeds_to_narrow(values, 0.05, 3)
    assert needed is not None

    def half_width(count: int) -> float:
        return float(scipy_stats.t.ppf(0.975, count - 1)) * spread / math.sqrt(count)

    assert half_width(needed) <= 0.05 < half_width(needed - 1)
    assert stats.seeds_to_narrow(values, 1.0, 3) == len(values)
    assert stats.seeds_to_narrow(values, 1e-6, 3) is None
    assert stats.seeds_to_narrow([0.1], 0.05, 3) is None


def test_seeds_to_settle_knows_no_answer_on_the_margin() -> None:
    margin = 0.1
    assert stats.seeds_to_settle([0.0, 0.2], margin, 3) is None
    assert stats.seeds_to_settle([0.1], margin, 3) is None


def test_bootstrap_equals_scipys_and_repeats() -> None:
    values = [0.02, 0.07, 0.05, 0.11, 0.04, 0.06]
    found = stats.bootstrap_interval(values, seed=3)
    assert found == stats.bootstrap_interval(values, seed=3)
    assert found is not None
    expected = scipy_stats.bootstrap((values,), np.mean, method="BCa", n_resamples=9999, rng=np.random.default_rng(3))
    assert (found.low, found.high) == pytest.approx(
        (expected.confidence_interval.low, expected.confidence_interval.high), abs=0.003
    )
    interval = stats.t_interval(values)
    assert interval is not None
    assert interval.low < found.low < found.mean < found.high < interval.high


@pytest.mark.parametrize("values", [[], [0.1], [0.1, 0.2]])
def test_no_bootstrap_from_fewer_than_three(values: list[float]) -> None:
    assert stats.bootstrap_interval(values) is None


def test_bootstrap_of_equal_values_has_no_width() -> None:
    found = stats.bootstrap_interval([0.5, 0.5, 0.5])
    assert found == stats.Interval(0.5, 0.5, 0.5, 3)


def test_holm_equals_the_published_example() -> None:
    """The four p-values of the usual textbook example, and R's p.adjust(..., "holm") of five others."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.2, 0.001, 0.5, 0.04, 0.9]) == pytest.approx([0.6, 0.005, 1.0, 0.16, 1.0])
    assert stats.holm([]) == []
    with pytest.raises(ValueError, match="p-values"):
        stats.holm([1.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_value_and_bonferroni(values: list[float]) -> None:
    for p, adjusted in zip(values, stats.holm(values), strict=True):
        assert p <= adjusted <= min(1.0, len(values) * p) + 1e-12


@given(st.lists(st.floats(-0.3, 0.3), min_size=2, max_size=12), st.floats(0.01, 0.2))
def test_a_claim_is_significant_exactly_when_the_interval_decides(values: list[float], margin: float) -> None:
    interval = stats.t_interval(values)
    assert interval is not None
    decides = interval.low > margin or interval.high < -margin or (interval.low > -margin and interval.high < margin)
    p = stats.claim_p(values, margin)
    if abs(p - 0.05) > 1e-6:
        assert (p < 0.05) is decides


def test_all_at_one_rate_and_none_at_the_next_bracket_a_knee_and_do_not_measure_it() -> None:
    found = stats.knee([1.0, 2.0], [1.0, 0.0], requests=100)
    assert found.rate_per_s is None
    assert found.why == "between two rates that are too far apart (1/s and 2/s)"
    assert stats.knee([1.0, 2.0], [1.0, 0.02], requests=100).rate_per_s is not None
    assert stats.knee([1.0, 2.0, 3.0], [1.0, 1.0, 0.0], requests=100).why.endswith("(2/s and 3/s)")
