"""Deaths of workers: made sure of, remembered, and told to every other worker until it has heard.

A worker's ranks hold staging back for a peer until its request has completed or its process is known dead (rule 13). Only the
coordinator knows the latter, so what it knows outlives it: `Store` keeps which processes served and which deaths are untold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from coordinator.pools.fleet import Fleet
from coordinator.pools.kept_beat import lasting
from coordinator.pools.probe import dial
from coordinator.pools.ray_nodes import NodeLostError, kill_on_node
from coordinator.pools.reports import Beat
from coordinator.pools.store import KnownProcess, Store
from protos.ids import WorkerId

log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
TELL_TIMEOUT_S = 5.0
DIAL_TIMEOUT_S = 2.0
ORPHANED_S = 90.0
"""A raylet that has lost the GCS for 60 s (Ray's `gcs_rpc_server_reconnect_timeout_s`), or hears that it was given up, ends and
takes its processes with it. From so long after Ray gave a node up, nothing of it can write into our memory."""


class Deaths:
    """Belongs to the coordinator's event loop. `handles` are the live actors, kept by the coordinator."""

    def __init__(self, store: Store, fleet: Fleet, handles: Mapping[WorkerId, ActorHandle], pause_s: float) -> None:
        self._store = store
        self._fleet = fleet
        self._handles = handles
        self._pause_s = pause_s
        self._noted: dict[WorkerId, KnownProcess] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._unseen: dict[asyncio.Task[None], str] = {}
        """Ends of what cannot be seen, with the node it runs on."""

    def serves(self, beat: Beat) -> None:
        """A worker that serves was heard: its processes are written down when they have changed."""
        view = beat.view
        known = KnownProcess(
            worker_id=view.worker_id,
            incarnation=view.incarnation,
            node_id=beat.node_id,
            processes=beat.processes,
            beat=lasting(beat),
        )
        if self._noted.get(known.worker_id) != known:
            self._noted[known.worker_id] = known
            self._store.put_process(known)

    def died(self, worker_id: WorkerId, beat: Beat | None) -> None:
        """Its processes are known dead: written down before anybody is told. `tell` follows."""
        self._noted.pop(worker_id, None)
        if beat is not None:
            self._store.put_fence(beat.view.incarnation)
        self._store.forget(worker_id)

    def lost(self, worker_id: WorkerId, beat: Beat) -> None:
        """It was given up because its node does not answer. Its death is made sure of and told when it can be."""
        view = beat.view
        self._noted.pop(worker_id, None)
        known = KnownProcess(worker_id=worker_id, incarnation=view.incarnation, node_id=beat.node_id, processes=beat.processes)
        self._store.put_process(known)
        self._make_sure(known, view.address)

    @property
    def silent_nodes(self) -> set[str]:
        """Nodes that hold processes which cannot be ended now, by Ray's id."""
        return set(self._unseen.values())

    def _make_sure(self, known: KnownProcess, address: str = "") -> None:
        task = asyncio.get_running_loop().create_task(self._end_unseen(known, address))
        self._unseen[task] = known.node_id
        task.add_done_callback(self._unseen.pop)

    def resume(self, found: Collection[WorkerId]) -> None:
        """After a restart: end for certain what served once and is not among the live actors `found`, and go on telling."""
        for known in self._store.processes():
            if known.worker_id not in found and known.worker_id not in self._fleet.members:
                log.warning("worker %s died while no coordinator ran", known.worker_id)
                self._make_sure(known)
        self.tell()

    def tell(self) -> None:
        """Tell every worker that serves of every death that somebody may not have heard of."""
        for incarnation in self._store.fences():
            if incarnation not in self._telling:
                self._spawn(incarnation, self._tell_all(incarnation))

    def _spawn(self, incarnation: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._telling[incarnation] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._telling.pop(incarnation, None))

    async def _tell_all(self, incarnation: str) -> None:
        # One that serves and is silent just now may hold something back as well.
        served = {known.worker_id for known in self._store.processes()}
        told = [w for w, member in self._fleet.members.items() if member.ready_s is not None or w in served]
        await asyncio.gather(*(self._tell_one(worker_id, incarnation) for worker_id in told))
        self._store.fenced(incarnation)

    async def _tell_one(self, worker_id: WorkerId, incarnation: str) -> None:
        """Until the worker has heard it or is gone itself: nothing else gives that staging back."""
        while worker_id in self._fleet.members:
            handle = self._handles.get(worker_id)
            try:
                if handle is not None:
                    async with asyncio.timeout(TELL_TIMEOUT_S):
                        await handle.peer_died.remote(incarnation)
                    return
            except ActorDiedError:
                return
            except (RayError, TimeoutError) as error:
                cause = getattr(error, "cause", None) or error
                log.warning("telling %s that %s is dead: %r; trying again", worker_id, incarnation, cause)
            await asyncio.sleep(self._pause_s)

    async def _end_unseen(self, known: KnownProcess, address: str) -> None:
        """Its actor is gone or out of reach, its processes may not be. `address`: where it served, "" when that is not known."""
        lost_s: float | None = None
        while True:
            try:
                left = await kill_on_node(known.node_id, known.processes, KILL_TIMEOUT_S)
                if not left:
                    break
                log.warning("pids %s of worker %s are still there; trying again", left, known.worker_id)
            except NodeLostError as error:
                lost_s = time.monotonic() if lost_s is None else lost_s
                refused = address and isinstance(await dial(address, DIAL_TIMEOUT_S), ConnectionRefusedError)
                if refused or time.monotonic() - lost_s > ORPHANED_S:
                    log.warning("worker %s is dead with its node: %s", known.worker_id, error)
                    break
            except (RayError, TimeoutError, OSError) as error:
                log.warning("worker %s: its death is not confirmed: %r; trying again", known.worker_id, error)
            await asyncio.sleep(self._pause_s)
        self._store.put_fence(known.incarnation)
        self._store.forget(known.worker_id)
        self.tell()
