"""The gateways as the coordinator keeps them: made where they are missing, asked how they are, ended where they cannot start."""

from __future__ import annotations

import asyncio
import logging
import time

from ray.exceptions import RayError, RayTaskError

from coordinator.pools.ray_gateway import GATEWAY_PREFIX, create_gateway, restart_gateway
from coordinator.pools.reports import CoordinatorSpec, GatewayReport

log = logging.getLogger(__name__)

_REPORT_TIMEOUT_S = 60.0
"""A gateway that starts loads its tokenizer first."""


class Gateways:
    """Belongs to the coordinator's event loop. `pause_s` is left between two questions to one gateway."""

    def __init__(self, spec: CoordinatorSpec, pause_s: float) -> None:
        self._spec = spec
        self._pause_s = pause_s
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.reports: dict[str, GatewayReport] = {}
        """Of those that answered when they were asked last."""
        self.heard_s: dict[str, float] = {}
        """When each report came, monotonic seconds."""
        self.faults: dict[str, str] = {}
        """Why gateways cannot start, a line each."""

    def keep(self) -> None:
        """Ask every gateway that is not being asked; returns at once."""
        for index in range(self._spec.settings.coordinator.gateways):
            key = f"{GATEWAY_PREFIX}{index}"
            if key not in self._asking:
                self._asking[key] = asyncio.get_running_loop().create_task(self._ask(key, index))

    async def _ask(self, key: str, index: int) -> None:
        """Make it if it is not there (Ray restarts it by itself) and hear how it is."""
        try:
            handle = await asyncio.to_thread(create_gateway, key, index, self._spec.settings, self._spec.log_dir)
            self.reports[key] = await asyncio.wait_for(handle.report.remote(), _REPORT_TIMEOUT_S)
            self.heard_s[key] = time.monotonic()
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
