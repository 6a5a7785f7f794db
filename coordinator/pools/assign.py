"""Which worker serves which pool: who stays, who takes another label, who goes, and what has to be started. Pure.

A worker can serve any role, and its engine is all that cannot be changed while it runs. So a pool that lacks workers takes them
first from those that another pool has too many of and whose engine arguments are the same: a new label, no load of the model.

What a change *replaces* (a pool that is gone or scaled to 0, or whose engine arguments have changed) holds accelerators that
its successors need, and serves until they do: `replacement` says who of it goes in which batch.

Who of a pool's workers serves and who stands by is for `spares` to say.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.pools import replacement
from coordinator.pools.records import PoolTarget, Restart, WorkerRecord
from coordinator.pools.replacement import Place, answers
from coordinator.pools.spares import Crew, crew, crews, kept, wants_running
from coordinator.routing.views import Role, WorkerState
from protos.ids import WorkerId

RESTARTS = "its restart was asked for"


class Fate(enum.StrEnum):
    """What becomes of one worker."""

    KEEP = "keep"
    RELABEL = "relabel"
    PROMOTE = "promote"
    """It stood by and serves from now on."""
    STAND_BY = "stand by"
    """It served and stands by from now on; what it has runs to its end."""
    STOP = "stop"
    """It is drained, then ended."""
    HOLD = "hold"
    """It goes too, in a later batch."""
    LEAVING = "leaving"
    """A drain was asked for before."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """One worker's fate. `target` is the pool it serves from now on, or stands by for as its `spare`; None for one that goes."""

    worker: WorkerRecord
    fate: Fate
    target: PoolTarget | None
    reason: str = ""
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """`missing` workers by pool are to be started in the end, `startable` of them now. `to_serve` of the missing are to
    serve, and come first; the others are to stand by."""

    workers: Mapping[WorkerId, Assigned]
    missing: Mapping[str, int]
    startable: Mapping[str, int]
    to_serve: Mapping[str, int]
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
    silent_nodes: Collection[str] = (),
) -> Assignment:
    """`workers` are those that live. Roles in `whole_roles` are offered whole requests. The larger of `budget_ranks` and what
    `targets` need is how many accelerators may be held at once while replaced workers are left, and `max_unavailable` the share
    of a pool that may be away then. `gateways_behind`: some gateway does not reach every ready worker yet, so no worker that
    serves is restarted or replaced for now. Spares on `silent_nodes` stand in for nobody."""
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
        staying[name], surplus = kept(target, wanted[name], ordered)
        # Who shrinks a pool by the worker that is cordoned wants it gone, and no other pool is served by it.
        going.extend(worker for worker in surplus if worker.cordoned or worker.restart)
        free.extend(worker for worker in surplus if not (worker.cordoned or worker.restart))
    missing = {n: max(0, wanted[n] + t.workers - t.replicas - len(staying[n]) - places[n]) for n, t in by_name.items()}
    for name, target in by_name.items():
        running = (w for w in free if w.engine == target.engine and w.state is not WorkerState.PLACED)
        taken = sorted(running, key=_worth, reverse=True)[
            : min(missing[name], wants_running(target, wanted[name], staying[name]))
        ]
        staying[name] += taken
        names = {w.worker_id for w in taken}
        free = [w for w in free if w.worker_id not in names]
        missing[name] -= len(taken)
    split = crews(by_name, wanted, staying, missing, silent_nodes)
    for name, target in by_name.items():
        fates.update(_labels(target, split[name]))
    for worker in (*going, *free):
        fates[worker.worker_id] = Assigned(worker, Fate.STOP, None, _why_gone(worker, by_name.get(worker.pool)))
    if not gateways_behind:
        whole_pools = [name for name in by_name if not missing[name] and not places[name]]
        for name, worker in _turns({name: staying[name] for name in whole_pools}, fates.values(), whole_roles).items():
            # A spare stands in for it at once.
            staying[name].remove(worker)
            split[name] = crew(name, wanted[name], staying[name], silent_nodes)
            fates.update(_labels(by_name[name], split[name]))
            fates[worker.worker_id] = Assigned(worker, Fate.STOP, None, RESTARTS)
    live = [Place(w, a.target, _is_replaced(a, by_name)) for w in alive for a in (fates[w.worker_id],)]
    replacing, startable = any(place.replaced for place in live), missing
    if replacing:
        batch = replacement.batch(
            targets,
            live,
            missing,
            budget_ranks=max(budget_ranks, sum(t.workers * t.ranks for t in targets)),
            max_unavailable=max_unavailable,
            whole_roles=whole_roles,
            gateways_behind=gateways_behind,
        )
        startable = dict(batch.startable)
        for worker in batch.held:
            stopped = fates[worker.worker_id]
            fates[worker.worker_id] = replace(stopped, fate=Fate.HOLD, reason=f"{stopped.reason}; it serves until its turn")
    to_serve = {name: min(count, max(0, wanted[name] - len(split[name].serving))) for name, count in missing.items()}
    return Assignment({w.worker_id: fates[w.worker_id] for w in alive}, missing, startable, to_serve, replacing)


