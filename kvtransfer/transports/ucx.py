"""Payload beside the `Fetch` stream, from slot to slot by UCX: shared memory inside a host, TCP or RDMA between hosts.

The receiver names a channel in `FetchRequest.ucx_worker_address`; a chunk's tag is that channel's number and the chunk's,
so tags are unique where they are matched. Endpoints are made from worker addresses, with UCX's error handling on: a peer
that dies costs its transfers and nothing else. Two sides of one host that both allow it go without (`Peer`).
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from kvtransfer.rpc import is_loopback
from kvtransfer.transports import TransportContext
from kvtransfer.transports.base import Memory, TransportError
from kvtransfer.transports.ucx_core import CHUNK_BITS, UCX_VERSION, Operation, Peer, UcxCore
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

# What travels as `ucx_worker_address`: format, UCX major and minor version, whether error handling may be off, channel,
# CRC32C of the rest, and UCX's own bytes. UCX trusts an address it is given, so a damaged or foreign one must not reach it.
_FRAME = struct.Struct("<4sBB?QI")
_MAGIC = b"SPU1"

RESET_AFTER_S = 5.0
"""A send between hosts that nobody took this long after its channel was closed is ended by closing the endpoint."""


def create(context: TransportContext) -> UcxTransport:
    settings = context.settings
    return UcxTransport(
        host_id=context.host_id,
        spin_s=settings.progress_timeout_s,
        direct_copy=settings.ucx_same_host == "direct",
        net_devices=_devices_for(settings.bind_host),
    )


def _devices_for(bind_host: str) -> str:
    """UCX listens on every network device, for anybody. A rank that is bound to loopback keeps it there; elsewhere UCX picks
    the devices, as an operator does with `UCX_NET_DEVICES`."""
    return "lo" if is_loopback(bind_host) and "UCX_NET_DEVICES" not in os.environ else ""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A UCX worker address as peers exchange it. `direct_copy`: its owner allows endpoints without error handling."""

    address: bytes
    direct_copy: bool = False
    channel: int = 0

    def encode(self) -> bytes:
        crc = google_crc32c.value(self.address)
        return _FRAME.pack(_MAGIC, *UCX_VERSION[:2], self.direct_copy, self.channel, crc) + self.address

    @classmethod
    def decode(cls, framed: bytes) -> WorkerAddress:
        """The inverse. Raises `TransportError("refused")` for anything that this UCX should not be given."""
        if len(framed) <= _FRAME.size:
            raise TransportError("refused", "the peer has no UCX worker address")
        magic, major, minor, direct_copy, channel, crc = _FRAME.unpack_from(framed)
        address = framed[_FRAME.size :]
        if magic != _MAGIC or crc != google_crc32c.value(address):
            raise TransportError("refused", "the peer's UCX worker address is damaged or of another format")
        if (major, minor) != UCX_VERSION[:2]:
            raise TransportError("refused", f"the peer has UCX {major}.{minor}, this side {UCX_VERSION[0]}.{UCX_VERSION[1]}")
        return cls(address, direct_copy, channel)


class _Channel:
    """What both halves share: operations outstanding, and the truth about them."""

    def __init__(self, core: UcxCore, peer: Peer) -> None:
        self._core = core
        self._peer = peer
        self._operations: list[Operation] = []
        self._closed_at: float | None = None

    async def drained(self, timeout_s: float) -> bool:
        pending = [operation.done for operation in self._operations if not operation.done.done()]
        if pending:
            if self._closed_at is not None and time.monotonic() - self._closed_at > RESET_AFTER_S:
                self._core.reset(self._peer)
            await asyncio.wait(pending, timeout=timeout_s)
        self._operations = [operation for operation in self._operations if not operation.done.done()]
        return not self._operations

    async def close(self) -> None:
        if self._closed_at is None:
            self._closed_at = time.monotonic()
        for operation in self._operations:
            if not operation.done.done():
                self._core.give_up(operation)


class UcxSendChannel(_Channel):
    def __init__(self, core: UcxCore, peer: Peer, channel: int, spin_s: float) -> None:
        super().__init__(core, peer)
        self._channel = channel
        self._spin_s = spin_s
        self._sent = 0
        core.warm(peer)

    async def send(self, header: pb.ChunkHeader, payload: Memory) -> AsyncIterator[pb.FetchResponse]:
        if self._closed_at is not None:
            raise TransportError("closed", f"the channel was closed before chunk {header.index}")
        self._raise_failure()
        self._operations = [operation for operation in self._operations if not operation.done.done()]
        self._sent += 1
        if self._sent >> CHUNK_BITS:
            raise TransportError("refused", f"more than {(1 << CHUNK_BITS) - 1} chunks in one transfer")
        header.tag = self._channel << CHUNK_BITS | self._sent
        operation = self._core.send(self._peer, payload, header.tag, self._spin_s)
        self._operations.append(operation)
        await operation.begun
        self._raise_failure()
        yield pb.FetchResponse(header=header)

    def _raise_failure(self) -> None:
        for operation in self._operations:
            if operation.done.done() and (failure := operation.done.result()):
                raise TransportError(failure.reason, f"sending to incarnation {self._peer.incarnation!r}: {failure}")


