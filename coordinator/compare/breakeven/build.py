"""Records to a map. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.compare.breakeven.fit import FitError, fit
from coordinator.compare.breakeven.map import Axes, BreakEvenMap, Cell, Crossing, Point, Source, call_measured
from coordinator.compare.breakeven.model import Fit, Layout
from coordinator.compare.breakeven.observe import (
    MapError,
    Measurement,
    Observation,
    bandwidth,
    kv_bytes_per_token,
    layout_of,
    measurements,
    observations,
    pair_of,
)

LINK_FACTORS = (0.1, 0.3, 1.0, 3.0)
"""Bandwidths of the default grid, of the measured one."""
LOADS = 4
STEPS = 40
"""Of one line of the grid, when the crossing is looked for."""
HALVINGS = 12

Record = Mapping[str, Any]


def build(
    records: Sequence[tuple[str, Record]],
    *,
    slo: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    bandwidth_bytes_per_s: float | None = None,
    challenger: str = "",
    inputs: Sequence[float] = (),
    outputs: Sequence[float] = (),
    loads: Sequence[float] = (),
    bandwidths: Sequence[float] = (),
) -> BreakEvenMap:
    """A map of (name, record) pairs of one model on one machine. `slo` is asked of all of them, else the first one's.

    `layout` is the arms' engines where the records do not tell; `bandwidth_bytes_per_s` is of the measured link, by its fastest
    transfers where it is not given. `challenger` names the split arm where there are several. Axes replace the default grid's.

    Raises:
        MapError: no records, records of different models or machines, or one without both arms.
    """
    if not records:
        raise MapError("give one record at least")
    _same(records)
    asked = dict(slo or records[0][1]["slo"])
    notes = [] if slo else _other_slos(records, asked)
    seen: list[Observation] = []
    measured: list[Measurement] = []
    arms = []
    used: Layout | None = None
    for name, record in records:
        try:
            split, colocated = pair_of(record, challenger)
        except MapError as error:
            raise MapError(f"{name}: {error}") from None
        known = layout or layout_of(record, split, colocated)
        if known is None:
            raise MapError(f"{name}: its manifest does not tell how many engines each arm has: give --engines")
        if used is not None and known != used:
            raise MapError(f"{name}: its arms have other engines than those of {records[0][0]}")
        used = known
        arms.append((record, split))
        seen += observations(record, split, colocated, known)
        measured += measurements(name, record, split, colocated, known, asked)
    assert used is not None
    found: Fit | None = None
    kv_bytes = kv_bytes_per_token(arms)
    link = bandwidth_bytes_per_s or bandwidth(arms)
    if link is None:
        notes.append("the link's bandwidth is unknown: nothing follows for other links; say it with --bandwidth")
    elif bandwidth_bytes_per_s is None:
        notes.append(f"the link is taken for {link:.3g} bytes/s, what the fastest tenth of the transfers reached")
    try:
        if kv_bytes is None:
            notes.append("no request tells how much KV it moved: the link's part of the model is by the token")
        found = fit(seen, used, kv_bytes or 1.0, link if kv_bytes is not None else None)
    except FitError as error:
        notes.append(f"no model: {error}")
    calibrated = tuple(
        sorted(
            {Point(input_tokens=one.input_tokens, output_tokens=one.output_tokens, load=one.load) for one in seen},
            key=lambda point: (point.input_tokens, point.output_tokens, point.load),
        )
    )
    bare = BreakEvenMap(
        slo=asked,
        records=tuple(name for name, _ in records),
        model_name=records[0][1]["model"],
        machine=_machine(records[0][1]),
        axes=_axes(calibrated, link, inputs, outputs, loads, bandwidths),
        measured=tuple(_cell(one) for one in measured),
        fit=found,
        calibrated=calibrated,
        bandwidth_bytes_per_s=link,
        notes=tuple(notes),
    )
    return fill(bare)


def fill(bare: BreakEvenMap) -> BreakEvenMap:
    """The same with its grid's cells and the crossings of break-even."""
    axes = bare.axes
    grid = itertools.product(axes.input_tokens, axes.output_tokens, axes.loads, axes.bandwidths)
    lines = itertools.product(axes.output_tokens, axes.loads, axes.bandwidths)
    cells = tuple(_at(bare.lookup(*place), *place) for place in grid)
    crossings = tuple(crossing for line in lines for crossing in _crossings(bare, *line)) if bare.fit is not None else ()
    return dataclasses.replace(bare, cells=cells, break_even=crossings)


