"""Who of a pool serves and who stands by. Pure.

A spare is a worker of its pool that is offered nothing: *warm*, its engine runs and gateways are connected to it; *placed*, it is
a reserved place in which an engine is started when it is needed. Whoever is fit stands in as soon as fewer serve than the pool
is to have, for whatever reason: one is dead, is being fenced, drains, or the pool grew. One that is merely suspected serves on in
its place, so nobody stands in for it; and a spare that is suspected stands in for nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coordinator.pools.records import PoolTarget, SpareKind, WorkerRecord
from coordinator.routing.views import WorkerState


@dataclass(frozen=True, slots=True)
class Crew:
    """One pool's workers: those that are offered requests (or will be, once they are ready), and those that stand by."""

    serving: tuple[WorkerRecord, ...]
    spares: tuple[WorkerRecord, ...]


def kept(target: PoolTarget, to_serve: int, workers: Sequence[WorkerRecord]) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
    """Those of a pool's `workers` that it keeps, and those that are too many. `workers` are in order, the first are worth most;
    `to_serve` of the kept are to serve, beside the target's spares."""
    running = [worker for worker in workers if worker.state is not WorkerState.PLACED]
    places = [worker for worker in workers if worker.state is WorkerState.PLACED]
    stay = running[: to_serve + target.running - target.replicas]
    warm = target.spare_kind is SpareKind.WARM
    reserved = [] if warm else places[: to_serve + target.workers - target.replicas - len(stay)]
    return [*stay, *reserved], [*running[len(stay) :], *places[len(reserved) :]]


def wants_running(target: PoolTarget, to_serve: int, workers: Sequence[WorkerRecord]) -> int:
    """How many more workers with an engine the pool has a use for, beside those that it keeps."""
    total = to_serve + target.running - target.replicas
    return max(0, total - sum(worker.state is not WorkerState.PLACED for worker in workers))


def crew(pool: str, to_serve: int, workers: Sequence[WorkerRecord], silent_nodes: Collection[str]) -> Crew:
    """Splits those that `pool` keeps. `to_serve` are to serve; fewer do when too few are there or fit. `silent_nodes`, by id, do
    not answer."""
    fit = [worker for worker in workers if not worker.spare or _fit(worker, silent_nodes)]
    serving = sorted(fit, key=lambda worker: _turn(pool, worker))[:to_serve]
    names = {worker.worker_id for worker in serving}
    return Crew(tuple(serving), tuple(worker for worker in workers if worker.worker_id not in names))


def crews(
    targets: Mapping[str, PoolTarget],
    to_serve: Mapping[str, int],
    workers: dict[str, list[WorkerRecord]],
    missing: dict[str, int],
    silent_nodes: Collection[str],
) -> dict[str, Crew]:
    """`crew` of every pool. One that lacks a worker and has no spare of its own left is lent another pool's, where it can be: it
    moves in `workers`, and the lender has one `missing` instead."""
    found = {name: crew(name, to_serve[name], workers[name], silent_nodes) for name in targets}
    for name, target in targets.items():
        lacking = max(0, min(missing[name], to_serve[name] - len(found[name].serving)))
        for lender, spare in _lendable(target, found, targets, silent_nodes)[:lacking]:
            workers[lender].remove(spare)
            workers[name].append(spare)
            missing[lender] += 1
            missing[name] -= 1
            for pool in (lender, name):
                found[pool] = crew(pool, to_serve[pool], workers[pool], silent_nodes)
    return found


def _lendable(
    borrower: PoolTarget, found: Mapping[str, Crew], targets: Mapping[str, PoolTarget], silent_nodes: Collection[str]
) -> list[tuple[str, WorkerRecord]]:
    """Warm spares, with their pools, that can serve `borrower` as they run: they were started with its engine's arguments."""
    return [
        (name, spare)
        for name, other in found.items()
        for spare in other.spares
        if name != borrower.name
        and targets[name].engine == borrower.engine == spare.engine
        and spare.spare
        and spare.state is WorkerState.READY
        and _fit(spare, silent_nodes)
    ]


def _fit(spare: WorkerRecord, silent_nodes: Collection[str]) -> bool:
    suspected = spare.host_silent or spare.failed_probes > 0 or spare.node_id in silent_nodes
    return not (spare.cordoned or suspected)


def _turn(pool: str, worker: WorkerRecord) -> tuple[int, bool, bool, float]:
    """Who serves stays; then those that can at once, those that load, and those that have yet to be started. Among equals the
    cordoned come last, then those that are to be restarted, then the newest."""
    standing_by = worker.spare or worker.pool != pool
    match worker.state:
        case WorkerState.READY:
            rank = int(standing_by)
        case WorkerState.PLACED:
            rank = 4 if worker.place_reserved else 5
        case _:
            rank = 3 if standing_by else 2
    return rank, worker.cordoned, worker.restart is not None, worker.created_s
