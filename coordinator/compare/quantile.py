"""Percentiles that are values which were observed. Pure; apart from `stats` so that a load client starts without scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed.

    Raises:
        ValueError: `values` is empty or `share` is outside (0, 1].
    """
    if not values or not 0 < share <= 1:
        raise ValueError("percentile needs values and a share in (0, 1]")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]
