"""Lengths and gaps drawn from named distributions. Pure; every draw comes from the generator that is given."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
"""Of one prompt or output; beyond this a number was mistyped."""


class Fixed(_Spec):
    """Every length the same."""

    kind: Literal["fixed"]
    tokens: Tokens


class Uniform(_Spec):
    """Whole numbers from `low` to `high`, both included."""

    kind: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.high < self.low:
            raise ValueError("high must be at least low")
        return self


class LogNormal(_Spec):
    """`median` x exp(`sigma` x standard normal), clipped to `low` .. `high`; what is clipped is counted."""

    kind: Literal["lognormal"]
    median: float = Field(gt=0)
    sigma: float = Field(ge=0, le=5)
    low: Tokens = 1
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> LogNormal:
        if not self.low <= self.median <= self.high:
            raise ValueError("median must lie between low and high")
        return self


Lengths = Annotated[Fixed | Uniform | LogNormal, Field(discriminator="kind")]


class Even(_Spec):
    """One request each mean gap."""

    kind: Literal["even"]


class Poisson(_Spec):
    """Independent arrivals: exponential gaps."""

    kind: Literal["poisson"]


class Gamma(_Spec):
    """Gamma gaps with this coefficient of variation: 1 is Poisson, above 1 bunched, below 1 more even."""

    kind: Literal["gamma"]
    cv: float = Field(gt=0, le=20)


class Bursts(_Spec):
    """Groups of `size` requests on average (geometric), `within` mean gaps apart inside a group; groups come at random."""

    kind: Literal["bursts"]
    size: float = Field(ge=1, le=1000)
    within: float = Field(0.02, ge=0, lt=1)


Arrivals = Annotated[Even | Poisson | Gamma | Bursts, Field(discriminator="kind")]


def lengths(spec: Lengths, generator: np.random.Generator, count: int) -> tuple[npt.NDArray[np.int64], int]:
    """`count` lengths in tokens, and how many of them were clipped."""
    if isinstance(spec, Fixed):
        return np.full(count, spec.tokens), 0
    if isinstance(spec, Uniform):
        return generator.integers(spec.low, spec.high, count, endpoint=True), 0
    drawn = np.rint(spec.median * np.exp(spec.sigma * generator.standard_normal(count)))
    clipped = int(np.count_nonzero((drawn < spec.low) | (drawn > spec.high)))
    return np.clip(drawn, spec.low, spec.high).astype(np.int64), clipped


def gaps(spec: Arrivals, generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """`count` gaps before a request each, scaled to a mean of exactly 1: a sequence of unit rate, so that what is offered is what
    was asked for. Unscaled, 1,000 Poisson arrivals come 3 % too fast or too slow, a different error for every seed."""
    drawn = _drawn(spec, generator, count)
    mean = float(drawn.mean())
    # A few gaps of a wide gamma distribution may all be too small for a float.
    return drawn / mean if mean > 0 else np.ones(count)


def _drawn(spec: Arrivals, generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Of mean 1 in expectation."""
    if isinstance(spec, Even):
        return np.ones(count)
    if isinstance(spec, Poisson):
        return generator.exponential(1.0, count)
    if isinstance(spec, Gamma):
        shape = 1.0 / spec.cv**2
        return generator.gamma(shape, 1.0 / shape, count)
    begins = generator.random(count) < 1.0 / spec.size
    # A sequence of one unfinished group would have no time between groups to scale.
    begins[0] = True
    between = spec.size - (spec.size - 1.0) * spec.within
    return np.where(begins, generator.exponential(between, count), spec.within)


def percentile_row(values: npt.NDArray[np.int64]) -> dict[str, float]:
    """Mean, median, 95th percentile (observed values) and extremes."""
    ordered = np.sort(values)
    return {
        "mean": float(ordered.mean()),
        "min": int(ordered[0]),
        "p50": int(ordered[math.ceil(0.5 * len(ordered)) - 1]),
        "p95": int(ordered[math.ceil(0.95 * len(ordered)) - 1]),
        "max": int(ordered[-1]),
    }
