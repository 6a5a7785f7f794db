"""Which worker serves which pool: who stays, who takes another label, who goes, and what has to be started. Pure.

A worker can serve any role, and its engine is all that cannot be changed while it runs. So a pool that lacks workers takes them
first from those that another pool has too many of and whose engine arguments are the same: a new label, no load of the model.

What a change *replaces* (a pool that is gone or scaled to 0, or whose engine arguments have changed) holds accelerators that
its successors need, and serves until they do: `replacement` says who of it goes in which batch.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.pools import replacement
from coordinator.pools.records import PoolTarget, Restart, WorkerRecord
from coordinator.pools.replacement import Place, answers, serves
from coordinator.routing.views import Role, WorkerState
from protos.ids import WorkerId

RESTARTS = "its restart was asked for"


class Fate(enum.StrEnum):
    """What becomes of one worker."""

    KEEP = "keep"
    RELABEL = "relabel"
    STOP = "stop"
    """It is drained, then ended."""
    HOLD = "hold"
    """It goes too, in a later batch."""
    LEAVING = "leaving"
    """A drain was asked for before."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """One worker's fate. `target` is the pool it serves from now on; None for one that goes."""

    worker: WorkerRecord
    fate: Fate
    target: PoolTarget | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """`missing` workers by pool are to be started in the end, `startable` of them now."""

    workers: Mapping[WorkerId, Assigned]
    missing: Mapping[str, int]
    startable: Mapping[str, int]
    replacing: bool = False
    """Workers that a change replaces are left, so it is not over."""


def assign(
    targets: Sequence[PoolTarget],
    workers: Iterable[WorkerRecord],
    *,
    budget_ranks: int = 0,
    max_unavailable: float = 0.0,
    whole_roles: frozenset[Role],
    gateways_behind: bool = False,
) -> Assignment:
    """`workers` are those that live. Roles in `whole_roles` are offered whole requests. The larger of `budget_ranks` and what
    `targets` need is how many accelerators may be held at once while replaced workers are left, and `max_unavailable` the share
    of a pool that may be away then. `gateways_behind`: some gateway does not reach every ready worker yet, so no worker that
    serves is restarted or replaced for now."""
    alive = list(workers)
    by_name = {target.name: target for target in targets}
    staying: dict[str, list[WorkerRecord]] = {name: [] for name in by_name}
    places = dict.fromkeys(by_name, 0)
    fates: dict[WorkerId, Assigned] = {}
    free: list[WorkerRecord] = []
    going: list[WorkerRecord] = []
    for worker in alive:
        home = by_name.get(worker.pool)
        at_home = home is not None and worker.engine in (None, home.engine)
        if worker.leaving:
            fates[worker.worker_id] = Assigned(worker, Fate.LEAVING, None)
            # Until it is gone it keeps its place, and with it its accelerator.
            places[worker.pool] = places.get(worker.pool, 0) + at_home
        elif at_home:
            staying[worker.pool].append(worker)
        else:
            free.append(worker)
    wanted: dict[str, int] = {}
    for name, target in by_name.items():
        ordered = sorted(staying[name], key=_worth, reverse=True)
        wanted[name] = target.replicas + (target.replicas > 0 and any(w.restart is Restart.SURGE for w in ordered))
        staying[name], surplus = ordered[: wanted[name]], ordered[wanted[name] :]
        # Who shrinks a pool by the worker that is cordoned wants it gone, and no other pool is served by it.
        going.extend(worker for worker in surplus if worker.cordoned or worker.restart)
        free.extend(worker for worker in surplus if not (worker.cordoned or worker.restart))
        for worker in staying[name]:
            fates[worker.worker_id] = _labelled(worker, target)
    missing = {n: max(0, wanted[n] - len(staying[n]) - places[n]) for n in by_name}
    for name, target in by_name.items():
        same = sorted((w for w in free if w.engine == target.engine), key=_worth, reverse=True)
        taken = {w.worker_id: _labelled(w, target) for w in same[: missing[name]]}
        fates.update(taken)
        free = [w for w in free if w.worker_id not in taken]
        missing[name] -= len(taken)
    for worker in (*going, *free):
        fates[worker.worker_id] = Assigned(worker, Fate.STOP, None, _why_gone(worker, by_name.get(worker.pool)))
    if not gateways_behind:
        whole_pools = [name for name in by_name if not missing[name] and not places[name]]
        for worker in _turns([staying[name] for name in whole_pools], fates.values(), whole_roles):
            fates[worker.worker_id] = Assigned(worker, Fate.STOP, None, RESTARTS)
    live = [Place(w, a.target, _is_replaced(a, by_name)) for w in alive for a in (fates[w.worker_id],)]
    replacing, startable = any(place.replaced for place in live), missing
    if replacing:
        batch = replacement.batch(
            targets,
            live,
            missing,
            budget_ranks=max(budget_ranks, sum(t.replicas * t.ranks for t in targets)),
            max_unavailable=max_unavailable,
            whole_roles=whole_roles,
            gateways_behind=gateways_behind,
        )
        startable = dict(batch.startable)
        for worker in batch.held:
            stopped = fates[worker.worker_id]
            fates[worker.worker_id] = replace(stopped, fate=Fate.HOLD, reason=f"{stopped.reason}; it serves until its turn")
    return Assignment({w.worker_id: fates[w.worker_id] for w in alive}, missing, startable, replacing)


def _turns(
    pools: Sequence[Sequence[WorkerRecord]], fates: Collection[Assigned], whole_roles: frozenset[Role]
) -> list[WorkerRecord]:
    """The workers whose turn it is to be restarted, at most one of each of `pools`, which lack nobody: the oldest, where all of
    its pool serve and others answer requests without it."""
    serving = [a.worker for a in fates if a.target is not None and serves(a.worker)]
    chosen = []
    for pool in pools:
        due = [worker for worker in pool if worker.restart is not None]
        if not due or any(worker.state is not WorkerState.READY for worker in pool):
            continue
        first = min(due, key=lambda worker: worker.created_s)
        others = [worker for worker in serving if worker is not first]
        if answers({worker.role for worker in others}, whole_roles):
            chosen.append(first)
            serving = others
    return chosen


def _worth(worker: WorkerRecord) -> tuple[bool, bool, bool, float]:
    """The cordoned go first, then those that do not serve yet, then those that are to be restarted, then the newest."""
    return (not worker.cordoned, worker.state is WorkerState.READY, worker.restart is None, -worker.created_s)


def _labelled(worker: WorkerRecord, target: PoolTarget) -> Assigned:
    if (worker.pool, worker.role) != (target.name, target.role):
        reason = f"{worker.pool} ({worker.role}) becomes {target.name} ({target.role}): its engine arguments are the same"
        return Assigned(worker, Fate.RELABEL, target, reason)
    return Assigned(worker, Fate.KEEP, target)


def _why_gone(worker: WorkerRecord, home: PoolTarget | None) -> str:
    if home is None:
        return f"pool {worker.pool} is gone"
    if worker.engine not in (None, home.engine):
        return f"the engine arguments of pool {home.name} have changed"
    return f"pool {home.name} is scaled to {home.replicas}"


def _is_replaced(assigned: Assigned, by_name: Mapping[str, PoolTarget]) -> bool:
    if assigned.target is not None:
        return False
    worker = assigned.worker
    home = by_name.get(worker.pool)
    return home is None or not home.replicas or worker.engine not in (None, home.engine)
