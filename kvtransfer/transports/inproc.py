"""Payload by reference between nodes of one process, each with its own thread: for tests and the simulated engine."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kvtransfer.memory import copy_into
from kvtransfer.transports import TransportContext
from kvtransfer.transports.base import Memory, TransportError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb


@dataclass(slots=True)
class _Offer:
    """One chunk on offer. `done` is set when its memory will not be read any more."""

    payload: Memory
    done: threading.Event = field(default_factory=threading.Event)


class _Exchange:
    """Chunks on offer in this process, by tag."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._tags = itertools.count(1)

    def offer(self, payload: Memory) -> tuple[int, _Offer]:
        with self._lock:
            tag = next(self._tags)
            offer = self._offers[tag] = _Offer(payload)
        return tag, offer

    def take(self, tag: int) -> _Offer | None:
        with self._lock:
            return self._offers.pop(tag, None)

    def withdraw(self, tag: int) -> None:
        offer = self.take(tag)
        if offer is not None:
            offer.done.set()


_EXCHANGE = _Exchange()


def create(context: TransportContext) -> InprocTransport:
    return InprocTransport()


class InprocSendChannel:
    def __init__(self) -> None:
        self._sent: list[tuple[int, _Offer]] = []

    async def send(self, header: pb.ChunkHeader, payload: Memory) -> AsyncIterator[pb.FetchResponse]:
        tag, offer = _EXCHANGE.offer(payload)
        self._sent.append((tag, offer))
        tagged = pb.ChunkHeader()
        tagged.CopyFrom(header)
        tagged.tag = tag
        yield pb.FetchResponse(header=tagged)

    async def drained(self, timeout_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(not offer.done.is_set() for _, offer in self._sent):
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.001)
        return True

    async def close(self) -> None:
        for tag, _ in self._sent:
            _EXCHANGE.withdraw(tag)


class InprocReceiveChannel:
    async def accept(
        self, response: pb.FetchResponse, target: Callable[[pb.ChunkHeader], Memory], timeout_s: float
    ) -> pb.ChunkHeader | None:
        if not response.HasField("header"):
            raise TransportError("corrupt", "a message without a header")
        memory = target(response.header)
        offer = _EXCHANGE.take(response.header.tag)
        if offer is None:
            raise TransportError("closed", f"chunk {response.header.index} is not on offer (any more)")
        try:
            if len(offer.payload) != len(memory):
                raise TransportError("corrupt", f"chunk of {len(offer.payload)} bytes where {len(memory)} were announced")
            copy_into(memory, offer.payload)
        finally:
            offer.done.set()
        return response.header

    async def drained(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        return


class InprocTransport:
    scheme = "inproc"

    async def start(self) -> None:
        return

    def worker_address(self) -> bytes:
        return b""

    def open_send(self, request: pb.FetchRequest) -> InprocSendChannel:
        return InprocSendChannel()

    def open_receive(self, sender: pb.RankEndpoint, request: pb.FetchRequest) -> InprocReceiveChannel:
        return InprocReceiveChannel()

    def peer_died(self, incarnation: str) -> None:
        return

    def describe(self) -> dict[str, str]:
        return {"scheme": self.scheme}

    async def stop(self) -> None:
        return
