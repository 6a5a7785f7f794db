"""One UCX worker on one thread: sends, receives, endpoints, progress. Nothing here knows of chunks or leases.

Only the thread touches UCX; callers live on one event loop, put commands into a queue and get futures back. The thread spins
while a transfer moves; while one stands still, and when there is none, it sleeps until UCX or a command wakes it.

A receive is handed to UCX only when its message has announced itself, so one that never comes holds no memory, and its
length is known before a byte is written. What was announced for a channel that is closed is taken off UCX's queue into a
buffer of one byte: that completes the peer's send and with it frees the peer's slot.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvtransfer.transports.base import Memory, TransportError
from kvtransfer.transports.ucx_environment import devices_missing
from kvtransfer.transports.ucx_leaks import leaked_attachments
from kvtransfer.transports.ucx_operation import UCX_VERSION, Array, Operation, Peer, as_array, failure_of, ucx
from kvtransfer.transports.ucx_sleep import Sleeper

__all__ = ["ASK_CHANNEL", "CHUNK_BITS", "UCX_VERSION", "WARM_CHANNEL", "Guest", "Operation", "Peer", "UcxCore"]

logger = logging.getLogger(__name__)

CHANNEL_BITS = 40
CHUNK_BITS = 24
WARM_CHANNEL = 0
ASK_CHANNEL = (1 << CHANNEL_BITS) - 1
"""Of what peers ask for and say (ucx_asks.py): no transfer's."""
WARM_BYTES = 64 * 1024
WARM_SPIN_S = 0.2
_CHANNEL_MASK = ((1 << CHANNEL_BITS) - 1) << CHUNK_BITS

PROGRESS_AT_ONCE = 32
SPIN_S = 0.002
LINGER_S = 1.0
SWEEP_EVERY_S = 0.001
CLOSED_CHANNEL_KEPT_S = 60.0
CLOSE_PERIOD_NS = 100_000_000
CLOSE_ATTEMPTS = 5


_never_freed: list[Any] = []
"""Requests to dead peers that UCX never completes. Dropping them would let UCX touch freed request objects."""


class Guest(Protocol):
    """Somebody else's work on the thread."""

    def turn(self, now: float) -> bool:
        """Called in every turn. True: the thread should not sleep now."""

    def end(self) -> None:
        """UCX stops."""


@dataclass(slots=True)
class _State:
    """What only the thread touches."""

    context: Any = None
    worker: Any = None
    endpoints: dict[Peer, Any] = field(default_factory=dict)
    retired: list[tuple[Peer, Any]] = field(default_factory=list)
    """Endpoints to be closed as soon as nobody waits for anything on them."""
    operations: list[Operation] = field(default_factory=list)
    sinks: list[tuple[Any, Any]] = field(default_factory=list)
    reached: set[Peer] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    moved_at: float = 0.0
    linger_until: float = 0.0
    swept_at: float = 0.0
    stopping: bool = False


