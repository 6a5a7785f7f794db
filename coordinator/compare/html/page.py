"""One self-contained HTML file from one or several records: no script, no other file, no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from coordinator.compare.html import figures
from coordinator.compare.load import Slo
from coordinator.compare.slo import in_words

STAGE_COLOURS = ("#8a97a5", "#6fb1e8", "#2f7fd1", "#9b6fd6", "#f2b45c", "#e07b39", "#5fb08a", "#c94f5d", "#b9c0c7")
"""One per part of the ledger; told apart on white and on black."""


def render(records: Sequence[tuple[str, figures.Record]]) -> str:
    """The page of (name, record) pairs, in order. Everything that a record says is text, never markup."""
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    )
    stages = [part.removesuffix("_s").replace("_", " ") for part in figures.PARTS]
    return template.render(
        reports=[_report(name, record) for name, record in records], stage_colours=STAGE_COLOURS, stages=stages
    )


def _report(name: str, record: figures.Record) -> dict[str, Any]:
    judgement = record["judgement"]
    chart, rows = figures.ledger(record)
    workload = [(f"seed {seed}, SHA-256", digest) for seed, digest in record["workload_digests"].items()]
    workload += [(f"{side} tokens", json.dumps(found)) for side, found in record.get("lengths", {}).items()]
    if record.get("source"):
        workload.append(("specification", json.dumps(record["source"])))
    return {
        "name": name,
        "model": record["model"],
        "target": record["target"],
        "started_at": record["started_at"],
        "wall": f"{record['wall_s']:.0f}",
        "slo": in_words(Slo(**record["slo"])),
        "verdict": judgement["verdict"],
        "sentence": figures.sentence(judgement),
        "ratio": _range(judgement["ratio"], judgement["low"], judgement["high"]),
        "seeds": judgement["seeds"],
        "floor": _range(None, judgement["floor_low"], judgement["floor_high"]),
        "bootstrap": _range(None, judgement.get("bootstrap_low"), judgement.get("bootstrap_high")),
        "notes": record["notes"],
        "attainment": figures.attainment(record),
        "distributions": figures.distributions(record),
        "ledger_chart": chart,
        "ledger_rows": rows,
        "paths": [arm["path"] for arm in record["loaded"]],
        "latencies": figures.latencies(record),
        "goodputs": figures.goodputs(record),
        "losses": figures.losses(record),
        "priors": record.get("priors", []),
        "void": figures.void_probes(record),
        "probes": len(record["probes"]),
        "workload": workload,
        "manifest": json.dumps(record["manifest"], indent=1) if record["manifest"] else "not recorded",
    }


def _range(middle: float | None, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "-" if middle is None else f"{middle:.3f}, no interval"
    return (f"{middle:.3f} " if middle is not None else "") + f"({low:.3f} to {high:.3f})"
