"""How many workers each autoscaled pool is to have: targets and goals, delays, one budget of accelerators for all. Pure.

Levels in, a decision for each pool out, each with the numbers it rests on. Who carries them out is `autoscaler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.gateway.latencies import share_within
from coordinator.pools.autoscale_gain import MIN_LATENCIES, Gain, Watched, gain, goals
from coordinator.pools.autoscale_policy import AutoscalePolicy
from coordinator.pools.autoscale_signals import Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Since when, and how far at least, one pool was to grow or to shrink without a break. `target` is the one that was held."""

    target: int
    up_since_s: float | None = None
    down_since_s: float | None = None
    most_wanted: int = 0
    """Workers, at any moment since `down_since_s`: it shrinks no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One figure and what it asks for. `value` is the whole pool's, for a goal the share that kept it; `target` is what the
    policy says: for one worker, or the goal in seconds. `samples`: of which it was put together."""

    name: str
    value: float
    target: float
    wanted_replicas: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`action`: "up", "down", "hold"; "limited" when it is to grow and the budget has no room for all of it; "refused" when the
    change was. `wanted` is what the signals ask for, within the pool's limits."""

    pool: str
    action: str
    current: int
    replicas: int
    wanted: int
    reason: str
    signals: tuple[Signal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one pass. `gains`: the next accelerator goes to the first of them. `taken`: accelerators after the decisions, of
    `budget`."""

    decisions: Mapping[str, Decision]
    delays: Mapping[str, Delays]
    gains: tuple[Gain, ...]
    taken: int
    budget: int | None


def decide(
    pools: Sequence[Watched], delays: Mapping[str, Delays], now_s: float, *, other_accelerators: int, budget: int | None
) -> Outcome:
    """`other_accelerators` are those of the pools that nobody scales automatically, of spares and of workers that drain; `budget`
    None: no limit.

    A pool grows when it was to grow for its upscale delay, and shrinks, to the most it wanted meanwhile, when it was to shrink
    for its downscale delay. What is missing or stale lets no pool shrink.
    """
    decisions, after = {}, {}
    for watched in pools:
        name = watched.target.name
        held = delays.get(name)
        changed = held is not None and held.target != watched.target.replicas
        if held is None or changed:
            held = Delays(target=watched.target.replicas)
        decisions[name], after[name] = _decide_one(watched, held, now_s)
    taken = other_accelerators + sum(w.target.ranks * min(w.target.replicas, decisions[w.target.name].replicas) for w in pools)
    taken = _share_out(pools, decisions, taken, budget)
    for name, decision in decisions.items():
        if decision.replicas != decision.current:
            after[name] = Delays(target=decision.replicas)
    return Outcome(decisions=decisions, delays=after, gains=_gains(pools, decisions), taken=taken, budget=budget)


def _decide_one(watched: Watched, held: Delays, now_s: float) -> tuple[Decision, Delays]:
    policy, seen, current = watched.policy, watched.observed, watched.target.replicas
    signals = _signals(watched)
    raw = max((s.wanted_replicas for s in signals), default=current)
    if seen.idle and not seen.gaps:
        raw = 0
    if current == 0 and seen.lacking:
        raw = max(raw, 1)
    raw = _damped(current, raw, policy)
    wanted = min(policy.max_replicas, max(policy.min_replicas, raw))
    decision = Decision(
        pool=watched.target.name, action="hold", current=current, replicas=current, wanted=wanted, reason="", signals=signals
    )
    why = _why(signals, seen, current, raw, policy)
    calm = replace(held, up_since_s=None, down_since_s=None, most_wanted=0)
    if not policy.min_replicas <= current <= policy.max_replicas:
        nearest = min(policy.max_replicas, max(policy.min_replicas, current))
        limits = f"its limits are {policy.min_replicas} to {policy.max_replicas}"
        action = "up" if nearest > current else "down"
        return replace(decision, action=action, replicas=nearest, wanted=max(nearest, wanted), reason=limits), calm
    if wanted > current:
        since_s = held.up_since_s if held.up_since_s is not None else now_s
        # A request that finds no worker at all is not made to wait for the delay.
        left_s = 0.0 if current == 0 else since_s + policy.upscale_delay_s - now_s
        delays = replace(calm, up_since_s=since_s)
        if left_s > 1e-9:
            return replace(decision, reason=f"{why}; {left_s:.0f} s of the upscale delay are left"), delays
        return replace(decision, action="up", replicas=wanted, reason=why), delays
    if wanted == current:
        return replace(decision, reason=why), calm
    if seen.gaps:
        return replace(decision, reason=f"{why}; it does not shrink on missing data: {'; '.join(seen.gaps)}"), calm
    since_s = held.down_since_s if held.down_since_s is not None else now_s
    most = max(wanted, held.most_wanted)
    delay_s = policy.downscale_delay_s
    if most == 0 and policy.downscale_to_zero_delay_s is not None:
        delay_s = policy.downscale_to_zero_delay_s
    delays = replace(calm, down_since_s=since_s, most_wanted=most)
    left_s = since_s + delay_s - now_s
    if left_s > 1e-9:
        return replace(decision, reason=f"{why}; {left_s:.0f} s of the downscale delay are left"), delays
    return replace(decision, action="down", replicas=most, reason=why), delays


def _signals(watched: Watched) -> tuple[Signal, ...]:
    policy, seen, current = watched.policy, watched.observed, watched.target.replicas
    signals = []
    for name, target in policy.targets.items():
        value = seen.loads[name]
        wanted = _for_load(value / target, current, policy.tolerance)
        signals.append(Signal(name=name, value=value, target=target, wanted_replicas=wanted, samples=seen.samples))
    measured = {name for name, _, _ in goals(watched)}
    for name, goal_s, counts in (("ttft_goal_s", policy.ttft_goal_s, seen.ttft), ("tpot_goal_s", policy.tpot_goal_s, seen.tpot)):
        if goal_s is None or not (total := sum(counts.values())):
            continue
        share = share_within(counts, goal_s)
        wanted = current
        if name in measured and seen.ready:
            fewer = share_within(counts, goal_s * (seen.ready - 1) / seen.ready)
            if share < policy.target_attainment and not seen.starting and seen.ready >= current:
                wanted = current + 1
            elif share >= policy.target_attainment and fewer >= policy.target_attainment:
                wanted = max(1, current - 1)
        signals.append(Signal(name=name, value=share, target=goal_s, wanted_replicas=wanted, samples=total))
    return tuple(signals)


def _for_load(exact: float, current: int, tolerance: float) -> int:
    """Workers for a load of `exact` targets. Close to what `current` can take it is `current`."""
    if exact > current * (1 + tolerance):
        return math.ceil(exact - 1e-9)
    return min(current, math.ceil(exact / (1 - tolerance) - 1e-9))


def _damped(current: int, raw: int, policy: AutoscalePolicy) -> int:
    if raw > current:
        return current + math.ceil((raw - current) * policy.upscaling_factor)
    return current - math.ceil((current - raw) * policy.downscaling_factor)


def _why(signals: Sequence[Signal], seen: Observed, current: int, raw: int, policy: AutoscalePolicy) -> str:
    if current == 0 and seen.lacking:
        said = f"{seen.lacking} requests wanted this leg and found no worker"
    elif seen.idle or not signals:
        said = "nothing was asked for" if seen.idle else "nothing was measured yet"
    else:
        leading = max(signals, key=lambda s: s.wanted_replicas)
        goal = leading.name.endswith("_goal_s")
        shown = (
            f"{leading.value:.1%} within {leading.name}"
            if goal
            else f"{leading.name.removeprefix('target_')} {leading.value:.4g}"
        )
        few = f" ({leading.samples} of {MIN_LATENCIES} latencies)" if goal and leading.samples < MIN_LATENCIES else ""
        said = f"{shown} (target {leading.target:g}) wants {leading.wanted_replicas}{few}"
    if raw > policy.max_replicas:
        return f"{said}, max_replicas is {policy.max_replicas}"
    return f"{said}, min_replicas is {policy.min_replicas}" if raw < policy.min_replicas else said


def _share_out(pools: Sequence[Watched], decisions: dict[str, Decision], taken: int, budget: int | None) -> int:
    """Grants what pools are to grow by one worker at a time, each to the pool whose goodput gains most by it. How many
    accelerators are taken then."""
    granted = {w.target.name: w.target.replicas for w in pools}
    wanting = {w.target.name: w for w in pools if decisions[w.target.name].replicas > w.target.replicas}
    last = ""
    while wanting:
        best = _ranked([_gain(w, pools, granted[name]) for name, w in wanting.items()])[0]
        name, decision = best.pool, decisions[best.pool]
        if budget is not None and taken + best.accelerators > budget:
            why = f"{decision.reason}; only {granted[name]} of {decision.replicas}: {taken} of {budget} accelerators are taken"
            why += f", the last by {last}; one more here: {best.goodput_per_s:.3g}" if last else ""
            decisions[name] = replace(decision, action="limited", replicas=granted[name], reason=why)
            del wanting[name]
            continue
        taken += best.accelerators
        granted[name] += 1
        last = f"{name} for {best.goodput_per_s:.3g} requests/s more in time"
        if granted[name] == decision.replicas:
            del wanting[name]
    return taken


def _gains(pools: Sequence[Watched], decisions: Mapping[str, Decision]) -> tuple[Gain, ...]:
    room = [w for w in pools if decisions[w.target.name].replicas < w.policy.max_replicas]
    return tuple(_ranked([_gain(w, pools, max(w.observed.ready, decisions[w.target.name].replicas)) for w in room]))


def _gain(watched: Watched, pools: Sequence[Watched], workers: int) -> Gain:
    return gain(watched, [w for w in pools if w is not watched], workers)


def _ranked(gains: list[Gain]) -> list[Gain]:
    """The largest first; between equal ones the pool that keeps the smaller share."""
    return sorted(gains, key=lambda g: (-g.goodput_per_s, g.share_now))
