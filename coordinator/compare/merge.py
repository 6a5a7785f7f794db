"""Several records of one experiment as one: short machine time adds up. Pure.

Runs belong to one experiment when they asked for the same objective of the same system with the same workload, each with seeds of
its own. Each seed was measured whole within one run, so its figures stand as they are; what is judged anew is all seeds together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordinator.compare.draw import percentile_row
from coordinator.compare.load import PATHS
from coordinator.compare.paired import paired
from coordinator.compare.record import Record
from coordinator.compare.slo import in_words
from coordinator.compare.stats import log_ratios
from coordinator.compare.summary import arm
from coordinator.compare.verdict import judge

MANIFEST_PARTS = ("settings", "versions", "model", "hardware")
"""What must not differ between runs of one experiment, where both recorded it."""


class MergeError(ValueError):
    """The records are not of one experiment; the text says what differs."""


def merge(records: Sequence[Record], looks: Sequence[int] = ()) -> Record:
    """One record of all seeds, judged with alpha spent over `looks` where these were planned.

    Raises:
        MergeError: fewer than two records, records of different experiments, or a seed that two of them have.
        ValueError: `looks` are no plan.
    """
    if len(records) < 2:
        raise MergeError("give two records at least")
    _same(records)
    knees = [entry for record in records for entry in record.knees]
    seeds = [entry["seed"] for entry in knees]
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise MergeError(f"seed {twice[0]} is in two records: each run needs seeds of its own (compare --first-seed)")
    first = records[0]
    probes = list(itertools.chain.from_iterable(record.probes for record in records))
    outcomes = [outcome for probe in probes for outcome in probe.outcomes]
    faults = [fault for record in records for fault in record.faults]
    unfit = [fault.text for fault in faults if fault.unfit]
    judgement = judge(
        _ratios(knees, "split", "colocated"),
        _ratios(knees, "colocated_first", "colocated_second"),
        first.judgement.margin,
        looks=looks,
        faults=unfit,
    )
    return dataclasses.replace(
        first,
        kind="merged",
        started_at=min(record.started_at for record in records),
        wall_s=sum(record.wall_s for record in records),
        workloads=[spec for record in records for spec in record.workloads],
        workload_digests={seed: digest for record in records for seed, digest in record.workload_digests.items()},
        lengths={
            "input": percentile_row(np.array([outcome.prompt_tokens for outcome in outcomes])),
            "output": percentile_row(np.array([outcome.wanted_tokens for outcome in outcomes])),
        }
        if outcomes
        else first.lengths,
        rates_per_s=sorted({rate for record in records for rate in record.rates_per_s}),
        loaded=[arm(path, probes, first.slo) for path in PATHS],
        knees=knees,
        probes=probes,
        paired=paired(probes),
        faults=faults,
        judgement=judgement,
        client_nice=max(record.client_nice for record in records),
        notes=[
            f"merged from {len(records)} records; the unloaded figures and the manifest are of the first",
            *(f"{record.started_at}: {note}" for record in records for note in record.notes),
        ],
    )


def _same(records: Sequence[Record]) -> None:
    wanted: tuple[tuple[str, Callable[[Record], Any]], ...] = (
        ("models", lambda record: record.model),
        ("objectives", lambda record: in_words(record.slo)),
        ("workloads", lambda record: record.source),
        ("prompt and output ranges", lambda record: _ranges(record)),
        ("margins", lambda record: record.judgement.margin),
        ("schema versions", lambda record: record.schema_version),
    )
    for name, pick in wanted:
        for other in records[1:]:
            if pick(other) != pick(records[0]):
                hint = "; give every run the same absolute --slo" if name == "objectives" else ""
                raise MergeError(f"the {name} differ: {pick(records[0])!r} and {pick(other)!r}{hint}")
    for part in MANIFEST_PARTS:
        # A machine lent again has another name.
        known = [_nameless(record.manifest[part]) for record in records if part in record.manifest]
        if any(each != known[0] for each in known):
            raise MergeError(f"the manifests differ in {part}: not one system")


def _nameless(part: Any) -> Any:
    return {key: value for key, value in part.items() if key != "host"} if isinstance(part, dict) else part


def _ranges(record: Record) -> Any:
    """Of the built-in workload, whose lengths nothing else names; a specification speaks for itself."""
    return None if record.source else [(tuple(spec.prompt_tokens), tuple(spec.output_tokens)) for spec in record.workloads[:1]]


def _ratios(knees: Sequence[dict[str, Any]], over: str, under: str) -> list[float]:
    pairs = [(entry[over]["rate_per_s"], entry[under]["rate_per_s"]) for entry in knees]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    return log_ratios([a for a, _ in whole], [b for _, b in whole])
