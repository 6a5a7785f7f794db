"""What a transport must do. `Fetch` (gRPC, one stream per rank and transfer) is the control channel of every transport:
it carries chunk headers in order. A transport decides only how a chunk's payload gets from the sender's slot into the
receiver's slot: inside the stream (`grpc`), beside it (`ucx`), or by reference (`inproc`).

Everything here runs on the node's own event loop. A transport never allocates payload memory: it reads the sender's slot
and writes the receiver's, and says when it is done with each, because a slot is reused only then (rule 13).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, runtime_checkable

from protos.splitpoint.v1 import kv_transfer_pb2 as pb

Memory = Any
"""A one-dimensional uint8 array over staging: numpy (host) or torch (device)."""


class TransportError(Exception):
    """Payload did not arrive. `reason` is a metric label: "timeout", "peer_lost", "corrupt", "closed", "refused"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SendChannel(Protocol):
    """The sender's half of one `Fetch`."""

    def send(self, header: pb.ChunkHeader, payload: Memory) -> AsyncIterator[pb.FetchResponse]:
        """Start sending one chunk and yield what goes on the stream for it, header first.

        `payload` is read until `drained`. Chunks are sent in order; the channel may pipeline them.
        """

    async def drained(self, timeout_s: float) -> bool:
        """True when no send of this channel can read its slot any more; False when that is not known in time."""

    async def close(self) -> None:
        """Give up what is outstanding. After it `drained` still tells the truth."""


@runtime_checkable
class ReadByPeer(Protocol):
    """A `SendChannel` whose receiver reads this side's memory: `drained` waits for its word."""

    def peer_done(self) -> None:
        """The receiver has said, by `Complete`, that it reads no more."""


@runtime_checkable
class ReadsPeer(Protocol):
    """A `ReceiveChannel` that may read the sender's memory."""

    @property
    def reads_peer(self) -> bool:
        """It has begun to, and that process lives: its slot is held until it hears `Complete`, which follows the last read."""


@runtime_checkable
class ChecksAsItLands(Protocol):
    """A `ReceiveChannel` that computes a chunk's checksum while it lands."""

    def landed_crc32c(self, index: int) -> int | None:
        """CRC32C of chunk `index` as it lies in the slot; None when it has to be computed. Asked once."""


class ReceiveChannel(Protocol):
    """The receiver's half of one `Fetch`."""

    async def accept(
        self, response: pb.FetchResponse, target: Callable[[pb.ChunkHeader], Memory], timeout_s: float
    ) -> pb.ChunkHeader | None:
        """Take one stream message. Returns the header when all of that chunk's payload has landed, else None.

        `target` gives the memory for a header, or raises `TransportError` when the header is out of bounds.

        Raises:
            TransportError: the payload is short, long, late or the peer is gone.
        """

    async def drained(self, timeout_s: float) -> bool:
        """True when nothing of this channel can write into its slot any more."""

    async def close(self) -> None: ...


@runtime_checkable
class Counts(Protocol):
    """A `Transport` that counts what it does."""

    def counters(self) -> dict[str, int]:
        """Every event since start, by name. Any thread."""


class Transport(Protocol):
    """One rank's side of one way to move payload."""

    scheme: str

    async def start(self) -> None:
        """Open devices. Raises `TransportError("refused", why)` when this host cannot."""

    def worker_address(self) -> bytes:
        """What a peer needs beside host:port; empty when nothing."""

    def open_send(self, request: pb.FetchRequest) -> SendChannel: ...

    def open_receive(self, sender: pb.RankEndpoint, request: pb.FetchRequest) -> ReceiveChannel:
        """Called before `Fetch` is sent; may fill `request.ucx_worker_address`."""

    def peer_died(self, incarnation: str) -> None:
        """The peer process is known dead: what was outstanding with it can touch no memory any more."""

    def describe(self) -> dict[str, str]:
        """What is really used, for `doctor` and the start-up log."""

    async def stop(self) -> None: ...
