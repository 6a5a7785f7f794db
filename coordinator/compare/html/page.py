"""One self-contained HTML file from one or several records: no script, no other file, no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from coordinator.compare.html import figures, quality, tables
from coordinator.compare.html.arms import arms_of, summaries, verdicts
from coordinator.compare.load import Slo
from coordinator.compare.slo import in_words

STAGE_COLOURS = ("#8a97a5", "#6fb1e8", "#2f7fd1", "#9b6fd6", "#f2b45c", "#e07b39", "#5fb08a", "#c94f5d", "#b9c0c7")
"""One per part of the ledger; told apart on white and on black."""


ARM_COLOURS = (
    ("#0b6bcb", "#5aa9f5"), ("#c2570c", "#f0954e"), ("#2e8b57", "#62c08c"),
    ("#8b3fb0", "#c58be0"), ("#a3242f", "#ef7d86"), ("#5b6770", "#aeb8c1"),
)  # fmt: skip
"""(on light, on dark) per style `arm-0` .. of the page; split and colocated have the first two everywhere."""


def render(records: Sequence[tuple[str, figures.Record]]) -> str:
    """The page of (name, record) pairs, in order. Everything that a record says is text, never markup."""
    stages = [figures.words(part) for part in figures.PARTS]
    return (
        environment()
        .get_template("page.html")
        .render(
            reports=[{**_report(name, record), "place": place} for place, (name, record) in enumerate(records, start=1)],
            stage_colours=STAGE_COLOURS,
            arm_colours=ARM_COLOURS,
            stages=stages,
        )
    )


def environment(*folders: Path) -> jinja2.Environment:
    """Templates of this folder and of `folders`; what they are given is text unless they say otherwise."""
    loader = jinja2.FileSystemLoader([Path(__file__).parent, *folders])
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def _report(name: str, record: figures.Record) -> dict[str, Any]:
    judgement = record["judgement"]
    chart, rows = figures.ledger(record)
    kv_chart, kv_key, kv_rate = figures.kv_use(record)
    workload = [(f"seed {seed}, SHA-256", digest) for seed, digest in record["workload_digests"].items()]
    workload += [(f"{side} tokens", json.dumps(found)) for side, found in record.get("lengths", {}).items()]
    if record.get("source"):
        workload.append(("specification", json.dumps(record["source"])))
    arms = arms_of(record)
    return {
        "name": name,
        "model": record["model"],
        "target": record["target"],
        "started_at": record["started_at"],
        "wall": f"{record['wall_s']:.0f}",
        "slo": in_words(Slo(**record["slo"])),
        "arms": arms,
        "verdict": judgement["verdict"],
        "sentences": tables.sentences(record),
        "verdicts": [
            (arm.name, found["verdict"], _range(found["ratio"], found["low"], found["high"]), found["seeds"])
            for arm, found in verdicts(record)
        ],
        "goodput_of": ", ".join(f"{arm.name} {tables.goodput(record, arm)}" for arm in arms),
        "floor": _range(None, judgement["floor_low"], judgement["floor_high"]),
        "bootstrap": _range(None, judgement.get("bootstrap_low"), judgement.get("bootstrap_high")),
        "notes": record["notes"],
        "attainment": figures.attainment(record),
        "distributions": figures.distributions(record),
        "ledger_chart": chart,
        "ledger_rows": rows,
        "loaded": [arm.name for arm, _ in summaries(record)],
        "ledgers": [arm.name for arm, summary in summaries(record) if summary["ledger_s"]],
        "latencies": tables.latencies(record),
        "goodput_head": tables.goodput_head(record),
        "goodputs": tables.goodputs(record),
        "goodput_means": tables.goodput_means(record),
        "losses": tables.losses(record),
        "kv_chart": kv_chart,
        "kv_key": kv_key,
        "kv_rate": "" if kv_rate is None else f"{kv_rate:.3g}",
        "peaks": tables.peaks(record),
        "configurations": tables.configurations(record),
        "quality": quality.parts(record),
        "priors": record.get("priors", []),
        "void": tables.void_probes(record),
        "probes": len(record["probes"]),
        "workload": workload,
        "manifest": json.dumps(record["manifest"], indent=1) if record["manifest"] else "not recorded",
    }


def _range(middle: float | None, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "-" if middle is None else f"{middle:.3f}, no interval"
    return (f"{middle:.3f} " if middle is not None else "") + f"({low:.3f} to {high:.3f})"
