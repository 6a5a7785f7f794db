"""A transfer benchmark's outcome as a table, one last line, a JSON record and a figure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from coordinator.bench.transfer import BOUNDS, CONNECTOR, NIXL, RAW_GRPC, UCX_ALONE, UCX_ONE_COPY, Outcome, Plan, cores
from coordinator.bench.transfer_summary import Key, Rate, Sample, bound, paired_ratio, rates
from coordinator.manifest import git_commit, hardware, versions
from kvtransfer.bench.bounds import AT_ONCE
from kvtransfer.bench.shape import REAL, SYNTHETIC

FORMAT = 1
TEXT = {
    "ucx": "transport ucx inside one host: the sender's staging mapped, checked",
    UCX_ONE_COPY: "transport ucx with ucx_same_host=one_copy: Splitpoint's own process_vm_readv, checked",
    UCX_ALONE: "transport ucx with ucx_same_host=contained: UCX's shared memory, checked",
    "grpc": "transport grpc, checked",
    RAW_GRPC: "a gRPC stream of ready-made messages: no copy, no check",
    NIXL: "NIXL alone, one descriptor a block and layer: no staging, no check",
    CONNECTOR: "vLLM's NixlConnector, its worker half: start_load_kv to get_finished, no check",
    "memcpy": "a copy inside one process",
    "crc32c": "CRC32C of bytes outside the cache",
    "memcpy_crc32c": "a copy in pieces of one block and layer, with CRC32C in the cache",
    "readv": "process_vm_readv",
    "readv_crc32c": "process_vm_readv with CRC32C in the cache",
    AT_ONCE: "gather, checksums and scatter by plain calls, all at the same time, nothing waiting for anything",
}


def table(found: Mapping[Key, Rate]) -> Table:
    """Rows in the order of measuring: GB/s, median and quartiles."""
    made = Table("path", "what", "blocks", "MiB", "GB/s", "quartiles", title="GB/s between two processes", title_justify="left")
    for (path, layout, size, staged, check), rate in found.items():
        what = "slot to slot" if staged else "cache to cache"
        if path in BOUNDS:
            what = "memory"
        if not check:
            what += ", checksum off"
        made.add_row(path, what, layout, f"{size:g}", f"{rate.median:.2f}", f"{rate.low:.2f} to {rate.high:.2f}")
    return made


def headline(samples: list[Sample], path: str, *, staged: bool = False) -> float | None:
    """Median GB/s of a path's real blocks over sizes of 32 MiB and more, from cache to cache unless `staged`."""
    chosen = [
        s.gigabytes_per_s
        for s in samples
        if s.path == path and s.layout == REAL.name and s.staged == staged and s.check and s.size_mib >= 32
    ]
    if not chosen:
        return None
    return sorted(chosen)[len(chosen) // 2]


def judged(outcome: Outcome) -> dict[str, Any]:
    """The ratios that the targets speak of, each over pairs of the same repeat, with quartiles; and the bound."""
    samples = [s for s in outcome.samples if s.size_mib >= 32]
    parts = {name: headline(outcome.samples, name) for name in BOUNDS}
    known = {name: value for name, value in parts.items() if value is not None}
    limit = bound(known, cores()) if len(known) == len(BOUNDS) else None
    reading = bound(known, cores(), reads=True) if len(known) == len(BOUNDS) else None
    ours = headline(outcome.samples, "ucx")

    def ratio(path: str, other: str, **choice: Any) -> dict[str, float] | None:
        found = paired_ratio(samples, path, other, layout=choice.pop("layout", REAL.name), **choice)
        return None if found is None else asdict(found)

    return {
        "ucx / NixlConnector": ratio("ucx", CONNECTOR),
        "ucx / NIXL READ": ratio("ucx", NIXL),
        "ucx / NIXL READ, 16-token pieces": ratio("ucx", NIXL, layout=SYNTHETIC.name),
        "ucx / ucx contained": ratio("ucx", UCX_ALONE),
        "ucx / ucx one copy": ratio("ucx", UCX_ONE_COPY),
        "grpc / gRPC stream, slot to slot": ratio("grpc", RAW_GRPC, staged=True),
        "bound, GB/s": limit,
        "ucx / bound": None if limit is None or ours is None else ours / limit,
        "bound of a path that reads, GB/s": reading,
        "ucx / bound of a path that reads": None if reading is None or ours is None else ours / reading,
        "stages at once, GB/s": known.get(AT_ONCE),
        "ucx / stages at once": ratio("ucx", AT_ONCE),
        "single operations, GB/s": known,
        "cores": cores(),
    }


def lines(outcome: Outcome) -> list[str]:
    """What to print below the table; the last one is the summary."""
    said = []
    for name, value in judged(outcome).items():
        if isinstance(value, dict) and "median" in value:
            said.append(f"{name}: {value['median']:.2f} (quartiles {value['low']:.2f} to {value['high']:.2f})")
        elif isinstance(value, float):
            said.append(f"{name}: {value:.2f}")
    said += [f"missing: {path}: {why}" for path, why in outcome.missing.items()]
    figures = {path: headline(outcome.samples, path) for path in ("ucx", "grpc", CONNECTOR, NIXL)}
    said.append(", ".join(f"{path} " + ("missing" if v is None else f"{v:.2f} GB/s") for path, v in figures.items()))
    return said


def record(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    """Everything, to be written as JSON."""
    return {
        "format": FORMAT,
        "kind": "bench transfer",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["splitpoint", *sys.argv[1:]],
        "git_commit": git_commit(),
        "hardware": hardware(),
        "versions": versions(),
        "plan": {"sizes_mib": list(plan.sizes), "repeats": plan.repeats, "own_cores": plan.own_cores},
        "paths": TEXT,
        "layouts": {layout.name: asdict(layout) for layout in (REAL, SYNTHETIC)},
        "missing": outcome.missing,
        "ratios": judged(outcome),
        "summary": lines(outcome)[-1],
        "samples": [asdict(sample) for sample in outcome.samples],
    }


def write(path: Path, value: dict[str, Any]) -> None:
    """Raises `OSError`."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def plot(path: Path, outcome: Outcome) -> None:
    """GB/s over size, one line a path, real blocks from cache to cache; bounds dashed. Raises `OSError`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    found = rates(outcome.samples)
    for name in TEXT:
        staged = name == RAW_GRPC
        points = [(key[2], rate) for key, rate in found.items() if key[:2] == (name, REAL.name) and key[3:] == (staged, True)]
        if not points:
            continue
        sizes = [size for size, _ in points]
        style = "--" if name in BOUNDS else "-"
        (line,) = axes.plot(sizes, [r.median for _, r in points], style, marker="o", markersize=3, label=name)
        axes.fill_between(sizes, [r.low for _, r in points], [r.high for _, r in points], alpha=0.15, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes := sorted({s.size_mib for s in outcome.samples}), [f"{size:g}" for size in sizes])
    axes.set_yscale("log")
    axes.set_xlabel("MiB in one transfer")
    axes.set_ylabel("GB/s (median, quartiles)")
    axes.legend(fontsize="small", ncols=2)
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path)
