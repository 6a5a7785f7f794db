"""The coordinator's actor, found again after each loss, without waiting for a GCS that is away."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from coordinator.pools.ray_cluster import NAMESPACE

COORDINATOR_NAME = "coordinator"


class Finder:
    """Belongs to one event loop. Ray's answer may wait for a minute, on a thread: one at most waits, whoever asks."""

    def __init__(self) -> None:
        self._asking: asyncio.Task[Any] | None = None

    async def find(self, timeout_s: float) -> Any:
        """The actor's handle.

        Raises:
            ValueError: there is none.
            TimeoutError: the GCS does not answer.
            RayError: Ray cannot say.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(asyncio.to_thread(ray.get_actor, COORDINATOR_NAME, NAMESPACE))
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._asking)
