"""The coarse search for a knee: which rate to try next, and which rates to compare at. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coordinator.compare.notes import ABOVE, BELOW
from coordinator.compare.stats import knee

STEP = 1.5
LEVEL = 0.9


def next_rate(
    tried: Mapping[float, float], start_per_s: float, requests: int, level: float = LEVEL, *, ceiling_per_s: float = math.inf
) -> float | None:
    """The rate to try after `tried` (rate to attainment, of `requests` each); None when the knee can be read off them.

    At `ceiling_per_s` and above nothing can be sent on time: it is never reached.

    Raises:
        ValueError: `start_per_s` is not positive.
    """
    if start_per_s <= 0:
        raise ValueError("start_per_s must be positive")
    if not tried:
        return min(start_per_s, ceiling_per_s / STEP)
    low, high = min(tried), max(tried)
    if tried[high] >= level:
        return min(high * STEP, math.sqrt(high * ceiling_per_s))
    if tried[low] < level:
        return low / STEP
    if found(tried, requests, level) is not None:
        return None
    # All attain at one rate and none at the next: halfway between them more is learned than beyond.
    below = max(rate for rate, attainment in tried.items() if attainment >= level)
    above = min((rate for rate, attainment in tried.items() if rate > below), default=below * STEP)
    return math.sqrt(below * above)


def further_rate(rates_per_s: Sequence[float], whys: Sequence[str]) -> float | None:
    """One more rate, as far from the outer ones as these from their neighbours, on the side where a knee was missed; None where
    none was. `whys` says of each arm why it has no knee, "" where it has one.

    Without it seeds whose knees happen to lie far out would drop out, and those that stay are a chosen sample.

    Raises:
        ValueError: fewer than two rates.
    """
    if len(rates_per_s) < 2:
        raise ValueError("a further rate needs two")
    rates = sorted(rates_per_s)
    if any(why.startswith(BELOW) for why in whys):
        return rates[0] ** 2 / rates[1]
    if any(why.startswith(ABOVE) for why in whys):
        return rates[-1] ** 2 / rates[-2]
    return None


def found(tried: Mapping[float, float], requests: int, level: float = LEVEL) -> float | None:
    """The knee between the rates that were tried; None where they do not bracket it."""
    if not tried:
        return None
    return knee(list(tried), list(tried.values()), level, requests).rate_per_s


def rates_around(knees_per_s: Sequence[float], count: int, spread: float) -> tuple[float, ...]:
    """`count` rates at equal ratios, from the lowest knee over `spread` to the highest times it.

    Raises:
        ValueError: no positive knee, fewer than two rates, or a spread that is not above 1.
    """
    if not knees_per_s or min(knees_per_s) <= 0 or count < 2 or spread <= 1:
        raise ValueError("rates need positive knees, two points and a spread above 1")
    low, high = min(knees_per_s) / spread, max(knees_per_s) * spread
    ratio = (high / low) ** (1 / (count - 1))
    return tuple(low * ratio**place for place in range(count))
