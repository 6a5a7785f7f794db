"""What a node's parts share: the lock, the tables, the memory, the transports, and who is woken when something changed.

The tables change under `lock`, on the engine's thread and on the node's loop; nothing awaits while holding it. Everything else
here belongs to the node's loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from kvtransfer.checksum import algorithm_for, checksum, start_on_device
from kvtransfer.config import KvTransferSettings
from kvtransfer.layout import fingerprint
from kvtransfer.lease import Action, Gather, Lease, LeaseTable
from kvtransfer.lending import Lending
from kvtransfer.machine import Refusal
from kvtransfer.memory import on_device, reserved_on_devices, use_device_of
from kvtransfer.metrics import KvMetrics
from kvtransfer.peer_watch import PeerWatch
from kvtransfer.peers import Peers
from kvtransfer.sessions import SessionTable
from kvtransfer.shared_area import shared_staging
from kvtransfer.sources import PlanCache
from kvtransfer.staging import Staging
from kvtransfer.transports.base import Counts, Memory, Transport
from kvtransfer.waiting import Bell, RoomQueue, Tasks
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

SWEEP_S = 0.25
DRAIN_POLL_S = 0.25
GATHER_POLL_S = 0.0002
DEVICE_WAITERS = 8
DEVICE_SPIN_S = 0.0005
LET_IT_SEND_S = 0.001


class NodeRuntime:
    """Made on the engine's thread; `bind` once on the node's loop before anything asynchronous."""

    def __init__(
        self,
        settings: KvTransferSettings,
        *,
        rank: int,
        incarnation: str,
        compatibility: pb.KvCompatibility,
        block_bytes: int,
        memory: Callable[[int], Memory],
        host: str,
    ) -> None:
        self.settings = settings
        self.rank = rank
        self.incarnation = incarnation
        self.compatibility = compatibility
        self.fingerprint = fingerprint(compatibility)
        self.block_bytes = block_bytes
        self.host_id = host
        self.lock = threading.Lock()
        self.metrics = KvMetrics()
        self.receive = Staging(settings.receive_staging_bytes)
        self.pack = Staging(settings.pack_staging_bytes)
        # One piece of memory, registered once: first the slots, then the room in which shares are cut.
        slots_bytes = Staging(settings.send_staging_bytes).capacity_bytes
        send_bytes = slots_bytes + self.pack.capacity_bytes
        self.shared = shared_staging(settings, memory, send_bytes, self.metrics.event)
        self.send = Staging(slots_bytes, mark=None if self.shared is None else self.shared.mark)
        self.send_memory = memory(send_bytes) if self.shared is None else self.shared.memory
        self.receive_memory = memory(self.receive.capacity_bytes)
        self.leases = LeaseTable(self.send, block_tokens=compatibility.block_tokens, block_bytes=block_bytes)
        self.sessions = SessionTable(self.receive)
        self.transports: dict[str, Transport] = {}
        self.endpoint = pb.RankEndpoint()
        self.recent_errors: deque[SplitpointError] = deque(maxlen=16)
        self.fetches: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        """Running streams by transfer and receiver's rank."""
        self.pulls: dict[bytes, asyncio.Task[Any]] = {}
        self.maps = PlanCache()
        self.lending = Lending(self)
        self.pending_fetches = 0
        self._polling: set[bytes] = set()
        self._kicks: dict[bytes, Callable[[], None]] = {}
        self._watchers: dict[bytes, Callable[[Callable[[], bool]], None]] = {}

    @property
    def chunk_bytes(self) -> int:
        """Most that one chunk out of this rank's staging may be."""
        return self.settings.device_chunk_bytes if on_device(self.send_memory) else self.settings.chunk_bytes

    def bind(self) -> None:
        """Take the running loop as this node's."""
        self.loop = asyncio.get_running_loop()
        self.send_room = RoomQueue(self.send, self.lock, partial(self.metrics.staging_waited, "send"))
        self.receive_room = RoomQueue(self.receive, self.lock, partial(self.metrics.staging_waited, "receive"))
        self.pack_room = RoomQueue(self.pack, self.lock, partial(self.metrics.staging_waited, "pack"))
        self.bell = Bell()
        self.metrics.watch(self.status)
        self.tasks = Tasks(self._background_failed)
        self.peers = Peers(self.compatibility, self.fingerprint, self.settings.handshake_timeout_s, self.settings.tls)
        self.watch = PeerWatch(
            self.incarnation,
            self.rank,
            interval_s=self.settings.peer_heartbeat_s,
            misses=self.settings.peer_missed_heartbeats,
            now=self.now,
            end_fetch=self.end_lease,
            on_event=self.metrics.event,
        )
        on_device = functools.partial(use_device_of, self.receive_memory)
        self.executor = ThreadPoolExecutor(2, thread_name_prefix=f"kv-checksum-{self.rank}", initializer=on_device)
        # Threads that sleep until a GPU has done a copy; they start with the first one.
        self.waiters = ThreadPoolExecutor(DEVICE_WAITERS, thread_name_prefix=f"kv-device-{self.rank}", initializer=on_device)

    @staticmethod
    def now() -> float:
        """Monotonic seconds: the clock of every `now` and `expires_at` here."""
        return time.monotonic()

    # -- after the tables have changed -----------------------------------------------------------------------------------

    def follow(self, transfer_id: bytes, actions: Iterable[Action]) -> None:
        """Carry out what a table asked for, and let waiting transfers have what became free. On the loop."""
        for action in actions:
            if action is Action.WAKE:
                self.bell.ring(transfer_id)
            elif action is Action.END_FETCH:
                for (fetched, _), task in list(self.fetches.items()):
                    if fetched == transfer_id:
                        task.cancel()
        self.lending.look()
        self.send_room.pump()
        self.receive_room.pump()

    def kick_with(self, transfer_id: bytes, kick: Callable[[], None], watch: Callable[[Callable[[], bool]], None]) -> None:
        """Call `kick` whenever more of this transfer may be staged: from any thread, without the loop. It must not wait. `watch`
        has its thread ask for a gather that is nearly done until the answer is True."""
        self._watchers[transfer_id] = watch
        self._kicks[transfer_id] = kick

    def stop_kicking(self, transfer_id: bytes) -> None:
        """The transfer is sent, or over."""
        self._kicks.pop(transfer_id, None)
        self._watchers.pop(transfer_id, None)

    def kick(self, transfer_id: bytes) -> None:
        """More of this transfer may be staged. Any thread."""
        kick = self._kicks.get(transfer_id)
        if kick is not None:
            kick()

    def follow_from_engine(self, transfer_id: bytes, actions: Iterable[Action]) -> None:
        """The same from the engine's thread, or any other: it only leaves a note."""
        self.kick(transfer_id)
        try:
            self.loop.call_soon_threadsafe(self._noted, transfer_id, tuple(actions))
        except RuntimeError:
            # The loop is closed: the node was stopped while the engine still ran a step.
            self.metrics.event("engine_call_after_stop")

    def _noted(self, transfer_id: bytes, actions: tuple[Action, ...]) -> None:
        self.follow(transfer_id, actions)
        with self.lock:
            waiting = [lease for lease in self.leases.leases() if lease.gathers and lease.transfer_id not in self._polling]
        for lease in waiting:
            self._polling.add(lease.transfer_id)
            self.tasks.spawn(f"gather {lease.transfer_id.hex()}", self._poll_gathers(lease))

    def scattered_when(self, transfer_id: bytes, ready: Callable[[], bool]) -> None:
        """The engine's reading of a receive slot is over when `ready()` is True; until then the slot is not used again. From the
        engine's thread."""

        def watch() -> None:
            self.tasks.spawn(f"scatter {transfer_id.hex()}", self._scattered(transfer_id, ready))

        try:
            self.loop.call_soon_threadsafe(watch)
        except RuntimeError:
            self.metrics.event("engine_call_after_stop")

    async def _scattered(self, transfer_id: bytes, ready: Callable[[], bool]) -> None:
        await self.until_ready(ready)
        with self.lock:
            self.sessions.scattered(transfer_id, self.now())
        self.follow(transfer_id, ())

    async def _poll_gathers(self, lease: Lease) -> None:
        """Until every gather of this lease is done on its device. It outlives the lease: the slot is pinned meanwhile."""
        try:
            while True:
                with self.lock:
                    gather = lease.gathers[0] if lease.gathers else None
                if gather is None:
                    return
                if hasattr(gather.ready, "wait"):
                    # Settled by the thread that sees it done: who sends need not wait for this loop.
                    await self.loop.run_in_executor(self.waiters, self._settle_when_done, lease, gather)
                else:
                    if gather.ready is not None:
                        await self.until_ready(gather.ready)
                    self._settle(lease, gather)
                self.follow(lease.transfer_id, [Action.WAKE])
        finally:
            self._polling.discard(lease.transfer_id)

    def _settle_when_done(self, lease: Lease, gather: Gather) -> None:
        """On a waiting thread. When the gather is nearly done, whoever sends is asked to look at it itself."""
        ready: Any = gather.ready
        # Only the last one is hurried: what follows earlier ones is another step of the engine.
        last = lease.committed_blocks == lease.num_blocks == gather.end_block
        watch = self._watchers.get(lease.transfer_id) if last else None
        if watch is not None and hasattr(ready, "wait_nearly") and ready.wait_nearly():
            watch(lambda: bool(ready()) and self._settle(lease, gather))
            # Waiting for the very moment would take the interpreter from that thread then.
            while not ready():
                time.sleep(LET_IT_SEND_S)
        ready.wait()
        self._settle(lease, gather)

    def _settle(self, lease: Lease, gather: Gather) -> bool:
        """It is done; whoever sees that first says so. True."""
        with self.lock:
            fresh = bool(lease.gathers) and lease.gathers[0] is gather
            if fresh:
                self.leases.settle(lease)
        if fresh:
            self.kick(lease.transfer_id)
        return True

    async def until_ready(self, ready: Callable[[], bool], spin_s: float = 0.0) -> None:
        """Until `ready()` is True. For `spin_s` it is asked in every turn of the loop, for what takes less than waking a thread;
        then one that has `wait()` is waited for on a thread, because asyncio's timers tick in milliseconds."""
        asked_until = self.now() + spin_s
        while not ready() and self.now() < asked_until:  # noqa: ASYNC110 - a device's event wakes nobody
            await asyncio.sleep(0)
        wait: Callable[[], None] | None = getattr(ready, "wait", None)
        if wait is not None and not ready():
            await self.loop.run_in_executor(self.waiters, wait)
        while not ready():  # noqa: ASYNC110 - a device's event wakes nobody
            await asyncio.sleep(GATHER_POLL_S)

    async def sweep(self) -> None:
        """End what has outlived its deadline, for as long as the node runs."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.watch.check()
            with self.lock:
                leases = self.leases.expire(self.now())
                sessions = self.sessions.expire(self.now())
            for lease, actions in leases:
                self.metrics.expired("send")
                logger.warning("transfer %s: lease expired; %s", lease.transfer_id.hex(), lease.machine.story())
                self.follow(lease.transfer_id, actions)
            for session in sessions:
                self.metrics.expired("receive")
                logger.warning("transfer %s: staged KV expired; %s", session.transfer_id.hex(), session.machine.story())
                self.cancel_pull(session.transfer_id)
            self.follow(b"", ())

    def end_lease(self, transfer_id: bytes, reason: str) -> None:
        """Release the sending side of a transfer, and with it every stream that fetches it."""
        with self.lock:
            _, actions = self.leases.release(transfer_id, reason, self.now())
        self.follow(transfer_id, actions)

    def cancel_pull(self, transfer_id: bytes) -> None:
        """End the task that pulls this transfer, if one does."""
        task = self.pulls.get(transfer_id)
        if task is not None:
            task.cancel()

    # -- small common things ---------------------------------------------------------------------------------------------

    def transport(self, scheme: str) -> Transport:
        """Raises `SplitpointError` TRANSFER_REFUSED naming what this rank has."""
        found = self.transports.get(scheme)
        if found is None:
            raise self.refused("transport", f"transport {scheme!r} is not available here; known: {', '.join(self.transports)}")
        return found

    def refused(self, reason: str, message: str, code: Code = Code.TRANSFER_REFUSED) -> SplitpointError:
        """A counted and remembered refusal, for the caller to raise."""
        self.metrics.event(f"refused.{reason}")
        return self.remember(SplitpointError(code, message))

    def refusal(self, refusal: Refusal) -> SplitpointError:
        return self.refused(refusal.reason, refusal.message)

    def remember(self, error: SplitpointError) -> SplitpointError:
        """Keep it for status."""
        self.recent_errors.append(error)
        return error

    async def checksum(self, memory: Memory, algorithm: str | None = None) -> pb.Checksum:
        """Of staged bytes, computed off the loop. `algorithm` None: what this rank sends with."""
        if algorithm is None:
            algorithm = algorithm_for(self.settings.checksum, memory)
        if algorithm == "off":
            return checksum(algorithm, memory)
        pending = start_on_device(algorithm, memory)
        if pending is not None:
            await self.until_ready(pending, spin_s=DEVICE_SPIN_S)
            return pb.Checksum(algorithm=algorithm, value=pending.value())
        return await self.loop.run_in_executor(self.executor, checksum, algorithm, memory)

    def counters(self) -> dict[str, int]:
        """Every event of this node so far. Any thread."""
        with self.lock:
            tables: list[tuple[str, Mapping[str, int]]] = [
                ("lease.", dict(self.leases.counters)),
                ("session.", dict(self.sessions.counters)),
            ]
        # What a transport counts itself, e.g. how its payload really went.
        for scheme, transport in list(self.transports.items()):
            if isinstance(transport, Counts):
                tables.append((f"{scheme}.", transport.counters()))
        return {**self.metrics.counters(), **{prefix + k: v for prefix, table in tables for k, v in table.items()}}

    def status(self) -> pb.GetNodeStatusResponse:
        """A snapshot. `leases` and `sessions` count ended ones too as long as something may still touch their slot."""
        with self.lock:
            response = pb.GetNodeStatusResponse(leases=len(self.leases) + self.leases.ending)
            response.sessions = len(self.sessions) + self.sessions.ending
            response.lease_states.update(Counter(str(lease.state) for lease in self.leases.leases() if lease.live))
            response.session_states.update(Counter(str(session.state) for session in self.sessions.sessions()))
            for target, staging in (
                (response.send, self.send),
                (response.receive, self.receive),
                (response.pack, self.pack),
            ):
                target.capacity_bytes = staging.capacity_bytes
                target.used_bytes = staging.used_bytes
                target.quarantined_bytes = staging.quarantined_bytes
        response.counters.update(self.counters())
        # A snapshot may be taken before the node has a loop.
        response.tasks = len(asyncio.all_tasks(self.loop)) if hasattr(self, "loop") else 0
        response.recent_errors.extend(error.to_proto() for error in list(self.recent_errors))
        response.device_memory_bytes = reserved_on_devices()
        return response

    def _background_failed(self, name: str, exc: BaseException) -> None:
        self.metrics.event("background_failed")
        self.remember(SplitpointError(Code.INTERNAL, f"{name}: {exc!r}"))
        logger.error("%s failed", name, exc_info=exc)
