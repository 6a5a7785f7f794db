"""Everything in a full comparison's record that follows from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coordinator.compare.experiment import Experiment
from coordinator.compare.faults import LATE_CLIENT, Fault, inspect, mistuned, second_halves
from coordinator.compare.goodput import floor, gains, ratios
from coordinator.compare.load import Probe
from coordinator.compare.notes import knee_notes, to_settle, void_notes
from coordinator.compare.paired import paired
from coordinator.compare.priors import priors
from coordinator.compare.record import Record
from coordinator.compare.summary import arm as summary_of
from coordinator.compare.verdict import Judgement, Verdict, judge, judge_family
from coordinator.compare.workload import Workload, lengths


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
    notes += to_settle(record.knees, record.probes, names) + parity_notes(record.parity)
    record.notes = [*notes, *(fault.text for fault in record.faults), *more_notes]


def judge_challengers(knees: Sequence[dict[str, Any]], experiment: Experiment, faults: Sequence[str]) -> dict[str, Judgement]:
    """One judgement per challenger against the baseline; with several, Holm's correction among them.

    Only at planned looks anything is decided.
    """
    against = {name: ratios(knees, name, experiment.baseline) for name in experiment.challengers}
    itself = floor(knees, experiment.baseline)
    found = {
        name: judge(
            differences,
            itself,
            experiment.margin,
            looks=experiment.looks,
            faults=faults,
            challenger=name,
            baseline=experiment.baseline,
        )
        for name, differences in against.items()
    }
    if len(found) == 1:
        return found
    together = judge_family({name: (differences, itself) for name, differences in against.items()}, experiment.margin)
    for name, alone in found.items():
        other = together[name]
        found[name] = replace(alone, p_adjusted=other.p_adjusted)
        if alone.verdict is not Verdict.UNDECIDED and other.verdict is Verdict.UNDECIDED:
            found[name] = replace(found[name], verdict=other.verdict, reason=other.reason, seeds_needed=other.seeds_needed)
    return found


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


def _priors(record: Record) -> list[str]:
    base, slo = record.unloaded[0], record.slo
    if base.ttft is None or base.tpot is None or min(base.ttft.p50, base.tpot.p50) <= 0:
        return []
    return priors(
        tpot_slo_s=slo.tpot_s,
        unloaded_tpot_s=base.tpot.p50,
        ttft_slo_s=slo.ttft_s,
        unloaded_ttft_s=base.ttft.p50,
        mean_output_tokens=record.lengths["output"]["mean"],
    )
