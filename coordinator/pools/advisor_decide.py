"""Whether workers are to move between the phases now, and whether the last move is to be undone. Pure.

A situation and what has been before in, an advice and what is to be remembered out. Times are seconds of a wall clock that the
caller gives: what is remembered outlives the process. Who carries it out is `advisor.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.pools.advisor_config import AdvisorSettings
from coordinator.pools.advisor_layouts import PHASES, Prediction, Situation, layouts, measured, predict
from coordinator.pools.advisor_phases import Known, Load
from coordinator.routing.views import Role

KEPT_COSTS = 5
"""Changes of a kind whose time is remembered; the longest of them is what the next one is taken to cost."""
_DOUBLINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One that was carried out and is not judged yet. `before` and `after` are workers by pool."""

    before: dict[str, int]
    after: dict[str, int]
    applied_s: float
    goodput_per_s: float
    load: Load
    settled_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What outlives one look, and the coordinator. `counts` are the pools as they were at the look before, `looked_s`, and since
    `counts_since_s`. `forgone` requests would have been in time with another layout, as long as they add up to more than
    nothing; its key is `key_of`. `costs_s`: what changes took, by how: "relabel", "restart"; `known` is what each phase was seen
    to do.
    """

    counts: dict[str, int] = field(default_factory=dict)
    counts_since_s: float = 0.0
    looked_s: float | None = None
    forgone: dict[str, float] = field(default_factory=dict)
    changed_s: float | None = None
    pending: Change | None = None
    rollbacks: int = 0
    backoff_until_s: float = 0.0
    costs_s: dict[str, list[float]] = field(default_factory=dict)
    known: dict[Role, Known] = field(default_factory=dict)

    def cost_s(self, how: str, settings: AdvisorSettings) -> tuple[float, int]:
        """Of a change of that kind, seconds, and of how many measured ones that is the longest; 0: the configured time."""
        known = self.costs_s.get(how, [])
        configured_s = settings.relabel_s if how == "relabel" else settings.restart_s
        return (max(known), len(known)) if known else (configured_s, 0)

    def with_cost(self, how: str, seconds: float) -> Memory:
        """A change has taken so long."""
        return replace(self, costs_s={**self.costs_s, how: [*self.costs_s.get(how, []), seconds][-KEPT_COSTS:]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Another layout and what it is predicted to bring. Goodputs are choices/s within their goals; `cost_requests` miss them
    while the change takes `cost_s`, `gain_requests` more keep them until the horizon. `measured_costs`: changes of its kind that
    were seen."""

    counts: dict[str, int]
    mode: str
    how: str
    now: Prediction
    then: Prediction
    meanwhile: Prediction
    baseline_per_s: float
    cost_s: float
    measured_costs: int
    cost_requests: float
    gain_requests: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`action`: "stay", "propose", "apply", "roll_back"; "refused" when the change was. `counts` are the workers by pool that are
    to be had by the last three. `wait_s`: how long dwell or back-off still keep it from being carried out."""

    action: str
    reason: str
    mode: str
    measured: Prediction
    load: Load
    counts: dict[str, int]
    wait_s: float = 0.0
    proposal: Proposal | None = None


def advise(
    situation: Situation, memory: Memory, settings: AdvisorSettings, now_s: float, *, unsettled: str
) -> tuple[Advice, Memory]:
    """`unsettled` says what is not yet as desired; "" when all is. What is remembered of an advice to change is what is to be
    remembered if it is carried out; see `carried_out`."""
    counts, looked_s = situation.counts, memory.looked_s
    memory = replace(memory, looked_s=now_s)
    if counts != memory.counts:
        memory = replace(memory, counts=counts, counts_since_s=now_s, forgone={})
    waiting = _waiting(situation, settings, now_s - memory.counts_since_s, unsettled)
    if not waiting:
        situation, memory = _learned(situation, memory)
    if memory.pending is not None:
        reason, memory, back = _judge(situation, memory, memory.pending, settings, now_s, unsettled, waiting)
        if back is not None:
            return _advice(situation, "roll_back", reason, counts=back), memory
        if memory.pending is not None or reason:
            return _advice(situation, "stay", reason), memory
    if waiting:
        return _advice(situation, "stay", waiting), memory
    # A look that came late says no more than one.
    since_s = 0.0 if looked_s is None else min(now_s - looked_s, 2 * settings.interval_s)
    best, why_not, memory = _best(situation, memory, settings, since_s)
    if best is None:
        return _advice(situation, "stay", why_not), memory
    reason, wait_s = _moved(situation, best), _wait_s(memory, settings, now_s)
    forgone = memory.forgone[key_of(best.counts)]
    needed = max(settings.hold_s * situation.load.rate_per_s, best.cost_requests)
    if forgone < needed - 1e-9:
        reason = f"{reason} would have brought {forgone:.0f} requests in time so far, and has to bring {needed:.0f}"
        return _advice(situation, "stay", reason, proposal=best), memory
    if not settings.apply:
        return _advice(situation, "propose", reason, counts=best.counts, wait_s=wait_s, proposal=best), memory
    if wait_s:
        what = "the back-off after a roll-back" if memory.backoff_until_s - now_s >= wait_s - 1e-9 else "the dwell time"
        reason = f"{reason}; {what} holds it for {wait_s:.0f} s more"
        return _advice(situation, "propose", reason, counts=best.counts, wait_s=wait_s, proposal=best), memory
    return _advice(situation, "apply", reason, counts=best.counts, proposal=best), memory


def carried_out(advice: Advice, memory: Memory, settings: AdvisorSettings, now_s: float) -> Memory:
    """What is remembered once the pools have `advice.counts`."""
    if advice.action == "roll_back":
        rollbacks = memory.rollbacks + 1
        backoff_s = settings.backoff_s * 2 ** min(rollbacks - 1, _DOUBLINGS)
        memory = replace(memory, pending=None, rollbacks=rollbacks, backoff_until_s=now_s + backoff_s)
    else:
        change = Change(
            before=memory.counts,
            after=advice.counts,
            applied_s=now_s,
            goodput_per_s=advice.measured.goodput_per_s,
            load=advice.load,
        )
        memory = replace(memory, pending=change)
    return replace(memory, counts=advice.counts, counts_since_s=now_s, changed_s=now_s, forgone={})


def _learned(situation: Situation, memory: Memory) -> tuple[Situation, Memory]:
    """What workers do while they are busy is known from then on: without it, a phase that has become quick would look as if fewer
    workers did as well, and one that is late as if more of them would not help. Only of a window in which they were the same."""
    before = {role: replace(phase, known=memory.known.get(role, Known())) for role, phase in situation.phases.items()}
    known = {role: phase.learned() for role, phase in before.items()}
    phases = {role: replace(phase, known=known[role]) for role, phase in before.items()}
    return replace(situation, phases=phases), replace(memory, known=known)


def _waiting(situation: Situation, settings: AdvisorSettings, held_s: float, unsettled: str) -> str:
    """Why nothing can be said yet; "" when it can."""
    if unsettled:
        return f"the pools are not settled: {unsettled}"
    gaps = dict.fromkeys(gap for phase in situation.phases.values() for gap in phase.gaps)
    if gaps:
        return f"it does not decide on missing data: {'; '.join(gaps)}"
    if held_s < settings.window_s - 1e-9:
        return f"the pools have changed: {settings.window_s - held_s:.0f} s of the window are left"
    busy = [phase for phase in situation.phases.values() if phase.legs_per_s]
    if not busy:
        return "nothing was asked for"
    few = [phase.role.value for phase in busy if not phase.measured]
    return f"too few latencies of {', '.join(few)}" if few else ""


def _judge(
    situation: Situation,
    memory: Memory,
    change: Change,
    settings: AdvisorSettings,
    now_s: float,
    unsettled: str,
    waiting: str,
) -> tuple[str, Memory, dict[str, int] | None]:
    """Why it is kept, dropped or undone; what is remembered; the workers to go back to."""
    over = replace(memory, pending=None)
    if situation.counts != change.after:
        return "somebody has changed the pools since the last change, which is not judged", over, None
    since_s = now_s - change.applied_s
    if change.settled_s is None:
        if unsettled:
            if since_s > max(settings.dwell_s, 2 * settings.restart_s):
                return f"the last change did not settle in {since_s:.0f} s: {unsettled}", memory, change.before
            return f"the last change is not settled: {unsettled}", memory, None
        change = replace(change, settled_s=now_s)
        memory = replace(memory, pending=change)
    assert change.settled_s is not None
    left_s = change.settled_s + settings.window_s - now_s
    if left_s > 1e-9 or waiting:
        if since_s > settings.horizon_s:
            return f"the last change could not be judged in {since_s:.0f} s: {waiting}", over, None
        return f"the last change is judged in {max(0.0, left_s):.0f} s" + (f"; {waiting}" if waiting else ""), memory, None
    now = measured(situation)
    if differs := situation.load.differs(change.load, settings.comparable):
        if since_s > settings.horizon_s:
            return f"the last change was not judged, its load did not come again: {differs}", over, None
        return f"the last change is not judged under another load: {differs}", memory, None
    # Loads that count as equal still differ: what is compared is the share in time of what came.
    expected_per_s = change.goodput_per_s / change.load.rate_per_s * situation.load.rate_per_s
    shown = f"goodput {now.goodput_per_s:.3g}/s, before the change {expected_per_s:.3g}/s of this load"
    if now.goodput_per_s < expected_per_s * (1 - settings.margin):
        return f"{shown}: it has fallen by more than {settings.margin:.0%}", memory, change.before
    return "", replace(over, rollbacks=0), None


def key_of(counts: Mapping[str, int]) -> str:
    """Names a layout."""
    return ",".join(f"{name}={count}" for name, count in counts.items())


def _best(situation: Situation, memory: Memory, settings: AdvisorSettings, since_s: float) -> tuple[Proposal | None, str, Memory]:
    """The layout that gains most after its cost, or why there is none; and what every layout would have brought, `since_s` later.

    What suits the load of a minute does not suit those that follow. So each layout's gains and losses are added up, from nothing,
    and a layout is taken when they have come to something: noise takes away what it gives.
    """
    found = [_proposal(situation, memory, settings, counts) for counts in layouts(situation)]
    if not found:
        fixed = "; ".join(f"{pool.name}: {pool.fixed}" for pool in situation.pools if pool.fixed)
        return None, f"no worker may move{f' ({fixed})' if fixed else ''}", replace(memory, forgone={})
    forgone = {}
    for proposal in found:
        key, more_per_s = key_of(proposal.counts), proposal.then.goodput_per_s - proposal.baseline_per_s
        forgone[key] = max(0.0, memory.forgone.get(key, 0.0) + more_per_s * since_s)
    memory = replace(memory, forgone=forgone)
    best = max(found, key=lambda p: p.gain_requests - p.cost_requests)
    more_per_s = best.then.goodput_per_s - best.baseline_per_s
    rates = f"{best.baseline_per_s:.3g}/s becomes {best.then.goodput_per_s:.3g}/s"
    shown = f"the best other layout is {_moved(situation, best)}: {rates}"
    if more_per_s < settings.min_gain * situation.load.rate_per_s:
        return None, f"{shown}, less than min_gain ({settings.min_gain:.0%}) of {situation.load.rate_per_s:.3g}/s", memory
    if best.gain_requests <= best.cost_requests:
        against = f"{best.cost_requests:.3g} requests lost in {best.cost_s:.0f} s"
        return None, f"{shown}: {best.gain_requests:.3g} gained in {settings.horizon_s:g} s (horizon_s) against {against}", memory
    return best, "", memory


def _proposal(situation: Situation, memory: Memory, settings: AdvisorSettings, counts: dict[str, int]) -> Proposal:
    how = "relabel" if situation.relabels(counts) else "restart"
    cost_s, measured_costs = memory.cost_s(how, settings)
    was, now, then = measured(situation), predict(situation, situation.counts), predict(situation, counts)
    meanwhile = predict(situation, situation.fewer(counts))
    # A queue that has grown makes the measured goodput worse than these workers deserve, a model that is wrong the predicted one.
    baseline_per_s = max(was.goodput_per_s, now.goodput_per_s)
    return Proposal(
        counts=counts,
        mode=situation.mode(counts),
        how=how,
        now=now,
        then=then,
        meanwhile=meanwhile,
        baseline_per_s=baseline_per_s,
        cost_s=cost_s,
        measured_costs=measured_costs,
        cost_requests=max(0.0, baseline_per_s - meanwhile.goodput_per_s) * cost_s,
        gain_requests=(then.goodput_per_s - baseline_per_s) * max(0.0, settings.horizon_s - cost_s),
    )


def _wait_s(memory: Memory, settings: AdvisorSettings, now_s: float) -> float:
    dwell_s = 0.0 if memory.changed_s is None else memory.changed_s + settings.dwell_s - now_s
    return max(0.0, dwell_s, memory.backoff_until_s - now_s)


def _moved(situation: Situation, proposal: Proposal) -> str:
    changes = [(pool.name, pool.replicas, proposal.counts[pool.name]) for pool in situation.pools]
    shown = ", ".join(f"{name} {old} to {new}" for name, old, new in changes if old != new)
    mode = situation.mode(situation.counts)
    return f"{shown} by {proposal.how}" + (f" ({mode} becomes {proposal.mode})" if mode != proposal.mode else "")


def _advice(
    situation: Situation,
    action: str,
    reason: str,
    *,
    counts: Mapping[str, int] | None = None,
    wait_s: float = 0.0,
    proposal: Proposal | None = None,
) -> Advice:
    return Advice(
        action=action,
        reason=reason,
        mode=situation.mode(situation.counts),
        measured=measured(situation),
        load=situation.load,
        counts=dict(counts if counts is not None else situation.counts),
        wait_s=wait_s,
        proposal=proposal,
    )


def evidence(situation: Situation, proposal: Proposal | None) -> list[str]:
    """What the advice rests on, a line for each phase."""
    lines = []
    for role in PHASES:
        phase = situation.phases[role]
        if not phase.workers and not phase.legs_per_s:
            continue
        line = (
            f"{role}: {phase.workers} workers, {phase.legs_per_s:.3g} legs/s, {phase.kept(situation.goal):.1%} in time, "
            f"{phase.queued_tokens:.0f} tokens wait, batch {phase.batch:.3g}, KV {phase.kv_used:.2g} workers"
        )
        if proposal is not None:
            then = situation.workers(proposal.counts)[role]
            line += f"; with {then}: {proposal.then.shares[role]:.1%} by {proposal.then.bases[role]}"
        lines.append(line)
    if situation.times is None:
        lines.append(f"no calibrated step times ({situation.no_model}): by what is measured, without changes of the mode")
    elif not situation.auto:
        lines.append('gateway.default_path is not "auto": requests would not follow a change of the mode')
    return lines
