"""The gateways as the coordinator keeps them: made where they are missing, asked how they are, ended where they cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError

from coordinator.pools.placement import choose_gateway
from coordinator.pools.probe import dial, is_silence
from coordinator.pools.ray_calls import gcs_call
from coordinator.pools.ray_gateway import GATEWAY_PREFIX, create_gateway, drain_gateways, end_gateway
from coordinator.pools.ray_placement import living_nodes
from coordinator.pools.reach import DIAL_TIMEOUT_S, dial_all
from coordinator.pools.records import Restart
from coordinator.pools.reports import CoordinatorSpec, GatewayReport
from coordinator.pools.store import Store

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
"""A gateway that starts loads its tokenizer first."""
_ANSWER_TIMEOUT_S = 10.0
"""One that has served on another node answers at once, or that node is away."""
_AVOIDED_S = 90.0
"""So long no gateway goes to a node that one was given up on: by then Ray knows what became of it."""


class Gateways:
    """Belongs to the coordinator's event loop. `pause_s` is left between two questions to one gateway; `here` is the node of the
    coordinator, by Ray's id."""

    def __init__(self, spec: CoordinatorSpec, store: Store, pause_s: float, here: str = "") -> None:
        self._spec = spec
        self._store = store
        self._pause_s = pause_s
        self._here = here
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._handles: dict[str, Any] = {}
        self._homes: dict[str, tuple[str, str]] = {}
        """Node and address of each that has served."""
        self._wanted: dict[str, str] = {}
        """The node of each, by id, from when it was chosen."""
        self._choosing = threading.Lock()
        self._silent_s: dict[str, float] = {}
        self._avoided: dict[str, float] = {}
        self._reached: set[tuple[str, int]] = set()
        self._reports: dict[str, GatewayReport] = {}
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

    @property
    def reports(self) -> dict[str, GatewayReport]:
        """Of those that answered when they were asked last, in the order of their numbers: the first is the one that stays
        beside the coordinator, and who is told of one address takes that."""
        return {key: self._reports[key] for key in self._keys() if key in self._reports}

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
            await gcs_call(end_gateway, key, again=True)
            while (report := self.reports.get(key)) is None or report.pid == old_pid or not report.ready:
                # Whoever cannot start is told of in `faults`; the others are left alone until it does.
                await self._news.wait()
            self._store.restarted(key)
            self.due.remove(key)
        except TimeoutError:
            log.warning("restarting %s: the GCS is away; tried again", key)
        finally:
            self._turn = None

    async def _ask(self, key: str, index: int) -> None:
        """Make it if it is not there (Ray restarts it by itself) and hear how it is."""
        try:
            if key not in self._handles:
                settings, where = self._spec.settings, partial(self._node_for, key)
                self._handles[key] = await gcs_call(create_gateway, key, index, settings, self._spec.log_dir, where)
            far = self._homes.get(key, ("", ""))[0] not in ("", self._here)
            async with asyncio.timeout(_ANSWER_TIMEOUT_S if far else _START_TIMEOUT_S):
                report: GatewayReport = await self._handles[key].report.remote()
            self._homes[key] = (report.node_id, report.http_address)
            self._silent_s.pop(key, None)
            self._reports[key] = replace(report, detail=await self._unreachable(report))
            self.heard_s[key] = time.monotonic()
            self._news.set()
            self._news = asyncio.Event()
            self.faults.pop(key, None)
        except (RayError, TimeoutError, ValueError) as error:
            self._reports.pop(key, None)
            log.warning("gateway %s: %s: %s", key, type(error).__name__, error)
            with contextlib.suppress(TimeoutError):  # the GCS is away: asked again next time
                await self._failed(key, error)
        finally:
            await asyncio.sleep(self._pause_s)
            self._asking.pop(key, None)

    def _node_for(self, key: str) -> str:
        """Where it is to be made, by the node's id; "": on the head. On a thread."""
        if self._spec.settings.coordinator.placement.gateways == "head":
            return ""
        nodes, now_s = living_nodes(), time.monotonic()
        keys = self._keys()
        with self._choosing:  # two at once would both take the least crowded node
            silent = [node_id for node_id, until_s in self._avoided.items() if now_s < until_s]
            self._wanted.pop(key, None)
            # In their order, whichever asks first: the first is beside the coordinator.
            for each in keys[: keys.index(key) + 1]:
                if each not in self._wanted:
                    node = choose_gateway(nodes, list(self._wanted.values()), silent=silent, here=self._here)
                    if node is None:
                        raise ValueError("no node for it")
                    self._wanted[each] = node.node_id
            node_id = self._wanted[key]
        log.info("placing %s on node %s", key, node_id)
        return node_id

    async def _unreachable(self, report: GatewayReport) -> str:
        """Which of its addresses leads nowhere from here, or ""; of a process they are found well once."""
        self._wanted[report.gateway_id] = report.node_id
        who = (report.gateway_id, report.pid)
        if report.node_id in ("", self._here) or who in self._reached:
            return ""
        doors = (report.http_address, report.grpc_address, report.admin_address, report.admin_http_address)
        faults = await dial_all(door for door in doors if door)
        if not faults:
            self._reached.add(who)
            return ""
        address, fault = next(iter(faults.items()))
        log.error("%s advertises %s, which the coordinator's node cannot reach: %s", report.gateway_id, address, fault)
        return f"advertises {address}, which the coordinator's node cannot reach: {fault}"

    async def _failed(self, key: str, error: Exception) -> None:
        """It did not answer, or cannot start. One whose host is silent for `partition_grace_s` is given up and made elsewhere."""
        handle = self._handles.pop(key, None)
        if isinstance(error, RayTaskError):
            self.faults[key] = f"{key}: {error.cause}"
            await gcs_call(end_gateway, key, again=True)
            return
        node_id, address = self._homes.get(key, ("", ""))
        if handle is None or isinstance(error, ActorDiedError) or node_id in ("", self._here):
            return
        since_s = self._silent_s.setdefault(key, time.monotonic())
        if time.monotonic() - since_s < self._spec.settings.coordinator.partition_grace_s:
            return
        if not is_silence(await dial(address, DIAL_TIMEOUT_S)):
            del self._silent_s[key]  # its host is there, and Ray starts it again
            return
        log.error("giving up %s: its host is silent; it is made on another node", key)
        await gcs_call(end_gateway, key, again=False)
        self._avoided[node_id] = time.monotonic() + _AVOIDED_S
        del self._homes[key], self._silent_s[key]
