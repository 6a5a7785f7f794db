"""A comparison's record as charts. Pure: the record is the mapping that its JSON holds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coordinator.compare.html.arms import Arm, Record, arms_of, judged, samples, summaries, valid
from coordinator.compare.html.svg import Band, Bar, Series, Span, line_chart, stacked_bars
from coordinator.compare.load import Outcome, Slo
from coordinator.compare.stats import Interval, t_interval
from coordinator.compare.summary import STAGES

MAX_POINTS = 200
"""Of one distribution's line; more cannot be seen."""
MIN_SEEDS = 3
"""For an interval; fewer are shown as their range."""
LEVEL = 0.9
DASHES = 4
PARTS = tuple(stage for stage in STAGES if stage != "e2e_s")


def attainment(record: Record) -> str:
    """Attainment over offered rate: a line per arm, its interval over seeds as a band, the goodput's interval as a bar on the
    line at 90 %; void probes left out."""
    series, bands, spans = [], [], []
    for arm in arms_of(record):
        by_rate: dict[float, dict[int, list[float]]] = {}
        for probe in valid(record, arm):
            share = _attained(probe, record["slo"])
            by_rate.setdefault(probe["rate_per_s"], {}).setdefault(probe["seed"], []).append(share)
        seeds = {rate: [statistics.fmean(shares) for shares in found.values()] for rate, found in sorted(by_rate.items())}
        line = tuple((rate, statistics.fmean(found)) for rate, found in seeds.items())
        if not line:
            continue
        series += [Series(name=arm.name, style=arm.style, points=line)]
        series += [Series(name=arm.name, style=f"{arm.style} dots", points=line)]
        bands.append(Band(style=arm.style, points=tuple((rate, *_band(found)) for rate, found in seeds.items())))
        goodput = goodput_interval(record, arm)
        if goodput is not None:
            spans.append(Span(style=arm.style, y=LEVEL, low=math.exp(goodput.low), high=math.exp(goodput.high)))
    return line_chart(
        "Attainment over offered rate",
        "offered requests/s",
        "attainment",
        series,
        bands=bands,
        spans=spans,
        level=LEVEL,
        y_percent=True,
    )


def goodput_interval(record: Record, arm: Arm) -> Interval | None:
    """Of the logarithm of the arm's goodput over seeds; None below `MIN_SEEDS` seeds with one."""
    rates = [entry[arm.name]["rate_per_s"] for entry in record["knees"] if arm.name in entry]
    logs = [math.log(rate) for rate in rates if rate]
    return t_interval(logs) if len(logs) >= MIN_SEEDS else None


def distributions(record: Record) -> list[tuple[str, str]]:
    """(name, chart) of TTFT, TPOT and the gaps between tokens under load, as cumulative shares of answered requests.

    A vertical line stands at the objective where it is one number.
    """
    slo = record["slo"]
    ttft_s = None if slo.get("ttft_s_per_token") else slo["ttft_s"]
    wanted: tuple[tuple[str, str, float | None, Callable[[Mapping[str, Any]], Iterable[float]]], ...] = (
        ("TTFT", "ms from due to the first token", ttft_s, _ttft),
        ("TPOT", "ms per token after the first", slo["tpot_s"], _tpot),
        ("ITL", "ms between two tokens", slo.get("itl_p99_s"), _gaps),
    )
    charts = []
    for name, label, bound_s, pick in wanted:
        series = []
        for arm in arms_of(record):
            answered = (o for probe in valid(record, arm) for o in judged(probe) if not o["failure"])
            values = sorted(1e3 * value for outcome in answered for value in pick(outcome))
            if values:
                series.append(Series(name=arm.name, style=arm.style, points=_cumulative(values)))
        limit = None if bound_s is None else 1e3 * bound_s
        charts.append((name, line_chart(f"{name}, cumulative", label, "share", series, x_log=True, y_percent=True, limit=limit)))
    return [(name, chart) for name, chart in charts if chart]


