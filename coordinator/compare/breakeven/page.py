"""The map as one self-contained HTML page, in the style of the report. Pure, but for the templates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from coordinator.compare.breakeven.map import FITTED_BAND, OUTSIDE_BAND, BreakEvenMap, Cell, Crossing, Source, Winner
from coordinator.compare.html.page import ARM_COLOURS, environment
from coordinator.compare.html.svg import HEIGHT, LEFT, RIGHT, TOP, WIDTH
from coordinator.compare.load import Slo
from coordinator.compare.slo import in_words

FULL_COLOUR = math.log(2)
"""A ratio of two or a half has the arm's whole colour."""
FLOOR = 58
"""Room below the cells for two lines of text."""
SMALL = 44
"""Narrower cells, in the picture's units, carry no number."""


def render(found: BreakEvenMap) -> str:
    """The page. Everything that the map says is text, never markup."""
    fit = found.fit
    return environment(Path(__file__).parent).get_template("map.html").render(
        arm_colours=ARM_COLOURS,
        found=found,
        slo=in_words(Slo(**found.slo)),
        panels=panels(found),
        measured=[_row(cell) for cell in found.measured],
        coefficients=[] if fit is None else [
            (name, f"{value:.4g}", f"{fit.errors[name]:.2g}" if name in fit.errors else "given")
            for name, value in asdict(fit.model.coefficients).items()
        ],
        residual="" if fit is None else f"{math.expm1(fit.residual):.1%}",
        observations=0 if fit is None else fit.observations,
        layout="" if fit is None else _layout(found),
        counts=_counts(found.cells),
        bands=(f"{FITTED_BAND:.0%}", f"{OUTSIDE_BAND:.0%}"),
        machine=[(key, str(value)) for key, value in found.machine.items()],
    )  # fmt: skip


