"""The coordinator: one named, detached Ray actor that Ray restarts. Off the token path: without it, traffic goes on.

Desired state is in `Store`; what is actual is learned from the live worker actors and their heartbeats, so a restart
reconciles with running workers instead of restarting them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence

import ray

from coordinator.config import Settings, served_model_name
from coordinator.pools import admin
from coordinator.pools.autoscale_sampler import Heard
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, Member, rules_of
from coordinator.pools.process import log_to
from coordinator.pools.ray_fleet import end_workers, free_places_but, live_workers
from coordinator.pools.ray_gateway import GATEWAY_PREFIX, drain_gateways
from coordinator.pools.ray_gateways import Gateways
from coordinator.pools.ray_workers import CALL_TIMEOUT_S, Workers
from coordinator.pools.reach import Reach
from coordinator.pools.reconcile import Actual, Backoff, Ending, reconcile
from coordinator.pools.records import PoolTarget
from coordinator.pools.reports import Beat, CoordinatorSpec, WorkerFacts
from coordinator.pools.scaling import Scaling
from coordinator.pools.store import Store
from coordinator.routing.views import WorkerState, WorkerView
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import admin_pb2

log = logging.getLogger(__name__)


class CoordinatorActor:
    """Made by `coordinator.launch` under the name that `ray_find` knows. All methods run on the actor's one event loop."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        log_to(spec.log_dir / "coordinator.log", spec.settings.log_format)
        self._spec = spec
        self._rules = rules_of(spec.settings)
        self._store = Store(spec.settings.coordinator.state_dir / "state.sqlite3")
        budget = spec.settings.coordinator.accelerator_budget
        self._first_life = self._store.begin_run(spec.run_id, spec.settings.pools, budget)
        self._fleet = Fleet(self._rules)
        self._pools = DesiredPools(spec.settings, self._store, self._fleet, self._rules.whole_roles)
        self._wake = asyncio.Event()
        self._workers = Workers(spec, self._store, self._fleet, self._pools, self._wake)
        self._gateways = Gateways(spec, self._store, self._rules.heartbeat_interval_s, ray.get_runtime_context().get_node_id())
        self._scaling = Scaling(spec.settings, self._store, self._pools, self._fleet)
        self._scaling.serve_metrics()
        self._reach = Reach(self._workers.dial_from, ray.get_runtime_context().get_node_id(), self._rules.heartbeat_interval_s)
        self._fleet.faults = self._reach.faults
        self._ending = Ending.NOT
        self._ready = asyncio.Event()
        self._loop_task = asyncio.get_running_loop().create_task(self._run())
        self._loop_task.add_done_callback(_end_process)
        self._scaling_task = asyncio.get_running_loop().create_task(self._scale_by_load())
        self._scaling_task.add_done_callback(_end_process)

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._adopt()
        self._ready.set()
        while True:
            self._wake.clear()
            now_s = time.monotonic()
            behind = self._pools.gateways_behind(self._gateways.reports.values())
            actual = Actual(
                workers=self._fleet.records(),
                backoff=self._fleet.backoff,
                gateways_behind=behind,
                silent_nodes=self._workers.silent_nodes,
            )
            wanted = self._pools.present
            for action in reconcile(
                wanted.targets,
                actual,
                now_s,
                self._rules,
                budget_ranks=wanted.budget_ranks,
                max_unavailable=wanted.max_unavailable,
                ending=self._ending,
            ):
                self._workers.carry_out(action, now_s)
            if self._ending is Ending.NOT:
                self._gateways.keep()
                self._reach.keep([member.beat for member in self._fleet.members.values() if member.beat is not None])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rules.heartbeat_interval_s):
                    await self._wake.wait()

    async def _scale_by_load(self) -> None:
        """Beside the loop, which it only wakes."""
        await self._ready.wait()
        names = tuple(f"{GATEWAY_PREFIX}{index}" for index in range(self._spec.settings.coordinator.gateways))
        await self._scaling.run(
            heard=lambda: Heard(reports=self._gateways.reports, heard_s=self._gateways.heard_s, expected=names),
            describe=self._pool_statuses,
            ending=lambda: self._ending is not Ending.NOT,
            changed=self._wake.set,
        )

    async def _adopt(self) -> None:
        """After a restart: wait until the live workers have been heard, so that nobody is told of an empty membership.

        What a former run left is ended: its workers have other settings, perhaps another model.
        """
        if self._first_life and (left := await asyncio.to_thread(end_workers)):
            log.warning("ended workers of a former run: %s", ", ".join(left))
        found = await asyncio.to_thread(live_workers)
        now_s = time.monotonic()
        for worker_id, handle in found.items():
            self._workers.watch(worker_id, handle)
        if freed := await asyncio.to_thread(free_places_but, {*found, *self._pools.places()}):
            log.warning("freed the places of workers that died unseen: %s", ", ".join(freed))
        wanted = set(found)
        until_s = now_s + self._rules.heartbeat_limit_s
        while wanted - set(self._fleet.members) and time.monotonic() < until_s:
            await self._fleet.next_change(until_s - time.monotonic())
        # Silent ones: alive and loading, late, stopped, or dead. The rest follows by itself.
        self._pools.adopt(wanted - set(self._fleet.members), time.monotonic())
        self._workers.deaths.resume(found)
        self._pools.resume_spares(time.monotonic())
        for worker_id, left_s in self._store.draining().items():
            self._fleet.drain(worker_id, time.monotonic() + max(0.0, left_s))
        self._pools.resume_cordons()
        self._pools.resume_restarts()
        if found:
            log.info("restarted; %d of %d workers answered", len(self._fleet.members), len(found))

    # -- called by workers and gateways --------------------------------------------------------------------------------

    async def heartbeat(self, beat: Beat) -> bool:
        """False: the worker was given up and must end itself."""
        if self._first_life and not self._ready.is_set():
            return False  # of a former run
        known = self._fleet.heard(beat, time.monotonic())
        if known and beat.view.state is WorkerState.READY:
            self._workers.deaths.serves(beat)
        if known:
            await self._workers.met(beat.view.worker_id)
        return known

    async def watch_membership(self, epoch: str, version: int, timeout_s: float) -> tuple[str, int, tuple[WorkerView, ...]]:
        """Long poll: returns at once when the membership has changed since `version` of `epoch`, else after `timeout_s` with
        the same membership and fresher loads."""
        await self._ready.wait()
        await self._fleet.newer(epoch, version, timeout_s)
        return self._fleet.epoch, self._fleet.version, self._fleet.views(time.monotonic())

    # -- called for operators ------------------------------------------------------------------------------------------

    async def status(self) -> admin_pb2.GetStatusResponse:
        await self._ready.wait()
        views = self._fleet.views(time.monotonic())
        beats = {m.record.worker_id: m.beat for m in self._fleet.members.values() if m.beat is not None}
        gateways, model = list(self._gateways.reports.values()), served_model_name(self._spec.settings)
        reply = admin.status(self._pool_statuses(), views, beats, gateways, model)
        reply.version = self._pools.present.version
        reply.unsettled.extend(self._pools.unsettled(self._gateways.reports.values()))
        reply.unsettled.extend(f"{name} is to be restarted" for name in self._gateways.due)
        reply.autoscaling.CopyFrom(self._scaling.autoscaler.status(time.monotonic()))
        reply.advisor.CopyFrom(self._scaling.advisor.status(time.time()))
        return reply

    def _pool_statuses(self) -> list[admin_pb2.PoolStatus]:
        views = self._fleet.views(time.monotonic())
        return [self._pool_status(target, views) for target in self._pools.targets]

    def _pool_status(self, target: PoolTarget, views: Sequence[WorkerView]) -> admin_pb2.PoolStatus:
        backoff = self._fleet.backoff.get(target.name, Backoff())
        engine = self._pools.present.settings.pools[target.name].engine
        detail, updated = self._fleet.failures.get(target.name, ""), self._pools.updated(target)
        return admin.pool_status(target, engine, views, backoff.failures, detail, updated=updated)

    async def settings(self) -> Settings:
        """What it was started with."""
        return self._spec.settings

    async def faults(self) -> list[str]:
        """Why gateways cannot start, and which addresses lead nowhere, one line each."""
        return [*self._gateways.faults.values(), *self._reach.lasting()]

    async def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse:
        """Raises `SplitpointError`: see `DesiredPools.scale`; `CONFLICT` also for an autoscaled pool."""
        await self._ready.wait()
        self._scaling.autoscaler.check_operator(request)
        target, steps = self._pools.scale(
            request.pool,
            request.replicas,
            current=request.current_replicas if request.HasField("current_replicas") else None,
            expected=request.expected_version if request.HasField("expected_version") else None,
            dry_run=request.dry_run,
        )
        self._wake.set()
        status = self._pool_status(target, self._fleet.views(time.monotonic()))
        return admin_pb2.ScalePoolResponse(pool=status, plan=admin.plan(steps), version=self._pools.present.version)

    async def set_autoscaler(self, request: admin_pb2.SetAutoscalerRequest) -> admin_pb2.SetAutoscalerResponse:
        """Raises `SplitpointError`: see `Autoscaler.set`."""
        await self._ready.wait()
        status = self._scaling.autoscaler.set(request, time.monotonic())
        self._scaling.policy_set.set()
        return admin_pb2.SetAutoscalerResponse(autoscaler=status)

    async def remove_autoscaler(self, pool: str) -> None:
        """Raises `SplitpointError(NOT_FOUND)`."""
        await self._ready.wait()
        self._scaling.autoscaler.remove(pool)

    async def apply_pools(self, request: admin_pb2.ApplyPoolsRequest) -> admin_pb2.ApplyPoolsResponse:
        """Raises `SplitpointError`: see `DesiredPools.apply`."""
        await self._ready.wait()
        expected = request.expected_version if request.HasField("expected_version") else None
        steps = self._pools.apply(
            admin.pools_of(request.pools), expected=expected, dry_run=request.dry_run, strategy=admin.strategy_of(request)
        )
        self._wake.set()
        return admin_pb2.ApplyPoolsResponse(plan=admin.plan(steps), version=self._pools.present.version)

    async def drain(self, worker_id: str, timeout_s: float) -> admin_pb2.WorkerStatus:
        """Returns when the worker is gone. Its pool's target stays, so a replacement follows. `timeout_s` 0: the default. A
        drain that runs already is shortened by a time that is over sooner.

        Raises:
            SplitpointError: `NOT_FOUND`.
        """
        await self._ready.wait()
        key = self._pools.worker(worker_id)
        limit_s = timeout_s or self._spec.settings.coordinator.drain_timeout_s
        self._pools.drain(key, limit_s, time.monotonic(), "asked for")
        self._wake.set()
        while key in self._fleet.members:
            await self._fleet.next_change(1.0)
        return self._workers.finals[key]

    async def restart(self, request: admin_pb2.RestartRequest) -> admin_pb2.RestartResponse:
        """Returns at once. Raises `SplitpointError`: see `DesiredPools.restart`."""
        await self._ready.wait()
        workers = self._pools.restart(list(request.pools), surge=request.surge)
        gateways = self._gateways.restart() if request.gateways else []
        self._wake.set()
        return admin_pb2.RestartResponse(workers=workers, gateways=gateways)

    async def cordon(self, worker_id: str, cordoned: bool) -> admin_pb2.WorkerStatus:
        """Raises `SplitpointError(NOT_FOUND)`."""
        await self._ready.wait()
        member = self._fleet.members[self._pools.cordon(worker_id, cordoned)]
        return admin.worker_status(member.view(time.monotonic()), member.beat)

    async def reset_prefix_caches(self, pools: Sequence[str]) -> int:
        """How many ready workers of `pools` (of all, when it is empty) forgot their cached prefixes.

        Raises:
            SplitpointError: `NOT_FOUND` unknown pool; `NO_WORKER` one cannot be asked, nothing was done; `CONFLICT` when one
                has blocks in use and kept them.
        """
        await self._ready.wait()
        ready = admin.ready_of(pools, self._pools.targets, self._fleet.views(time.monotonic()))
        if strangers := [w for w in ready if w not in self._workers.handles]:
            raise admin.unavailable(f"it has no connection to {', '.join(strangers)} yet")
        done: list[bool] = await asyncio.gather(*(self._workers.handles[w].reset_prefix_cache.remote() for w in ready))
        kept = [w for w, ok in zip(ready, done, strict=True) if not ok]
        if kept:
            raise SplitpointError(Code.CONFLICT, f"blocks are in use on {', '.join(kept)}; nothing was reset there")
        return len(ready)

    async def manifest(self) -> str:
        """The run manifest with the facts of the workers that are ready now, as JSON; also written to its file."""
        ready = [
            m
            for m in self._fleet.members.values()
            if m.record.state is WorkerState.READY and m.record.worker_id in self._workers.handles
        ]
        asked = await asyncio.gather(*(self._facts(m) for m in ready), return_exceptions=True)
        for member, answer in zip(ready, asked, strict=True):
            if isinstance(answer, BaseException):
                log.warning("no facts from worker %s: %s", member.record.worker_id, type(answer).__name__)
        whole = self._spec.manifest.with_workers([f for f in asked if isinstance(f, WorkerFacts)])
        await asyncio.to_thread(whole.write, self._spec.settings.coordinator.state_dir)
        return whole.to_json()

    async def _facts(self, member: Member) -> WorkerFacts:
        handle = self._workers.handles[member.record.worker_id]
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await handle.facts.remote()

    async def shutdown(self, timeout_s: float) -> None:
        """Close the gateways, let them finish what is in flight, then drain and stop every worker; start no more. Returns when
        all are gone, at the latest shortly after `timeout_s`."""
        self._ending = Ending.GATEWAYS
        end_s = time.monotonic() + timeout_s
        await drain_gateways(list(self._gateways.reports), timeout_s)
        self._ending = Ending.WORKERS
        timeout_s = max(1.0, end_s - time.monotonic())
        for worker_id, member in list(self._fleet.members.items()):
            if member.record.state is not WorkerState.STARTING:
                self._pools.drain(worker_id, timeout_s, time.monotonic(), "shutting down")
        self._wake.set()
        until_s = time.monotonic() + timeout_s + 4 * CALL_TIMEOUT_S
        while self._fleet.members and time.monotonic() < until_s:
            await self._fleet.next_change(1.0)


def _end_process(task: asyncio.Task[None]) -> None:
    """A coordinator whose loop has ended decides nothing any more; Ray starts another, which learns everything anew."""
    log.critical("the reconcile loop ended", exc_info=None if task.cancelled() else task.exception())
    os._exit(1)
