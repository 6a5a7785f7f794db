"""Target against actual: which workers to start, drain, stop or fence. Pure.

One pass compares every pool's target with the workers that exist and returns actions; the shell (`ray_workers`) carries
them out and feeds what happened back in as `WorkerRecord`s. Decisions look at levels, never at edges: a pass that is
repeated, or that follows a coordinator's restart, comes to the same answer.

Life of a worker: `STARTING -> READY -> DRAINING -> stopped`, and from each of them `DEAD`. A dead worker is never revived;
its replacement has a new id and a new incarnation. Which worker serves which pool is `assign`'s to say.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.pools.assign import Assigned, Fate, assign
from coordinator.pools.records import PoolTarget, WorkerRecord
from coordinator.routing.views import Role, WorkerState
from protos.errors import Code, SplitpointError
from protos.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Starts of one pool that failed in a row. A worker that serves for a while ends the row (`Fleet`)."""

    failures: int = 0
    last_failure_s: float = 0.0

    def failed(self, now_s: float) -> Backoff:
        """One more failure."""
        return replace(self, failures=self.failures + 1, last_failure_s=now_s)

    def wait_s(self, now_s: float, rules: Rules) -> float:
        """Seconds until the next start is allowed; 0 when it is."""
        if not self.failures:
            return 0.0
        pause = min(rules.restart_backoff_s * 2.0 ** min(self.failures - 1, 30), rules.restart_backoff_max_s)
        return max(0.0, self.last_failure_s + pause - now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits, seconds."""

    heartbeat_interval_s: float
    heartbeat_limit_s: float
    probe_interval_s: float
    max_failed_probes: int
    start_grace_s: float = 30.0
    """Beside an engine's own time to start: for its process to be placed, and to say why it did not start."""
    restart_backoff_s: float
    restart_backoff_max_s: float
    partition_grace_s: float = 0.0
    """How long a host may be silent before its workers are given up."""
    whole_roles: frozenset[Role] = frozenset(Role)
    """Roles that are offered whole requests."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start one worker of `pool` under a new id. `spare`: to stand by; where a pool's spares are placed, that is to reserve
    its place."""

    pool: str
    spare: bool = False


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Tell `worker_id` to refuse new legs; it is stopped once idle."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class RelabelWorker:
    """`worker_id` serves `pool` in `role` from now on, or stands by for it as a `spare`; what it has of its former role runs to
    its end there."""

    worker_id: WorkerId
    pool: str
    role: Role
    reason: str
    spare: bool = False


@dataclass(frozen=True, slots=True)
class PromoteWorker:
    """`worker_id` stood by and is offered requests from now on; one that is `placed` gets its engine now."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class StandByWorker:
    """`worker_id` is offered nothing from now on, and keeps its engine."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class ReservePlace:
    """Ask for the place of `worker_id`, a spare that is placed, and whether it has got it."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class ProbeWorker:
    """Ask `worker_id` over the data plane whether it answers."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End `worker_id` in order. `timed_out`: it still held requests or leases when its drain's time was over."""

    worker_id: WorkerId
    reason: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class FenceWorker:
    """Kill `worker_id` by pid on its node and confirm the death: it may be stopped, and would hear nothing else."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """`worker_id` is dead: free its placement group and its name."""

    worker_id: WorkerId
    reason: str


Action = (
    StartWorker
    | DrainWorker
    | RelabelWorker
    | PromoteWorker
    | StandByWorker
    | ReservePlace
    | ProbeWorker
    | StopWorker
    | FenceWorker
    | ForgetWorker
)
_LABELS = (RelabelWorker, PromoteWorker, StandByWorker)
"""Said to gateways together, in one version of the membership."""
_CAN_WAIT = (ProbeWorker, ReservePlace)


_UNBORN = (WorkerState.STARTING, WorkerState.PLACED)
"""They have nothing to finish."""


class Ending(enum.Enum):
    """How far a shutdown is. Gateways go first, so workers serve what those have taken: it may need more legs yet."""

    NOT = enum.auto()
    GATEWAYS = enum.auto()
    """Gateways finish what they have; nothing is started any more."""
    WORKERS = enum.auto()
    """No gateway is left to ask a worker for anything: all are drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actual:
    """Every worker that is known, each pool's failed starts, whether gateways know the workers, and the nodes, by Ray's id,
    that do not answer."""

    workers: Sequence[WorkerRecord]
    backoff: Mapping[str, Backoff] = field(default_factory=dict)
    gateways_behind: bool = False
    """See `assign`."""
    silent_nodes: Collection[str] = frozenset()


def reconcile(
    targets: Iterable[PoolTarget],
    actual: Actual,
    now_s: float,
    rules: Rules,
    *,
    budget_ranks: int = 0,
    max_unavailable: float = 0.0,
    ending: Ending = Ending.NOT,
) -> list[Action]:
    """The actions that bring `actual` closer to `targets`. At most one action per worker and pass.

    `budget_ranks`, `max_unavailable`: see `assign`.
    """
    if ending is Ending.WORKERS:
        targets = ()
    wanted = list(targets)
    alive: list[WorkerRecord] = []
    urgent: dict[WorkerId, Action] = {}
    for worker in actual.workers:
        action = _liveness(worker, now_s, rules)
        if action is None and worker.state is WorkerState.DRAINING:
            action = _drained(worker, now_s, rules)
        if action is None and worker.state in _UNBORN and worker.draining_until_s is not None:
            action = StopWorker(worker.worker_id, "drained before it served")
        if action is not None:
            urgent[worker.worker_id] = action
        if isinstance(action, FenceWorker):
            # It serves nobody any more, so that a spare stands in for it before its death is made sure of.
            alive.append(replace(worker, state=WorkerState.DRAINING))
        elif not isinstance(action, ForgetWorker):
            alive.append(worker)
    assignment = assign(
        wanted,
        alive,
        budget_ranks=budget_ranks,
        max_unavailable=max_unavailable,
        whole_roles=rules.whole_roles,
        gateways_behind=actual.gateways_behind or ending is not Ending.NOT,
        silent_nodes=actual.silent_nodes,
    )
    waits = {t.name: actual.backoff.get(t.name, Backoff()) for t in wanted}
    for worker_id, assigned in assignment.workers.items():
        action = _fated(assigned)
        if isinstance(action, PromoteWorker) and assigned.worker.state is WorkerState.PLACED:
            action = action if ending is Ending.NOT and _may_start(waits[assigned.worker.pool], now_s, rules) else None
        # A new label is one message, so that pools change together; a probe that is due can wait for the next pass.
        goes_first = isinstance(action, (*_LABELS, DrainWorker)) and isinstance(urgent.get(worker_id), _CAN_WAIT)
        if action is not None and (worker_id not in urgent or goes_first):
            urgent[worker_id] = action
    starts: list[StartWorker] = []
    for target in wanted if ending is Ending.NOT else ():
        count, to_serve = assignment.startable[target.name], assignment.to_serve[target.name]
        starts.extend(_starts(target, count, to_serve, waits[target.name], now_s, rules))
    # Where accelerators are short, those that serve come first.
    return [*urgent.values(), *sorted(starts, key=lambda start: start.spare)]


def check_scale(
    targets: Sequence[PoolTarget], pool: str, replicas: int, current: int | None, colocated_roles: frozenset[Role]
) -> PoolTarget:
    """The new target of `pool`. It may be 0 only while a pool stays that is offered whole requests (`colocated_roles`).

    Raises:
        SplitpointError: `NOT_FOUND` unknown pool; `CONFLICT` the guard `current` is not the present target, or nothing
            would be left to serve a whole request.
    """
    target = next((t for t in targets if t.name == pool), None)
    if target is None:
        known = ", ".join(t.name for t in targets)
        raise SplitpointError(Code.NOT_FOUND, f"no pool {pool!r}; pools: {known}", param="pool")
    if current is not None and current != target.replicas:
        message = f"pool {pool} has the target {target.replicas}, not {current}: look again and repeat"
        raise SplitpointError(Code.CONFLICT, message, param="current_replicas")
    if replicas == 0 and not any(t.replicas and t.role in colocated_roles for t in targets if t.name != pool):
        roles = ", ".join(sorted(colocated_roles))
        message = f"pool {pool} cannot go to 0: its {target.role} leg would have no worker, and no other pool of a role that"
        message += f" serves whole requests ({roles}) has a replica"
        raise SplitpointError(Code.CONFLICT, message, param="replicas")
    return replace(target, replicas=replicas)


def _liveness(worker: WorkerRecord, now_s: float, rules: Rules) -> Action | None:
    if worker.state is WorkerState.DEAD:
        return ForgetWorker(worker.worker_id, worker.dead_reason or "died")
    if worker.state is WorkerState.PLACED:
        due = worker.probed_s is None or now_s - worker.probed_s > rules.heartbeat_interval_s
        return ReservePlace(worker.worker_id) if due and not (worker.place_reserved or worker.leaving) else None
    if worker.state is WorkerState.STARTING:
        # An engine that loads keeps its process too busy for heartbeats; its time to start is the limit.
        limit_s = worker.start_timeout_s + rules.start_grace_s
        if now_s - worker.created_s > limit_s:
            return FenceWorker(worker.worker_id, f"not ready after {limit_s:g} s")
        return None
    if worker.state is WorkerState.READY and worker.heartbeat_s is None and worker.probed_s is None:
        # A former coordinator knew it: whether it is still there is not known before it is asked.
        return ProbeWorker(worker.worker_id)
    heard_s = worker.heartbeat_s if worker.heartbeat_s is not None else worker.created_s
    late_s = now_s - heard_s
    if worker.host_silent and late_s <= rules.partition_grace_s:
        # A process that died or stopped on a host that is there is refused or accepted at once: this is the network.
        return ProbeWorker(worker.worker_id) if now_s - (worker.probed_s or 0.0) > rules.heartbeat_interval_s else None
    if worker.failed_probes >= rules.max_failed_probes:
        return FenceWorker(worker.worker_id, f"{worker.failed_probes} probes of its data plane failed in a row")
    if late_s > rules.heartbeat_limit_s:
        probed_since = worker.probed_s is not None and worker.probed_s > heard_s + rules.heartbeat_limit_s
        if probed_since and worker.failed_probes:
            return FenceWorker(worker.worker_id, f"no heartbeat for {late_s:.1f} s and its data plane does not answer")
        if not probed_since or now_s - (worker.probed_s or 0.0) > rules.heartbeat_interval_s:
            return ProbeWorker(worker.worker_id)
        return None
    # One that drains has no news to give, but for the end of a silence; its drain is not to wait for it.
    ready = worker.state is WorkerState.READY
    if ready or worker.failed_probes:
        interval_s = rules.heartbeat_interval_s if ready and worker.failed_probes else rules.probe_interval_s
        if now_s - (worker.probed_s if worker.probed_s is not None else worker.created_s) > interval_s:
            return ProbeWorker(worker.worker_id)
    return None


def _drained(worker: WorkerRecord, now_s: float, rules: Rules) -> Action | None:
    """Drain means no requests and no leases (rule 10), seen for two heartbeats after the worker began to refuse."""
    if worker.draining_until_s is None:
        # It drains by itself; what it never comes to the end of must not keep it for ever.
        return DrainWorker(worker.worker_id, "it drains by itself")
    if worker.drain_since_s is None:
        if now_s > worker.draining_until_s:
            return StopWorker(worker.worker_id, "drain timed out before it confirmed", timed_out=True)
        return DrainWorker(worker.worker_id, "drain not confirmed yet")
    if worker.idle_since_s is not None and now_s - worker.idle_since_s >= 2 * rules.heartbeat_interval_s:
        return StopWorker(worker.worker_id, "drained: no requests, no leases")
    if now_s > worker.draining_until_s:
        return StopWorker(worker.worker_id, "drain timed out", timed_out=True)
    return None


def _fated(assigned: Assigned) -> Action | None:
    worker, target = assigned.worker, assigned.target
    if assigned.fate is Fate.STOP:
        if worker.state in _UNBORN:
            return StopWorker(worker.worker_id, assigned.reason)
        return DrainWorker(worker.worker_id, assigned.reason)
    unheard = not worker.label_heard and worker.heartbeat_s is not None
    if target is not None and (assigned.fate is Fate.RELABEL or unheard):
        reason = assigned.reason or "it has not heard its label yet"
        return RelabelWorker(worker.worker_id, target.name, target.role, reason, assigned.spare)
    if assigned.fate is Fate.PROMOTE:
        return PromoteWorker(worker.worker_id, assigned.reason)
    if assigned.fate is Fate.STAND_BY:
        return StandByWorker(worker.worker_id, assigned.reason)
    return None


def _starts(target: PoolTarget, count: int, to_serve: int, backoff: Backoff, now_s: float, rules: Rules) -> list[StartWorker]:
    """`count` starts; the first of them `to_serve`, the rest to stand by."""
    if count <= 0 or backoff.wait_s(now_s, rules) > 0:
        return []
    starts = [StartWorker(target.name, spare=number >= to_serve) for number in range(count)]
    return starts[:1] if backoff.failures else starts


def _may_start(backoff: Backoff, now_s: float, rules: Rules) -> bool:
    """An engine in a place that is reserved. One failure is what the place is kept for; a row of them waits as any start does."""
    return backoff.failures <= 1 or backoff.wait_s(now_s, rules) <= 0
