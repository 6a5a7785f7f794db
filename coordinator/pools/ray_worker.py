"""The worker actor: a Ray shell around `WorkerProcess`. Never restarted: a dead worker is replaced under a new id."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray.exceptions import RayError

from coordinator.pools.process import log_to, use_cores
from coordinator.pools.ray_find import Finder
from coordinator.pools.ray_nodes import process_tree
from coordinator.pools.ray_placement import this_node
from coordinator.pools.reports import Beat, WorkerFacts, WorkerSpec
from coordinator.pools.worker_process import Host, WorkerProcess
from coordinator.routing.views import Role

_PUSH_TIMEOUT_S = 3.0


class WorkerActor:
    """Starts its engine by itself; every method is quick or waits for an end."""

    def __init__(self, spec: WorkerSpec) -> None:
        settings = spec.settings
        log_to(spec.log_dir / f"{spec.worker_id}.log", settings.log_format)
        if not ray.get_gpu_ids():
            use_cores(spec.slot, settings.engine_of(spec.pool).omp_threads, pin=settings.coordinator.pin_cpus)
        node = this_node(ray.get_runtime_context().get_node_id())
        host = Host(
            node_id=node.node_id,
            node_ip=node.address,
            push=Pusher().push,
            processes=process_tree,
            rack=node.labels.get(settings.coordinator.placement.rack_label, ""),
        )
        self._process = WorkerProcess(spec, host)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._process.run()
            await self._process.last_words()
        finally:
            # Nothing of this process may outlive its engine. Children that ignore it are killed by the coordinator.
            os._exit(1)

    async def wait_ended(self) -> str:
        """Why the worker ended, once it has."""
        return await self._process.wait_ended()

    async def drain(self) -> None:
        self._process.drain()

    async def relabel(self, pool: str, role: Role) -> None:
        self._process.relabel(pool, role)

    async def stop(self, reason: str) -> None:
        """Returns when the engine has stopped; the process exits soon after."""
        await self._process.stop(reason)

    async def peer_died(self, incarnation: str) -> None:
        """Raises `SplitpointError` when a rank does not answer."""
        await self._process.peer_died(incarnation)

    async def reach(self, addresses: list[str]) -> dict[str, str]:
        return await self._process.reach(addresses)

    async def reset_prefix_cache(self) -> bool:
        return await self._process.reset_prefix_cache()

    async def facts(self) -> WorkerFacts:
        return self._process.facts()


class Pusher:
    """Heartbeats to the coordinator, whichever process it is at the time."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._finder = Finder()

    async def push(self, beat: Beat) -> bool:
        """False: end yourself. Raises `ConnectionError` when the coordinator is away."""
        try:
            if self._handle is None:
                self._handle = await self._finder.find(_PUSH_TIMEOUT_S)
            async with asyncio.timeout(_PUSH_TIMEOUT_S):
                return bool(await self._handle.heartbeat.remote(beat))
        except (RayError, ValueError, TimeoutError) as error:
            self._handle = None
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
