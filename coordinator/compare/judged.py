"""Everything in a full comparison's record that follows from what was measured. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coordinator.compare.experiment import Candidate, Experiment
from coordinator.compare.faults import LATE_CLIENT, Fault, inspect, mistuned, second_halves
from coordinator.compare.goodput import bounded_ratios, floor, gains, ratios
from coordinator.compare.load import Probe
from coordinator.compare.notes import knee_notes, to_settle, void_notes
from coordinator.compare.paired import paired
from coordinator.compare.priors import priors
from coordinator.compare.record import Record
from coordinator.compare.stats import Interval, t_interval
from coordinator.compare.summary import arm as summary_of
from coordinator.compare.verdict import Judgement, Verdict, among, judge_at_looks
from coordinator.compare.workload import Workload, lengths

RECOMPUTED_SHARE = 0.005
TUNED_OVER = ("max_num_batched_tokens", "max_num_seqs")
"""Engine arguments that the best configuration of either path may depend on."""


def refresh(record: Record, experiment: Experiment, sent: Sequence[Workload], *, more_notes: Sequence[str] = ()) -> None:
    """Summaries, faults, verdicts and notes anew from the record's probes and knees. `sent`: one workload per measured seed."""
    names = tuple(experiment.arms)
    record.faults = _faults(record, experiment, sent)
    record.lengths = lengths(sent)
    record.loaded = [summary_of(name, record.probes, record.slo) for name in names]
    record.paired = paired(record.probes, experiment.challengers[0], experiment.baseline)
    record.priors = _priors(record)
    record.verdicts = judge_challengers(record.knees, experiment, [fault.text for fault in record.faults if fault.unfit])
    record.judgement = record.verdicts[experiment.challengers[0]]
    notes = void_notes(record.probes, names) + knee_notes(record.knees, names)
    if not settled(record.verdicts):
        notes += to_settle(record.knees, record.probes, names)
    notes += parity_notes(record.parity) + _recomputed(record)
    notes += _untuned(record, experiment)
    if any(len(arm.tried) > 1 for arm in record.arms):
        notes.append("the unloaded figures, and with them the objective, are of each arm's first candidate")
    record.notes = [*notes, *(fault.text for fault in record.faults), *more_notes]


def judge_challengers(knees: Sequence[dict[str, Any]], experiment: Experiment, faults: Sequence[str]) -> dict[str, Judgement]:
    """One judgement per challenger against the baseline; with several, Holm's correction among them.

    Only at planned looks anything is decided. A verdict that would be another with the seeds whose knee was missed at the outer
    rates is none: which seeds are missed depends on the result.
    """
    itself = floor(knees, experiment.baseline)
    found = {}
    for name in experiment.challengers:
        judge = functools.partial(
            judge_at_looks,
            floor=itself,
            margin=experiment.margin,
            looks=experiment.looks,
            faults=faults,
            challenger=name,
            baseline=experiment.baseline,
        )
        judgement = judge(ratios(knees, name, experiment.baseline))
        bounded = bounded_ratios(_until(knees, judgement.seeds, name, experiment.baseline), name, experiment.baseline)
        if judgement.verdict is not Verdict.UNDECIDED and len(bounded) > judgement.seeds:
            interval = t_interval(bounded, judgement.confidence)
            if interval is None or not _agrees(judgement.verdict, interval, math.log1p(experiment.margin)):
                reason = f"{judgement.winner}, but not with the seeds whose knee the rates missed"
                judgement = replace(judgement, verdict=Verdict.UNDECIDED, reason=reason, seeds_needed=None)
        found[name] = judgement
    return found if len(found) == 1 else among(found, "arms")


def _until(knees: Sequence[dict[str, Any]], seeds: int, over: str, under: str) -> Sequence[dict[str, Any]]:
    """The seeds that were measured when this many had given a ratio, and what was missed up to the next."""
    usable = [place for place, entry in enumerate(knees) if ratios([entry], over, under)]
    return knees[: usable[seeds]] if seeds < len(usable) else knees


def _agrees(verdict: Verdict, interval: Interval, bound: float) -> bool:
    if verdict is Verdict.SPLIT:
        return interval.low > bound
    if verdict is Verdict.COLOCATE:
        return interval.high < -bound
    return interval.low > -bound and interval.high < bound


