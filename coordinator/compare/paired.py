"""The same request on both paths: for how many splitting lost, and by how much. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.compare.load import Outcome, Probe
from coordinator.compare.stats import percentile

WORST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One request under one seed and rate; seconds, split less colocated, means over an arm's probes."""

    seed: int
    rate_per_s: float
    index: int
    output_tokens: int
    e2e_s: float
    ttft_s: float
    tpot_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """`lost` of `requests` ended later when split; quantiles of (split less colocated) E2E, seconds; `worst` first."""

    requests: int
    lost: int
    median_s: float
    p90_s: float
    worst: tuple[Loss, ...]


def paired(probes: Sequence[Probe], challenger: str = "split", baseline: str = "colocated") -> Paired | None:
    """Every request that both arms answered, in probes that are not void; None without any."""
    found: dict[tuple[int, float, int], dict[str, list[Outcome]]] = {}
    for probe in probes:
        if probe.void:
            continue
        for outcome in probe.outcomes:
            if not outcome.failure and outcome.e2e_s is not None and outcome.ttft_s is not None:
                key = (probe.seed, probe.rate_per_s, outcome.index)
                found.setdefault(key, {}).setdefault(probe.path, []).append(outcome)
    losses = [_loss(key, arms[challenger], arms[baseline]) for key, arms in found.items() if {challenger, baseline} <= set(arms)]
    if not losses:
        return None
    differences = [loss.e2e_s for loss in losses]
    return Paired(
        requests=len(losses),
        lost=sum(difference > 0 for difference in differences),
        median_s=statistics.median(differences),
        p90_s=percentile(differences, 0.9),
        worst=tuple(sorted((loss for loss in losses if loss.e2e_s > 0), key=lambda loss: -loss.e2e_s)[:WORST]),
    )


def _loss(key: tuple[int, float, int], split: list[Outcome], colocated: list[Outcome]) -> Loss:
    tpots = [[outcome.tpot_s for outcome in arm if outcome.tpot_s is not None] for arm in (split, colocated)]
    seed, rate_per_s, index = key
    return Loss(
        seed=seed,
        rate_per_s=rate_per_s,
        index=index,
        output_tokens=split[0].wanted_tokens,
        e2e_s=_mean([o.e2e_s for o in split]) - _mean([o.e2e_s for o in colocated]),
        ttft_s=_mean([o.ttft_s for o in split]) - _mean([o.ttft_s for o in colocated]),
        tpot_s=statistics.fmean(tpots[0]) - statistics.fmean(tpots[1]) if all(tpots) else None,
    )


def _mean(values: Sequence[float | None]) -> float:
    return statistics.fmean(value for value in values if value is not None)
