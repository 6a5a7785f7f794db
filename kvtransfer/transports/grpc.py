"""Payload inside the `Fetch` stream: works wherever gRPC does.

A chunk is its header with the first piece of payload, then pieces alone. A piece is copied out of the slot when its message
is made, so the slot is free of this transport the moment the stream ends, whatever the network still holds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

import numpy as np

from kvtransfer.bounce import Bounce
from kvtransfer.checksum import crc32c
from kvtransfer.memory import as_host, copy_into, on_device
from kvtransfer.transports import TransportContext
from kvtransfer.transports.base import Memory, TransportError
from kvtransfer.wire import Piece
from protos.splitpoint.v1 import kv_transfer_pb2 as pb


def create(context: TransportContext) -> GrpcTransport:
    return GrpcTransport(context.settings.grpc_message_bytes)


class GrpcSendChannel:
    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._closed = False
        self._bounce: Bounce | None = None

    async def send(self, header: pb.ChunkHeader, payload: Memory) -> AsyncIterator[pb.FetchResponse]:
        start = 0
        for piece in self._pieces(payload):
            if self._closed:
                raise TransportError("closed", f"the channel was closed at byte {start} of chunk {header.index}")
            # Serialised, and so copied out of the slot, before the node awaits anything.
            yield cast(pb.FetchResponse, Piece(header if start == 0 else None, piece))
            start += len(piece)

    def _pieces(self, payload: Memory) -> Iterator[np.ndarray]:
        if on_device(payload):
            self._bounce = self._bounce or Bounce(payload, self._message_bytes)
            yield from self._bounce.pieces(payload)
            return
        host = as_host(payload)
        for start in range(0, len(host), self._message_bytes):
            yield host[start : start + self._message_bytes]

    async def drained(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        self._closed = True


class GrpcReceiveChannel:
    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._bounce: Bounce | None = None
        self._header: pb.ChunkHeader | None = None
        self._target: Memory = None
        self._landed = 0
        self._value = 0
        self._values: dict[int, int] = {}

    async def accept(
        self, response: pb.FetchResponse, target: Callable[[pb.ChunkHeader], Memory], timeout_s: float
    ) -> pb.ChunkHeader | None:
        if response.HasField("header"):
            if self._header is not None:
                raise TransportError("corrupt", f"a chunk began before chunk {self._header.index} was whole")
            self._header, self._landed, self._value = response.header, 0, 0
            self._target = target(response.header)
        header = self._header
        if header is None:
            raise TransportError("corrupt", f"{len(response.payload)} bytes of payload without a chunk")
        end = self._landed + len(response.payload)
        if len(response.payload) == 0 or end > header.bytes:
            raise TransportError("corrupt", f"chunk {header.index}: {end} bytes where {header.bytes} were announced")
        self._land(self._target[self._landed : end], response.payload, header)
        self._landed = end
        if end < header.bytes:
            return None
        if self._bounce is not None:
            self._bounce.finish()
        elif header.checksum.algorithm == "crc32c":
            self._values[header.index] = self._value
        self._header = self._target = None
        return header

    def landed_crc32c(self, index: int) -> int | None:
        """CRC32C of chunk `index` as it lies in host memory; None for a device's. Once."""
        return self._values.pop(index, None)

    def _land(self, target: Memory, payload: bytes, header: pb.ChunkHeader) -> None:
        if not on_device(target):
            copy_into(target, payload)
            if header.checksum.algorithm == "crc32c":
                # Of what lies in the slot, while the processor still has it at hand.
                self._value = crc32c(target, self._value)
            return
        self._bounce = self._bounce or Bounce(target, self._message_bytes)
        self._bounce.land(target, payload)

    async def drained(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        if self._bounce is not None:
            self._bounce.finish()
        self._header = self._target = None


class GrpcTransport:
    """No state of its own: the node's gRPC server and channels carry everything."""

    scheme = "grpc"

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes

    async def start(self) -> None:
        return

    def worker_address(self) -> bytes:
        return b""

    def open_send(self, request: pb.FetchRequest) -> GrpcSendChannel:
        return GrpcSendChannel(self._message_bytes)

    def open_receive(self, sender: pb.RankEndpoint, request: pb.FetchRequest) -> GrpcReceiveChannel:
        return GrpcReceiveChannel(self._message_bytes)

    def peer_died(self, incarnation: str) -> None:
        return

    def describe(self) -> dict[str, str]:
        return {"scheme": self.scheme, "message_bytes": str(self._message_bytes)}

    async def stop(self) -> None:
        return
