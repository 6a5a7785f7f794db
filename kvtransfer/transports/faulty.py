"""Any transport, made to fail on purpose: what a receiver gets is dropped, late, cut, doubled, swapped, flipped or ends.

A schedule decides for each stream message. Faults of the stream are made where it leaves the sender; a flipped bit where it
has landed, so that payload beside the stream is reached too.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum

import numpy as np

from kvtransfer.memory import as_host, copy_into
from kvtransfer.transports.base import (
    ChecksAsItLands,
    Memory,
    ReadByPeer,
    ReadsPeer,
    ReceiveChannel,
    SendChannel,
    Transport,
    TransportError,
)
from protos.splitpoint.v1 import kv_transfer_pb2 as pb


class Fault(StrEnum):
    DROP = "drop"
    DELAY = "delay"
    TRUNCATE = "truncate"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    FLIP = "flip"
    CLOSE = "close"
    STALL = "stall"


Schedule = Callable[[int, int], Fault | None]
"""(number of the message in this channel, payload bytes before it) -> what happens to it."""
Faults = Callable[[], Schedule]
"""Makes the schedule of one channel."""


def at_message(number: int, fault: Fault) -> Faults:
    """One fault, at one message of each channel."""
    return lambda: lambda message, _: fault if message == number else None


def at_byte(offset: int, fault: Fault) -> Faults:
    """One fault a channel, at the first message that begins at or after this payload byte."""

    def make() -> Schedule:
        fired = False

        def schedule(_: int, begins_at: int) -> Fault | None:
            nonlocal fired
            if fired or begins_at < offset:
                return None
            fired = True
            return fault

        return schedule

    return make


def seeded(seed: int, rates: Mapping[Fault, float]) -> Faults:
    """Each message independently, with these probabilities; the same seed gives the same faults."""
    rng = random.Random(seed)

    def schedule(_: int, __: int) -> Fault | None:
        draw = rng.random()
        for fault, rate in rates.items():
            draw -= rate
            if draw < 0:
                return fault
        return None

    return lambda: schedule


class FaultySendChannel:
    def __init__(self, inner: SendChannel, owner: FaultyTransport) -> None:
        self._inner = inner
        self._owner = owner
        self._schedule = owner.faults()
        self._messages = 0
        self._bytes = 0
        self._held: pb.FetchResponse | None = None
        self._closed = asyncio.Event()

    async def send(self, header: pb.ChunkHeader, payload: Memory) -> AsyncIterator[pb.FetchResponse]:
        async for response in self._inner.send(header, payload):
            fault = self._schedule(self._messages, self._bytes)
            self._messages += 1
            self._bytes += len(response.payload) or response.header.bytes
            async for faulty in self._apply(fault, response):
                yield faulty
        if header.last and self._held is not None:
            held, self._held = self._held, None
            yield held

    async def _apply(self, fault: Fault | None, response: pb.FetchResponse) -> AsyncIterator[pb.FetchResponse]:
        if fault is not None and fault is not Fault.FLIP:
            self._owner.injected[fault] += 1
        if fault is Fault.CLOSE:
            raise TransportError("closed", "closed on purpose")
        if fault is Fault.STALL:
            await self._closed.wait()
            raise TransportError("closed", "stalled on purpose until closed")
        if fault is Fault.DELAY:
            await asyncio.sleep(self._owner.delay_s)
        if fault is Fault.REORDER and self._held is None:
            self._held = response
            return
        if fault is not Fault.DROP:
            yield _cut(response) if fault is Fault.TRUNCATE else response
        if fault is Fault.DUPLICATE:
            yield response
        if self._held is not None:
            held, self._held = self._held, None
            yield held

    async def drained(self, timeout_s: float) -> bool:
        return await self._inner.drained(timeout_s)

    async def close(self) -> None:
        self._closed.set()
        await self._inner.close()

    def peer_done(self) -> None:
        """As `ReadByPeer`; nothing where the receiver does not read this side's memory."""
        if isinstance(self._inner, ReadByPeer):
            self._inner.peer_done()


def _cut(response: pb.FetchResponse) -> pb.FetchResponse:
    """One byte short: of the payload where the stream carries it, of the announcement where it does not."""
    header = response.header if response.HasField("header") else None
    short = pb.FetchResponse(header=header, payload=bytes(response.payload))
    if short.payload:
        short.payload = short.payload[:-1]
    else:
        short.header.bytes -= 1
    return short


class FaultyReceiveChannel:
    """It lends nothing (`Lends`): a fault is made in what has landed."""

    def __init__(self, inner: ReceiveChannel, owner: FaultyTransport) -> None:
        self._inner = inner
        self._owner = owner
        self._schedule = owner.faults()
        self._messages = 0
        self._bytes = 0
        self._flip = False
        self._flipped: set[int] = set()
        self._landing: Memory = None

    async def accept(
        self, response: pb.FetchResponse, target: Callable[[pb.ChunkHeader], Memory], timeout_s: float
    ) -> pb.ChunkHeader | None:
        self._flip |= self._schedule(self._messages, self._bytes) is Fault.FLIP
        self._messages += 1
        self._bytes += len(response.payload) or response.header.bytes

        def noted(header: pb.ChunkHeader) -> Memory:
            self._landing = target(header)
            return self._landing

        header = await self._inner.accept(response, noted, timeout_s)
        if header is not None and self._flip:
            self._flip = False
            self._owner.flip(self._landing)
            self._flipped.add(header.index)
        return header

    @property
    def reads_peer(self) -> bool:
        """As `ReadsPeer`."""
        return isinstance(self._inner, ReadsPeer) and self._inner.reads_peer

    def landed_crc32c(self, index: int) -> int | None:
        """As `ChecksAsItLands`. What was flipped afterwards has to be looked at again."""
        if not isinstance(self._inner, ChecksAsItLands):
            return None
        value = self._inner.landed_crc32c(index)
        return None if index in self._flipped else value

    async def drained(self, timeout_s: float) -> bool:
        return await self._inner.drained(timeout_s)

    async def close(self) -> None:
        await self._inner.close()


class FaultyTransport:
    """`inner` with faults; it answers to the same scheme. `injected` counts what was really done.

    Wrap both sides with the same faults to reach every fault; wrapped on one side alone, only that side's are made.
    """

    def __init__(self, inner: Transport, faults: Faults, *, delay_s: float = 0.01, seed: int = 0) -> None:
        self.inner = inner
        self.scheme = inner.scheme
        self.faults = faults
        self.delay_s = delay_s
        self.injected: Counter[Fault] = Counter()
        self._rng = random.Random(seed)

    def flip(self, memory: Memory) -> None:
        """Flip one bit of landed payload."""
        self.injected[Fault.FLIP] += 1
        place = self._rng.randrange(len(memory))
        byte = as_host(memory[place : place + 1]) ^ np.uint8(1 << self._rng.randrange(8))
        copy_into(memory[place : place + 1], byte)

    async def start(self) -> None:
        await self.inner.start()

    def worker_address(self) -> bytes:
        return self.inner.worker_address()

    def open_send(self, request: pb.FetchRequest) -> FaultySendChannel:
        return FaultySendChannel(self.inner.open_send(request), self)

    def open_receive(self, sender: pb.RankEndpoint, request: pb.FetchRequest) -> FaultyReceiveChannel:
        return FaultyReceiveChannel(self.inner.open_receive(sender, request), self)

    def peer_died(self, incarnation: str) -> None:
        self.inner.peer_died(incarnation)

    def describe(self) -> dict[str, str]:
        return {**self.inner.describe(), "faulty": "yes"}

    async def stop(self) -> None:
        await self.inner.stop()