class UcxReceiveChannel(_Channel):
    def __init__(self, core: UcxCore, peer: Peer, channel: int) -> None:
        super().__init__(core, peer)
        self._channel = channel
        core.expect(peer)

    async def accept(
        self, response: pb.FetchResponse, target: Callable[[pb.ChunkHeader], Memory], timeout_s: float
    ) -> pb.ChunkHeader | None:
        if not response.HasField("header") or response.payload:
            raise TransportError("corrupt", "payload inside the stream of a UCX transfer")
        header = response.header
        if self._closed_at is not None:
            raise TransportError("closed", f"the channel was closed before chunk {header.index}")
        if header.tag >> CHUNK_BITS != self._channel:
            raise TransportError("corrupt", f"chunk {header.index} names tag {header.tag:#x}, not one of this transfer")
        memory = target(header)
        if len(memory) != header.bytes:
            raise TransportError("corrupt", f"chunk {header.index}: {header.bytes} bytes for a place of {len(memory)}")
        operation = self._core.receive(self._peer, memory, header.tag, timeout_s)
        self._operations = [*(o for o in self._operations if not o.done.done()), operation]
        try:
            failure = await asyncio.wait_for(asyncio.shield(operation.done), timeout_s)
        except TimeoutError:
            self._core.give_up(operation)
            raise TransportError(
                "timeout", f"chunk {header.index}: {header.bytes} bytes did not land in {timeout_s:.3f} s"
            ) from None
        if failure is not None:
            raise TransportError(failure.reason, f"chunk {header.index}: {failure}")
        return header

    async def close(self) -> None:
        await super().close()
        self._core.close_channel(self._channel)


class UcxTransport:
    """A rank's UCX worker and the endpoints to its peers: one per peer incarnation and rank, kept until it is known dead."""

    scheme = "ucx"

    def __init__(self, *, host_id: str, spin_s: float = 10.0, direct_copy: bool = False, net_devices: str = "") -> None:
        self._host_id = host_id
        self._spin_s = spin_s
        self._direct_copy = direct_copy
        self._core = UcxCore(net_devices)

    async def start(self) -> None:
        await self._core.start()

    def worker_address(self) -> bytes:
        return WorkerAddress(self._core.address, self._direct_copy).encode() if self._core.address else b""

    def open_send(self, request: pb.FetchRequest) -> UcxSendChannel:
        """Raises `TransportError("refused")` when the receiver's address is missing or not of this UCX."""
        theirs = WorkerAddress.decode(request.ucx_worker_address)
        direct = theirs.direct_copy and self._direct_copy and request.receiver_host_id == self._host_id
        peer = Peer(request.receiver_incarnation, theirs.address, error_handling=not direct)
        return UcxSendChannel(self._core, peer, theirs.channel, self._spin_s)

    def open_receive(self, sender: pb.RankEndpoint, request: pb.FetchRequest) -> UcxReceiveChannel:
        """Fills `request.ucx_worker_address`. Raises `TransportError("refused")` like `open_send`."""
        theirs = WorkerAddress.decode(sender.ucx_worker_address)
        direct = theirs.direct_copy and self._direct_copy and sender.host_id == self._host_id
        peer = Peer(sender.incarnation, theirs.address, error_handling=not direct)
        channel = self._core.open_channel()
        request.ucx_worker_address = WorkerAddress(self._core.address, direct, channel).encode()
        return UcxReceiveChannel(self._core, peer, channel)

    def peer_died(self, incarnation: str) -> None:
        self._core.peer_died(incarnation)

    def counters(self) -> dict[str, int]:
        """Since start: endpoints, endpoints_closed, completed, failed, warmed, sunk, abandoned."""
        return dict(self._core.counters)

    def describe(self) -> dict[str, str]:
        devices = re.findall(r"-- (\S+/\S+)", self._core.info)
        verbs, rdmacm = _rdma_compiled_in()
        return {
            "scheme": self.scheme,
            "ucx_version": ".".join(str(part) for part in UCX_VERSION),
            "devices": " ".join(devices),
            "same_host": "direct copy, no UCX error handling" if self._direct_copy else "shared memory with UCX error handling",
            "cross_host": "network devices with UCX error handling",
            "lanes_in_use": "not measured here; `python -m kvtransfer.transports.ucx_probe` measures them",
            "verbs": verbs,
            "rdmacm": rdmacm,
        }

    async def stop(self) -> None:
        await self._core.stop()


def _rdma_compiled_in() -> tuple[str, str]:
    """Whether the UCX that is loaded brings verbs and rdmacm: "yes", "no", or "unknown" when its folder cannot be found."""
    found = re.search(r"(/\S*)/libucp[-.\w]*\.so", Path("/proc/self/maps").read_text())
    if found is None:
        return "unknown", "unknown"
    modules = [path.name for path in (Path(found[1]) / "ucx").glob("libuct_*.so*")]
    return tuple("yes" if any(name.startswith(start) for name in modules) else "no" for start in ("libuct_ib", "libuct_rdmacm"))  # type: ignore[return-value]
