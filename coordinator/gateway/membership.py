"""The workers this gateway knows, and its stream to each. Last known good: a feed that fails changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from coordinator.gateway.client_config import WorkerClientSettings
from coordinator.gateway.worker_client import WorkerClient
from coordinator.routing.router import Router
from coordinator.routing.views import WorkerState, WorkerView
from protos.ids import Incarnation

POLL_BACKOFF_S = (0.2, 5.0)
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSnapshot:
    """All workers at one version. Versions rise within one `epoch`, a random id of the coordinator's life."""

    version: int
    workers: tuple[WorkerView, ...]
    epoch: str = ""


Poll = Callable[[str, int], Awaitable[MembershipSnapshot | None]]
"""`poll(known_epoch, known_version)`: the next snapshot when there is a newer one, None when its own patience ended."""


class Membership:
    """Belongs to one event loop. Feed it by `apply`, or let `follow` poll a coordinator.

    `on_event(name)`: "membership_stale", "membership_poll_failed" and what its worker clients tell.
    """

    def __init__(
        self,
        router: Router,
        settings: WorkerClientSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._router = router
        self._settings = settings
        self._clock = clock
        self._on_event = on_event
        self._clients: dict[Incarnation, WorkerClient] = {}
        self._views: tuple[WorkerView, ...] = ()
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False
        self.version = -1
        self.epoch = ""
        self.applied_s: float | None = None
        """When the last snapshot or "nothing new" came, by this gateway's clock."""

    @property
    def views(self) -> tuple[WorkerView, ...]:
        return self._views

    def client(self, incarnation: Incarnation) -> WorkerClient | None:
        """The stream to a worker, or None when it is gone."""
        return self._clients.get(incarnation)

    def connected(self, incarnation: Incarnation) -> bool:
        client = self._clients.get(incarnation)
        return client is not None and client.connected

    def apply(self, snapshot: MembershipSnapshot) -> bool:
        """Take a newer snapshot; an older one of the same epoch is counted and ignored. True when it was taken."""
        if self._closed:
            return False
        if snapshot.epoch == self.epoch and snapshot.version <= self.version:
            if snapshot.version == self.version:
                self.applied_s = self._clock()
            else:
                self._on_event("membership_stale")
            return False
        alive = {v.incarnation: v for v in snapshot.workers if v.state in (WorkerState.READY, WorkerState.DRAINING)}
        self._router.update(snapshot.workers)
        for incarnation in self._clients.keys() - alive.keys():
            self._remove(incarnation)
        for view in alive.values():
            self._add(view)
        # Last, so that a snapshot that fails half-way is asked for again.
        self.epoch, self.version = snapshot.epoch, snapshot.version
        self.applied_s = self._clock()
        self._views = snapshot.workers
        return True

    def _add(self, view: WorkerView) -> None:
        client = self._clients.get(view.incarnation)
        if client is not None and client.address == view.address:
            return
        if client is not None:
            self._remove(view.incarnation)
        self._router.load.set_reachable(view.incarnation, False)
        client = WorkerClient(
            worker_id=view.worker_id,
            incarnation=view.incarnation,
            address=view.address,
            settings=self._settings,
            clock=self._clock,
            on_reachable=self._router.load.set_reachable,
            on_event=self._on_event,
        )
        self._clients[view.incarnation] = client
        client.start()
        log.info("worker_joined", worker_id=view.worker_id, incarnation=view.incarnation, role=view.role.value)

    def _remove(self, incarnation: Incarnation) -> None:
        client = self._clients.pop(incarnation)
        log.info("worker_left", worker_id=client.worker_id, incarnation=incarnation, legs=client.open_legs)
        task = asyncio.create_task(client.close(), name=f"worker-client-close-{client.worker_id}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def follow(self, poll: Poll) -> None:
        """Poll for ever. A failing poll keeps the last known workers and backs off.

        Raises:
            asyncio.CancelledError: the only way it ends.
        """
        pause_s = POLL_BACKOFF_S[0]
        while True:
            try:
                snapshot = await poll(self.epoch, self.version)
                if snapshot is not None:
                    self.apply(snapshot)
            except Exception as error:
                # Whatever the coordinator's client raises, or its snapshot causes: traffic goes on with what is known.
                self._on_event("membership_poll_failed")
                log.warning("membership_poll_failed", error=repr(error), version=self.version, retry_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, POLL_BACKOFF_S[1])
                continue
            pause_s = POLL_BACKOFF_S[0]
            if snapshot is None:
                self.applied_s = self._clock()
            else:
                # Lets a coordinator that answers the same version again and again not spin this loop.
                await asyncio.sleep(0)

    async def close(self) -> None:
        """End every stream. Idempotent."""
        self._closed = True
        for incarnation in list(self._clients):
            self._remove(incarnation)
        leaving: Iterable[asyncio.Task[None]] = list(self._leaving)
        await asyncio.gather(*leaving)