def panels(found: BreakEvenMap) -> list[tuple[str, str]]:
    """(title, picture): every load on the measured link, then every other link at the middle load."""
    axes = found.axes
    own = min(axes.bandwidths, key=lambda link: _apart(link, found.bandwidth_bytes_per_s))
    middle = axes.loads[len(axes.loads) // 2]
    shown: list[tuple[float, float | None]] = [(load, own) for load in axes.loads]
    shown += [(middle, link) for link in axes.bandwidths if link != own]
    return [
        (
            f"{load:.3g} requests/s and accelerator, {_link(link)}",
            heatmap(
                [cell for cell in found.cells if (cell.load, cell.bandwidth_bytes_per_s) == (load, link)],
                [each for each in found.break_even if (each.load, each.bandwidth_bytes_per_s) == (load, link)],
                axes.input_tokens,
                axes.output_tokens,
            ),
        )
        for load, link in shown
    ]


def heatmap(cells: Sequence[Cell], crossings: Sequence[Crossing], inputs: Sequence[float], outputs: Sequence[float]) -> str:
    """Prompts across, outputs upwards; the colour is the arm with more room, a thick stroke where splitting breaks even."""
    wide, high = (WIDTH - LEFT - RIGHT) / len(inputs), (HEIGHT - TOP - FLOOR) / len(outputs)
    parts, numbers = [], []
    for cell in cells:
        x = LEFT + inputs.index(cell.input_tokens) * wide
        y = HEIGHT - FLOOR - (outputs.index(cell.output_tokens) + 1) * high
        parts += _box(cell, x, y, wide, high)
        if wide >= SMALL:
            numbers.append(_number(cell, x + wide / 2, y + high / 2))
    for crossing in crossings:
        x = LEFT + (_along(crossing.input_tokens, inputs) + 0.5) * wide
        y = HEIGHT - FLOOR - (outputs.index(crossing.output_tokens) + 1) * high
        style = "crossing" + (" outside" if crossing.source is Source.OUTSIDE else "")
        parts.append(f'<line class="{style}" x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + high:.1f}"/>')
    parts += numbers
    for place, value in enumerate(inputs):
        x = LEFT + (place + 0.5) * wide
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - FLOOR + 18}" text-anchor="middle">{_tokens(value)}</text>')
    for place, value in enumerate(outputs):
        y = HEIGHT - FLOOR - (place + 0.5) * high
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{_tokens(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">uncached prompt tokens</text>')
    up = (TOP + HEIGHT - FLOOR) / 2
    parts.append(f'<text transform="translate(15 {up:.0f}) rotate(-90)" text-anchor="middle">output tokens</text>')
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Break-even map" xmlns="http://www.w3.org/2000/svg">'
    return head + "".join(parts) + "</svg>"


def _box(cell: Cell, x: float, y: float, wide: float, high: float) -> list[str]:
    strength = 0.0 if cell.ratio is None else min(1.0, abs(math.log(cell.ratio)) / FULL_COLOUR)
    if cell.ratio is None and cell.winner is not Winner.NONE:
        strength = 1.0  # The other arm is overloaded.
    towards = cell.winner.value if cell.ratio is None else ("split" if cell.ratio > 1 else "colocated")
    box = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{wide - 2:.1f}" height="{high - 2:.1f}"'
    label = f"{_tokens(cell.input_tokens)} in, {_tokens(cell.output_tokens)} out: {cell.source}, {cell.winner}; {cell.why}"
    return [
        f'<rect class="heat {escape(towards)}" fill-opacity="{0.75 * strength:.2f}" {box}/>',
        f'<rect class="edge {escape(cell.source.value)}" {box}><title>{escape(label)}</title></rect>',
    ]


def _number(cell: Cell, x: float, y: float) -> str:
    text = "-" if cell.ratio is None else f"{cell.ratio:.2f}"
    style = "cell" + ("" if cell.winner in (Winner.SPLIT, Winner.COLOCATED) else " open")
    return f'<text class="{style}" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{text}</text>'


def _along(value: float, marks: Sequence[float]) -> float:
    """The place of a value among the columns, by logarithms."""
    for place, (low, high) in enumerate(itertools.pairwise(marks)):
        if low <= value <= high:
            return place + math.log(value / low) / math.log(high / low)
    return 0.0 if value < marks[0] else len(marks) - 1.0


def _row(cell: Cell) -> list[str]:
    interval = "no interval" if cell.low is None or cell.high is None else f"{cell.low:.2f} to {cell.high:.2f}"
    return [
        cell.record,
        f"{cell.input_tokens:.4g} / {cell.output_tokens:.4g}",
        f"{cell.load:.3g}/s",
        "-" if cell.ratio is None else f"{cell.ratio:.2f} ({interval})",
        f"{_share(cell.split_stress)} / {_share(cell.colocated_stress)}",
        cell.winner.value,
        cell.why,
    ]


def _counts(cells: Sequence[Cell]) -> str:
    return ", ".join(f"{sum(cell.source is source for cell in cells)} {source}" for source in Source)


def _layout(found: BreakEvenMap) -> str:
    assert found.fit is not None
    layout = found.fit.model.layout
    return (
        f"{layout.prefill} prefill and {layout.decode} decode engines against {layout.colocated} colocated, "
        f"{layout.accelerators} accelerators, {found.fit.model.kv_bytes_per_token:,.0f} bytes of KV a token"
    )


def _apart(link: float | None, own: float | None) -> float:
    return 0.0 if link is None or own is None else abs(math.log(link / own))


def _link(link: float | None) -> str:
    return "the link as measured" if link is None else f"{link / 1e9:.3g} GB/s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _tokens(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def as_plain(found: BreakEvenMap) -> dict[str, Any]:
    """For a terminal: what the map holds, in a few lines."""
    return {
        "cells": _counts(found.cells),
        "measured": len(found.measured),
        "split": sum(cell.winner is Winner.SPLIT for cell in found.cells),
        "colocated": sum(cell.winner is Winner.COLOCATED for cell in found.cells),
        "no winner": sum(cell.winner in (Winner.NONE, Winner.EQUAL) for cell in found.cells),
    }
