"""A world of worker processes in given time, for the pure cores that look after them: table, reconcile, routing.

Processes beat once a second, obey what they are told, and are stopped, deafened or killed by the story. What the coordinator's
shell does with Ray is done here at once.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from coordinator.pools.fleet import Fleet
from coordinator.pools.reconcile import (
    Action,
    Actual,
    DrainWorker,
    FenceWorker,
    ForgetWorker,
    ProbeWorker,
    PromoteWorker,
    RelabelWorker,
    ReservePlace,
    Rules,
    StandByWorker,
    StartWorker,
    StopWorker,
    reconcile,
)
from coordinator.pools.records import PoolTarget, SpareKind
from coordinator.pools.reports import Beat
from coordinator.routing.config import RoutingSettings
from coordinator.routing.router import Router
from coordinator.routing.views import Placement, Role, WorkerState
from protos.ids import Incarnation, WorkerId
from tests.support.views import worker_view

RULES = Rules(
    heartbeat_interval_s=1.0,
    heartbeat_limit_s=3.0,
    probe_interval_s=30.0,
    max_failed_probes=3,
    restart_backoff_s=2.0,
    restart_backoff_max_s=60.0,
    partition_grace_s=20.0,
)
DRAIN_TIMEOUT_S = 60.0
TRANSPORTS = ("ucx", "grpc")


@dataclass
class Process:
    """One worker process: what it would say of itself."""

    worker_id: WorkerId
    pool: str
    role: Role
    engine: str
    serves: bool = False
    refusing: bool = False
    running: int = 0
    leases: int = 0
    stopped: bool = False
    """By a signal: it says nothing and answers nobody."""
    deaf: bool = False
    """It beats, and its data plane does not answer."""
    node: str = ""
    rack: str = ""
    away: bool = False
    """Nothing that its host sends or is sent arrives."""

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.worker_id}-i")

    def beat(self) -> Beat:
        state = WorkerState.READY if self.serves else WorkerState.STARTING
        view = replace(
            worker_view(self.worker_id, self.role, pool=self.pool, state=state, running=self.running, transports=TRANSPORTS),
            leases=self.leases,
            node_id=self.node,
            rack=self.rack,
        )
        return Beat(
            view=view, slot=0, node_id=self.node or "n", processes=(), refusing=self.refusing, uptime_s=0.0, engine=self.engine
        )  # fmt: skip


class PoolWorld:
    """Processes, the coordinator's table of them, and one gateway's router over that table. The clock is `now_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.targets: dict[str, PoolTarget] = {}
        self.surge_ranks = 0
        """What may be held beyond `targets` while workers are replaced."""
        self.max_unavailable = 0.25
        self.processes: dict[WorkerId, Process] = {}
        self.fleet = Fleet()
        self.router = Router(RoutingSettings(), random.Random(1), transports=TRANSPORTS)
        self._numbers: Counter[str] = Counter()

    def place_pairs(self, placement: Placement, imbalance_tokens: int) -> None:
        """The gateway's setting; its breakers and loads begin anew."""
        rules = RoutingSettings(placement=placement, placement_imbalance_tokens=imbalance_tokens)
        self.router = Router(rules, random.Random(1), transports=TRANSPORTS)
        self.look()

    def tick(self) -> None:
        """A second passes: who can, beats."""
        self.now_s += 1.0
        for process in self.processes.values():
            if not (process.stopped or process.away):
                self.fleet.heard(process.beat(), self.now_s)
        self.look()

    def look(self) -> None:
        """The gateway hears of the membership."""
        self.router.update(self.fleet.views(self.now_s))

    def reconcile(self) -> list[Action]:
        """One pass, carried out."""
        actual = Actual(workers=self.fleet.records(), backoff=self.fleet.backoff)
        targets = list(self.targets.values())
        budget_ranks = sum(t.workers * t.ranks for t in targets) + self.surge_ranks
        limits = {"budget_ranks": budget_ranks, "max_unavailable": self.max_unavailable}
        actions = reconcile(targets, actual, self.now_s, RULES, **limits)
        for action in actions:
            self._carry_out(action)
        self.look()
        return actions

    def died(self, worker_id: WorkerId, reason: str, *, wanted: bool = False) -> None:
        """The process is gone, and that is known."""
        self.processes.pop(worker_id, None)
        self.fleet.died(worker_id, reason, self.now_s, wanted=wanted)
        self.look()

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartWorker():
                self._start(self.targets[action.pool], action.spare)
            case PromoteWorker() | StandByWorker():
                self._stand_by(action.worker_id, isinstance(action, StandByWorker))
            case ReservePlace():
                self.fleet.reserved(action.worker_id, f"node of {action.worker_id}", self.now_s)
            case DrainWorker():
                self.fleet.drain(action.worker_id, self.now_s + DRAIN_TIMEOUT_S)
                self.processes[action.worker_id].refusing = not self.processes[action.worker_id].stopped
            case RelabelWorker():
                process = self.processes[action.worker_id]
                self.fleet.relabel(action.worker_id, action.pool, action.role)
                self._stand_by(action.worker_id, action.spare)
                if not process.stopped:
                    process.pool, process.role = action.pool, action.role
            case ProbeWorker():
                asked = self.processes.get(action.worker_id)
                away = asked is not None and asked.away
                answers = asked is not None and not (asked.stopped or asked.deaf or asked.away)
                self.fleet.probed(action.worker_id, answers, self.now_s, host_silent=away)
            case StopWorker():
                self.died(action.worker_id, action.reason, wanted=True)
                self.fleet.forget(action.worker_id)
            case FenceWorker():
                self.died(action.worker_id, action.reason)
                self.fleet.forget(action.worker_id)
            case ForgetWorker():
                self.fleet.forget(action.worker_id)

    def _start(self, target: PoolTarget, spare: bool) -> None:
        self._numbers[target.name] += 1
        worker_id = WorkerId(f"{target.name}-{self._numbers[target.name]}")
        placed = spare and target.spare_kind is SpareKind.PLACED
        self.fleet.created(
            worker_id, target.name, target.role, 0, self.now_s, engine=target.engine, spare=spare, placed=placed
        )  # fmt: skip
        if not placed:
            self._run(worker_id)

    def _stand_by(self, worker_id: WorkerId, spare: bool) -> None:
        self.fleet.stand_by(worker_id, spare, self.now_s)
        if worker_id not in self.processes:
            self._run(worker_id)

    def _run(self, worker_id: WorkerId) -> None:
        record = self.fleet.members[worker_id].record
        self.processes[worker_id] = Process(worker_id, record.pool, record.role, record.engine or "")
