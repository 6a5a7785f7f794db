"""Target against actual: which workers to start, drain, stop or fence. Pure.

One pass compares every pool's target with the workers that exist and returns actions; the shell (`ray_coordinator`) carries
them out and feeds what happened back in as `WorkerRecord`s. Decisions look at levels, never at edges: a pass that is
repeated, or that follows a coordinator's restart, comes to the same answer.

Life of a worker: `STARTING -> READY -> DRAINING -> stopped`, and from each of them `DEAD`. A dead worker is never revived;
its replacement has a new id and a new incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.routing.views import Role, WorkerState
from protos.errors import Code, SplitpointError
from protos.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTarget:
    """What the operator wants of one pool."""

    name: str
    role: Role
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What is known of one worker. All times are seconds on the coordinator's monotonic clock.

    `heartbeat_s` is when the last heartbeat arrived. `probed_s` is when the last data-plane probe ended and
    `failed_probes` how many have failed in a row up to then. `drain_since_s` is when this worker confirmed that it refuses
    new legs; `idle_since_s` when its heartbeats began to report no request and no lease after that. `draining_until_s` is
    set as soon as a drain is wanted. `dead_reason` is set when its process is known to be gone.
    """

    worker_id: WorkerId
    pool: str
    state: WorkerState
    created_s: float
    heartbeat_s: float | None = None
    probed_s: float | None = None
    failed_probes: int = 0
    draining_until_s: float | None = None
    drain_since_s: float | None = None
    idle_since_s: float | None = None
    dead_reason: str = ""


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
    start_timeout_s: float
    restart_backoff_s: float
    restart_backoff_max_s: float


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start one worker of `pool` under a new id."""

    pool: str


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Tell `worker_id` to refuse new legs; it is stopped once idle."""

    worker_id: WorkerId
    reason: str


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


Action = StartWorker | DrainWorker | ProbeWorker | StopWorker | FenceWorker | ForgetWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Actual:
    """Every worker that is known, and each pool's failed starts."""

    workers: Sequence[WorkerRecord]
    backoff: Mapping[str, Backoff] = field(default_factory=dict)


def reconcile(targets: Iterable[PoolTarget], actual: Actual, now_s: float, rules: Rules) -> list[Action]:
    """The actions that bring `actual` closer to `targets`. At most one action per worker and pass."""
    by_name = {target.name: target for target in targets}
    actions: list[Action] = []
    alive: dict[str, list[WorkerRecord]] = {name: [] for name in by_name}
    for worker in actual.workers:
        action = _liveness(worker, now_s, rules)
        if action is None and worker.state is WorkerState.DRAINING:
            action = _drained(worker, now_s, rules)
        if action is None and worker.state is WorkerState.STARTING and worker.draining_until_s is not None:
            action = StopWorker(worker.worker_id, "drained before it served")
        if action is None and worker.pool not in by_name:
            action = _surplus(worker, f"pool {worker.pool} is gone")
        if action is not None:
            actions.append(action)
        if not isinstance(action, ForgetWorker) and worker.pool in alive:
            alive[worker.pool].append(worker)
    acted = {action.worker_id for action in actions if not isinstance(action, StartWorker)}
    for target in by_name.values():
        actions.extend(_count(target, alive[target.name], acted, actual.backoff.get(target.name, Backoff()), now_s, rules))
    return actions


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
        message = f"pool {pool} cannot go to 0: no other pool of a role that serves whole requests ({roles}) has a replica"
        raise SplitpointError(Code.CONFLICT, message, param="replicas")
    return replace(target, replicas=replicas)


def _liveness(worker: WorkerRecord, now_s: float, rules: Rules) -> Action | None:
    if worker.state is WorkerState.DEAD:
        return ForgetWorker(worker.worker_id, worker.dead_reason or "died")
    if worker.state is WorkerState.STARTING:
        # An engine that loads keeps its process too busy for heartbeats; its time to start is the limit.
        if now_s - worker.created_s > rules.start_timeout_s:
            return FenceWorker(worker.worker_id, f"not ready after {rules.start_timeout_s:g} s")
        return None
    heard_s = worker.heartbeat_s if worker.heartbeat_s is not None else worker.created_s
    late_s = now_s - heard_s
    if worker.failed_probes >= rules.max_failed_probes:
        return FenceWorker(worker.worker_id, f"{worker.failed_probes} probes of its data plane failed in a row")
    if late_s > rules.heartbeat_limit_s:
        probed_since = worker.probed_s is not None and worker.probed_s > heard_s + rules.heartbeat_limit_s
        if probed_since and worker.failed_probes:
            return FenceWorker(worker.worker_id, f"no heartbeat for {late_s:.1f} s and its data plane does not answer")
        if not probed_since or now_s - (worker.probed_s or 0.0) > rules.heartbeat_interval_s:
            return ProbeWorker(worker.worker_id)
        return None
    if worker.state is WorkerState.READY:
        interval_s = rules.heartbeat_interval_s if worker.failed_probes else rules.probe_interval_s
        if now_s - (worker.probed_s if worker.probed_s is not None else worker.created_s) > interval_s:
            return ProbeWorker(worker.worker_id)
    return None


def _drained(worker: WorkerRecord, now_s: float, rules: Rules) -> Action | None:
    """Drain means no requests and no leases (rule 10), seen for two heartbeats after the worker began to refuse."""
    if worker.drain_since_s is None:
        if worker.draining_until_s is not None and now_s > worker.draining_until_s:
            return StopWorker(worker.worker_id, "drain timed out before it confirmed", timed_out=True)
        return DrainWorker(worker.worker_id, "drain not confirmed yet")
    if worker.idle_since_s is not None and now_s - worker.idle_since_s >= 2 * rules.heartbeat_interval_s:
        return StopWorker(worker.worker_id, "drained: no requests, no leases")
    if worker.draining_until_s is not None and now_s > worker.draining_until_s:
        return StopWorker(worker.worker_id, "drain timed out", timed_out=True)
    return None


def _surplus(worker: WorkerRecord, reason: str) -> Action | None:
    if worker.state is WorkerState.STARTING:
        return StopWorker(worker.worker_id, reason)
    if worker.state is WorkerState.READY:
        return DrainWorker(worker.worker_id, reason)
    return None


def _count(
    target: PoolTarget, alive: list[WorkerRecord], acted: set[WorkerId], backoff: Backoff, now_s: float, rules: Rules
) -> list[Action]:
    """Start what is missing. A draining worker keeps its place (and its accelerator) until it is gone; surplus goes
    newest and least ready first."""
    missing = target.replicas - len(alive)
    if missing > 0:
        if backoff.wait_s(now_s, rules) > 0:
            return []
        return [StartWorker(target.name)] * (1 if backoff.failures else missing)
    staying = [w for w in alive if w.state in (WorkerState.STARTING, WorkerState.READY)]
    surplus = len(staying) - target.replicas
    if surplus <= 0:
        return []
    order = sorted(staying, key=lambda w: (w.state is WorkerState.READY, -w.created_s))
    reason = f"pool {target.name} is scaled to {target.replicas}"
    chosen = [_surplus(w, reason) for w in order[:surplus] if w.worker_id not in acted]
    return [action for action in chosen if action is not None]
