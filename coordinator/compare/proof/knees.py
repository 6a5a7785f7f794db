"""`stats.knee` for many curves at once. Pure; a test holds the two equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]


def knees(rates: Floats, attainments: Floats, level: float = 0.9, requests: int = 100) -> Floats:
    """The crossing of each curve, attainments [..., rate] at `rates` of a broadcastable shape; NaN where not bracketed."""
    rates = np.broadcast_to(rates, attainments.shape)
    fitted = falling_fit(attainments)
    below = fitted < level
    after = np.argmax(below, axis=-1)[..., None]
    bracketed = below.any(axis=-1) & ~below[..., 0]
    before = np.maximum(after - 1, 0)

    def at(values: Floats, index: npt.NDArray[np.intp]) -> Floats:
        return np.take_along_axis(values, index, axis=-1)[..., 0]

    least = 0.5 / requests
    high, low = (special.ndtri(np.clip(at(fitted, index), least, 1 - least)) for index in (before, after))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.maximum(0.0, (high - special.ndtri(level)) / (high - low))
        crossing = at(rates, before) * (at(rates, after) / at(rates, before)) ** share
    return np.where(bracketed, crossing, np.nan)


def falling_fit(values: Floats) -> Floats:
    """The least-squares fit that never rises along the last axis, all weights equal, by the min-max formula."""
    count = values.shape[-1]
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
    fitted = np.empty_like(values)
    for i in range(count):
        best = np.full(values.shape[:-1], np.inf)
        for a in range(i + 1):
            means = [(sums[..., b + 1] - sums[..., a]) / (b + 1 - a) for b in range(i, count)]
            best = np.minimum(best, np.max(means, axis=0))
        fitted[..., i] = best
    return fitted
