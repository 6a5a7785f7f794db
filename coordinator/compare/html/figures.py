"""A comparison's record as figures and rows for the page. Pure: the record is the mapping that its JSON holds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coordinator.compare.html.svg import Band, Bar, Series, line_chart, stacked_bars
from coordinator.compare.summary import STAGES

PATHS = ("split", "colocated")
MAX_POINTS = 200
"""Of one distribution's line; more cannot be seen."""
PARTS = tuple(stage for stage in STAGES if stage != "e2e_s")

Record = Mapping[str, Any]


def attainment(record: Record) -> str:
    """Attainment over offered rate: a line per arm, the range of its seeds as a band, void probes left out."""
    series, bands = [], []
    for path in PATHS:
        by_rate: dict[float, dict[int, list[float]]] = {}
        for probe in _valid(record, path):
            share = _attained(probe, record["slo"])
            by_rate.setdefault(probe["rate_per_s"], {}).setdefault(probe["seed"], []).append(share)
        seeds = {rate: [statistics.fmean(shares) for shares in found.values()] for rate, found in sorted(by_rate.items())}
        line = tuple((rate, statistics.fmean(found)) for rate, found in seeds.items())
        if line:
            series += [Series(name=path, style=path, points=line), Series(name=path, style=f"{path} dots", points=line)]
            bands.append(Band(style=path, points=tuple((rate, min(found), max(found)) for rate, found in seeds.items())))
    return line_chart(
        "Attainment over offered rate", "offered requests/s", "attainment", series, bands=bands, level=0.9, y_percent=True
    )


def distributions(record: Record) -> list[tuple[str, str]]:
    """(name, chart) of TTFT, TPOT and the gaps between tokens under load, as cumulative shares of answered requests."""
    wanted: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Iterable[float]]], ...] = (
        ("TTFT", "ms from due to the first token", lambda o: [o["ttft_s"]] if o["ttft_s"] is not None else []),
        ("TPOT", "ms per token after the first", _tpot),
        ("ITL", "ms between two tokens", lambda o: o["gaps_s"]),
    )
    charts = []
    for name, label, pick in wanted:
        series = []
        for path in PATHS:
            answered = (o for probe in _valid(record, path) for o in probe["outcomes"] if not o["failure"])
            values = sorted(1e3 * value for outcome in answered for value in pick(outcome))
            if values:
                series.append(Series(name=path, style=path, points=_cumulative(values)))
        charts.append((name, line_chart(f"{name}, cumulative", label, "share", series, x_log=True, y_percent=True)))
    return [(name, chart) for name, chart in charts if chart]


def ledger(record: Record) -> tuple[str, list[tuple[str, list[str]]]]:
    """The chart of mean stages per arm, and its table: (stage, a cell per arm), milliseconds."""
    arms = [arm for arm in record["loaded"] if arm["ledger_s"]]
    bars = [
        Bar(
            name=arm["path"],
            parts=tuple((_words(stage), f"stage-{i}", 1e3 * arm["ledger_s"][stage]) for i, stage in enumerate(PARTS)),
        )
        for arm in arms
    ]
    rows = [(_words(stage), [f"{1e3 * arm['ledger_s'][stage]:.1f}" for arm in arms]) for stage in STAGES]
    return stacked_bars("Mean time of each stage", "ms", bars), rows if arms else []


def latencies(record: Record) -> list[tuple[str, list[str]]]:
    """(figure, a cell per arm) under load."""
    arms = record["loaded"]

    def cells(pick: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [pick(arm) for arm in arms]

    return [
        ("TTFT ms, p50 / p90 / p99", cells(lambda arm: _spread(arm["ttft"]))),
        ("TPOT ms, p50 / p90 / p99", cells(lambda arm: _spread(arm["tpot"]))),
        ("gap to 2nd token ms, p50 / p90 / p99", cells(lambda arm: _spread(arm["second_token_gap"]))),
        ("ITL ms, p99 / largest", cells(lambda arm: f"{_ms(arm['itl_p99_s'])} / {_ms(arm['itl_largest_s'])}")),
        ("E2E ms, p50 / p90 / p99", cells(lambda arm: _spread(arm["e2e"]))),
        ("attainment", cells(lambda arm: "-" if arm["attainment"] is None else f"{arm['attainment']:.1%}")),
        ("offered / failed", cells(lambda arm: f"{arm['offered']} / {arm['failed']}")),
        ("KV moved, MiB", cells(lambda arm: f"{arm['transfer_bytes'] / 2**20:.1f}")),
        ("recomputed", cells(lambda arm: str(arm["recomputed"]))),
    ]


def void_probes(record: Record) -> list[list[str]]:
    """Path, seed, rate and reason of each."""
    return [
        [probe["path"], str(probe["seed"]), f"{probe['rate_per_s']:.3g}", probe["void"]]
        for probe in record["probes"]
        if probe["void"]
    ]


def goodputs(record: Record) -> list[list[str]]:
    """Seed, each arm's knee or why there is none, their ratio."""
    rows = []
    for entry in record["knees"]:
        cells = [_knee(entry[path]) for path in PATHS]
        rates = [entry[path]["rate_per_s"] for path in PATHS]
        ratio = f"{rates[0] / rates[1]:.3f}" if None not in rates else "-"
        rows.append([str(entry["seed"]), *cells, ratio])
    return rows


def losses(record: Record) -> tuple[str, list[list[str]]]:
    """One line about all requests, and a row for each of those that lost most; "" and none where nothing was paired."""
    found = record.get("paired")
    if not found:
        return "", []
    line = (
        f"Splitting lost for {found['lost']} of {found['requests']} requests: E2E {_signed(found['median_s'])} ms in the median, "
    )
    line += f"{_signed(found['p90_s'])} ms at p90."
    return line, [
        [
            f"{loss['seed']} / {loss['rate_per_s']:.3g} / {loss['index']}",
            str(loss["output_tokens"]),
            *(_signed(loss[key]) for key in ("e2e_s", "ttft_s", "tpot_s")),
        ]
        for loss in found["worst"]
    ]


def sentence(judgement: Mapping[str, Any]) -> str:
    """The verdict for people, from its record."""
    text = f"{judgement['verdict']}: {judgement['reason']}"
    if judgement["ratio"] is not None:
        text += f" (split over colocated {judgement['ratio']:.2f}"
        if judgement["low"] is not None:
            share = judgement.get("confidence", 0.95)
            text += f", {share:.1%} interval {judgement['low']:.2f} to {judgement['high']:.2f}"
        text += ")"
    return text


def _valid(record: Record, path: str) -> list[Mapping[str, Any]]:
    return [probe for probe in record["probes"] if probe["path"] == path and not probe["void"]]


def _attained(probe: Mapping[str, Any], slo: Mapping[str, Any]) -> float:
    """As `Outcome.meets` judged it; the record holds what that needs."""
    from coordinator.compare.load import Outcome, Slo

    bound = Slo(**slo)
    return statistics.fmean(Outcome(**outcome).meets(bound) for outcome in probe["outcomes"])


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


def _words(stage: str) -> str:
    return stage.removesuffix("_s").replace("_", " ")


def _knee(found: Mapping[str, Any]) -> str:
    return str(found["why"]) if found["rate_per_s"] is None else f"{found['rate_per_s']:.3g}/s"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:+.1f}"


def _spread(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else " / ".join(_ms(found[key]) for key in ("p50", "p90", "p99"))
