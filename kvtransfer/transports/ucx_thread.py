"""What UCX's thread does: one UCX worker, its sends and receives, progress, sleep and end.

It spins while a transfer moves; while one stands still, and when there is none, it sleeps until UCX or a command wakes it.

A receive is handed to UCX only when its message has announced itself, so one that never comes holds no memory, and its
length is known before a byte is written. Connections are in ucx_endpoints.py, tags and unwanted messages in ucx_tags.py, how the
process talks to the thread in ucx_core.py.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtransfer.transports.base import Memory, TransportError
from kvtransfer.transports.ucx_endpoints import Endpoints
from kvtransfer.transports.ucx_leaks import leaked_attachments
from kvtransfer.transports.ucx_operation import UCX_VERSION, Array, Guest, Operation, Peer, as_array, failure_of, ucx
from kvtransfer.transports.ucx_queue import QueueWatch
from kvtransfer.transports.ucx_sleep import Sleeper
from kvtransfer.transports.ucx_tags import CHUNK_BITS, WARM_BYTES, WARM_CHANNEL, Tags

logger = logging.getLogger(__name__)

WARM_SPIN_S = 0.2
PROGRESS_AT_ONCE = 32
SPIN_S = 0.002
LINGER_S = 1.0
SWEEP_EVERY_S = 0.001


_never_freed: list[Any] = []
"""Requests to dead peers that UCX never completes. Dropping them would let UCX touch freed request objects."""


class UcxThread:
    """One, and its UCX worker. What stands under "any thread" may be called from any, the rest on this one alone."""

    def __init__(
        self, config: dict[str, str], prepare: Callable[[], None], tags: Tags, counters: collections.Counter[str]
    ) -> None:
        """`config`: UCX's settings for its context. `prepare` runs first on the thread."""
        self.config = config
        self.counters = counters
        self.guest: Guest | None = None
        self.failure = ""
        """Why it ended by itself."""
        self.address = b""
        self.info = ""
        self.operations: list[Operation] = []
        self.endpoints: Any = None
        self.queue = QueueWatch(counters, UCX_VERSION)
        self.ended = asyncio.Event()
        """Set on the loop when the thread has ended though nobody stopped it."""
        self._prepare = prepare
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where whoever waits for operations lives."""
        self._tags = tags
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._sleeper = Sleeper()
        self._context: Any = None
        self._worker: Any = None
        self._warm_count = 0
        self._moved_at = 0.0
        self._linger_until = 0.0
        self._swept_at = 0.0
        self._turned_at = 0.0
        self._stopping = False

    # ---- any thread

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[str]:
        """Begin. Resolves on `loop` when UCX is open, to why it is not or to nothing."""
        self._loop = loop
        ready: asyncio.Future[str] = loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="splitpoint-ucx", daemon=True)
        self._thread.start()
        return ready

    @property
    def alive(self) -> bool:
        """It runs."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end, which `begin_stop` asks for, and close what woke it. False: UCX has not let go of the thread by then;
        both are left alone, until the process ends."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._sleeper.close()
        return True

    def submit(self, command: Callable[[], None]) -> None:
        """Run `command` on the thread, soon; after its end it is dropped."""
        self._commands.append(command)
        self._sleeper.wake()

    def condition(self, peer: Peer) -> str:
        """In words, what there is to know when bytes of this peer do not come. Any thread."""
        now = time.monotonic()
        endpoints = self.endpoints
        if endpoints is None or not self.alive:
            return f"UCX's thread has ended{': ' if self.failure else ''}{self.failure}"
        way = "works" if endpoints.working(peer) else "failed" if endpoints.lost(peer) else "does not exist"
        return (
            f"UCX's thread turned {now - self._turned_at:.3f} s and moved something {now - self._moved_at:.3f} s ago, "
            f"{len(self.operations)} operations are under way, the connection {way}, the host's queue: {self.queue.condition}"
        )

    def new_operation(self, peer: Peer, memory: Memory, tag: int, spin_s: float, *, sending: bool) -> Operation:
        """One that `post` begins."""
        loop = self._loop
        assert loop is not None, "start first"
        return Operation(peer, memory, tag, sending, loop.create_future(), loop.create_future(), time.monotonic() + spin_s)

    # ---- on the thread

    def _run(self, ready: asyncio.Future[str]) -> None:
        try:
            self._prepare()
            self.queue.before_opening()
            # WAKEUP: a message that nobody expects, such as a peer's ask, wakes the thread; it need not look for one.
            self._context = ucx.UCXContext(self.config, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
            self._worker = ucx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self.endpoints = Endpoints(self._worker, self.counters)
            self.queue.opened()
            self._sleeper.watch(self._worker.epoll_file_descriptor)
            self.address = self._worker.address.tobytes()
            self.info = self._context.info
        except (ucx.UCXError, RuntimeError, OSError) as exc:
            self._resolve(ready, f"UCX does not open: {exc}")
            return
        self._resolve(ready, "")
        try:
            while not self._stopping:
                self._turn()
            self._end()
        except BaseException as exc:  # a fault of ours or UCX's that nobody foresaw
            self._died(f"UCX's thread ended: {exc!r}")
        finally:
            self.queue.close()

    def _turn(self) -> None:
        """Commands, progress, completions; then as long a pause as nothing suffers from."""
        while self._commands:
            command = self._commands.popleft()
            try:
                command()
            except Exception:  # a fault of ours, or a hostile message: everybody's transfers live on this thread
                self._fault("a command")
        moved = self._progress()
        now = self._turned_at = time.monotonic()
        if moved:
            self._moved_at = now
        self.queue.look(now)
        self._advance(now)
        busy = self.guest is not None and self.guest.turn(now)
        if now - self._swept_at > SWEEP_EVERY_S:
            self._swept_at = now
            self._tags.sweep(self._worker, now, whole=self._warms_whole())
        pause = self._pause_s(now)
        if busy or pause == 0 or self._stopping:
            return
        self._sleeper.sleep(pause, lambda: not self._commands and (self.queue.suspect or self._worker.arm()))

    def _progress(self) -> bool:
        """Let UCX work while it has something to do, or bytes are on their way: a turn takes longer than a step of theirs. True:
        something moved."""
        now = time.monotonic()
        moving = [op.request for op in self.operations if op.request is not None and not op.cancelled and now < op.spin_until]
        moved = False
        for _ in range(PROGRESS_AT_ONCE):
            if self._worker.progress_once():
                moved = True
            elif not moving or self._commands:
                break
            if moving and any(request.completed for request in moving):
                return True
        return moved

    def _pause_s(self, now: float) -> float | None:
        if any(not op.cancelled and now < op.spin_until for op in self.operations):
            still = now - self._moved_at
            return 0 if still < SPIN_S else 0.0001 if still < 0.05 else 0.001
        if now < self._linger_until or self.queue.suspect:  # UCX that cannot be armed wakes nobody
            return 0.001
        if self.operations or self._tags.sinking:
            return 0.01
        return 0.25 if self.endpoints else None

    def linger(self) -> None:
        """Look often for a while."""
        self._linger_until = time.monotonic() + LINGER_S

    def _endpoint(self, peer: Peer) -> Any:
        endpoint = self.endpoints.get(peer)
        self.linger()
        return endpoint

    def _warms_whole(self) -> bool:
        return all(peer.error_handling for peer in self.endpoints.peers)

    def probe(self, tag: int) -> int | None:
        """Bytes of the oldest message under `tag` that waits, None when none does."""
        found = self._worker.tag_probe(ucx.UCXXTag(tag))
        return found.length if found.matched else None

    def take(self, tag: int, memory: np.ndarray) -> Any:
        """Receive what `probe` found into host memory; the request, which says `completed`. Longer messages are cut."""
        return self._worker.tag_recv(Array(memory), ucx.UCXXTag(tag))

    def admit(self, peer: Peer) -> Peer | None:
        """As `Endpoints.admit`."""
        admitted: Peer | None = self.endpoints.admit(peer, time.monotonic())
        return admitted

    def lost(self, peer: Peer) -> bool:
        """The peer is known dead, or its endpoint has failed."""
        lost: bool = self.endpoints.lost(peer)
        return lost

    def prepare(self, peer: Peer) -> None:
        """Make the endpoint and be ready for the peer's first message."""
        try:
            self._endpoint(peer)
            self.endpoints.trust(peer)
        except TransportError as exc:
            # The first receive meets the same and tells its caller.
            logger.warning("ucx: %s", exc)

    def warm(self, peer: Peer) -> None:
        """Send one throw-away message if this peer is new: the first message pays for wire-up and registration."""
        self.endpoints.trust(peer)
        if peer in self.endpoints.peers:
            return
        self._warm_count += 1
        tag = WARM_CHANNEL << CHUNK_BITS | self._warm_count % (1 << CHUNK_BITS)
        operation = self.new_operation(peer, np.zeros(WARM_BYTES, np.uint8), tag, WARM_SPIN_S, sending=True)
        operation.message = True
        self.post(operation)

    def post(self, operation: Operation) -> None:
        """Begin it; whoever waits for it hears when that fails."""
        self._moved_at = time.monotonic()
        try:
            if self._stopping:
                raise TransportError("closed", "UCX is stopped")
            endpoint = self._endpoint(operation.peer)
            if not operation.message:
                self.endpoints.trust(operation.peer)
            if operation.array is None:
                operation.array = as_array(operation.memory)  # also of a receive: now, and not when its message is there
            if operation.sending:
                operation.endpoint = endpoint
                operation.request = endpoint.tag_send(operation.array, ucx.UCXXTag(operation.tag))
        except (ucx.UCXError, RuntimeError) as exc:
            self.settle(operation, TransportError("peer_lost", f"UCX refused to send: {exc}"))
        except TransportError as exc:
            self.settle(operation, exc)
        except Exception as exc:  # as `_turn`: it ends this operation
            self._fault("a send")
            self.settle(operation, TransportError("refused", f"it cannot be sent: {exc!r}"))
        else:
            self.operations.append(operation)
            if operation.begun is not None:
                self._resolve(operation.begun, None)

    def _advance(self, now: float) -> None:
        """Begin receives whose message is announced, settle what has completed."""
        for operation in list(self.operations):
            if operation.request is None:
                self._begin_receive(operation)
            request = operation.request
            if request is not None and request.completed:
                operation.request = operation.array = operation.endpoint = None
                self.settle(operation, failure_of(request))
        self._tags.settle()
        self.endpoints.close_retired(self.operations)

    def _begin_receive(self, operation: Operation) -> None:
        tag = ucx.UCXXTag(operation.tag)
        if operation.cancelled:
            self.settle(operation, TransportError("closed", "given up before the payload was announced"))
            return
        endpoint = self.endpoints.working(operation.peer)
        if endpoint is None:
            self.settle(operation, TransportError("peer_lost", "the connection to the sender failed"))
            return
        found = self._worker.tag_probe(tag)
        if not found.matched:
            return
        expected = len(operation.memory)
        if found.length != expected:
            self._tags.sink(self._worker, found, whole=self._warms_whole())
            self.settle(operation, TransportError("corrupt", f"{found.length} bytes came where {expected} were announced"))
            return
        operation.endpoint = endpoint
        try:
            operation.request = endpoint.tag_recv(operation.array, tag)
            if operation.spin_when_begun_s:
                operation.spin_until = time.monotonic() + operation.spin_when_begun_s
        except (ucx.UCXError, RuntimeError) as exc:
            self.settle(operation, TransportError("peer_lost", f"UCX refused to receive: {exc}"))

    def retire(self, peer: Peer) -> None:
        """End what was given up on this peer's endpoint (`UcxCore.reset`)."""
        if not self.endpoints.retire(peer, self.operations):
            return
        if any(op.peer == peer and op.endpoint is None and not op.cancelled for op in self.operations):
            self.prepare(peer)  # a receive waits for its message: it will be posted on the new one
        self.endpoints.close_retired(self.operations)

    def bury(self, incarnation: str) -> None:
        """The process is gone: close its endpoints, then settle what was outstanding whether or not UCX completed it."""
        self.endpoints.bury(incarnation)
        self.queue.look(time.monotonic(), at_once=True)
        self._advance(time.monotonic())
        for operation in [op for op in self.operations if op.peer.incarnation == incarnation]:
            self._abandon(operation, TransportError("peer_lost", f"incarnation {incarnation!r} is dead"))
        self.counters["leaked_attachments"] = leaked_attachments()

    def _abandon(self, operation: Operation, why: TransportError) -> None:
        if operation.request is not None:
            _never_freed.append((operation.request, operation.array))
            self.counters["abandoned"] += 1
        self.settle(operation, why)

    def settle(self, operation: Operation, failure: TransportError | None) -> None:
        """It is over: tell whoever waits."""
        with contextlib.suppress(ValueError):
            self.operations.remove(operation)
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
        logger.critical("ucx: %s", why, exc_info=True)
        self.failure = why
        self.counters["thread_ended"] += 1
        operations, self.operations = self.operations, []
        for operation in operations:
            if operation.begun is not None:
                self._resolve(operation.begun, None)
            if operation.request is None:
                self._resolve(operation.done, TransportError("closed", why))
        _never_freed.append((operations, self._tags.sinking, self.endpoints, self._worker, self._context))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self.ended.set)
        if self.guest is not None:
            self.guest.end()

    def begin_stop(self) -> None:
        """End after this turn."""
        self._stopping = True

    def _end(self) -> None:
        """Close everything. A live peer of this host may still read what is outstanding, so its request is never freed."""
        while self._commands:
            self._commands.popleft()()
        outstanding = bool(self.operations or self._tags.sinking)
        self.endpoints.close()
        self._advance(time.monotonic())
        for operation in list(self.operations):
            self._abandon(operation, TransportError("closed", "UCX is stopped"))
        if self.guest is not None:
            self.guest.end()
        if outstanding:
            _never_freed.append((self._tags.sinking, self._worker, self._context))
        self.endpoints = self._worker = self._context = None
