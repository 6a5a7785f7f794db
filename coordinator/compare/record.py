"""The record of a comparison: everything the verdict rests on, as one JSON object."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStep:
    """One probe of the search for a candidate's knee, on a tuning seed. `chosen`: of the candidate that is compared; `void`: why
    it tells nothing but that higher rates cannot be sent, "" when it counts; `requests`: that were sent, 0 where it was not
    kept."""

    candidate: str
    seed: int
    rate_per_s: float
    attainment: float
    chosen: bool = False
    void: str = ""
    requests: int = 0


@dataclass(slots=True, kw_only=True)
class ArmRecord:
    """One arm as it was compared. `tried` holds each candidate's goodput per tuning seed, requests/s; `engine`, by pool, the
    arguments that its engines were started with, where the manifest tells them."""

    name: str
    path: str
    candidate: str
    pools: tuple[str, ...] = ()
    transport: str = ""
    engine: dict[str, dict[str, Any]] = field(default_factory=dict)
    tuning: list[TuningStep] = field(default_factory=list)
    tried: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Record:
    """`kind` is "quick", "full" or "merged". `unloaded` and `loaded` hold one summary per path, or arm. `notes` says what is
    missing.

    `paired` is about requests that both paths answered; `priors` is what is usually so; `faults` are those of method and of an
    arm that were found. `lengths` holds mean, p50, p95 and extremes of `input` and `output` over all seeds; `source` the
    specification that the workloads were made from, empty for the built-in one. `knees` holds, per seed, each arm's goodput or
    why there is none. `manifest` is the system's own, empty when it was not to be had. `client_nice` is the load client's
    niceness, `client_realtime` whether it ran before every ordinary process, and so before the system under test. `unit_gaps`:
    drawn gaps were scaled to the offered rate; those of older records were so in expectation only.

    Of a full comparison: `experiment` is the plan as it was read and `experiment_digest` what runs of it have in common; `arms`
    are the baseline and the others; `verdicts` is the judgement of each challenger, of which `judgement` is the first's.
    `quality` is what the question set found, `parity` one sample of equal tokens per seed; empty where the plan asks for none.
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
    client_realtime: bool = False
    unit_gaps: bool = False
    notes: list[str] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    experiment: dict[str, Any] = field(default_factory=dict)
    experiment_digest: str = ""
    arms: list[ArmRecord] = field(default_factory=list)
    verdicts: dict[str, Judgement] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    parity: list[dict[str, Any]] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One line per field, and per probe: what is large is dense, and a difference is still found line by line."""
        lines = []
        for name, value in dataclasses.asdict(self).items():
            if name == "probes" and value:
                text = "[\n  " + ",\n  ".join(_dense(probe) for probe in value) + "\n ]"
            else:
                text = _dense(value)
            lines.append(f' "{name}": {text}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _dense(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write(record: Record, path: Path) -> None:
    """As `write_text`."""
    write_text(record.to_json(), path)


def write_text(text: str, path: Path) -> None:
    """Write it whole or not at all: a reader never sees half a record. Where the name ends in .gz it is compressed.

    Raises `OSError`.
    """
    data = text.encode()
    if path.suffix == ".gz":
        # Without a time stamp: equal records are equal files.
        data = gzip.compress(data, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
