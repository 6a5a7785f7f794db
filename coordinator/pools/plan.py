"""What an assignment means for people: a line for each worker, and what is not yet as desired. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.pools.assign import Assigned, Assignment, Fate
from coordinator.pools.records import WorkerRecord
from coordinator.routing.views import WorkerState
from protos.ids import WorkerId

_GOES = (Fate.STOP, Fate.HOLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One worker's part of a plan. `action` is one of those of `WorkerPlan` in admin.proto."""

    action: str
    worker_id: str = ""
    pool: str = ""
    new_pool: str = ""
    reason: str = ""


def plan(assignment: Assignment) -> list[Step]:
    """A step per worker, in the order the workers came, then one for each start that takes nobody's place. Workers that drain
    already are not in it."""
    to_start = [name for name, count in assignment.missing.items() for _ in range(count)]
    steps = []
    for worker_id, assigned in assignment.workers.items():
        worker, target = assigned.worker, assigned.target
        if target is not None:
            step = Step(
                action=assigned.fate.value, worker_id=worker_id, pool=worker.pool, new_pool=target.name, reason=assigned.reason
            )
        elif assigned.fate in _GOES and to_start:
            step = Step(action="restart", worker_id=worker_id, pool=worker.pool, new_pool=to_start.pop(0), reason=assigned.reason)
        elif assigned.fate in _GOES:
            step = Step(action="stop", worker_id=worker_id, pool=worker.pool, reason=assigned.reason)
        else:
            continue
        steps.append(step)
    return [*steps, *(Step(action="start", new_pool=name, reason=f"pool {name} lacks a worker") for name in to_start)]


def unsettled(assignment: Assignment, former_legs: Mapping[WorkerId, int]) -> list[str]:
    """What is not yet as desired, a line each; nothing when all workers serve their pools and nothing else."""
    lines = [f"pool {name} lacks {count} of its workers" for name, count in assignment.missing.items() if count]
    for worker_id, assigned in assignment.workers.items():
        if line := _unsettled_worker(assigned, former_legs.get(worker_id, 0)):
            lines.append(f"{worker_id} {line}")
    return lines


def _unsettled_worker(assigned: Assigned, former_legs: int) -> str:
    worker = assigned.worker
    if assigned.fate in (Fate.PROMOTE, Fate.STAND_BY):
        return "serves from now on" if assigned.fate is Fate.PROMOTE else "stands by from now on"
    if assigned.fate is Fate.RELABEL or (assigned.target is not None and not worker.label_heard):
        return f"takes the label {assigned.target.name if assigned.target is not None else worker.pool}"
    if assigned.target is None:
        return f"goes: {assigned.reason}" if assigned.reason else "drains"
    if worker.state is WorkerState.PLACED:
        return "" if worker.place_reserved else "waits for its place"
    if worker.state is not WorkerState.READY:
        return f"is {worker.state}"
    if worker.restart is not None:
        return "is to be restarted"
    return f"still runs {former_legs} legs of its former role" if former_legs else ""


def living(records: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Those that are not known to be dead."""
    return [record for record in records if record.state is not WorkerState.DEAD]
