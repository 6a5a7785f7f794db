"""The break-even map: where splitting pays, over prompt, output, load and link. Pure; what serves it needs no statistics.

A cell is a load of requests that are all alike. Its `ratio` is how much of the objective a request uses colocated over how much
it uses split: above 1 splitting leaves more room. Every cell says where it comes from; too near to break-even
for the model's error no winner is called, outside of what was measured still less.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from coordinator.compare.breakeven.model import COLOCATED, SPLIT, Fit, Times, stress

SCHEMA_VERSION = 1
"""Rises when a field changes its meaning or goes; new fields alone do not raise it."""
MARGIN = 0.05
FITTED_BAND = 0.15
"""So near to break-even a fitted cell names no winner; nor within twice the model's residual."""
OUTSIDE_BAND = 0.25
"""The same for a cell outside of what was measured."""
MATCH = 0.1
"""What differs by no more than this is the same length, load or bandwidth."""
REACH = 2.0
"""A fitted cell lies within this factor of something measured, in each of lengths and load at once."""


class Source(enum.StrEnum):
    MEASURED = "measured"
    FITTED = "fitted"
    OUTSIDE = "outside"


class Winner(enum.StrEnum):
    SPLIT = "split"
    COLOCATED = "colocated"
    EQUAL = "equal"  # measured, within the margin: stay colocated, the simpler system
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`load` is offered requests/s and accelerator. `bandwidth_bytes_per_s` None: the link as it was measured.

    `low` and `high` are the 95 % interval of a measured ratio. A stress is the share of the objective that a request uses, None
    where the arm is overloaded, and so is `ratio`. `why` is for people.
    """

    input_tokens: float
    output_tokens: float
    load: float
    bandwidth_bytes_per_s: float | None
    source: Source
    winner: Winner
    ratio: float | None
    why: str
    low: float | None = None
    high: float | None = None
    split_stress: float | None = None
    colocated_stress: float | None = None
    record: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Something that was measured, and so calibrates the model around it."""

    input_tokens: float
    output_tokens: float
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """At these outputs, load and link splitting breaks even at this prompt length."""

    input_tokens: float
    output_tokens: float
    load: float
    bandwidth_bytes_per_s: float | None
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The grid: tokens, tokens, requests/s and accelerator, bytes/s (None: the link as measured)."""

    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]
    loads: tuple[float, ...]
    bandwidths: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenMap:
    """`measured` are cells of records, `cells` those of the grid. `fit` is None where the records do not determine one; `notes`
    says why. `bandwidth_bytes_per_s` is of the measured link, None when unknown. `machine` is what it holds for."""

    slo: dict[str, Any]
    records: tuple[str, ...]
    model_name: str
    machine: dict[str, Any]
    axes: Axes
    measured: tuple[Cell, ...]
    cells: tuple[Cell, ...] = ()
    break_even: tuple[Crossing, ...] = ()
    fit: Fit | None = None
    calibrated: tuple[Point, ...] = ()
    bandwidth_bytes_per_s: float | None = None
    notes: tuple[str, ...] = ()
    kind: str = "break-even map"
    schema_version: int = field(default=SCHEMA_VERSION)

    def lookup(self, input_tokens: float, output_tokens: float, load: float, bandwidth_bytes_per_s: float | None = None) -> Cell:
        """The measured cell of this place, else what the model says of exactly this place.

        `input_tokens` are those that no cache has. Raises `ValueError` for what is not above 0.
        """
        if min(input_tokens, output_tokens, load) <= 0 or (bandwidth_bytes_per_s is not None and bandwidth_bytes_per_s <= 0):
            raise ValueError("lengths, load and bandwidth must be above 0")
        if self._same_link(bandwidth_bytes_per_s):
            place = (input_tokens, output_tokens, load)
            near = [(_distance(cell, place), cell) for cell in self.measured]
            close = [(far, cell) for far, cell in near if far <= math.log1p(MATCH)]
            if close:
                return min(close, key=lambda pair: pair[0])[1]
        return self.predict(input_tokens, output_tokens, load, bandwidth_bytes_per_s)

    def predict(self, input_tokens: float, output_tokens: float, load: float, bandwidth_bytes_per_s: float | None) -> Cell:
        """What the model says, measured or not."""
        unknown = "nothing was measured here, and the records determine no model" if self.fit is None else ""
        if bandwidth_bytes_per_s is not None and self.bandwidth_bytes_per_s is None:
            unknown = unknown or "the measured link's bandwidth is unknown, so nothing follows for another"
        if self.fit is None or unknown:
            return Cell(
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                load=load,
                bandwidth_bytes_per_s=bandwidth_bytes_per_s,
                source=Source.OUTSIDE,
                winner=Winner.NONE,
                ratio=None,
                why=unknown,
            )
        model = self.fit.model
        split, colocated = (
            model.times(arm, input_tokens, output_tokens, load, bandwidth_bytes_per_s) for arm in (SPLIT, COLOCATED)
        )
        used = [stress(times.ttft_s, times.tpot_s, input_tokens, self.slo) for times in (split, colocated)]
        beyond = self.outside(input_tokens, output_tokens, load, bandwidth_bytes_per_s)
        band = max(OUTSIDE_BAND if beyond else FITTED_BAND, math.expm1(2 * self.fit.residual))
        winner, why = _call(split, colocated, used[1] / used[0], band)
        whole = not (split.saturated or colocated.saturated)
        return Cell(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            load=load,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            source=Source.OUTSIDE if beyond else Source.FITTED,
            winner=winner,
            ratio=used[1] / used[0] if whole else None,
            why="; ".join(part for part in (why, beyond) if part),
            split_stress=None if split.saturated else used[0],
            colocated_stress=None if colocated.saturated else used[1],
        )

    def outside(self, input_tokens: float, output_tokens: float, load: float, bandwidth_bytes_per_s: float | None) -> str:
        """Why the place is not covered by what was measured, or ""."""
        place = (input_tokens, output_tokens, load)
        for axis, name in enumerate(("prompts", "outputs", "loads")):
            known = [_place(point)[axis] for point in self.calibrated]
            if not known:
                return "nothing was measured"
            low, high = min(known) / (1 + MATCH), max(known) * (1 + MATCH)
            if not low <= place[axis] <= high:
                return f"measured were {name} of {min(known):.4g} to {max(known):.4g}"
        if not any(_distance(point, place) <= math.log(REACH) for point in self.calibrated):
            return f"nothing was measured within a factor of {REACH:g} of this combination"
        if not self._same_link(bandwidth_bytes_per_s):
            known_link = self.bandwidth_bytes_per_s
            return "another link than the measured one" + (f" ({known_link:.3g} bytes/s)" if known_link is not None else "")
        return ""

    def _same_link(self, bandwidth_bytes_per_s: float | None) -> bool:
        if bandwidth_bytes_per_s is None:
            return True
        known = self.bandwidth_bytes_per_s
        return known is not None and abs(math.log(bandwidth_bytes_per_s / known)) <= math.log1p(MATCH)


def call_measured(low: float | None, high: float | None, seeds: int, failing: str = "") -> tuple[Winner, str]:
    """The winner of a measured cell, by its interval against the margin."""
    if low is None or high is None:
        return Winner.NONE, f"{seeds} seed{'' if seeds == 1 else 's'}; fewer than 3 never decide" + failing
    if low > 1 + MARGIN:
        return Winner.SPLIT, "measured" + failing
    if high < 1 / (1 + MARGIN):
        return Winner.COLOCATED, "measured" + failing
    if low > 1 / (1 + MARGIN) and high < 1 + MARGIN:
        return Winner.EQUAL, "measured: no difference beyond the margin" + failing
    return Winner.NONE, "measured: the interval reaches across the margin" + failing


def _call(split: Times, colocated: Times, ratio: float, band: float) -> tuple[Winner, str]:
    """With an overloaded arm `ratio` is a bound on its side, which is enough to call the other."""
    if split.saturated and colocated.saturated:
        return Winner.NONE, "both arms are overloaded"
    overloaded = "split is overloaded" if split.saturated else "colocated is overloaded" if colocated.saturated else ""
    if abs(math.log(ratio)) <= math.log1p(band):
        return Winner.NONE, f"within {band:.0%} of break-even"
    return (Winner.SPLIT if ratio > 1 else Winner.COLOCATED), overloaded


def _place(point: Point | Cell) -> tuple[float, float, float]:
    return point.input_tokens, point.output_tokens, point.load


def _distance(point: Point | Cell, place: tuple[float, float, float]) -> float:
    """The largest of the three logarithms."""
    return max(abs(math.log(a / b)) for a, b in zip(_place(point), place, strict=True))
