"""Several records of one experiment as one: short machine time adds up. Pure.

Runs belong to one experiment when they asked for the same objective of the same system with the same workload, each with seeds of
its own. Each seed was measured whole within one run, so its figures stand as they are; what is judged anew is all seeds together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.compare.draw import percentile_row
from coordinator.compare.experiment import ExperimentError, check
from coordinator.compare.faults import CARRY_OVER, second_halves
from coordinator.compare.goodput import floor, gains, ratios
from coordinator.compare.judged import judge_challengers
from coordinator.compare.load import PATHS
from coordinator.compare.paired import paired
from coordinator.compare.record import Record
from coordinator.compare.slo import in_words
from coordinator.compare.summary import arm
from coordinator.compare.usage import Usage
from coordinator.compare.verdict import BASELINE, judge

MANIFEST_PARTS = ("settings", "versions", "model", "hardware", "step_times")
"""What must not differ between runs of one experiment, where both recorded it."""


class MergeError(ValueError):
    """The records are not of one experiment; the text says what differs."""


def merge(records: Sequence[Record], looks: Sequence[int] = ()) -> Record:
    """One record of all seeds, judged with alpha spent over `looks` where these were planned. One record alone is judged anew, by
    the rules of this version.

    Raises:
        MergeError: no records, records of different experiments, or a seed that two of them have.
        ValueError: `looks` are no plan.
    """
    if not records:
        raise MergeError("give a record at least")
    _same(records)
    knees = [entry for record in records for entry in record.knees]
    seeds = [entry["seed"] for entry in knees]
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise MergeError(f"seed {twice[0]} is in two records: each run needs seeds of its own (compare --first-seed)")
    first = records[0]
    probes = list(itertools.chain.from_iterable(record.probes for record in records))
    outcomes = [outcome for probe in probes for outcome in probe.outcomes]
    faults = [fault for record in records for fault in record.faults]
    if not any(fault.kind == CARRY_OVER for fault in faults):
        # Short runs have too few seeds each to show it.
        named = [each.name for each in records[0].arms] or list(PATHS)
        faults += [fault for fault in (second_halves(gains(knees, named)),) if fault is not None]
    unfit = [fault.text for fault in faults if fault.unfit]
    if first.experiment:
        if looks:
            raise MergeError("the looks of a full comparison are planned in its experiment: give no --looks")
        try:
            experiment = check(first.experiment)
        except ExperimentError as error:
            raise MergeError(f"the records' plan is of another version of this program: {error}") from error
        names, baseline, challenger = tuple(experiment.arms), experiment.baseline, experiment.challengers[0]
        verdicts = judge_challengers(knees, experiment, unfit)
        judgement = verdicts[challenger]
    else:
        names, baseline, challenger, verdicts = PATHS, BASELINE, "split", {}
        judgement = judge(
            ratios(knees, "split", BASELINE), floor(knees, BASELINE), first.judgement.margin, looks=looks, faults=unfit
        )
    notes = [
        f"merged from {len(records)} records; the unloaded figures and the manifest are of the first",
        *(f"{record.started_at}: {note}" for record in records for note in record.notes),
    ]
    alone = len(records) == 1
    return dataclasses.replace(
        first,
        kind=first.kind if alone else "merged",
        verdicts=verdicts,
        parity=[sample for record in records for sample in record.parity],
        usage=_usage(records),
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
        loaded=[arm(name, probes, first.slo) for name in names],
        knees=knees,
        probes=probes,
        paired=paired(probes, challenger, baseline),
        faults=faults,
        judgement=judgement,
        client_nice=max(record.client_nice for record in records),
        client_realtime=all(record.client_realtime for record in records),
        notes=first.notes if alone else notes,
    )


def _same(records: Sequence[Record]) -> None:
    wanted: tuple[tuple[str, Callable[[Record], Any]], ...] = (
        ("models", lambda record: record.model),
        ("objectives", lambda record: in_words(record.slo)),
        ("workloads", lambda record: record.source),
        ("prompt and output ranges", lambda record: _ranges(record)),
        ("experiments", lambda record: record.experiment_digest),
        ("rates", lambda record: record.rates_per_s if record.experiment else None),
        ("configurations", lambda record: [(each.name, each.candidate) for each in record.arms]),
        # A trace's gaps were always scaled.
        ("scales of drawn gaps", lambda record: record.unit_gaps or record.source.get("kind") == "trace"),
        ("margins", lambda record: record.judgement.margin),
        ("schema versions", lambda record: record.schema_version),
    )
    for name, pick in wanted:
        for other in records[1:]:
            if pick(other) != pick(records[0]):
                hint = "; give every run the same absolute --slo" if name == "objectives" else ""
                raise MergeError(f"the {name} differ: {pick(records[0])!r} and {pick(other)!r}{hint}")
    for record in records[1:]:
        if part := other_system(records[0].manifest, record.manifest):
            raise MergeError(f"the manifests differ in {part}: not one system")


def other_system(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What differs between two manifests of what should be one system; "" where nothing that both recorded does.

    A machine lent again has another name; where the system keeps its state, and its ports, are no part of it.
    """
    for part in MANIFEST_PARTS:
        if part in first and part in other and _lasting(first[part]) != _lasting(other[part]):
            return part
    return ""


def _lasting(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    kept = {key: value for key, value in part.items() if key != "host"}
    if isinstance(kept.get("coordinator"), dict):
        kept["coordinator"] = {key: value for key, value in kept["coordinator"].items() if key != "state_dir"}
    if isinstance(kept.get("gateway"), dict):
        kept["gateway"] = {key: value for key, value in kept["gateway"].items() if not key.endswith("_port")}
    return kept


def _ranges(record: Record) -> Any:
    """Of the built-in workload, whose lengths nothing else names; a specification speaks for itself."""
    return None if record.source else [(tuple(spec.prompt_tokens), tuple(spec.output_tokens)) for spec in record.workloads[:1]]


def _usage(records: Sequence[Record]) -> list[Usage]:
    """All samples, each with its probe's place in the merged record."""
    found, before = [], 0
    for record in records:
        found += [dataclasses.replace(sample, probe=sample.probe + before) for sample in record.usage]
        before += len(record.probes)
    return found
