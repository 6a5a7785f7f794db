"""Counts of latencies by size, fine enough to ask afterwards what share kept a goal. Pure.

A bucket is 5 % wide, so a goal is judged to within 5 %. Counts of several gateways and moments add up and subtract.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

_GROWTH = math.log(1.05)
_SMALLEST_S = 1e-5
FAILED = 1 << 20
"""The bucket of what never came: above every goal."""

Counts = Mapping[int, int]
"""Latencies by bucket."""


def bucket_of(seconds: float) -> int:
    """The bucket whose upper end is the first that is not below `seconds`."""
    return math.ceil(math.log(max(seconds, _SMALLEST_S)) / _GROWTH - 1e-9)


def added(parts: Iterable[Counts]) -> dict[int, int]:
    """All of `parts` together."""
    whole: dict[int, int] = {}
    for part in parts:
        for bucket, count in part.items():
            whole[bucket] = whole.get(bucket, 0) + count
    return whole


def since(now: Counts, before: Counts) -> dict[int, int]:
    """What `now` has beyond `before`; both only ever grow."""
    return {bucket: count - before.get(bucket, 0) for bucket, count in now.items() if count > before.get(bucket, 0)}


def median_s(counts: Counts) -> float:
    """The upper end of the bucket that holds the median, seconds; infinite where that never came, 0 without any."""
    half, below = sum(counts.values()) / 2, 0
    for bucket in sorted(counts):
        below += counts[bucket]
        if below >= half:
            return math.inf if bucket >= FAILED else math.exp(bucket * _GROWTH)
    return 0.0


def share_within(counts: Counts, goal_s: float) -> float:
    """The share of latencies of at most `goal_s`, seconds. Without any it is 1: no promise was broken."""
    total = sum(counts.values())
    if not total:
        return 1.0
    last = math.floor(math.log(goal_s) / _GROWTH + 1e-9) if goal_s > 0 else -FAILED
    return sum(count for bucket, count in counts.items() if bucket <= last) / total
