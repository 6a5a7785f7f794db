"""The statistics of the quality gate. Pure. The unit is the question: tokens of one answer are no independent sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy import stats as scipy_stats

CONFIDENCE = 0.95
RESAMPLES = 999

Values = npt.NDArray[np.float64]


def share_interval(right: int, asked: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share; (0, 1) where nothing was asked.

    Raises:
        ValueError: not 0 <= right <= asked.
    """
    if asked == 0 == right:
        return 0.0, 1.0
    found = scipy_stats.binomtest(right, asked).proportion_ci(confidence, method="exact")
    return float(found.low), float(found.high)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """The exact p-value that questions which only one of two arms answers right fall to either alike; 1 where there are none.

    Raises:
        ValueError: a count below 0.
    """
    if only_first + only_second == 0 and only_first == 0:
        return 1.0
    return float(scipy_stats.binomtest(only_first, only_first + only_second, 0.5).pvalue)


def drop_interval(only_first: int, only_second: int, asked: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Tango's score interval of the difference of two paired shares, first minus second: what the second arm loses.

    Unlike a normal approximation it keeps a width where the two arms answer every question alike.

    Raises:
        ValueError: counts below 0, or more of them than were asked.
    """
    if min(only_first, only_second) < 0 or only_first + only_second > asked or asked < 1:
        raise ValueError("discordant pairs are between none and all of those asked")
    z = float(scipy_stats.norm.ppf((1 + confidence) / 2))

    def score(drop: float) -> float:
        # Under a true drop d the share of questions that only the second answers right solves 2n q^2 + B q + C = 0.
        b = -only_first - only_second + (2 * asked - only_first + only_second) * drop
        c = -only_second * drop * (1 - drop)
        q = (math.sqrt(max(0.0, b * b - 8 * asked * c)) - b) / (4 * asked)
        variance = asked * (2 * q + drop * (1 - drop))
        difference = only_first - only_second - asked * drop
        return (
            difference / math.sqrt(variance) if variance > 1e-15 else math.copysign(math.inf, difference) if difference else 0.0
        )

    edge = 1 - 1e-9
    estimate = (only_first - only_second) / asked

    def root(target: float, low: float, high: float) -> float:
        if (score(low) - target) * (score(high) - target) > 0:
            return low if target > 0 else high
        return float(optimize.brentq(lambda drop: max(-1e6, min(1e6, score(drop))) - target, low, high, xtol=1e-9))

    estimate = max(-edge, min(edge, estimate))
    return root(z, -edge, estimate), root(-z, estimate, edge)


def bootstrap(
    groups: Sequence[int], statistic: Callable[[npt.NDArray[np.intp]], float], confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval of a statistic over whole groups drawn with replacement.

    `groups` are the indices to draw from; `statistic` gets as many of them, and is asked `RESAMPLES` times. (nan, nan) below two.
    """
    if len(groups) < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    drawn = rng.choice(np.asarray(groups, dtype=np.intp), size=(RESAMPLES, len(groups)))
    found = np.asarray([statistic(row) for row in drawn])
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return float(low), float(high)


def questions_needed(allowed_drop: float, confidence: float = CONFIDENCE) -> int:
    """How many questions, answered alike by both arms, bound the drop at `allowed_drop` (0 to 1)."""
    z = float(scipy_stats.norm.ppf((1 + confidence) / 2))
    return math.ceil(z * z * (1 - allowed_drop) / allowed_drop)