def parity_notes(samples: Sequence[dict[str, Any]]) -> list[str]:
    """Arms whose tokens are not the baseline's, one note each with the first reason."""
    differing: dict[str, tuple[int, str]] = {}
    for sample in samples:
        for arm in sample.get("arms", []):
            if arm["verdict"] == "differs":
                count, why = differing.get(arm["arm"], (0, arm["why"]))
                differing[arm["arm"]] = (count + 1, why)
    return [
        f"{name} gave other tokens than the baseline in {count} of {len(samples)} samples: {why}"
        for name, (count, why) in differing.items()
    ]


def engine_arguments(manifest: dict[str, Any], pools: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By pool, the arguments of its engines as the manifest tells them; of all pools where none is named."""
    settings = manifest.get("settings", {})
    common, known = settings.get("engine", {}), settings.get("pools", {})
    return {name: {**common, **known[name].get("engine", {})} for name in pools or known if name in known}


def _untuned(record: Record, experiment: Experiment) -> list[str]:
    """What every candidate of an arm has alike, as far as the plan and the manifest tell: another value may be better."""
    found = []
    for name, arm in experiment.arms.items():
        engines = [_engines(record.manifest, candidate) for candidate in arm.candidates.values()]
        for option in TUNED_OVER:
            first, *others = {tuple(engine.get(option) for engine in own) for own in engines}
            if first and None not in first and not others:
                values = " and ".join(str(value) for value in dict.fromkeys(first))
                found.append(f"{name} was not tuned over {option}: every candidate has {values}")
    return found


def _engines(manifest: dict[str, Any], candidate: Candidate) -> list[dict[str, Any]]:
    """The arguments of a candidate's engines, pool by pool."""
    if not candidate.apply:
        return list(engine_arguments(manifest, candidate.pools).values())
    common = manifest.get("settings", {}).get("engine", {})
    return [{**common, **pool.get("engine", {})} for pool in candidate.apply.values()]


def settled(verdicts: dict[str, Judgement]) -> bool:
    return bool(verdicts) and all(found.verdict is not Verdict.UNDECIDED for found in verdicts.values())


def _lost_probes(probes: Sequence[Probe]) -> int:
    """Void probes in whose place no other counted."""
    kept = {(p.seed, p.rate_per_s, p.path, p.half) for p in probes if not p.void}
    return len({(p.seed, p.rate_per_s, p.path, p.half) for p in probes if p.void} - kept)


def _faults(record: Record, experiment: Experiment, sent: Sequence[Workload]) -> list[Fault]:
    names = tuple(experiment.arms)
    found = [fault for fault in inspect(record.probes, sent, names) if fault.kind != LATE_CLIENT]
    # A probe that was sent again in its place is no loss; one that stayed void is.
    lost = _lost_probes(record.probes)
    if lost > 0.1 * len(record.probes):
        found.insert(0, Fault(LATE_CLIENT, f"the client fell behind: {lost} of {len(record.probes)} probes are void", True))
    tuned = (mistuned(arm.name, arm.tried, arm.candidate, experiment.margin) for arm in record.arms)
    return found + [fault for fault in (second_halves(gains(record.knees, names)), *tuned) if fault is not None]


def _recomputed(record: Record) -> list[str]:
    """Split requests whose prompt decode computed itself moved no KV: with many of them the arm is not what its name says."""
    return [
        f"{arm.recomputed} of {arm.offered - arm.failed} answers of {arm.path} were computed without a transfer"
        for arm in record.loaded
        if arm.recomputed > RECOMPUTED_SHARE * max(1, arm.offered - arm.failed)
    ]


def _priors(record: Record) -> list[str]:
    base, slo = record.unloaded[0], record.slo
    if base.ttft is None or base.tpot is None or min(base.ttft.p50, base.tpot.p50) <= 0:
        return []
    return priors(
        tpot_slo_s=slo.tpot_s,
        unloaded_tpot_s=base.tpot.p50,
        ttft_slo_s=record.slo_multiples["ttft"] * base.ttft.p50,
        unloaded_ttft_s=base.ttft.p50,
        mean_output_tokens=record.lengths["output"]["mean"],
    )
