"""The quality and parity parts of a record as tables. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONG = 8
"""Lists of more are told by their length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One table with its title, column names ("" ones for plain facts) and a line below it."""

    title: str
    head: tuple[str, ...]
    rows: list[list[str]]
    below: str = ""


def parts(record: Mapping[str, Any]) -> list[Part]:
    """What the record holds of the two; forms that this page does not know are shown as plain facts."""
    found = []
    quality, parity = record.get("quality"), record.get("parity")
    if quality:
        found.append(_quality(quality) if {"arms", "compared", "floor"} <= set(quality) else _plain("Quality", quality))
    if parity:
        samples = parity if isinstance(parity, list) else parity.get("samples", [parity])
        known = all(isinstance(each, Mapping) and "arms" in each for each in samples)
        found.append(_parity(samples) if known else _plain("Parity", parity))
    return found


def facts(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested values as (dotted name, text) rows."""
    if isinstance(value, Mapping):
        return [row for key, inner in value.items() for row in facts(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list) and (len(value) > LONG or any(isinstance(each, (list, dict)) for each in value)):
        return [(name, f"{len(value)} entries, in the record")]
    return [(name, as_text(value))]


def as_text(value: Any) -> str:
    """A value of the record in a cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _plain(title: str, value: Any) -> Part:
    return Part(title=title, head=(), rows=[list(row) for row in facts(value)])


def _quality(report: Mapping[str, Any]) -> Part:
    scores = {arm["name"]: arm["scores"] for arm in report["arms"]}
    rows = [[report["baseline"], "baseline", _score(scores.get(report["baseline"], [])), *_divergence(report["floor"]), ""]]
    rows += [
        [arm["arm"], str(arm["verdict"]), _score(scores.get(arm["arm"], [])), *_divergence(arm), arm["why"]]
        for arm in report["compared"]
    ]
    below = f"{report['questions']} questions, set {report['set_digest'][:12]}; {report['left_out']} left out. "
    below += "The baseline's divergences are from itself, asked twice; the excess is above them. Nats per token."
    head = ("arm", "verdict", "right answers", "drop", "excess divergence", "p99", "same best token", "why")
    return Part(title="Quality", head=head, rows=rows, below=below)


def _score(scores: Sequence[Mapping[str, Any]]) -> str:
    for score in scores:
        if not score["kind"] and score["share"] is not None:
            return f"{score['share']:.1%} of {score['asked']} ({score['low']:.1%} to {score['high']:.1%})"
    return "-"


def _divergence(arm: Mapping[str, Any]) -> list[str]:
    paired, read = arm.get("paired"), arm["read"]
    drop = "-" if not paired else f"{paired['drop']:+.1%} ({paired['low']:+.1%} to {paired['high']:+.1%})"
    return [
        drop,
        _between(read["excess"], read["excess_low"], read["excess_high"]),
        _between(read["p99"], read["p99_low"], read["p99_high"]),
        _between(read["agreement"], read["agreement_low"], read["agreement_high"]),
    ]


def _between(middle: float | None, low: float | None, high: float | None) -> str:
    if middle is None:
        return "-"
    return f"{middle:.3g}" if low is None or high is None else f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _parity(samples: Sequence[Mapping[str, Any]]) -> Part:
    rows = [
        [
            str(sample.get("seed", "-")),
            arm["arm"],
            arm["verdict"],
            f"{arm['divergences']} of {arm['asked']}",
            f"{arm['batched_divergences']} of {arm['batched']}",
            f"{arm['worst_gap']:.3g} / {sample['floor']:.3g} / {sample['batched_floor']:.3g}",
            arm["why"],
        ]
        for sample in samples
        for arm in sample["arms"]
    ]
    head = ("seed", "arm", "verdict", "differ, one at a time", "differ, batched", "worst gap / floor / batched, nats", "why")
    return Part(
        title="Parity", head=head, rows=rows, below="Greedy tokens against the baseline's; the floors are the baseline's own."
    )
