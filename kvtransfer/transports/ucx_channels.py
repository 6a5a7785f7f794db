"""The two halves of one UCX transfer. A chunk goes one of two ways, told by its header: as a UCX message under the header's tag,
or, inside one host, read by the receiver itself at the header's address (same_host.py)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from kvtransfer.memory import as_host
from kvtransfer.shared_area import Mapping
from kvtransfer.transports.base import Lent, Memory, TransportError
from kvtransfer.transports.mapped import MappedShare, check_all
from kvtransfer.transports.same_host import ProcessId, address_of, read_all, why_unreadable
from kvtransfer.transports.ucx_asks import COMPLETE_TAG, Answers, Asking, Asks, Takes
from kvtransfer.transports.ucx_core import CHUNK_BITS, Operation, Peer, UcxCore
from kvtransfer.transports.ucx_operation import as_array
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

Settled = Callable[[TransportError | None], None]

RESET_AFTER_S = 5.0
"""A send between hosts that nobody took this long after its channel was closed is ended by closing the endpoint."""


class _Channel:
    """What both halves share: operations outstanding, and the truth about them. Operations begin on the node's loop or on UCX's
    thread, under `_guard`: none begins after `close`, and `drained` misses none."""

    def __init__(self, core: UcxCore, peer: Peer) -> None:
        self._core = core
        self._peer = peer
        self._operations: list[Operation] = []
        self._closed_at: float | None = None
        self._guard = threading.Lock()

    def _outstanding(self) -> list[Operation]:
        with self._guard:
            self._operations = [operation for operation in self._operations if not operation.done.done()]
            return list(self._operations)

    def _on_thread(self, header: pb.ChunkHeader, memory: Memory, spin_s: float, settled: Settled, *, sending: bool) -> Operation:
        """An operation for UCX's thread to post. Raises `TransportError("closed")`."""
        operation = self._core.prepare_operation(self._peer, memory, header.tag, spin_s, settled, sending=sending)
        with self._guard:
            if self._closed_at is not None:
                raise TransportError("closed", f"the channel was closed before chunk {header.index}")
            self._operations.append(operation)
        return operation

    async def drained(self, timeout_s: float) -> bool:
        pending = [operation.done for operation in self._outstanding()]
        if pending:
            if self._closed_at is not None and time.monotonic() - self._closed_at > RESET_AFTER_S:
                self._core.reset(self._peer)
            await asyncio.wait(pending, timeout=timeout_s)
        return not self._outstanding()

    async def close(self) -> None:
        with self._guard:
            if self._closed_at is None:
                self._closed_at = time.monotonic()
        for operation in self._outstanding():
            self._core.give_up(operation)


class UcxSendChannel(_Channel):
    """`read_by_peer`: the receiver asked to read host memory itself. It then says when it is done (`peer_done`), or is dead."""

    def __init__(
        self, core: UcxCore, peer: Peer, channel: int, spin_s: float, *, read_by_peer: bool, counters: Counter[str]
    ) -> None:
        super().__init__(core, peer)
        self._channel = channel
        self._spin_s = spin_s
        self._sent = 0
        self._read_by_peer = read_by_peer
        self._counters = counters
        self._offered = False
        self._announced: Any = None
        """The announced payload as UCX takes it."""
        self._peer_done = asyncio.Event()
        if not read_by_peer:
            core.warm(peer)

    async def send(self, header: pb.ChunkHeader, payload: Memory) -> AsyncIterator[pb.FetchResponse]:
        if self._closed_at is not None:
            raise TransportError("closed", f"the channel was closed before chunk {header.index}")
        if self._read_by_peer:
            address = address_of(payload)
            if address:
                self._offered = True
                self._counters["chunks_offered"] += 1
                header.address = address
                yield pb.FetchResponse(header=header)
                return
            self._counters["chunks_not_readable"] += 1
        self._raise_failure()
        self._name(header)
        operation = self._core.send(self._peer, payload, header.tag, self._spin_s)
        self._operations = [*self._outstanding(), operation]
        assert operation.begun is not None
        await operation.begun
        self._raise_failure()
        yield pb.FetchResponse(header=header)

    def send_now(self, header: pb.ChunkHeader, payload: Memory, answers: Answers, settled: Settled) -> None:
        """On UCX's thread: header and payload at once. `settled` hears of each when it is on its way or with the receiver, or why
        not.

        Raises:
            TransportError: "closed", or too many chunks; nothing is sent then.
        """
        self._name(header)
        operation = self._on_thread(header, payload, self._spin_s, settled, sending=True)
        answers.header(header, settled)
        self._core.post(operation)

    def announce_now(self, header: pb.ChunkHeader, payload: Memory, answers: Answers, settled: Settled) -> None:
        """As `transports.base.SendsItself`."""
        self._name(header)
        self._announced = as_array(payload)
        answers.header(header, settled, announced=True)

    def send_announced(self, header: pb.ChunkHeader, payload: Memory, settled: Settled) -> None:
        """As `transports.base.SendsItself`."""
        operation = self._on_thread(header, payload, self._spin_s, settled, sending=True)
        operation.array, self._announced = self._announced, None
        self._core.post(operation)

    def _name(self, header: pb.ChunkHeader) -> None:
        self._sent += 1
        if self._sent >> CHUNK_BITS:
            raise TransportError("refused", f"more than {(1 << CHUNK_BITS) - 1} chunks in one transfer")
        header.tag = self._channel << CHUNK_BITS | self._sent

    def peer_done(self) -> None:
        """The receiver has said that it reads no more, or its process is dead."""
        self._peer_done.set()

    async def drained(self, timeout_s: float) -> bool:
        begun = time.monotonic()
        if not await super().drained(timeout_s):
            return False
        if self._offered and not self._peer_done.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, timeout_s - (time.monotonic() - begun))):
                    await self._peer_done.wait()
        return self._peer_done.is_set() or not self._offered

    def _raise_failure(self) -> None:
        with self._guard:
            operations = list(self._operations)
        for operation in operations:
            if operation.done.done() and (failure := operation.done.result()):
                raise TransportError(failure.reason, f"sending to incarnation {self._peer.incarnation!r}: {failure}")