class UcxCore:
    """A rank's UCX worker. Every method is called on the event loop on which `start` was."""

    def __init__(self, net_devices: str = "", prepare_thread: Callable[[], None] = lambda: None) -> None:
        """`net_devices`: as `UCX_NET_DEVICES`; empty leaves the choice to UCX and its environment. `prepare_thread` runs first on
        the thread that drives UCX."""
        self._prepare_thread = prepare_thread
        self._config = {"NET_DEVICES": net_devices} if net_devices else {}
        self._state = _State()
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._sleeper = Sleeper()
        self.guest: Guest | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open_channels: set[int] = set()
        self._kept_tags: set[int] = set()
        self._closed_channels: collections.deque[tuple[float, int]] = collections.deque(maxlen=256)
        self._next_channel = int.from_bytes(os.urandom(4), "little") + 1
        self._warm_count = 0
        self.address = b""
        self.info = ""
        self.counters: collections.Counter[str] = collections.Counter()

    # ---- on the event loop

    async def start(self) -> None:
        """Open UCX. Raises `TransportError("refused")` when it cannot, or is to use a device that is not there."""
        asked = self._config.get("NET_DEVICES") or os.environ.get("UCX_NET_DEVICES", "")
        if missing := devices_missing(asked):
            raise TransportError("refused", f"UCX_NET_DEVICES names {', '.join(missing)}: there is no such network device")
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="splitpoint-ucx", daemon=True)
        self._thread.start()
        if failure := await ready:
            self._sleeper.close()
            raise TransportError("refused", failure)

    async def stop(self) -> None:
        """Close endpoints and end the thread. Operations still outstanding resolve as closed."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._submit(self._begin_stop)
        await asyncio.to_thread(thread.join)
        self._sleeper.close()

    def open_channel(self) -> int:
        """A number that the tags of one transfer's messages to this worker begin with."""
        self._next_channel = (self._next_channel + 1) % ASK_CHANNEL or 1
        self._open_channels.add(self._next_channel)
        return self._next_channel

    def keep_tags(self, *tags: int) -> None:
        """Somebody takes what comes for these, for as long as this runs."""
        self._kept_tags |= set(tags)

    def close_channel(self, channel: int) -> None:
        """What still comes for it is thrown away."""
        if channel in self._open_channels:
            self._open_channels.discard(channel)
            self._closed_channels.append((time.monotonic(), channel))
            self._submit(self._linger)

    def expect(self, peer: Peer) -> None:
        """Make the endpoint and be ready for the peer's first message."""
        self._submit(lambda: self._prepare(peer))

    def warm(self, peer: Peer) -> None:
        """Send one throw-away message if this peer is new: the first message pays for wire-up and registration."""
        self._submit(lambda: self._warm(peer))

    def send(self, peer: Peer, memory: Memory, tag: int, spin_s: float) -> Operation:
        return self._operation(peer, memory, tag, spin_s, sending=True)

    def receive(self, peer: Peer, memory: Memory, tag: int, spin_s: float) -> Operation:
        return self._operation(peer, memory, tag, spin_s, sending=False)

    def give_up(self, operation: Operation) -> None:
        """Stop spinning for it. A receive that has not begun ends; anything else ends when UCX says so."""
        operation.cancelled = True
        self._submit(self._linger)

    def reset(self, peer: Peer) -> None:
        """End what was given up on an endpoint that has error handling; no-op on others. UCX cancels no single request, so the
        endpoint is closed, but only when nothing healthy is left on it: new messages take a new one meanwhile."""
        if peer.error_handling:
            self._submit(lambda: self._retire(peer))

    def peer_died(self, incarnation: str) -> None:
        self._submit(lambda: self._bury(incarnation))

    def _operation(self, peer: Peer, memory: Memory, tag: int, spin_s: float, *, sending: bool) -> Operation:
        operation = self._new(peer, memory, tag, spin_s, sending=sending)
        if self._thread is None or not self._thread.is_alive():
            assert operation.begun is not None
            operation.begun.set_result(None)
            operation.done.set_result(TransportError("closed", "UCX is stopped"))
        else:
            self._submit(lambda: self._post(operation))
        return operation

    # What a guest calls on the thread.

    def post(self, operation: Operation) -> None:
        """Begin an operation that `prepare_operation` made."""
        self._post(operation)

    def prepare_operation(
        self,
        peer: Peer,
        memory: Memory,
        tag: int,
        spin_s: float,
        settled: Callable[[TransportError | None], None],
        *,
        sending: bool,
    ) -> Operation:
        """An operation that `post` begins."""
        operation = self._new(peer, memory, tag, spin_s, sending=sending)
        operation.begun, operation.settled = None, settled
        return operation

    def probe(self, tag: int) -> int | None:
        """Bytes of the oldest message under `tag` that waits, None when none does."""
        found = self._state.worker.tag_probe(ucx.UCXXTag(tag))
        return found.length if found.matched else None

    def take(self, tag: int, memory: np.ndarray) -> Any:
        """Receive what `probe` found into host memory; the request, which says `completed`. Longer messages are cut."""
        return self._state.worker.tag_recv(Array(memory), ucx.UCXXTag(tag))

    def lost(self, peer: Peer) -> bool:
        """The peer is known dead, or its endpoint has failed."""
        endpoint = self._state.endpoints.get(peer)
        return peer.incarnation in self._state.dead or (endpoint is not None and not endpoint.alive)

    def _new(self, peer: Peer, memory: Memory, tag: int, spin_s: float, *, sending: bool) -> Operation:
        loop = self._loop
        assert loop is not None, "start first"
        return Operation(peer, memory, tag, sending, loop.create_future(), loop.create_future(), time.monotonic() + spin_s)

    def run(self, command: Callable[[], None]) -> None:
        """Run `command` on the thread, soon. Any thread; after `stop` it is dropped."""
        self._submit(command)

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._sleeper.wake()

    # ---- on the thread

    def _run(self, ready: asyncio.Future[str]) -> None:
        state = self._state
        try:
            self._prepare_thread()
            # WAKEUP: a message that nobody expects, such as a peer's ask, wakes the thread; it need not look for one.
            state.context = ucx.UCXContext(self._config, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
            state.worker = ucx.UCXWorker(state.context)
            state.worker.init_blocking_progress_mode()
            self._sleeper.watch(state.worker.epoll_file_descriptor)
            self.address = state.worker.address.tobytes()
            self.info = state.context.info
        except (ucx.UCXError, RuntimeError, OSError) as exc:
            self._resolve(ready, f"UCX does not open: {exc}")
            return
        self._resolve(ready, "")
        try:
            while not state.stopping:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        """Commands, progress, completions; then as long a pause as nothing suffers from."""
        state = self._state
        while self._commands:
            command = self._commands.popleft()
            try:
                command()
            except Exception:  # a fault of ours, or a hostile message: everybody's transfers live on this thread
                self._fault("a command")
        moved = False
        for _ in range(PROGRESS_AT_ONCE):
            if not state.worker.progress_once():
                break
            moved = True
        now = time.monotonic()
        if moved:
            state.moved_at = now
        self._advance(now)
        busy = self.guest is not None and self.guest.turn(now)
        if now - state.swept_at > SWEEP_EVERY_S:
            state.swept_at = now
            self._sweep(now)
        pause = self._pause_s(now)
        if busy or pause == 0 or state.stopping:
            return
        self._sleeper.sleep(pause, lambda: not self._commands and state.worker.arm())

    def _pause_s(self, now: float) -> float | None:
        state = self._state
        if any(not op.cancelled and now < op.spin_until for op in state.operations):
            still = now - state.moved_at
            return 0 if still < SPIN_S else 0.0001 if still < 0.05 else 0.001
        if now < state.linger_until:
            return 0.001
        if state.operations or state.sinks:
            return 0.01
        return 0.25 if state.endpoints else None

    def _linger(self) -> None:
        self._state.linger_until = time.monotonic() + LINGER_S

    def _endpoint(self, peer: Peer) -> Any:
        """The cached endpoint, or a new one when there is none or UCX has seen it fail. Raises `TransportError`."""
        state = self._state
        if peer.incarnation in state.dead:
            raise TransportError("peer_lost", f"incarnation {peer.incarnation!r} is dead")
        endpoint = state.endpoints.get(peer)
        if endpoint is not None and not endpoint.alive:
            self._drop(peer)
            endpoint = None
        if endpoint is None:
            try:
                address = ucx.UCXAddress.create_from_buffer(bytearray(peer.address))
                endpoint = ucx.UCXEndpoint.create_from_worker_address(state.worker, address, peer.error_handling)
            except (ucx.UCXError, RuntimeError, ValueError) as exc:
                reason = "peer_lost" if peer in state.reached else "refused"
                raise TransportError(reason, f"no UCX path to incarnation {peer.incarnation!r}: {exc}") from exc
            state.endpoints[peer] = endpoint
            state.reached.add(peer)
            self.counters["endpoints"] += 1
        self._linger()
        return endpoint

    def _prepare(self, peer: Peer) -> None:
        try:
            self._endpoint(peer)
        except TransportError as exc:
            # The first receive meets the same and tells its caller.
            logger.warning("ucx: %s", exc)

    def _warm(self, peer: Peer) -> None:
        if peer in self._state.endpoints:
            return
        self._warm_count += 1
        tag = WARM_CHANNEL << CHUNK_BITS | self._warm_count % (1 << CHUNK_BITS)
        self._post(self._new(peer, np.zeros(WARM_BYTES, np.uint8), tag, WARM_SPIN_S, sending=True))

    def _post(self, operation: Operation) -> None:
        state = self._state
        state.moved_at = time.monotonic()
        try:
            if state.stopping:
                raise TransportError("closed", "UCX is stopped")
            endpoint = self._endpoint(operation.peer)
            if operation.sending:
                operation.array, operation.endpoint = as_array(operation.memory), endpoint
                operation.request = endpoint.tag_send(operation.array, ucx.UCXXTag(operation.tag))
        except (ucx.UCXError, RuntimeError) as exc:
            self._settle(operation, TransportError("peer_lost", f"UCX refused to send: {exc}"))
        except TransportError as exc:
            self._settle(operation, exc)
        except Exception as exc:  # as `_turn`: it ends this operation
            self._fault("a send")
            self._settle(operation, TransportError("refused", f"it cannot be sent: {exc!r}"))
        else:
            state.operations.append(operation)
            if operation.begun is not None:
                self._resolve(operation.begun, None)

    def _advance(self, now: float) -> None:
        """Begin receives whose message is announced, settle what has completed."""
        state = self._state
        for operation in list(state.operations):
            if operation.request is None:
                self._begin_receive(operation)
            request = operation.request
            if request is not None and request.completed:
                operation.request = operation.array = operation.endpoint = None
                self._settle(operation, failure_of(request))
        state.sinks = [entry for entry in state.sinks if not entry[0].completed]
        if state.retired:
            self._close_retired()

    def _begin_receive(self, operation: Operation) -> None:
        state = self._state
        tag = ucx.UCXXTag(operation.tag)
        if operation.cancelled:
            self._settle(operation, TransportError("closed", "given up before the payload was announced"))
            return
        endpoint = state.endpoints.get(operation.peer)
        if endpoint is None or not endpoint.alive:
            self._settle(operation, TransportError("peer_lost", "the connection to the sender failed"))
            return
        found = state.worker.tag_probe(tag)
        if not found.matched:
            return
        expected = len(operation.memory)
        if found.length != expected:
            self._sink(found)
            self._settle(operation, TransportError("corrupt", f"{found.length} bytes came where {expected} were announced"))
            return
        operation.array, operation.endpoint = as_array(operation.memory), endpoint
        try:
            operation.request = endpoint.tag_recv(operation.array, tag)
        except (ucx.UCXError, RuntimeError) as exc:
            self._settle(operation, TransportError("peer_lost", f"UCX refused to receive: {exc}"))

    def _sweep(self, now: float) -> None:
        """Take messages that nobody waits for off UCX's queue."""
        worker = self._state.worker
        while (found := worker.tag_probe(ucx.UCXXTag(0), ucx.UCXXTagMask(0))).matched:
            tag = found.sender_tag.value
            if tag in self._kept_tags or tag >> CHUNK_BITS in self._open_channels:
                break
            self._sink(found)
        while self._closed_channels and now - self._closed_channels[0][0] > CLOSED_CHANNEL_KEPT_S:
            self._closed_channels.popleft()
        # A message for an open channel at the head of the queue hides what is behind it.
        if found.matched:
            for _, channel in list(self._closed_channels):
                while (hidden := worker.tag_probe(ucx.UCXXTag(channel << CHUNK_BITS), ucx.UCXXTagMask(_CHANNEL_MASK))).matched:
                    self._sink(hidden)

    def _sink(self, found: Any) -> None:
        """Receive an announced message into a buffer that is too short, which completes its send without a byte moved.

        A warm-up is received whole where that cannot end this process (`Peer`).
        """
        warm = found.sender_tag.value >> CHUNK_BITS == WARM_CHANNEL and found.length <= WARM_BYTES
        whole = warm and all(peer.error_handling for peer in self._state.endpoints)
        scratch = np.zeros(found.length if whole else 1, np.uint8)
        array = Array(scratch)
        request = self._state.worker.tag_recv(array, ucx.UCXXTag(found.sender_tag.value))
        self._state.sinks.append((request, array))
        self.counters["warmed" if warm else "sunk"] += 1

    def _drop(self, peer: Peer) -> None:
        """Close an endpoint. With error handling everything on it completes; bounded, progresses UCX meanwhile."""
        endpoint = self._state.endpoints.pop(peer, None)
        if endpoint is not None:
            self._close(peer, endpoint)

    def _retire(self, peer: Peer) -> None:
        state = self._state
        endpoint = state.endpoints.get(peer)
        if endpoint is None or not any(op.endpoint is endpoint and op.cancelled for op in state.operations):
            return
        del state.endpoints[peer]
        state.retired.append((peer, endpoint))
        self.counters["endpoints_retired"] += 1
        if any(op.peer == peer and op.endpoint is None and not op.cancelled for op in state.operations):
            self._prepare(peer)  # a receive waits for its message: it will be posted on the new one
        self._close_retired()

    def _close_retired(self) -> None:
        state = self._state
        for entry in list(state.retired):
            if not any(op.endpoint is entry[1] and not op.cancelled for op in state.operations):
                state.retired.remove(entry)
                self._close(*entry)

    def _close(self, peer: Peer, endpoint: Any) -> None:
        self.counters["endpoints_closed"] += 1
        if not peer.error_handling:
            endpoint.close()  # close_blocking can hang here
        elif endpoint.alive:  # closing one that has failed crashes ucxx
            endpoint.close_blocking(CLOSE_PERIOD_NS, CLOSE_ATTEMPTS)
        self._quiet()

    def _quiet(self) -> None:
        """Progress until UCX has nothing to do, so that bytes already here land before their slot is called free."""
        for _ in range(10_000):
            if not self._state.worker.progress_once():
                return

    def _bury(self, incarnation: str) -> None:
        """The process is gone: close its endpoints, then settle what was outstanding whether or not UCX completed it."""
        state = self._state
        state.dead.add(incarnation)
        state.reached = {peer for peer in state.reached if peer.incarnation != incarnation}
        for peer in [p for p in state.endpoints if p.incarnation == incarnation]:
            self._drop(peer)
        for entry in [e for e in state.retired if e[0].incarnation == incarnation]:
            state.retired.remove(entry)
            self._close(*entry)
        self._advance(time.monotonic())
        for operation in [op for op in state.operations if op.peer.incarnation == incarnation]:
            self._abandon(operation, TransportError("peer_lost", f"incarnation {incarnation!r} is dead"))
        self.counters["leaked_attachments"] = leaked_attachments()

    def _abandon(self, operation: Operation, why: TransportError) -> None:
        if operation.request is not None:
            _never_freed.append((operation.request, operation.array))
            self.counters["abandoned"] += 1
        self._settle(operation, why)

    def _settle(self, operation: Operation, failure: TransportError | None) -> None:
        with contextlib.suppress(ValueError):
            self._state.operations.remove(operation)
        self.counters["failed" if failure else "completed"] += 1
        operation.memory = None
        self._resolve(operation.done, failure)
        if operation.begun is not None:
            self._resolve(operation.begun, None)
        if operation.settled is not None:
            try:
                operation.settled(failure)
            except Exception:  # as `_turn`
                self._fault("whoever waited")

    def _fault(self, what: str) -> None:
        self.counters["faults"] += 1
        logger.exception("ucx: %s failed", what)

    def _resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        def resolve() -> None:
            if not future.done():
                future.set_result(value)

        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(resolve)

    def _begin_stop(self) -> None:
        self._state.stopping = True

    def _end(self) -> None:
        """Close everything. A live peer of this host may still read what is outstanding, so its request is never freed."""
        state = self._state
        while self._commands:
            self._commands.popleft()()
        outstanding = bool(state.operations or state.sinks)
        for peer in list(state.endpoints):
            self._drop(peer)
        while state.retired:
            self._close(*state.retired.pop())
        self._advance(time.monotonic())
        for operation in list(state.operations):
            self._abandon(operation, TransportError("closed", "UCX is stopped"))
        if self.guest is not None:
            self.guest.end()
        if outstanding:
            _never_freed.append((state.sinks, state.worker, state.context))
        state.sinks = []
        state.worker = state.context = None