def ledger(record: Record) -> tuple[str, list[tuple[str, list[str]]]]:
    """The chart of mean stages per arm, and its table: (stage, a cell per arm), milliseconds."""
    found = [(arm, summary["ledger_s"]) for arm, summary in summaries(record) if summary["ledger_s"]]
    bars = [
        Bar(name=arm.name, parts=tuple((words(stage), f"stage-{i}", 1e3 * stages[stage]) for i, stage in enumerate(PARTS)))
        for arm, stages in found
    ]
    rows = [(words(stage), [f"{1e3 * stages[stage]:.1f}" for _, stages in found]) for stage in STAGES]
    return stacked_bars("Mean time of each stage", "ms", bars), rows if found else []


def kv_use(record: Record) -> tuple[str, list[tuple[str, str, str]], float | None]:
    """KV use over time in one probe of each arm, a line per worker: the chart, its key as (worker, arm's style, dash's style),
    and the offered rate that is shown: the highest at which most arms were sampled."""
    sampled: dict[tuple[float, str], dict[int, list[Mapping[str, Any]]]] = {}
    for sample, probe in samples(record):
        sampled.setdefault((probe["rate_per_s"], sample["arm"]), {}).setdefault(sample["probe"], []).append(sample)
    if not sampled:
        return "", [], None
    rates = {rate for rate, _ in sampled}
    rate = max(rates, key=lambda each: (sum(one == each for one, _ in sampled), each))
    series, key = [], []
    for arm in arms_of(record):
        probes = sampled.get((rate, arm.name), {})
        shown = max(probes.values(), key=len, default=[])
        for place, worker in enumerate(sorted({sample["worker"] for sample in shown})):
            points = tuple((s["t_s"], s["kv_usage"]) for s in shown if s["worker"] == worker)
            dash = f"dash-{place % DASHES}"
            series.append(Series(name=worker, style=f"{arm.style} {dash}", points=points))
            key.append((f"{arm.name}: {worker}", arm.style, dash))
    return line_chart("KV blocks in use over time", "s since the probe began", "KV in use", series, y_percent=True), key, rate


def words(stage: str) -> str:
    """A stage of the ledger for people."""
    return stage.removesuffix("_s").replace("_", " ")


def _band(shares: Sequence[float]) -> tuple[float, float]:
    interval = t_interval(shares) if len(shares) >= MIN_SEEDS else None
    if interval is None:
        return min(shares), max(shares)
    return max(0.0, interval.low), min(1.0, interval.high)


def _attained(probe: Mapping[str, Any], slo: Mapping[str, float]) -> float:
    """As `Outcome.meets` judged it; the record holds what that needs."""
    bound = Slo(**slo)
    return statistics.fmean(Outcome(**outcome).meets(bound) for outcome in judged(probe))


def _ttft(outcome: Mapping[str, Any]) -> list[float]:
    return [] if outcome["ttft_s"] is None else [outcome["ttft_s"]]


def _gaps(outcome: Mapping[str, Any]) -> Iterable[float]:
    gaps: list[float] = outcome["gaps_s"]
    return gaps


def _tpot(outcome: Mapping[str, Any]) -> list[float]:
    if outcome["tokens"] < 2 or outcome["ttft_s"] is None or outcome["e2e_s"] is None:
        return []
    return [(outcome["e2e_s"] - outcome["ttft_s"]) / (outcome["tokens"] - 1)]


def _cumulative(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    count = len(values)
    picked = (
        sorted({round(i * (count - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)}) if count > MAX_POINTS else range(count)
    )
    points = [(values[i], (i + 1) / count) for i in picked]
    # Steps: a share is reached at its value, not on the way there.
    flat = [(after[0], before[1]) for before, after in itertools.pairwise(points)]
    return tuple(itertools.chain(points[:1], *zip(flat, points[1:], strict=True)))
