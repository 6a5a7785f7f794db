"""What a transport must do. `Fetch` (gRPC, one stream per rank and transfer) is the control channel of every transport:
it carries chunk headers in order. A transport decides only how a chunk's payload gets from the sender's slot into the
receiver's slot: inside the stream (`grpc`), beside it (`ucx`), or by reference (`inproc`).

Everything here runs on the node's own event loop. A transport never allocates payload memory: it reads the sender's slot
and writes the receiver's, and says when it is done with each, because a slot is reused only then (rule 13).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, runtime_checkable

from protos.errors import SplitpointError
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


class Lent(Protocol):
    """A sender's slot that is read where it lies. The sender holds it until it hears `Complete`."""

    def view(self, num_bytes: int) -> Memory:
        """The slot's first bytes, read-only; they can be read as long as a view exists, whatever becomes of the sender."""

    def intact(self) -> bool:
        """What was read up to now was this transfer's: the sender has not given the slot to anybody. It would do so only when it
        took this receiver for dead."""

    def give_back(self) -> None:
        """Nobody will ask for a view any more."""


@runtime_checkable
class Lends(Protocol):
    """A `ReceiveChannel` that can leave payload where the sender staged it, and nothing in the receiver's slot."""

    def lend(self) -> None:
        """Payload may stay there: whoever asks for that looks at `lent`. Before the first chunk."""

    @property
    def lent(self) -> Lent | None:
        """All of this transfer, chunk by chunk as it is accepted. None: it lands in the slot."""


class Takes(Protocol):
    """What a receiver does with what comes beside gRPC. Called on the transport's thread: no waiting."""

    def place(self, header: pb.ChunkHeader, *, ahead: bool) -> Memory:
        """Where this chunk lands. `ahead`: its bytes are being gathered, and its checksum comes by `summed`. What it raises ends
        the transfer."""

    def summed(self, index: int, value: pb.Checksum) -> None:
        """The checksum of a chunk that was placed ahead. What it raises ends the transfer."""

    def soon(self) -> None:
        """A chunk may be announced within a moment: it has just been asked for, or the sender says so."""

    def coming(self, header: pb.ChunkHeader, memory: Memory) -> None:
        """It is on its way there: time to prepare what follows."""

    def landed(self, header: pb.ChunkHeader, memory: Memory) -> None:
        """It lies there."""

    def failed(self, exc: Exception) -> None:
        """Nothing more will come. Once."""


class Answers(Protocol):
    """The sender's way back to whoever asked beside gRPC."""

    def run(self, work: Callable[[], None]) -> None:
        """Do it on the transport's thread. Any thread."""

    def watch(self, done: Callable[[], bool]) -> None:
        """Ask `done` again and again, until it says True. On the thread."""

    def soon(self) -> None:
        """Tell the asker to be awake. On the thread."""

    def checksum(self, index: int, value: pb.Checksum, settled: Callable[[TransportError | None], None]) -> None:
        """Of a chunk that was announced. `settled` hears when it is on its way, or why not. On the thread."""

    def believe(self) -> None:
        """The ask has shown a lease's capability: the asker is answered whatever others ask. On the thread."""

    def error(self, error: SplitpointError) -> None:
        """There will be no more chunks. Any thread."""


class Serves(Protocol):
    """What a rank does with what its peers ask for and say beside gRPC. Called on the transport's thread: no waiting."""

    def asked(self, request: pb.FetchRequest, answers: Answers) -> None:
        """A peer asks for a transfer."""

    def completed(self, request: pb.CompleteRequest) -> None:
        """A peer says how its transfer ended."""


@runtime_checkable
class TakesAsks(Protocol):
    """A `Transport` that carries `Fetch` and `Complete` too, and a whole transfer on its own thread."""

    def serve(self, serves: Serves) -> None:
        """Answer peers that ask. Before `worker_address` is given to anybody."""

    def open_answer(self, request: pb.FetchRequest) -> SendsItself:
        """The sender's half for an ask. On the transport's thread. Raises as `Transport.open_send`."""


class SendsItself(Protocol):
    """A `SendChannel` that also sends on the transport's thread."""

    def send_now(
        self, header: pb.ChunkHeader, payload: Memory, answers: Any, settled: Callable[[TransportError | None], None]
    ) -> None:
        """Header and payload at once. `settled` hears of each when it is on its way, or why not. On the thread.

        Raises:
            TransportError: nothing was sent.
        """

    def announce_now(
        self, header: pb.ChunkHeader, payload: Memory, answers: Any, settled: Callable[[TransportError | None], None]
    ) -> None:
        """The header alone, ahead of its payload (`send_announced`) and of its checksum; the bytes are not final. As `send_now`.
        One at a time."""

    def send_announced(self, header: pb.ChunkHeader, payload: Memory, settled: Callable[[TransportError | None], None]) -> None:
        """The payload of the header that was announced. As `send_now`."""

    def send(self, header: pb.ChunkHeader, payload: Memory) -> AsyncIterator[pb.FetchResponse]: ...

    async def drained(self, timeout_s: float) -> bool: ...

    async def close(self) -> None: ...


@runtime_checkable
class AsksItself(Protocol):
    """A `ReceiveChannel` that can do without the gRPC stream."""

    @property
    def asks(self) -> bool:
        """The sender takes asks, and its payload comes by this transport."""

    def ask(self, request: pb.FetchRequest, takes: Takes, limit_s: float) -> None:
        """Ask for everything. While chunks are announced, one lands every `limit_s` or the transfer ends. `close` ends it too,
        and then nothing is called any more."""

    async def tell(self, request: pb.CompleteRequest) -> bool:
        """The last word, also after `close`. False: it could not be sent. On the loop."""

    def until(self, done: Callable[[], bool]) -> None:
        """Ask `done` again and again until it says True. On the transport's thread."""

    def run(self, work: Callable[[], None]) -> None:
        """Do it on the transport's thread. Any thread."""


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


@runtime_checkable
class CanFail(Protocol):
    """A `Transport` that may end by itself. Slots that it was given are never drained after that."""

    async def until_failed(self) -> str:
        """Until it has ended though nobody stopped it: why."""


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
