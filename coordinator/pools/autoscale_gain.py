"""Which pool's requests gain most by one more worker: marginal goodput, with the figures it was computed from. Pure.

A pool's requests keep their goals in the share that was measured; with m instead of n workers every latency is taken to be n/m of
what it was, so the share is that of the latencies within goal * m/n. Queues fall faster than that when a worker is added, so the
gain is a lower bound. Where there is no goal, or too little was measured, the share is that of the load which the targets allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.gateway.latencies import share_within
from coordinator.pools.autoscale_policy import AutoscalePolicy
from coordinator.pools.autoscale_signals import Observed
from coordinator.pools.records import PoolTarget
from coordinator.routing.views import Role

MIN_LATENCIES = 20
"""Fewer in a window say nothing about a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One autoscaled pool as the decision sees it; `target.replicas` is its present target."""

    target: PoolTarget
    policy: AutoscalePolicy
    observed: Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Requests/s within their goals that one more worker of `pool` brings, over the `accelerators` it takes, and the evidence:
    `legs_per_s` came, `share_now` kept their goals with `workers`, `share_more` would with one more, `partner_share` are kept by
    the other phase. `basis`: "latency", "load", or "none" where nothing is known."""

    pool: str
    workers: int
    accelerators: int
    legs_per_s: float
    share_now: float
    share_more: float
    partner_share: float
    basis: str

    @property
    def goodput_per_s(self) -> float:
        """By which goodput rises, for each accelerator."""
        return self.legs_per_s * (self.share_more - self.share_now) * self.partner_share / self.accelerators


def goals(watched: Watched) -> list[tuple[str, float, Mapping[int, int]]]:
    """The goals that enough was measured for: field, seconds, latencies."""
    policy, seen = watched.policy, watched.observed
    found = (("ttft_goal_s", policy.ttft_goal_s, seen.ttft), ("tpot_goal_s", policy.tpot_goal_s, seen.tpot))
    return [(name, goal, counts) for name, goal, counts in found if goal is not None and sum(counts.values()) >= MIN_LATENCIES]


def share_with(watched: Watched, workers: float) -> tuple[float, str]:
    """The share of the pool's requests that would keep its goals with so many workers, and the basis of that."""
    seen = watched.observed
    measured = goals(watched) if seen.ready else []
    if measured:
        share = 1.0
        for _, goal_s, counts in measured:
            # TTFT and TPOT of one request are taken to be independent of each other.
            share *= share_within(counts, goal_s * workers / seen.ready)
        return share, "latency"
    needed = max((seen.loads[name] / target for name, target in watched.policy.targets.items()), default=0.0)
    if not seen.ready and seen.lacking:
        needed = max(needed, 1.0)
    if not needed:
        return 1.0, "load" if watched.policy.targets else "none"
    return min(1.0, workers / needed), "load"


def gain(watched: Watched, others: Sequence[Watched], workers: int) -> Gain:
    """Of one worker more than `workers`. `others` are the other autoscaled pools."""
    seen, target = watched.observed, watched.target
    now, basis = share_with(watched, workers)
    more, _ = share_with(watched, workers + 1)
    rate = seen.legs_per_s or (seen.lacking / seen.span_s if seen.span_s > 0 else 0.0)
    return Gain(
        pool=target.name,
        workers=workers,
        accelerators=target.ranks,
        legs_per_s=rate,
        share_now=now,
        share_more=more,
        partner_share=_partner_share(target.role, others),
        basis=basis,
    )


def _partner_share(role: Role, others: Sequence[Watched]) -> float:
    """What the other phase keeps of what this one delivers; 1 where nobody watches it."""
    partner = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(role)
    pools = [w for w in others if w.target.role is partner and w.observed.ready]
    weights = [w.observed.legs_per_s for w in pools]
    if not sum(weights):
        return 1.0
    return sum(share_with(w, w.observed.ready)[0] * weight for w, weight in zip(pools, weights, strict=True)) / sum(weights)
