"""The pools' control loop without Ray: workers of one process, the coordinator's table, store and decisions, gateways' feed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from coordinator.config import PoolSettings, Settings
from coordinator.gateway.core import GatewayCore
from coordinator.gateway.membership import MembershipSnapshot
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.reconcile import (
    Action,
    Actual,
    DrainWorker,
    ForgetWorker,
    ProbeWorker,
    PromoteWorker,
    RelabelWorker,
    ReservePlace,
    StandByWorker,
    StartWorker,
    StopWorker,
    reconcile,
)
from coordinator.pools.reports import GatewayReport, ProcessRef
from coordinator.pools.store import Store
from coordinator.pools.worker_process import Host, WorkerProcess
from coordinator.routing.views import WorkerState
from protos.ids import WorkerId

STEP_S = 0.02


class SmallCluster:
    """Carries out what `reconcile` says, as the coordinator actor does. Belongs to one event loop."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._rules = rules_of(settings)
        self.store = Store(folder / "state.sqlite3")
        self.store.begin_run("run", settings.pools)
        self.fleet = Fleet()
        self.pools = DesiredPools(settings, self.store, self.fleet, self._rules.whole_roles)
        self.cores: list[GatewayCore] = []
        """Gateways that follow it."""
        self.processes: dict[WorkerId, WorkerProcess] = {}
        self._lives: dict[WorkerId, asyncio.Task[str]] = {}
        self._stops: dict[WorkerId, asyncio.Task[None]] = {}
        self._loop: asyncio.Task[None] | None = None
        self._passed = asyncio.Event()
        self._ready = asyncio.Event()
        self._ready.set()

    async def poll(self, epoch: str, version: int) -> MembershipSnapshot:
        """What a gateway follows; nobody is told of a membership that is still being learned."""
        await self.fleet.newer(epoch, version, 0.2)
        await self._ready.wait()
        now_s = time.monotonic()
        return MembershipSnapshot(epoch=self.fleet.epoch, version=self.fleet.version, workers=self.fleet.views(now_s))

    async def settled(self, core: GatewayCore, timeout_s: float = 40.0) -> None:
        """Until everything is as desired, and `core` knows it."""
        until_s = time.monotonic() + timeout_s
        while lines := self.pools.unsettled([report_of(core)]):
            assert time.monotonic() < until_s, lines
            await self._passed.wait()

    async def restart_coordinator(self) -> None:
        """What was only in its memory is lost; it goes on from the disk and from what the live workers say."""
        self._ready.clear()
        await self._end_loop()
        self.store.close()
        self.store = Store(self._folder / "state.sqlite3")
        assert not self.store.begin_run("run", self._settings.pools), "the same run"
        self.fleet = Fleet()
        self.pools = DesiredPools(self._settings, self.store, self.fleet, self._rules.whole_roles)
        while len(self.fleet.members) < len(self._lives):
            await self.fleet.next_change(20.0)
        self.pools.resume_spares(time.monotonic())
        self.pools.resume_cordons()
        self.pools.resume_restarts()
        self._ready.set()
        self._loop = asyncio.create_task(self._run())

    async def _end_loop(self) -> None:
        assert self._loop is not None
        self._loop.cancel()
        outcome = await asyncio.gather(self._loop, return_exceptions=True)
        assert isinstance(outcome[0], asyncio.CancelledError), outcome

    async def _run(self) -> None:
        while True:
            behind = self.pools.gateways_behind([report_of(core) for core in self.cores])
            actual = Actual(workers=self.fleet.records(), backoff=self.fleet.backoff, gateways_behind=behind)
            now_s, wanted = time.monotonic(), self.pools.present
            limits = {"budget_ranks": wanted.budget_ranks, "max_unavailable": wanted.max_unavailable}
            for action in reconcile(wanted.targets, actual, now_s, self._rules, **limits):
                self._carry_out(action, now_s)
            self._passed.set()
            self._passed = asyncio.Event()
            await asyncio.sleep(STEP_S)

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case StartWorker(pool, spare):
                worker_id = self.pools.new_worker(pool, now_s, spare=spare)
                if not self._is_place(worker_id):
                    self._start(worker_id)
            case RelabelWorker(worker_id, pool, role, reason, spare):
                self.pools.relabel(worker_id, pool, role, reason, spare=spare, now_s=now_s)
                if not self._is_place(worker_id):
                    self.processes[worker_id].relabel(pool, role)
            case PromoteWorker(worker_id, reason) | StandByWorker(worker_id, reason):
                was_place = self._is_place(worker_id)
                self.pools.stand_by(worker_id, isinstance(action, StandByWorker), now_s, reason)
                if was_place:
                    self._start(worker_id)
            case ReservePlace(worker_id):
                self.fleet.reserved(worker_id, "n", now_s)
            case DrainWorker(worker_id, reason):
                self.pools.drain(worker_id, self._settings.coordinator.drain_timeout_s, now_s, reason)
                self.processes[worker_id].drain()
            case StopWorker(worker_id, reason, timed_out):
                assert not timed_out, f"{worker_id}: {reason}"
                if worker_id not in self._stops:
                    self._stops[worker_id] = asyncio.create_task(self._stop(worker_id, reason))
            case ProbeWorker(worker_id):
                self.fleet.probed(worker_id, True, now_s)
            case ForgetWorker(worker_id):
                self.fleet.forget(worker_id)
            case _:
                raise AssertionError(f"nothing here should be fenced: {action}")

    def _is_place(self, worker_id: WorkerId) -> bool:
        return self.fleet.members[worker_id].record.state is WorkerState.PLACED

    def _start(self, worker_id: WorkerId) -> None:
        spec = self.pools.spec(worker_id, self._folder)

        async def push(beat: object) -> bool:
            return self.fleet.heard(beat, time.monotonic())  # type: ignore[arg-type]

        refs = (ProcessRef(os.getpid(), 0.0),)
        process = WorkerProcess(spec, Host(node_id="n", node_ip="127.0.0.1", push=push, processes=lambda: refs))
        self.processes[worker_id] = process
        self._lives[worker_id] = asyncio.create_task(process.run())

    async def _stop(self, worker_id: WorkerId, reason: str) -> None:
        self.fleet.stopping(worker_id)
        if worker_id in self._lives:
            await self.processes[worker_id].stop(reason)
            await self._lives.pop(worker_id)
        self.fleet.died(worker_id, reason, time.monotonic(), wanted=True)

    async def __aenter__(self) -> SmallCluster:
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *ended: object) -> None:
        try:
            await self._end_loop()
        finally:
            await asyncio.gather(*self._stops.values())
            for worker_id, life in self._lives.items():
                await self.processes[worker_id].stop("the test is over")
                await life
            self.store.close()


def report_of(core: GatewayCore) -> GatewayReport:
    """What the gateway actor says of itself, as far as pools go by it."""
    membership = core.membership
    ready = [view for view in membership.views if view.state is WorkerState.READY]
    return GatewayReport(
        gateway_id="gateway/0", http_address="", grpc_address="", admin_address="", in_flight=core.in_flight, pid=0, tasks=0,
        open_files=0, membership_age_s=0.0, ready=core.ready(), epoch=membership.epoch, version=membership.version,
        unconnected=tuple(v.worker_id for v in ready if not membership.connected(v.incarnation)),
        loads=core.loads(), lacking=dict(core.pool_loads.lacking),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def followed(cluster: SmallCluster, core: GatewayCore) -> AsyncIterator[None]:
    """`core` follows the cluster's membership."""
    cluster.cores.append(core)
    task = asyncio.create_task(core.membership.follow(cluster.poll))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pool_settings(**pools: Mapping[str, object]) -> dict[str, PoolSettings]:
    return {name: PoolSettings.model_validate(pool) for name, pool in pools.items()}
