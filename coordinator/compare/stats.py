"""The statistics of a comparison. Pure. The unit is the seed, never the request."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy import stats as scipy_stats

from coordinator.compare.quantile import percentile as percentile

CONFIDENCE = 0.95
BOOTSTRAP_RESAMPLES = 9999
MAX_SEEDS = 1000
TOO_FAR_APART = "between two rates that are too far apart"
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided t-interval for a mean."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """log(n / d) per pair.

    Raises:
        ValueError: lengths differ or a value is not positive.
    """
    if len(numerators) != len(denominators):
        raise ValueError("pairs need sequences of one length")
    if any(value <= 0 for value in (*numerators, *denominators)):
        raise ValueError("a ratio needs positive values")
    return [math.log(n / d) for n, d in zip(numerators, denominators, strict=True)]


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """None for fewer than two values: one value says nothing about its own spread."""
    count = len(values)
    if count < 2:
        return None
    mean = statistics.fmean(values)
    half = _quantile(count, confidence) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def equivalence_p(values: Sequence[float], margin: float) -> float:
    """The p-value of two one-sided t-tests that the mean lies in (-margin, margin): the larger of the two.

    Equivalent at level a when p < a; that is the same as the (1 - 2a) t-interval lying inside the margin.

    Raises:
        ValueError: fewer than two values, or a margin that is not positive.
    """
    if len(values) < 2 or margin <= 0:
        raise ValueError("two one-sided tests need two values and a positive margin")
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    freedom = len(values) - 1
    above = float(scipy_stats.t.sf((mean + margin) / error, freedom))
    below = float(scipy_stats.t.cdf((mean - margin) / error, freedom))
    return max(above, below)


def bootstrap_interval(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> Interval | None:
    """The bias-corrected and accelerated bootstrap interval of the mean, over seeds; None for fewer than three values.

    It stands beside the t-interval as a check of its shape and decides nothing: over few values it is too narrow.
    """
    if len(values) < 3:
        return None
    mean = statistics.fmean(values)
    if max(values) == min(values):
        return Interval(mean, mean, mean, len(values))
    found = scipy_stats.bootstrap(
        (np.asarray(values),),
        np.mean,
        confidence_level=confidence,
        n_resamples=BOOTSTRAP_RESAMPLES,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(mean, float(found.low), float(found.high), len(values))


def claim_p(values: Sequence[float], margin: float) -> float:
    """The p-value of the strongest of the three claims: above `margin`, below minus it, inside.

    Twice the smallest one-sided p-value, so that it is below 5 % exactly when the 95 % t-interval decides.

    Raises:
        ValueError: as `equivalence_p`.
    """
    inside = equivalence_p(values, margin)
    error = statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    if error == 0:
        return 0.0 if abs(mean) != margin else 1.0
    freedom = len(values) - 1
    above = float(scipy_stats.t.sf((mean - margin) / error, freedom))
    below = float(scipy_stats.t.cdf((mean + margin) / error, freedom))
    return min(1.0, 2 * min(inside, above, below))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: rejecting those below a level keeps the chance of any false claim below it.

    Raises:
        ValueError: a value outside [0, 1].
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise ValueError("p-values lie in [0, 1]")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True, slots=True)
class Knee:
    """Where attainment crosses the level. `rate_per_s` is None when the rates tried do not bracket it; `why` says which way."""

    rate_per_s: float | None
    why: str = ""


def knee(rates_per_s: Sequence[float], attainments: Sequence[float], level: float = 0.9, requests: int = 100) -> Knee:
    """The rate at which a falling fit through the points crosses `level`.

    Attainment can only fall with the rate, so the points are first made monotone (least squares, equal rates averaged). Between
    two rates the crossing is read off a straight line in the normal quantile of the attainment over the logarithm of the rate:
    the curve is bent there, and a line through the attainments themselves is off by more the farther apart the rates are, which
    does not cancel between arms of different slope. `requests` is behind each point, which is no surer than half a request. Where
    all attain at one rate and none at the next, the knee is bracketed and not measured.

    Raises:
        ValueError: no points, lengths differ, or a rate that is not positive.
    """
    if not rates_per_s or len(rates_per_s) != len(attainments) or min(rates_per_s) <= 0:
        raise ValueError("a knee needs positive rates and as many attainments")
    by_rate: dict[float, list[float]] = {}
    for rate, attainment in zip(rates_per_s, attainments, strict=True):
        by_rate.setdefault(rate, []).append(attainment)
    rates = sorted(by_rate)
    means = [statistics.fmean(by_rate[rate]) for rate in rates]
    weights = [float(len(by_rate[rate])) for rate in rates]
    fitted = [float(y) for y in optimize.isotonic_regression(means, weights=weights, increasing=False).x]
    if fitted[0] < level:
        return Knee(None, f"below the lowest rate tried ({rates[0]:.3g}/s)")
    if fitted[-1] >= level:
        return Knee(None, f"above the highest rate tried ({rates[-1]:.3g}/s)")
    after = next(i for i, value in enumerate(fitted) if value < level)
    least = 0.5 / requests
    if fitted[after - 1] > 1 - least and fitted[after] < least:
        # Everything attains at one rate and nothing at the next: a line would put every such knee at one place, whatever it is.
        return Knee(None, f"{TOO_FAR_APART} ({rates[after - 1]:.3g}/s and {rates[after]:.3g}/s)")
    high, low = (_NORMAL.inv_cdf(min(1 - least, max(least, value))) for value in (fitted[after - 1], fitted[after]))
    # Half a request can be more than the level leaves: then the upper point is the crossing.
    share = max(0.0, (high - _NORMAL.inv_cdf(level)) / (high - low))
    return Knee(rates[after - 1] * (rates[after] / rates[after - 1]) ** share)


def seeds_to_settle(values: Sequence[float], margin: float, minimum: int) -> int | None:
    """How many seeds in all would decide if further ones had this mean and spread; None: more than `MAX_SEEDS`, or unknown.

    `margin` bounds |log ratio|. Needs two values.
    """
    if len(values) < 2:
        return None
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    counts = np.arange(max(minimum, len(values)), MAX_SEEDS + 1)
    half = _quantiles()[counts] * spread / np.sqrt(counts)
    decides = (mean - half > margin) | (mean + half < -margin) | ((mean - half > -margin) & (mean + half < margin))
    return int(counts[np.argmax(decides)]) if decides.any() else None


def seeds_to_narrow(values: Sequence[float], half_width: float, minimum: int) -> int | None:
    """How many seeds in all would have an interval that narrow if further ones had this spread; None: more than `MAX_SEEDS`, or
    unknown. Needs two values."""
    if len(values) < 2:
        return None
    counts = np.arange(max(minimum, len(values)), MAX_SEEDS + 1)
    narrow = _quantiles()[counts] * statistics.stdev(values) / np.sqrt(counts) <= half_width
    return int(counts[np.argmax(narrow)]) if narrow.any() else None


@functools.cache
def _quantile(count: int, confidence: float) -> float:
    return float(scipy_stats.t.ppf((1 + confidence) / 2, count - 1))


@functools.cache
def _quantiles() -> npt.NDArray[np.float64]:
    """By number of values, up to `MAX_SEEDS`; there is none below two."""
    counts = np.arange(2, MAX_SEEDS + 1)
    return np.concatenate([[np.nan, np.nan], scipy_stats.t.ppf((1 + CONFIDENCE) / 2, counts - 1)])
