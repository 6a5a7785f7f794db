"""Payload beside the `Fetch` stream, written by NIXL from the sender's slot into the receiver's: one-sided, but only by grant.

A chunk's header goes over the stream; the receiver checks it and grants the chunk's place in its slot; the sender, whose lease
the `Fetch` has checked, writes there. NIXL's wheels bring a UCX with InfiniBand, RoCE and EFA, which the UCX of PyPI has not.
See docs/decisions/0012.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable

from kvtransfer.transports import TransportContext
from kvtransfer.transports.base import Memory, TransportError
from kvtransfer.transports.nixl_core import NixlCore
from kvtransfer.transports.nixl_library import NIXL_VERSION, verbs_bundled
from kvtransfer.transports.nixl_messages import AgentAddress
from kvtransfer.transports.nixl_operation import Operation, Peer
from kvtransfer.transports.ucx_environment import devices_for
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

SCHEME = "nixl"
CHANNEL_BYTES = 8


def create(context: TransportContext) -> NixlTransport:
    name = f"{context.incarnation}.{context.rank}"
    areas = [context.send_memory, context.receive_memory]
    return NixlTransport(NixlCore(name, areas, devices_for(context.settings.bind_host)))


class _Channel:
    """What both halves share: operations outstanding, and the truth about them."""

    def __init__(self, core: NixlCore, peer: Peer, channel: int) -> None:
        self._core = core
        self._peer = peer
        self._channel = channel
        self._operations: list[Operation] = []
        self._closed = False

    async def drained(self, timeout_s: float) -> bool:
        pending = [operation.done for operation in self._operations if not operation.done.done()]
        if pending:
            await asyncio.wait(pending, timeout=timeout_s)
        self._operations = [operation for operation in self._operations if not operation.done.done()]
        return not self._operations

    async def close(self) -> None:
        self._closed = True
        for operation in self._operations:
            if not operation.done.done():
                self._core.give_up(operation)


class NixlSendChannel(_Channel):
    async def send(self, header: pb.ChunkHeader, payload: Memory) -> AsyncIterator[pb.FetchResponse]:
        if self._closed:
            raise TransportError("closed", f"the channel was closed before chunk {header.index}")
        self._raise_failure()
        self._operations = [operation for operation in self._operations if not operation.done.done()]
        operation = self._core.offer(self._peer, self._channel, header.index, payload)
        self._operations.append(operation)
        await operation.begun
        self._raise_failure()
        yield pb.FetchResponse(header=header)

    def _raise_failure(self) -> None:
        for operation in self._operations:
            if operation.done.done() and (failure := operation.done.result()):
                raise TransportError(failure.reason, f"sending to incarnation {self._peer.incarnation!r}: {failure}")


class NixlReceiveChannel(_Channel):
    async def accept(
        self, response: pb.FetchResponse, target: Callable[[pb.ChunkHeader], Memory], timeout_s: float
    ) -> pb.ChunkHeader | None:
        if not response.HasField("header") or response.payload:
            raise TransportError("corrupt", "payload inside the stream of a NIXL transfer")
        header = response.header
        if self._closed:
            raise TransportError("closed", f"the channel was closed before chunk {header.index}")
        memory = target(header)
        if len(memory) != header.bytes:
            raise TransportError("corrupt", f"chunk {header.index}: {header.bytes} bytes for a place of {len(memory)}")
        operation = self._core.grant(self._peer, self._channel, header.index, memory)
        self._operations = [*(o for o in self._operations if not o.done.done()), operation]
        await self._landed(operation, header, timeout_s)
        return header

    async def _landed(self, operation: Operation, header: pb.ChunkHeader, timeout_s: float) -> None:
        """Until the chunk is whole; `timeout_s` without a step of it is a failure."""
        while not operation.done.done():
            left_s = operation.moved_at + timeout_s - time.monotonic()
            if left_s <= 0:
                self._core.give_up(operation)
                text = f"chunk {header.index}: no step of {header.bytes} bytes landed in {timeout_s:.3f} s"
                raise TransportError("timeout", text)
            await asyncio.wait((operation.done, operation.lost), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if operation.lost.done() and not operation.done.done() and (failure := operation.lost.result()):
                raise TransportError(failure.reason, f"chunk {header.index}: {failure}")
        if (failure := operation.done.result()) is not None:
            raise TransportError(failure.reason, f"chunk {header.index}: {failure}")


class NixlTransport:
    """A rank's NIXL agent and what it knows of its peers, kept until they are known dead."""

    scheme = SCHEME

    def __init__(self, core: NixlCore) -> None:
        self._core = core

    async def start(self) -> None:
        await self._core.start()

    def worker_address(self) -> bytes:
        return self._core.address

    def open_send(self, request: pb.FetchRequest) -> NixlSendChannel:
        """Raises `TransportError("refused")` when the receiver's address is missing or not of this NIXL."""
        channel, address = request.transport_address[:CHANNEL_BYTES], request.transport_address[CHANNEL_BYTES:]
        peer = _peer(address, request.receiver_incarnation)
        return NixlSendChannel(self._core, peer, int.from_bytes(channel, "little"))

    def open_receive(self, sender: pb.RankEndpoint, request: pb.FetchRequest) -> NixlReceiveChannel:
        """Fills `request.transport_address`. Raises `TransportError("refused")` like `open_send`."""
        peer = _peer(sender.transport_addresses[SCHEME], sender.incarnation)
        channel = secrets.token_bytes(CHANNEL_BYTES)
        request.transport_address = channel + self._core.address
        return NixlReceiveChannel(self._core, peer, int.from_bytes(channel, "little"))

    def peer_died(self, incarnation: str) -> None:
        self._core.peer_died(incarnation)

    def counters(self) -> dict[str, int]:
        """Since start: peers, reconnects, completed, failed, late_notices, strange_notices, and what went wrong."""
        return dict(self._core.counters)

    def describe(self) -> dict[str, str]:
        return {
            "scheme": self.scheme,
            "nixl_version": ".".join(str(part) for part in NIXL_VERSION),
            "backend": "UCX",
            "verbs": "yes" if verbs_bundled() else "no",
        }

    async def stop(self) -> None:
        await self._core.stop()


def _peer(address: bytes, incarnation: str) -> Peer:
    try:
        known = AgentAddress.decode(address, version=NIXL_VERSION)
    except ValueError as exc:
        raise TransportError("refused", str(exc)) from exc
    if not known.agent.startswith(f"{incarnation}."):
        raise TransportError("refused", f"the NIXL address of {known.agent} is not of incarnation {incarnation!r}")
    return Peer(incarnation, known.agent, known.metadata)