def _at(cell: Cell, input_tokens: float, output_tokens: float, load: float, link: float | None) -> Cell:
    """A measured cell stands in the grid where it was looked up."""
    return dataclasses.replace(
        cell, input_tokens=input_tokens, output_tokens=output_tokens, load=load, bandwidth_bytes_per_s=link
    )


def _crossings(found: BreakEvenMap, output_tokens: float, load: float, link: float | None) -> list[Crossing]:
    low, high = min(found.axes.input_tokens), max(found.axes.input_tokens)
    if high <= low:
        return []

    def log_ratio(input_tokens: float) -> float | None:
        ratio = found.predict(input_tokens, output_tokens, load, link).ratio
        return None if ratio is None else math.log(ratio)

    points = [low * (high / low) ** (step / STEPS) for step in range(STEPS + 1)]
    crossings = []
    for before, after in itertools.pairwise(points):
        here, there = log_ratio(before), log_ratio(after)
        if here is None or there is None or here * there > 0 or here == there:
            continue
        for _ in range(HALVINGS):  # Near overload the ratio is far from straight between two points.
            middle = math.sqrt(before * after)
            value = log_ratio(middle)
            if value is None:
                break
            before, after = (middle, after) if value * here > 0 else (before, middle)
        at = math.sqrt(before * after)
        beyond = found.outside(at, output_tokens, load, link)
        source = Source.OUTSIDE if beyond else Source.FITTED
        crossings.append(
            Crossing(input_tokens=at, output_tokens=output_tokens, load=load, bandwidth_bytes_per_s=link, source=source)
        )
    return crossings


def _cell(one: Measurement) -> Cell:
    winner, why = call_measured(one.low, one.high, one.seeds)
    return Cell(
        input_tokens=one.input_tokens,
        output_tokens=one.output_tokens,
        load=one.load,
        bandwidth_bytes_per_s=None,
        source=Source.MEASURED,
        winner=winner,
        ratio=one.ratio,
        why=why,
        low=one.low,
        high=one.high,
        split_stress=one.split_stress,
        colocated_stress=one.colocated_stress,
        record=one.record,
    )


def _axes(
    calibrated: Sequence[Point],
    link: float | None,
    inputs: Sequence[float],
    outputs: Sequence[float],
    loads: Sequence[float],
    bandwidths: Sequence[float],
) -> Axes:
    """One octave beyond what was measured on each side, so that its edge is seen."""
    links: tuple[float | None, ...] = tuple(bandwidths) or (
        (None,) if link is None else tuple(link * factor for factor in LINK_FACTORS)
    )
    known = calibrated or (Point(input_tokens=1, output_tokens=1, load=1),)
    return Axes(
        input_tokens=tuple(inputs) or _octaves([point.input_tokens for point in known]),
        output_tokens=tuple(outputs) or _octaves([point.output_tokens for point in known]),
        loads=tuple(loads) or _between([point.load for point in known]),
        bandwidths=links,
    )


def _octaves(values: Sequence[float]) -> tuple[float, ...]:
    low, high = math.floor(math.log2(min(values))) - 1, math.ceil(math.log2(max(values))) + 1
    return tuple(float(2**power) for power in range(max(0, low), high + 1))


def _between(values: Sequence[float]) -> tuple[float, ...]:
    low, high = min(values), max(values)
    if high <= low * 1.01:
        return (low,)
    return tuple(float(f"{low * (high / low) ** (i / (LOADS - 1)):.4g}") for i in range(LOADS))


def _machine(record: Record) -> dict[str, Any]:
    hardware = record.get("manifest", {}).get("hardware") or {}
    return {key: value for key, value in hardware.items() if key != "host"}


def _same(records: Sequence[tuple[str, Record]]) -> None:
    first_name, first = records[0]
    for name, record in records[1:]:
        if record["model"] != first["model"]:
            raise MapError(f"{name}: {record['model']!r} is another model than that of {first_name}, {first['model']!r}")
        machines = [_machine(each) for each in (first, record)]
        if all(machines) and machines[0] != machines[1]:
            raise MapError(f"{name}: measured on another machine than {first_name}")


def _other_slos(records: Sequence[tuple[str, Record]], asked: Mapping[str, Any]) -> list[str]:
    others = [name for name, record in records if dict(record["slo"]) != dict(asked)]
    return [f"judged anew under the objective of {records[0][0]}: {', '.join(others)}"] if others else []