def _turns(
    pools: Mapping[str, Sequence[WorkerRecord]], fates: Collection[Assigned], whole_roles: frozenset[Role]
) -> dict[str, WorkerRecord]:
    """The workers whose turn it is to be restarted, at most one of each of `pools`, which lack nobody: the oldest, where all of
    its pool serve, or could at once, and others answer requests without it."""
    serving = [a.worker for a in fates if a.target is not None and _could_serve(a.worker)]
    chosen = {}
    for name, pool in pools.items():
        due = [worker for worker in pool if worker.restart is not None]
        if not due or any(worker.state not in (WorkerState.READY, WorkerState.PLACED) for worker in pool):
            continue
        first = min(due, key=lambda worker: worker.created_s)
        others = [worker for worker in serving if worker is not first]
        if answers({worker.role for worker in others}, whole_roles):
            chosen[name] = first
            serving = others
    return chosen


def _could_serve(worker: WorkerRecord) -> bool:
    """It does, or would as soon as it is named."""
    return worker.state is WorkerState.READY and not worker.cordoned


def _worth(worker: WorkerRecord) -> tuple[bool, bool, bool, bool, float]:
    """The cordoned go first, then those that do not serve yet, then those that are to be restarted, then spares, which have
    nothing to finish, then the newest."""
    ready = worker.state is WorkerState.READY
    return (not worker.cordoned, ready, worker.restart is None, not worker.spare, -worker.created_s)


def _labels(target: PoolTarget, pool: Crew) -> dict[WorkerId, Assigned]:
    serving = {worker.worker_id: _labelled(worker, target, spare=False) for worker in pool.serving}
    return serving | {worker.worker_id: _labelled(worker, target, spare=True) for worker in pool.spares}


def _labelled(worker: WorkerRecord, target: PoolTarget, *, spare: bool) -> Assigned:
    if (worker.pool, worker.role) != (target.name, target.role):
        becomes = f"{target.name} ({target.role}{', spare' if spare else ''})"
        reason = f"{worker.pool} ({worker.role}) becomes {becomes}: its engine arguments are the same"
        return Assigned(worker, Fate.RELABEL, target, reason, spare)
    if worker.spare and not spare:
        return Assigned(worker, Fate.PROMOTE, target, f"pool {target.name} lacks a worker that serves")
    if spare and not worker.spare:
        return Assigned(worker, Fate.STAND_BY, target, f"pool {target.name} lacks a spare", spare)
    return Assigned(worker, Fate.KEEP, target, spare=spare)


def _why_gone(worker: WorkerRecord, home: PoolTarget | None) -> str:
    if home is None:
        return f"pool {worker.pool} is gone"
    if worker.engine not in (None, home.engine):
        return f"the engine arguments of pool {home.name} have changed"
    if worker.spare:
        return f"pool {home.name} keeps {home.spares if home.replicas else 0} {home.spare_kind} spares"
    return f"pool {home.name} is scaled to {home.replicas}"


def _is_replaced(assigned: Assigned, by_name: Mapping[str, PoolTarget]) -> bool:
    if assigned.target is not None:
        return False
    worker = assigned.worker
    home = by_name.get(worker.pool)
    return home is None or not home.replicas or worker.engine not in (None, home.engine)
