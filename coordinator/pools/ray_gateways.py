"""The gateways as the coordinator keeps them: made where they are missing, asked how they are, ended where they cannot start."""

from __future__ import annotations

import asyncio
import logging
import time

from ray.exceptions import RayError, RayTaskError

from coordinator.pools.ray_gateway import GATEWAY_PREFIX, create_gateway, drain_gateways, restart_gateway
from coordinator.pools.records import Restart
from coordinator.pools.reports import CoordinatorSpec, GatewayReport
from coordinator.pools.store import Store

log = logging.getLogger(__name__)

_REPORT_TIMEOUT_S = 60.0
"""A gateway that starts loads its tokenizer first."""


class Gateways:
    """Belongs to the coordinator's event loop. `pause_s` is left between two questions to one gateway."""

    def __init__(self, spec: CoordinatorSpec, store: Store, pause_s: float) -> None:
        self._spec = spec
        self._store = store
        self._pause_s = pause_s
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.reports: dict[str, GatewayReport] = {}
        """Of those that answered when they were asked last."""
        self.heard_s: dict[str, float] = {}
        """When each report came, monotonic seconds."""
        self.faults: dict[str, str] = {}
        """Why gateways cannot start, a line each."""

        self.due = [name for name in self._keys() if name in store.restarts()]
        """Gateways that are to be restarted, in their order; the first may be on its way."""
        self._turn: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def _keys(self) -> list[str]:
        return [f"{GATEWAY_PREFIX}{index}" for index in range(self._spec.settings.coordinator.gateways)]

    def restart(self) -> list[str]:
        """Every gateway, one after the other, each when all the others serve. Returns their ids at once."""
        self.due = self._keys()
        self._store.put_restarts(self.due, Restart.IN_PLACE)
        return list(self.due)

    def keep(self) -> None:
        """Ask every gateway that is not being asked, and restart the next one whose turn it is; returns at once."""
        if self.due and self._turn is None and all(k in self.reports and self.reports[k].ready for k in self._keys()):
            self._turn = asyncio.get_running_loop().create_task(self._restart(self.due[0]))
        for index, key in enumerate(self._keys()):
            if key not in self._asking:
                self._asking[key] = asyncio.get_running_loop().create_task(self._ask(key, index))

    async def _restart(self, key: str) -> None:
        """It finishes what it has and closes, its process ends, and Ray makes another. Over when that one serves."""
        try:
            old_pid = self.reports[key].pid
            log.info("restarting %s", key)
            await drain_gateways([key], self._spec.settings.coordinator.drain_timeout_s)
            await asyncio.to_thread(restart_gateway, key)
            while (report := self.reports.get(key)) is None or report.pid == old_pid or not report.ready:
                # Whoever cannot start is told of in `faults`; the others are left alone until it does.
                await self._news.wait()
            self._store.restarted(key)
            self.due.remove(key)
        finally:
            self._turn = None

    async def _ask(self, key: str, index: int) -> None:
        """Make it if it is not there (Ray restarts it by itself) and hear how it is."""
        try:
            handle = await asyncio.to_thread(create_gateway, key, index, self._spec.settings, self._spec.log_dir)
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                self.reports[key] = await handle.report.remote()
            self.heard_s[key] = time.monotonic()
            self._news.set()
            self._news = asyncio.Event()
            self.faults.pop(key, None)
        except (RayError, TimeoutError, ValueError) as error:
            self.reports.pop(key, None)
            if isinstance(error, RayTaskError):
                self.faults[key] = f"{key}: {error.cause}"
                await asyncio.to_thread(restart_gateway, key)
            log.warning("gateway %s: %s: %s", key, type(error).__name__, error)
        finally:
            await asyncio.sleep(self._pause_s)
            self._asking.pop(key, None)
