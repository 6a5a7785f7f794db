"""Line charts and stacked bars as inline SVG, coloured by the page's style sheet. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 50
LETTER = 8.5
"""Width of a letter of a name, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line. `style` is a class of the page ("split", "colocated", with "thin" or "dots" where wanted)."""

    name: str
    style: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """What lies between two curves over the same x."""

    style: str
    points: tuple[tuple[float, float, float], ...]  # x, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A horizontal interval at `y`, ended by two strokes."""

    style: str
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a stacked bar: (part's name, its class, value)."""

    name: str
    parts: tuple[tuple[str, str, float], ...]


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    bands: Sequence[Band] = (),
    spans: Sequence[Span] = (),
    level: float | None = None,
    limit: float | None = None,
    x_log: bool = False,
    y_percent: bool = False,
) -> str:
    """A chart with ticks, a horizontal line at `level` and a vertical one at `limit`; "" where there is nothing to draw.

    A limit beyond the drawn values is left out: it says nothing about them. With `x_log` points at x <= 0 are left out.
    `y_percent` fixes the axis to 0..100 %.
    """
    xs = [x for one in series for x, _ in one.points if not x_log or x > 0]
    ys = [y for one in series for _, y in one.points]
    if not xs:
        return ""
    low_x, high_x = _padded(min(xs), max(xs), x_log)
    low_y, high_y = (0.0, 1.0) if y_percent else _padded(min(0.0, *ys), max(ys), False)

    def place(x: float, y: float) -> tuple[float, float]:
        at = (math.log(x / low_x) / math.log(high_x / low_x)) if x_log else (x - low_x) / (high_x - low_x)
        up = (y - low_y) / (high_y - low_y)
        return LEFT + at * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(place, _ticks(low_x, high_x, x_log), _ticks(low_y, high_y, False), (low_x, low_y, high_x, high_y), y_percent)]
    for band in bands:
        upper = [place(x, high) for x, _, high in band.points]
        lower = [place(x, low) for x, low, _ in reversed(band.points)]
        if len(upper) > 1:
            parts.append(f'<polygon class="band {escape(band.style)}" points="{_path(upper + lower)}"/>')
    if level is not None:
        (left, y), (right, _) = place(low_x, level), place(high_x, level)
        parts.append(f'<line class="level" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>')
    if limit is not None and low_x < limit < high_x:
        (x, bottom), (_, top) = place(limit, low_y), place(limit, high_y)
        parts.append(f'<line class="level" x1="{x:.1f}" y1="{bottom:.1f}" x2="{x:.1f}" y2="{top:.1f}"/>')
    for span in spans:
        (left, y), (right, _) = (place(min(max(x, low_x), high_x), span.y) for x in (span.low, span.high))
        strokes = f"M{left:.1f},{y - 6:.1f}v12M{left:.1f},{y:.1f}H{right:.1f}M{right:.1f},{y - 6:.1f}v12"
        parts.append(f'<path class="span {escape(span.style)}" d="{strokes}"/>')
    for one in series:
        placed = [place(x, y) for x, y in one.points if not x_log or x > 0]
        if "dots" in one.style.split():
            parts += [f'<circle class="{escape(one.style)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in placed]
        else:
            parts.append(f'<polyline class="{escape(one.style)}" points="{_path(placed)}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    up = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" transform="translate(15 {up:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return _svg(title, HEIGHT, parts)


def stacked_bars(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """Rows of parts that add up, all to one scale; parts below zero take no room. "" where there is nothing."""
    totals = [sum(max(0.0, value) for _, _, value in bar.parts) for bar in bars]
    if not bars or max(totals) <= 0:
        return ""
    height = 34 * len(bars) + 34
    left = min(WIDTH / 2, max(100.0, 12 + LETTER * max(len(bar.name) for bar in bars)))
    scale = (WIDTH - left - RIGHT) / max(totals)
    parts = []
    for row, bar in enumerate(bars):
        x, y = left, 8 + 34 * row
        parts.append(f'<text class="axis" x="{left - 8:.0f}" y="{y + 16}" text-anchor="end">{escape(bar.name)}</text>')
        for name, style, value in bar.parts:
            wide = max(0.0, value) * scale
            if wide > 0:
                label = f"<title>{escape(name)}: {value:.1f} {escape(unit)}</title>"
                parts.append(f'<rect class="{escape(style)}" x="{x:.1f}" y="{y}" width="{wide:.2f}" height="24">{label}</rect>')
            x += wide
    for tick in _ticks(0.0, max(totals), False):
        at = left + tick * scale
        parts.append(f'<text class="tick" x="{at:.1f}" y="{height - 8}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text class="axis" x="{left - 8:.0f}" y="{height - 8}" text-anchor="end">{escape(unit)}</text>')
    return _svg(title, height, parts)


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'
    return head + "".join(parts) + "</svg>"


def _grid(
    place: Callable[[float, float], tuple[float, float]],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    box: tuple[float, float, float, float],
    y_percent: bool,
) -> str:
    low_x, low_y, high_x, high_y = box
    parts = []
    for tick in x_ticks:
        x, bottom = place(tick, low_y)
        _, top = place(tick, high_y)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{bottom:.1f}" x2="{x:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{tick:.4g}</text>')
    for tick in y_ticks:
        left, y = place(low_x, tick)
        right, _ = place(high_x, tick)
        label = f"{tick:.0%}" if y_percent else f"{tick:.4g}"
        parts.append(f'<line class="grid" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        # Values that are as good as one need room on either side, or all ticks read alike.
        return (low / 1.5, high * 1.5) if high <= 1.02 * low else (low, high)
    if high <= low:
        return low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return low, high


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """About five round numbers."""
    if log:
        span = math.log10(high / low)
        steps = (1, 2, 5) if span < 3 else (1,)
        tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**ten for ten in tens for step in steps]
        inside = [tick for tick in found if low <= tick <= high]
        if len(inside) >= 2:
            return inside
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
