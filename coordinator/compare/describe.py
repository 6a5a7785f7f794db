"""A workload in figures: lengths, arrivals, what a prefix cache could find. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.compare.draw import percentile_row
from coordinator.compare.shapes import Counts, Shapes, hit_share

DISPERSION_WINDOW_S = 60.0
MIN_WINDOWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Requests whose length lies in [`low`, `high`), tokens."""

    low: int
    high: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One seed's workload at `rate_per_s`.

    `arrival_cv` is of the gaps. `dispersion` is variance over mean of the counts in windows of `DISPERSION_WINDOW_S`, None where
    there are fewer than `MIN_WINDOWS`; Poisson arrivals have 1 in both. `hit_share` is ideal; `hit_share_of` maps a cache's
    tokens to the share with that size.
    """

    seed: int
    digest: str
    requests: int
    rate_per_s: float
    native_rate_per_s: float | None
    duration_s: float
    arrival_cv: float
    dispersion: float | None
    input: dict[str, float]
    output: dict[str, float]
    input_bins: tuple[Bin, ...]
    output_bins: tuple[Bin, ...]
    input_tokens: int
    output_tokens: int
    is_shared: bool
    hit_share: float
    hit_share_of: dict[int, float]
    counts: Counts
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def describe(shapes: Shapes, *, rate_per_s: float | None = None, cache_tokens: Sequence[int] = ()) -> Description:
    """The figures at this rate, else at the source's own, else at one request a second.

    Raises:
        ValueError: a rate or a cache size that is not positive.
    """
    rate = rate_per_s if rate_per_s is not None else shapes.native_rate_per_s or 1.0
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate must be above 0, got {rate:g}")
    if any(size < 1 for size in cache_tokens):
        raise ValueError(f"cache tokens must be at least 1, got {min(cache_tokens)}")
    inputs = np.array([request.input_tokens for request in shapes.requests])
    outputs = np.array([request.output_tokens for request in shapes.requests])
    gaps = np.array([request.gap for request in shapes.requests]) / rate
    due_s = np.cumsum(gaps)
    return Description(
        seed=shapes.seed,
        digest=shapes.digest,
        requests=len(shapes.requests),
        rate_per_s=rate,
        native_rate_per_s=shapes.native_rate_per_s,
        duration_s=float(due_s[-1]),
        arrival_cv=float(gaps.std() / gaps.mean()),
        dispersion=_dispersion(due_s),
        input=percentile_row(inputs),
        output=percentile_row(outputs),
        input_bins=bins(inputs),
        output_bins=bins(outputs),
        input_tokens=int(inputs.sum()),
        output_tokens=int(outputs.sum()),
        is_shared=shapes.is_shared,
        hit_share=hit_share(shapes.requests),
        hit_share_of={size: hit_share(shapes.requests, capacity_tokens=size) for size in cache_tokens},
        counts=shapes.counts,
        notes=shapes.notes,
    )


def bins(values: npt.NDArray[np.int64]) -> tuple[Bin, ...]:
    """A histogram with bounds at powers of two, from the first bin that holds a value to the last."""
    edges = 2 ** np.arange(int(values.min()).bit_length() - 1, int(values.max()).bit_length() + 1)
    counts, _ = np.histogram(values, edges)
    # numpy's last bin includes its upper bound, which no value reaches.
    return tuple(
        Bin(low=int(low), high=int(high), count=int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)
    )


def _dispersion(due_s: npt.NDArray[np.float64]) -> float | None:
    windows = int(due_s[-1] // DISPERSION_WINDOW_S)
    if windows < MIN_WINDOWS:
        return None
    counts, _ = np.histogram(due_s, np.arange(windows + 1) * DISPERSION_WINDOW_S)
    return float(counts.var() / counts.mean()) if counts.mean() > 0 else None
