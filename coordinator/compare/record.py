"""The record of a comparison: everything the verdict rests on, as one JSON object."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.compare.faults import Fault
from coordinator.compare.load import Probe, Slo
from coordinator.compare.paired import Paired
from coordinator.compare.summary import ArmSummary
from coordinator.compare.usage import Usage
from coordinator.compare.verdict import Judgement
from coordinator.compare.workload import WorkloadSpec

SCHEMA_VERSION = 1
"""Rises when a field changes its meaning or goes; new fields alone do not raise it."""


@dataclass(slots=True, kw_only=True)
class Record:
    """`kind` is "quick" or "merged". `unloaded` and `loaded` hold one summary per path. `notes` says what was cut or left out.

    `paired` is about requests that both paths answered; `priors` is what is usually so; `faults` are those of method and of an
    arm that were found. `lengths` holds mean, p50, p95 and extremes of `input` and `output` over all seeds; `source` the
    specification that the workloads were made from, empty for the built-in one. `knees` holds, per seed, each arm's goodput or
    why there is none. `manifest` is the system's own, empty when it was not to be had. `client_nice` is the load client's
    niceness; below 0 it ran before the system under test where both were ready.
    """

    kind: str
    target: str
    model: str
    started_at: str
    wall_s: float
    workloads: list[WorkloadSpec]
    workload_digests: dict[str, str]
    slo: Slo
    slo_multiples: dict[str, float]
    rates_per_s: list[float]
    unloaded: list[ArmSummary]
    loaded: list[ArmSummary]
    knees: list[dict[str, Any]]
    probes: list[Probe]
    judgement: Judgement
    paired: Paired | None = None
    priors: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lengths: dict[str, dict[str, float]] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    client_nice: int = 0
    notes: list[str] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write(record: Record, path: Path) -> None:
    """As `write_text`."""
    write_text(record.to_json(), path)


def write_text(text: str, path: Path) -> None:
    """Write it whole or not at all: a reader never sees half a record. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