class UcxReceiveChannel(_Channel):
    """`source`: the sender's process, when its memory is read from here; `readers` are the threads that do it."""

    def __init__(
        self,
        core: UcxCore,
        peer: Peer,
        channel: int,
        *,
        source: ProcessId | None,
        mapping: Callable[[], Mapping | None] | None = None,
        readers: Executor,
        stopping: threading.Event,
        counters: Counter[str],
        asks: Asks | None = None,
    ) -> None:
        """`mapping`: maps the sender's staging, where that may be done; `asks`: the sender also takes `Fetch` as a UCX message
        (`ask`)."""
        super().__init__(core, peer)
        self._asks = asks
        self._asking: Asking | None = None
        self._channel = channel
        self._source = source
        self._mapping = mapping
        self._share: MappedShare | None = None
        self._readers = readers
        self._stopping = stopping
        self._counters = counters
        self._give_up = False
        self._has_read = False
        self._reads: set[asyncio.Future[int]] = set()
        self._values: dict[int, int] = {}
        if source is None:
            core.expect(peer)

    async def accept(
        self, response: pb.FetchResponse, target: Callable[[pb.ChunkHeader], Memory], timeout_s: float
    ) -> pb.ChunkHeader | None:
        if not response.HasField("header") or response.payload:
            raise TransportError("corrupt", "payload inside the stream of a UCX transfer")
        header = response.header
        if self._closed_at is not None:
            raise TransportError("closed", f"the channel was closed before chunk {header.index}")
        if header.address:
            return await self._read(header, target, timeout_s)
        if header.tag >> CHUNK_BITS != self._channel:
            raise TransportError("corrupt", f"chunk {header.index} names tag {header.tag:#x}, not one of this transfer")
        memory = target(header)
        if len(memory) != header.bytes:
            raise TransportError("corrupt", f"chunk {header.index}: {header.bytes} bytes for a place of {len(memory)}")
        operation = self._core.receive(self._peer, memory, header.tag, timeout_s)
        self._operations = [*self._outstanding(), operation]
        try:
            async with asyncio.timeout(timeout_s):
                failure = await asyncio.shield(operation.done)
        except TimeoutError:
            self._core.give_up(operation)
            text = f"chunk {header.index}: {header.bytes} bytes did not land in {timeout_s:.3f} s"
            raise TransportError("timeout", f"{text} ({self._core.condition(self._peer)})") from None
        if failure is not None:
            raise TransportError(failure.reason, f"chunk {header.index}: {failure}")
        return header

    @property
    def asks(self) -> bool:
        """As `AsksItself`."""
        return self._asks is not None

    def ask(self, request: pb.FetchRequest, takes: Takes, limit_s: float) -> None:
        """As `AsksItself`."""
        asks = self._asks
        assert asks is not None

        def operation(header: pb.ChunkHeader, memory: Memory, settled: Settled, *, announced: bool) -> Operation:
            self._require_whole(header, memory)
            made = self._on_thread(header, memory, 0.0 if announced else limit_s, settled, sending=False)
            made.spin_when_begun_s = limit_s
            return made

        asking = self._asking = Asking(asks, self._peer, self._channel, takes, operation, limit_s, request.grant)
        self._core.run(lambda: asks.ask(asking, request))

    async def tell(self, request: pb.CompleteRequest) -> bool:
        """As `AsksItself`."""
        asks = self._asks
        assert asks is not None
        told: Future[bool] = Future()

        def settled(failure: TransportError | None) -> None:
            # Whoever waited may have given up, which cancels it.
            if told.set_running_or_notify_cancel():
                told.set_result(failure is None)

        self._core.run(lambda: asks.say(self._peer, COMPLETE_TAG, request, settled))
        return await asyncio.wrap_future(told)

    def until(self, done: Callable[[], bool]) -> None:
        """As `AsksItself`."""
        assert self._asks is not None
        self._asks.watch(done)

    def run(self, work: Callable[[], None]) -> None:
        """As `AsksItself`."""
        self._core.run(work)

    def _require_whole(self, header: pb.ChunkHeader, memory: Memory) -> None:
        if header.tag >> CHUNK_BITS != self._channel:
            raise TransportError("corrupt", f"chunk {header.index} names tag {header.tag:#x}, not one of this transfer")
        if len(memory) != header.bytes:
            raise TransportError("corrupt", f"chunk {header.index}: {header.bytes} bytes for a place of {len(memory)}")

    async def _read(self, header: pb.ChunkHeader, target: Callable[[pb.ChunkHeader], Memory], timeout_s: float) -> pb.ChunkHeader:
        if self._source is None:
            raise TransportError("corrupt", f"chunk {header.index} names an address, and nobody asked for one")
        memory = as_host(target(header))
        if len(memory) != header.bytes:
            raise TransportError("corrupt", f"chunk {header.index}: {header.bytes} bytes for a place of {len(memory)}")
        mapped = None if self._share is None else self._share.find(header)
        moved = 0

        def count() -> None:
            nonlocal moved
            moved += 1

        check = header.checksum.algorithm == "crc32c"
        read = partial(read_all, self._source, header.address, memory) if mapped is None else partial(check_all, mapped)
        work = partial(read, check=check, stopped=self._stopped, moved=count)
        reading = asyncio.get_running_loop().run_in_executor(self._readers, work)
        self._reads.add(reading)
        self._has_read = True
        reading.add_done_callback(self._ended)
        seen = -1
        while not reading.done() and moved != seen:
            seen = moved
            await asyncio.wait([reading], timeout=timeout_s)
        if not reading.done():
            self._give_up = True
            raise TransportError("timeout", f"chunk {header.index}: nothing was read for {timeout_s:.3f} s")
        value = await reading
        if check:
            self._values[header.index] = value
        how = "read" if mapped is None else "mapped"
        self._counters[f"chunks_{how}"] += 1
        self._counters[f"bytes_{how}"] += header.bytes
        return header

    @property
    def reads_peer(self) -> bool:
        return self._has_read and self._source is not None and not why_unreadable(self._source)

    def lend(self) -> None:
        """As `Lends`."""
        mapping = None if self._mapping is None else self._mapping()
        self._share = None if mapping is None else MappedShare(mapping)

    @property
    def lent(self) -> Lent | None:
        """As `Lends`."""
        return self._share if self._share is not None and self._share.used else None

    def landed_crc32c(self, index: int) -> int | None:
        """CRC32C of chunk `index` as it lies in the slot, where reading it computed that already. Once."""
        return self._values.pop(index, None)

    def _stopped(self) -> bool:
        return self._give_up or self._closed_at is not None or self._stopping.is_set()

    def _ended(self, reading: asyncio.Future[int]) -> None:
        self._reads.discard(reading)
        if not reading.cancelled():
            reading.exception()  # whoever waited has it; after a cancel nobody did

    async def drained(self, timeout_s: float) -> bool:
        begun = time.monotonic()
        if self._reads:
            await asyncio.wait(self._reads, timeout=timeout_s)
        left_s = max(0.0, timeout_s - (time.monotonic() - begun))
        return not self._reads and await super().drained(left_s)

    async def close(self) -> None:
        await super().close()
        asks, asking = self._asks, self._asking
        if asks is not None and asking is not None:
            self._core.run(lambda: asks.leave(asking))
        self._core.close_channel(self._channel)
