"""One UCX worker on one thread: sends, receives, endpoints, progress. Nothing here knows of chunks or leases.

Only the thread touches UCX; callers live on one event loop, put commands into a queue and get futures back. The thread spins
while a transfer moves; while one stands still, and when there is none, it sleeps until UCX or a command wakes it.

A receive is handed to UCX only when its message has announced itself, so one that never comes holds no memory, and its
length is known before a byte is written. Connections are in ucx_endpoints.py, tags and unwanted messages in ucx_tags.py.
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
from kvtransfer.transports.ucx_endpoints import Endpoints
from kvtransfer.transports.ucx_environment import devices_missing
from kvtransfer.transports.ucx_leaks import leaked_attachments
from kvtransfer.transports.ucx_operation import UCX_VERSION, Array, Operation, Peer, as_array, failure_of, ucx
from kvtransfer.transports.ucx_queue import QueueWatch
from kvtransfer.transports.ucx_sleep import Sleeper
from kvtransfer.transports.ucx_tags import ASK_CHANNEL, CHUNK_BITS, WARM_BYTES, WARM_CHANNEL, Tags

__all__ = ["ASK_CHANNEL", "CHUNK_BITS", "UCX_VERSION", "WARM_CHANNEL", "Guest", "Operation", "Peer", "UcxCore"]

logger = logging.getLogger(__name__)

WARM_SPIN_S = 0.2
PROGRESS_AT_ONCE = 32
SPIN_S = 0.002
LINGER_S = 1.0
SWEEP_EVERY_S = 0.001


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
    endpoints: Any = None
    operations: list[Operation] = field(default_factory=list)
    moved_at: float = 0.0
    linger_until: float = 0.0
    swept_at: float = 0.0
    turned_at: float = 0.0
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
        self._warm_count = 0
        self.address = b""
        self.info = ""
        self.counters: collections.Counter[str] = collections.Counter()
        self._ended = asyncio.Event()
        self._failure = ""
        self._tags = Tags(self.counters)
        self._queue = QueueWatch(self.counters, UCX_VERSION)

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

    async def until_failed(self) -> str:
        """Until the thread has ended though nobody stopped it: why. What it had begun is never called done after that, because
        UCX may still touch it."""
        await self._ended.wait()
        return self._failure

    def open_channel(self) -> int:
        """A number that the tags of one transfer's messages to this worker begin with."""
        return self._tags.open()

    def keep_tags(self, *tags: int) -> None:
        """Somebody takes what comes for these, for as long as this runs."""
        self._tags.keep(*tags)

    def close_channel(self, channel: int) -> None:
        """What still comes for it is thrown away."""
        if self._tags.close(channel):
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

    def condition(self, peer: Peer) -> str:
        """In words, what there is to know when bytes of this peer do not come. Any thread."""
        state, now = self._state, time.monotonic()
        if self._thread is None or not self._thread.is_alive() or state.endpoints is None:
            return f"UCX's thread has ended{': ' if self._failure else ''}{self._failure}"
        way = "works" if state.endpoints.working(peer) else "failed" if state.endpoints.lost(peer) else "does not exist"
        return (
            f"UCX's thread turned {now - state.turned_at:.3f} s and moved something {now - state.moved_at:.3f} s ago, "
            f"{len(state.operations)} operations are under way, the connection {way}, the host's queue: {self._queue.condition}"
        )

    @property
    def queue_watched(self) -> bool:
        """Whether a queue that a killed process of this host has spoilt is noticed (ucx_queue.py)."""
        return self._queue.watched

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

    def admit(self, peer: Peer) -> Peer | None:
        """As `Endpoints.admit`."""
        admitted: Peer | None = self._state.endpoints.admit(peer, time.monotonic())
        return admitted

    def lost(self, peer: Peer) -> bool:
        """The peer is known dead, or its endpoint has failed."""
        lost: bool = self._state.endpoints.lost(peer)
        return lost

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
            self._queue.before_opening()
            # WAKEUP: a message that nobody expects, such as a peer's ask, wakes the thread; it need not look for one.
            state.context = ucx.UCXContext(self._config, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
            state.worker = ucx.UCXWorker(state.context)
            state.worker.init_blocking_progress_mode()
            state.endpoints = Endpoints(state.worker, self.counters)
            self._queue.opened()
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
            self._end()
        except BaseException as exc:  # a fault of ours or UCX's that nobody foresaw
            self._died(f"UCX's thread ended: {exc!r}")
        finally:
            self._queue.close()

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
        now = state.turned_at = time.monotonic()
        if moved:
            state.moved_at = now
        self._queue.look(now)
        self._advance(now)
        busy = self.guest is not None and self.guest.turn(now)
        if now - state.swept_at > SWEEP_EVERY_S:
            state.swept_at = now
            self._tags.sweep(state.worker, now, whole=self._warms_whole())
        pause = self._pause_s(now)
        if busy or pause == 0 or state.stopping:
            return
        self._sleeper.sleep(pause, lambda: not self._commands and (self._queue.suspect or state.worker.arm()))

    def _pause_s(self, now: float) -> float | None:
        state = self._state
        if any(not op.cancelled and now < op.spin_until for op in state.operations):
            still = now - state.moved_at
            return 0 if still < SPIN_S else 0.0001 if still < 0.05 else 0.001
        if now < state.linger_until or self._queue.suspect:  # UCX that cannot be armed wakes nobody
            return 0.001
        if state.operations or self._tags.sinking:
            return 0.01
        return 0.25 if state.endpoints else None

    def _linger(self) -> None:
        self._state.linger_until = time.monotonic() + LINGER_S

    def _endpoint(self, peer: Peer) -> Any:
        endpoint = self._state.endpoints.get(peer)
        self._linger()
        return endpoint

    def _warms_whole(self) -> bool:
        return all(peer.error_handling for peer in self._state.endpoints.peers)

    def _prepare(self, peer: Peer) -> None:
        try:
            self._endpoint(peer)
            self._state.endpoints.trust(peer)
        except TransportError as exc:
            # The first receive meets the same and tells its caller.
            logger.warning("ucx: %s", exc)

    def _warm(self, peer: Peer) -> None:
        self._state.endpoints.trust(peer)
        if peer in self._state.endpoints.peers:
            return
        self._warm_count += 1
        tag = WARM_CHANNEL << CHUNK_BITS | self._warm_count % (1 << CHUNK_BITS)
        operation = self._new(peer, np.zeros(WARM_BYTES, np.uint8), tag, WARM_SPIN_S, sending=True)
        operation.message = True
        self._post(operation)

    def _post(self, operation: Operation) -> None:
        state = self._state
        state.moved_at = time.monotonic()
        try:
            if state.stopping:
                raise TransportError("closed", "UCX is stopped")
            endpoint = self._endpoint(operation.peer)
            if not operation.message:
                state.endpoints.trust(operation.peer)
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
        self._tags.settle()
        state.endpoints.close_retired(state.operations)

    def _begin_receive(self, operation: Operation) -> None:
        state = self._state
        tag = ucx.UCXXTag(operation.tag)
        if operation.cancelled:
            self._settle(operation, TransportError("closed", "given up before the payload was announced"))
            return
        endpoint = state.endpoints.working(operation.peer)
        if endpoint is None:
            self._settle(operation, TransportError("peer_lost", "the connection to the sender failed"))
            return
        found = state.worker.tag_probe(tag)
        if not found.matched:
            return
        expected = len(operation.memory)
        if found.length != expected:
            self._tags.sink(state.worker, found, whole=self._warms_whole())
            self._settle(operation, TransportError("corrupt", f"{found.length} bytes came where {expected} were announced"))
            return
        operation.array, operation.endpoint = as_array(operation.memory), endpoint
        try:
            operation.request = endpoint.tag_recv(operation.array, tag)
        except (ucx.UCXError, RuntimeError) as exc:
            self._settle(operation, TransportError("peer_lost", f"UCX refused to receive: {exc}"))

    def _retire(self, peer: Peer) -> None:
        state = self._state
        if not state.endpoints.retire(peer, state.operations):
            return
        if any(op.peer == peer and op.endpoint is None and not op.cancelled for op in state.operations):
            self._prepare(peer)  # a receive waits for its message: it will be posted on the new one
        state.endpoints.close_retired(state.operations)

    def _bury(self, incarnation: str) -> None:
        """The process is gone: close its endpoints, then settle what was outstanding whether or not UCX completed it."""
        state = self._state
        state.endpoints.bury(incarnation)
        self._queue.look(time.monotonic(), at_once=True)
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

    def _died(self, why: str) -> None:
        """UCX may be in any state, so it is left alone, and so is all memory that it was given. What it was not given ends."""
        state = self._state
        logger.critical("ucx: %s", why, exc_info=True)
        self._failure = why
        self.counters["thread_ended"] += 1
        operations, state.operations = state.operations, []
        for operation in operations:
            if operation.begun is not None:
                self._resolve(operation.begun, None)
            if operation.request is None:
                self._resolve(operation.done, TransportError("closed", why))
        _never_freed.append((operations, self._tags.sinking, state.endpoints, state.worker, state.context))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._ended.set)
        if self.guest is not None:
            self.guest.end()

    def _begin_stop(self) -> None:
        self._state.stopping = True

    def _end(self) -> None:
        """Close everything. A live peer of this host may still read what is outstanding, so its request is never freed."""
        state = self._state
        while self._commands:
            self._commands.popleft()()
        outstanding = bool(state.operations or self._tags.sinking)
        state.endpoints.close()
        self._advance(time.monotonic())
        for operation in list(state.operations):
            self._abandon(operation, TransportError("closed", "UCX is stopped"))
        if self.guest is not None:
            self.guest.end()
        if outstanding:
            _never_freed.append((self._tags.sinking, state.worker, state.context))
        state.endpoints = state.worker = state.context = None
