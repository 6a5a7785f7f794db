"""One NIXL agent on one thread: offers, grants, writes, notices, progress. Nothing here knows of transfers or leases.

NIXL writes are one-sided. Here a sender writes a chunk only into the place, and only after, its receiver has granted it, so a
receiver knows at any time what may still be written: the grants that were answered by neither DONE nor NEVER. A revoked grant
is asked about until it is answered or the peer process is known dead.

Only the thread touches NIXL, without NIXL's own progress thread, so nothing lands while it does not turn. A chunk is written in
steps, and each step tells the receiver: progress is visible long before a large chunk is whole.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtransfer.transports.base import Memory, TransportError
from kvtransfer.transports.nixl_connections import Connections
from kvtransfer.transports.nixl_library import ERRORS, NIXL_VERSION, api, devices_set
from kvtransfer.transports.nixl_messages import AgentAddress, Notice, NoticeKind
from kvtransfer.transports.nixl_operation import Operation, Peer, locate

logger = logging.getLogger(__name__)

_OPEN_ERRORS: tuple[type[Exception], ...] = (*ERRORS, RuntimeError, OSError)

STEP_BYTES = 4 * 1024 * 1024
SPIN_S = 0.002
IDLE_POLL_S = 0.05
REVOKE_EVERY_S = 1.0
SETTLE_S = 1.0
"""After a peer's death or a broken write: what its last bytes may take from this host's own queues into memory."""
MAX_BROKEN = 1024

_never_freed: list[Any] = []
"""Agents that were stopped while a peer might still write: their registration stays as long as this process."""


class NixlCore:
    """A rank's agent. Every public method is called on the event loop on which `start` was."""

    def __init__(self, agent: str, areas: Sequence[Memory], net_devices: str = "") -> None:
        """`areas`: staging, registered once; every operation's memory lies in one of them. `net_devices`: as `UCX_NET_DEVICES`;
        empty leaves the choice to UCX and its environment."""
        self._name = agent
        self._net_devices = net_devices
        self._areas = [area for area in areas if area is not None]
        self._agent: Any = None
        self._connections: Any = None
        self._offers: dict[tuple[int, int], Operation] = {}
        self._grants: dict[tuple[int, int], Operation] = {}
        self._broken: collections.OrderedDict[tuple[int, int], None] = collections.OrderedDict()
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._moved_at = 0.0
        self.address = b""
        self.counters: collections.Counter[str] = collections.Counter()

    # ---- on the event loop

    async def start(self) -> None:
        """Make the agent and register the areas. Raises `TransportError("refused")` when NIXL cannot."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="splitpoint-nixl", daemon=True)
        self._thread.start()
        if failure := await ready:
            raise TransportError("refused", failure)

    async def stop(self) -> None:
        """End the thread. Operations still outstanding resolve as closed."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._submit(self._begin_stop)
        await asyncio.to_thread(thread.join)

    def offer(self, peer: Peer, channel: int, chunk: int, memory: Memory) -> Operation:
        """Write `memory` to the peer once it grants `chunk` of its `channel`."""
        return self._operation(peer, channel, chunk, memory, sending=True)

    def grant(self, peer: Peer, channel: int, chunk: int, memory: Memory) -> Operation:
        """Let the peer write `chunk` of this side's `channel` into `memory`."""
        return self._operation(peer, channel, chunk, memory, sending=False)

    def give_up(self, operation: Operation) -> None:
        """An offer that nobody granted ends; a write ends with its present step; a grant is revoked."""
        self._submit(lambda: self._give_up(operation))

    def peer_died(self, incarnation: str) -> None:
        """What it was to write has landed or never will; what was to be written to it ends."""
        self._submit(lambda: self._bury(incarnation))

    def contains(self, memory: Memory) -> bool:
        """Whether it lies in registered staging."""
        start, size = locate(memory)[0], len(memory)
        return any(first <= start and start + size <= first + len(area) for area in self._areas for first in [locate(area)[0]])

    def _operation(self, peer: Peer, channel: int, chunk: int, memory: Memory, *, sending: bool) -> Operation:
        loop = self._loop
        assert loop is not None, "start first"
        futures = loop.create_future(), loop.create_future(), loop.create_future()
        operation = Operation(peer, (channel, chunk), memory, sending, *futures, moved_at=time.monotonic())
        if self._thread is None or not self._thread.is_alive():
            operation.begun.set_result(None)
            operation.done.set_result(TransportError("closed", "NIXL is stopped"))
        elif not self.contains(memory):
            operation.begun.set_result(None)
            operation.done.set_result(TransportError("refused", "memory outside of the staging that NIXL has registered"))
        else:
            self._submit(lambda: self._take_up(operation))
        return operation

    def _submit(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # ---- on the thread

    def _run(self, ready: asyncio.Future[str]) -> None:
        try:
            with devices_set(self._net_devices):
                self._agent = api.nixl_agent(self._name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            for area in self._areas:
                address, device, kind = locate(area)
                self._agent.register_memory([(address, len(area), device, "")], kind)
            self._connections = Connections(self._agent, self.counters, self._writing_to)
            metadata = self._agent.get_agent_metadata()
            self.address = AgentAddress(self._name, metadata, NIXL_VERSION).encode()
        except _OPEN_ERRORS as exc:
            self._resolve(ready, f"NIXL does not open: {exc}")
            return
        self._resolve(ready, "")
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._hear()
        now = time.monotonic()
        for operation in list(self._offers.values()):
            if operation.handle is not None:
                self._check_write(operation, now)
        for operation in list(self._grants.values()):
            if operation.settle_at is not None and now >= operation.settle_at:
                self._settle(operation, operation.settle_with)
            elif operation.revoke_at is not None and now >= operation.revoke_at:
                operation.revoke_at = now + REVOKE_EVERY_S
                self._connections.tell(operation.peer, Notice(NoticeKind.REVOKE, *operation.key))
        pause = self._pause_s(now)
        if pause == 0 or self._stopping:
            return
        with self._wake:
            if not self._commands:
                self._wake.wait(pause)

    def _pause_s(self, now: float) -> float | None:
        if any(not op.given_up for op in (*self._offers.values(), *self._grants.values())):
            still = now - self._moved_at
            return 0 if still < SPIN_S else 0.0002 if still < 0.05 else 0.002
        if self._offers or self._grants:
            return 0.01
        return IDLE_POLL_S if self._connections else None

    def _writing_to(self, peer: Peer) -> bool:
        return any(op.handle is not None and op.peer == peer for op in self._offers.values())

    def _take_up(self, operation: Operation) -> None:
        table = self._offers if operation.sending else self._grants
        try:
            if self._stopping:
                raise TransportError("closed", "NIXL is stopped")
            self._connections.connect(operation.peer)
        except TransportError as exc:
            self._settle(operation, exc)
            return
        self._moved_at = operation.moved_at = time.monotonic()
        table[operation.key] = operation
        if not operation.sending:
            address = locate(operation.memory)[0]
            if not self._connections.tell(
                operation.peer, Notice(NoticeKind.GRANT, *operation.key, address, len(operation.memory))
            ):
                # It may have arrived all the same: ask until that is known.
                operation.revoke_at = operation.moved_at + REVOKE_EVERY_S
                self._resolve(operation.lost, TransportError("peer_lost", f"{operation.peer.agent} cannot be told of a chunk"))
        self._resolve(operation.begun, None)

    # -- notices

    def _hear(self) -> None:
        try:
            notices = self._agent.get_new_notifs()
        except ERRORS as exc:
            self.counters["progress_failed"] += 1
            logger.warning("nixl: progress: %s", exc)
            return
        for agent, messages in notices.items():
            name = agent.decode() if isinstance(agent, bytes) else agent
            for message in messages:
                notice = Notice.decode(message)
                if notice is None:
                    self.counters["strange_notices"] += 1
                else:
                    self._heard(name, notice)

    def _heard(self, agent: str, notice: Notice) -> None:
        key = (notice.channel, notice.chunk)
        if notice.kind in (NoticeKind.GRANT, NoticeKind.REVOKE):
            offer = self._offers.get(key)
            if offer is not None and offer.peer.agent != agent:
                self.counters["strange_notices"] += 1
            elif notice.kind is NoticeKind.GRANT and offer is not None and offer.target is None and not offer.given_up:
                self._granted(offer, notice)
            elif notice.kind is NoticeKind.REVOKE and offer is not None and offer.handle is not None:
                offer.given_up = True  # its answer follows the step that is being written
            else:
                self._decline(agent, key, offer)
            return
        grant = self._grants.get(key)
        if grant is None or grant.peer.agent != agent:
            self.counters["late_notices"] += 1
            return
        self._moved_at = grant.moved_at = time.monotonic()
        if notice.kind is NoticeKind.DONE:
            self._settle(grant, None)
        elif notice.kind is NoticeKind.NEVER:
            self._settle(grant, TransportError("closed", "the sender will not write this chunk"))
        elif notice.kind is NoticeKind.BROKEN:
            failure = TransportError("peer_lost", "the sender's write failed")
            self._resolve(grant.lost, failure)
            self._settle_later(grant, failure)

    def _granted(self, offer: Operation, notice: Notice) -> None:
        if notice.num_bytes != len(offer.memory):
            why = f"{notice.num_bytes} bytes granted for {len(offer.memory)}"
            self._connections.tell(offer.peer, Notice(NoticeKind.NEVER, *offer.key))
            self._settle(offer, TransportError("corrupt", why))
            return
        offer.target = notice.address
        self._write(offer)

    def _decline(self, agent: str, key: tuple[int, int], offer: Operation | None) -> None:
        """Nothing is or will be written for this key."""
        peer = self._connections.get(agent)
        if offer is not None:
            self._settle(offer, TransportError("closed", "the receiver does not want this chunk any more"))
        if peer is None:
            self.counters["strange_notices"] += 1
            return
        self._connections.tell(peer, Notice(NoticeKind.BROKEN if key in self._broken else NoticeKind.NEVER, *key))

    # -- writes

    def _write(self, offer: Operation) -> None:
        """Begin the next step."""
        assert offer.target is not None
        local, device, kind = locate(offer.memory)
        offer.step = min(STEP_BYTES, len(offer.memory) - offer.written)
        end = offer.written + offer.step
        last = end == len(offer.memory)
        notice = Notice(NoticeKind.DONE if last else NoticeKind.PROGRESS, *offer.key, 0, end)
        try:
            mine = self._agent.get_xfer_descs([(local + offer.written, offer.step, device)], kind)
            # Both sides keep staging in the same kind of memory: it is in the fingerprint's layout.
            theirs = self._agent.get_xfer_descs([(offer.target + offer.written, offer.step, device)], kind)
            offer.handle = self._agent.initialize_xfer("WRITE", mine, theirs, offer.peer.agent, notice.encode())
            self._agent.transfer(offer.handle)
        except ERRORS as exc:
            self._write_failed(offer, exc)

    def _check_write(self, offer: Operation, now: float) -> None:
        try:
            state = self._agent.check_xfer_state(offer.handle)
        except ERRORS as exc:
            self._write_failed(offer, exc)
            return
        if state == "PROC":
            return
        if state != "DONE":
            self._write_failed(offer, state)
            return
        self._release(offer)
        self._moved_at = offer.moved_at = now
        offer.written += offer.step
        if offer.written == len(offer.memory):
            self._settle(offer, None)
        elif offer.given_up:
            self._connections.tell(offer.peer, Notice(NoticeKind.NEVER, *offer.key))
            self._settle(offer, TransportError("closed", "given up between two steps"))
        else:
            self._write(offer)

    def _write_failed(self, offer: Operation, why: object) -> None:
        self._release(offer)
        self._broken[offer.key] = None
        while len(self._broken) > MAX_BROKEN:
            self._broken.popitem(last=False)
        self._settle(offer, TransportError("peer_lost", f"NIXL: {type(why).__name__}: {why}"))
        self._connections.tell(offer.peer, Notice(NoticeKind.BROKEN, *offer.key))

    def _release(self, offer: Operation) -> None:
        handle, offer.handle = offer.handle, None
        if handle is None:
            return
        try:
            self._agent.release_xfer_handle(handle)
        except ERRORS as exc:
            # Still active inside NIXL: it must outlive its request.
            _never_freed.append(handle)
            self.counters["handles_kept"] += 1
            logger.warning("nixl: a transfer handle stays: %s", exc)

    # -- ends

    def _give_up(self, operation: Operation) -> None:
        if operation.given_up or operation.done.done():
            return
        operation.given_up = True
        if not operation.sending:
            operation.revoke_at = 0.0
        elif operation.handle is None:
            self._settle(operation, TransportError("closed", "given up before it was granted"))

    def _bury(self, incarnation: str) -> None:
        failure = TransportError("peer_lost", f"incarnation {incarnation!r} is dead")
        for operation in [op for op in self._offers.values() if op.peer.incarnation == incarnation]:
            self._release(operation)
            self._settle(operation, failure)
        for operation in [op for op in self._grants.values() if op.peer.incarnation == incarnation]:
            operation.given_up, operation.revoke_at = True, None
            self._resolve(operation.lost, failure)
            self._settle_later(operation, failure)
        self._connections.bury(incarnation)

    def _settle_later(self, grant: Operation, failure: TransportError) -> None:
        """Bytes already in this host's queues land first: the thread turns meanwhile."""
        if grant.settle_at is None:
            grant.settle_at, grant.settle_with = time.monotonic() + SETTLE_S, failure

    def _settle(self, operation: Operation, failure: TransportError | None) -> None:
        table = self._offers if operation.sending else self._grants
        if table.get(operation.key) is operation:
            del table[operation.key]
        self.counters["failed" if failure else "completed"] += 1
        operation.memory = None
        self._resolve(operation.done, failure)
        self._resolve(operation.begun, None)

    def _resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        def resolve() -> None:
            if not future.done():
                future.set_result(value)

        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(resolve)

    def _begin_stop(self) -> None:
        self._stopping = True

    def _end(self) -> None:
        while self._commands:
            self._commands.popleft()()
        outstanding = [*self._offers.values(), *self._grants.values()]
        if outstanding:
            _never_freed.append((self._agent, self._areas))
            self.counters["abandoned"] += len(outstanding)
        for operation in outstanding:
            if not operation.sending:
                self._connections.tell(operation.peer, Notice(NoticeKind.REVOKE, *operation.key))
            self._settle(operation, TransportError("closed", "NIXL is stopped"))
        self._connections.close()
        self._agent = self._connections = None
