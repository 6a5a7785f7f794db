"""The coordinator's hands: what `reconcile` decided for one worker is carried out on its Ray actor.

At most one piece of work runs for each worker; one that fails is logged, and the next pass decides anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from coordinator.pools import admin
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.probe import Answer, probe
from coordinator.pools.ray_calls import gcs_call, gcs_call_unbounded
from coordinator.pools.ray_deaths import Deaths
from coordinator.pools.ray_fleet import create_worker, free_worker, kill_worker, live_workers, reserve_place, wait_death
from coordinator.pools.ray_nodes import NodeLostError
from coordinator.pools.ray_placement import Placement
from coordinator.pools.ray_worker import WorkerActor
from coordinator.pools.reconcile import (
    Action,
    DrainWorker,
    FenceWorker,
    ForgetWorker,
    ProbeWorker,
    PromoteWorker,
    RelabelWorker,
    ReservePlace,
    StandByWorker,
    StartWorker,
    StopWorker,
)
from coordinator.pools.reports import Beat, CoordinatorSpec, WorkerSpec
from coordinator.pools.store import Store
from coordinator.routing.views import Role, WorkerState
from protos.ids import WorkerId
from protos.splitpoint.v1 import admin_pb2

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
"""What one call to an actor may take."""


class Workers:
    """Belongs to the coordinator's event loop. `wake` is set when a piece of work has ended or a worker has died."""

    def __init__(self, spec: CoordinatorSpec, store: Store, fleet: Fleet, pools: DesiredPools, wake: asyncio.Event) -> None:
        self._spec = spec
        self._worker_class = ray.remote(WorkerActor)
        self._store = store
        self._fleet = fleet
        self._pools = pools
        self._wake = wake
        self.handles: dict[WorkerId, ActorHandle] = {}
        """The live actors that are known."""
        self.finals: dict[WorkerId, admin_pb2.WorkerStatus] = {}
        """What each worker that is gone was last."""
        self.deaths = Deaths(store, fleet, self.handles, rules_of(spec.settings).heartbeat_interval_s)
        self._placement = Placement(spec.settings.coordinator.placement)
        self._busy: dict[WorkerId, asyncio.Task[None]] = {}
        self._watches: dict[WorkerId, asyncio.Task[None]] = {}

    def carry_out(self, action: Action, now_s: float) -> None:
        """Begin it; a worker whose former piece of work still runs is left to the next pass."""
        if isinstance(action, StartWorker):
            self._start(action.pool, action.spare, now_s)
            return
        # All labels of a pass are in one version of the membership; that the worker hears of its own may take longer.
        if isinstance(action, RelabelWorker):
            worker_id, pool, role = action.worker_id, action.pool, action.role
            self._pools.relabel(worker_id, pool, role, action.reason, spare=action.spare, now_s=now_s)
        if isinstance(action, PromoteWorker | StandByWorker) and not self._is_place(action.worker_id):
            self._pools.stand_by(action.worker_id, isinstance(action, StandByWorker), now_s, action.reason)
            return
        if action.worker_id in self._busy:
            return
        match action:
            case ProbeWorker(worker_id):
                work = self._probe(worker_id)
            case ReservePlace(worker_id):
                work = self._reserve(self._pools.spec(worker_id, self._spec.log_dir))
            case PromoteWorker(worker_id, reason) | StandByWorker(worker_id, reason):
                self._pools.stand_by(worker_id, False, now_s, reason)
                work = self._create(self._pools.spec(worker_id, self._spec.log_dir))
            case DrainWorker(worker_id, reason):
                self._pools.drain(worker_id, self._spec.settings.coordinator.drain_timeout_s, now_s, reason)
                work = self._tell_drain(worker_id)
            case RelabelWorker(worker_id, pool, role):
                work = self._tell_label(worker_id, pool, role)
            case StopWorker(worker_id, reason, timed_out):
                if timed_out:
                    log.warning("worker %s: %s; what it still holds is ended", worker_id, reason)
                work = self._stop(worker_id, reason)
            case FenceWorker(worker_id, reason):
                log.error("fencing worker %s: %s", worker_id, reason)
                work = self._end(worker_id, f"fenced: {reason}", wanted=False)
            case ForgetWorker(worker_id, reason):
                work = self._end(worker_id, reason, wanted=False)
        self._busy[action.worker_id] = asyncio.get_running_loop().create_task(self._guard(action.worker_id, work))

    async def _guard(self, worker_id: WorkerId, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (RayError, TimeoutError, OSError) as error:
            log.warning("worker %s: %s: %s; the next pass tries again", worker_id, type(error).__name__, error)
        finally:
            self._busy.pop(worker_id, None)
            self._wake.set()

    def _is_place(self, worker_id: WorkerId) -> bool:
        return self._fleet.members[worker_id].record.state is WorkerState.PLACED

    def _start(self, pool: str, spare: bool, now_s: float) -> None:
        worker_id = self._pools.new_worker(pool, now_s, spare=spare)
        if self._is_place(worker_id):
            self._wake.set()
            return
        work = self._create(self._pools.spec(worker_id, self._spec.log_dir))
        self._busy[worker_id] = asyncio.get_running_loop().create_task(self._guard(worker_id, work))

    async def _create(self, spec: WorkerSpec) -> None:
        try:
            handle = await gcs_call_unbounded(create_worker, self._worker_class, spec, *self._where())
        except (RayError, ValueError) as error:
            self._fleet.died(spec.worker_id, f"could not be made: {error}", time.monotonic())
            return
        self.watch(spec.worker_id, handle)

    async def _reserve(self, spec: WorkerSpec) -> None:
        node_id = await gcs_call_unbounded(reserve_place, spec, *self._where())
        self._fleet.reserved(spec.worker_id, node_id, time.monotonic())

    def _where(self) -> tuple[int, Placement, list[Beat], frozenset[str]]:
        beats = [member.beat for member in self._fleet.members.values() if member.beat is not None]
        return self._spec.num_gpus, self._placement, beats, self.silent_nodes

    @property
    def silent_nodes(self) -> frozenset[str]:
        """Nodes, by Ray's id, that do not answer."""
        return frozenset(self.deaths.silent_nodes | self._fleet.silent_nodes)

    async def met(self, worker_id: WorkerId) -> None:
        """A worker was heard: its actor is looked up, if it is not known, and watched."""
        if worker_id in self.handles:
            return
        try:
            handle = (await gcs_call(live_workers)).get(worker_id)
        except TimeoutError:
            return  # its next heartbeat asks again
        if handle is not None and worker_id not in self.handles:
            self.watch(worker_id, handle)

    def watch(self, worker_id: WorkerId, handle: ActorHandle) -> None:
        """Remember the actor, and hear of its death."""
        self.handles[worker_id] = handle
        self._watches[worker_id] = asyncio.get_running_loop().create_task(self._watch_until_death(worker_id, handle))

    async def _watch_until_death(self, worker_id: WorkerId, handle: ActorHandle) -> None:
        reason = await wait_death(handle)
        member = self._fleet.members.get(worker_id)
        wanted = member is not None and member.stopping
        if self._fleet.died(worker_id, reason, time.monotonic()):
            log.log(logging.INFO if wanted else logging.ERROR, "worker %s is dead: %s", worker_id, reason)
        self._wake.set()

    async def _probe(self, worker_id: WorkerId) -> None:
        member = self._fleet.members.get(worker_id)
        answer = Answer.HOST
        if member is not None and member.beat is not None:
            settings = self._spec.settings
            answer = await probe(member.beat.view, settings.coordinator.probe_timeout_s, settings.security)
        silent = answer is Answer.NOTHING
        self._fleet.probed(worker_id, answer is Answer.WORKER, time.monotonic(), host_silent=silent)

    async def dial_from(self, worker_id: WorkerId, addresses: Sequence[str]) -> dict[str, str]:
        """What stands between the worker and each of `addresses`; one that can be reached is not in the answer.

        Raises:
            ConnectionError: the worker could not be asked.
            TimeoutError: it took too long.
        """
        try:
            async with asyncio.timeout(2 * CALL_TIMEOUT_S):
                faults: dict[str, str] = await self.handles[worker_id].reach.remote(list(addresses))
        except (RayError, KeyError) as error:
            raise ConnectionError(f"{worker_id} did not dial: {type(error).__name__}") from error
        return faults

    async def _tell_drain(self, worker_id: WorkerId) -> None:
        handle = self.handles.get(worker_id)
        if handle is not None:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await handle.drain.remote()

    async def _tell_label(self, worker_id: WorkerId, pool: str, role: Role) -> None:
        handle, member = self.handles.get(worker_id), self._fleet.members.get(worker_id)
        if handle is not None and member is not None and member.beat is not None:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await handle.relabel.remote(pool, role)

    async def _stop(self, worker_id: WorkerId, reason: str) -> None:
        """Let it end its engine in order, then make sure."""
        self._fleet.stopping(worker_id)
        handle = self.handles.get(worker_id)
        member = self._fleet.members.get(worker_id)
        if handle is not None and member is not None and member.record.state is not WorkerState.STARTING:
            try:
                async with asyncio.timeout(2 * CALL_TIMEOUT_S):
                    await handle.stop.remote(reason)
            except (RayError, TimeoutError) as error:
                log.info("worker %s did not stop by itself (%s)", worker_id, type(error).__name__)
        await self._end(worker_id, reason, wanted=True)

    async def _end(self, worker_id: WorkerId, reason: str, *, wanted: bool) -> None:
        member = self._fleet.members.get(worker_id)
        if member is None:
            return
        handle = self.handles.get(worker_id)
        try:
            if member.record.host_silent:
                raise NodeLostError("its host is silent")
            await kill_worker(worker_id, member.beat)
        except NodeLostError as error:
            # Others take its work now. What peers hold back for its sake waits until its death is known (rule 13).
            log.error("giving up worker %s: %s", worker_id, error)
            self._fleet.died(worker_id, reason, time.monotonic(), wanted=wanted)
            await gcs_call(free_worker, worker_id, handle)
            assert member.beat is not None, "only processes that were heard of can be lost"
            self.deaths.lost(worker_id, member.beat)
        else:
            # Gateways and peers hear of it at once; its place comes back when the GCS answers, at this pass or a later one.
            self._fleet.died(worker_id, reason, time.monotonic(), wanted=wanted)
            self.deaths.died(worker_id, member.beat)
            await gcs_call(free_worker, worker_id, handle)
        self._placement.forget(worker_id)
        watch = self._watches.pop(worker_id, None)
        if watch is not None:
            watch.cancel()
        self.handles.pop(worker_id, None)
        self.finals[worker_id] = admin.worker_status(member.view(time.monotonic()), member.beat)
        self._fleet.forget(worker_id)
        self.deaths.tell()
        log.info("worker %s is gone: %s", worker_id, reason)
