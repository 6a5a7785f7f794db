"""Payload beside the `Fetch` stream, from slot to slot: between hosts and between GPUs by UCX; host memory inside one host is
read by the receiver itself (same_host.py), which UCX has no part in.

The receiver names a channel in `FetchRequest.ucx_worker_address`; a chunk's tag is that channel's number and the chunk's,
so tags are unique where they are matched. Endpoints are made from worker addresses, with UCX's error handling on: a peer
that dies costs its transfers and nothing else. `kvtransfer.ucx_same_host` says what happens inside one host.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import struct
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import google_crc32c

from kvtransfer.memory import on_device, use_device_of
from kvtransfer.transports import TransportContext
from kvtransfer.transports.base import Memory, Serves, TransportError
from kvtransfer.transports.mapped import Mappings
from kvtransfer.transports.process_watch import ProcessWatch
from kvtransfer.transports.same_host import NO_PROCESS, ProcessId, this_process, why_unreadable
from kvtransfer.transports.ucx_asks import Answers, Asks
from kvtransfer.transports.ucx_channels import UcxReceiveChannel, UcxSendChannel
from kvtransfer.transports.ucx_core import ASK_CHANNEL, UCX_VERSION, WARM_CHANNEL, Peer, UcxCore
from kvtransfer.transports.ucx_environment import devices_for
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

# What travels as `ucx_worker_address`: format, UCX major and minor version, whether error handling may be off, whether the
# sender's memory is read, whether its owner takes asks, channel, CRC32C of the rest; then the process and UCX's own bytes. UCX
# trusts an address it is given, so a damaged or foreign one must not reach it.
_FRAME = struct.Struct("<4sBB???QI")
_MAGIC = b"SPU4"

SameHost = Literal["mapped", "one_copy", "contained", "direct"]
READERS = 2
"""Threads that read from peers of this host: one chunk of one transfer each."""
_SAME_HOST_TEXT = {
    "mapped": "host memory: the sender's staging is mapped and read where it lies, not by UCX; where that cannot be, as one_copy",
    "one_copy": "host memory: Splitpoint's own process_vm_readv, not UCX; else UCX shared memory with error handling",
    "contained": "UCX shared memory with error handling",
    "direct": "UCX direct copy (CMA), no UCX error handling",
}


def create(context: TransportContext) -> UcxTransport:
    settings = context.settings
    return UcxTransport(
        host_id=context.host_id,
        spin_s=settings.progress_timeout_s,
        same_host=settings.ucx_same_host,
        net_devices=devices_for(settings.bind_host),
        staging=context.receive_memory,
        shares=context.shared is not None,
    )


ACROSS_CHUNK_BYTES = 4 * 1024 * 1024
"""UCX says nothing of a message that is half there, so over a slow network a chunk is the step in which progress shows: at
4 Mbit/s still one in ten seconds, the default of `kvtransfer.progress_timeout_s`."""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A UCX worker address as peers exchange it. `direct_copy`: its owner allows endpoints without error handling; `process`: its
    owner's, when peers of its host may read its memory; `reads`: a receiver that will do so; `asks`: its owner takes `Fetch` as
    a UCX message."""

    address: bytes
    direct_copy: bool = False
    channel: int = 0
    process: ProcessId = NO_PROCESS
    reads: bool = False
    asks: bool = False

    def encode(self) -> bytes:
        rest = self.process.encode() + self.address
        fields = (*UCX_VERSION[:2], self.direct_copy, self.reads, self.asks, self.channel, google_crc32c.value(rest))
        return _FRAME.pack(_MAGIC, *fields) + rest

    @classmethod
    def decode(cls, framed: bytes) -> WorkerAddress:
        """The inverse. Raises `TransportError("refused")` for anything that this UCX should not be given."""
        if len(framed) <= _FRAME.size + ProcessId.SIZE:
            raise TransportError("refused", "the peer has no UCX worker address")
        magic, major, minor, direct_copy, reads, asks, channel, crc = _FRAME.unpack_from(framed)
        rest = framed[_FRAME.size :]
        if magic != _MAGIC or crc != google_crc32c.value(rest):
            raise TransportError("refused", "the peer's UCX worker address is damaged or of another format")
        if (major, minor) != UCX_VERSION[:2]:
            raise TransportError("refused", f"the peer has UCX {major}.{minor}, this side {UCX_VERSION[0]}.{UCX_VERSION[1]}")
        if channel >= ASK_CHANNEL:
            raise TransportError("refused", f"the peer's channel must be below {ASK_CHANNEL}, is {channel}")
        return cls(rest[ProcessId.SIZE :], direct_copy, channel, ProcessId.decode(rest[: ProcessId.SIZE]), reads, asks)


class UcxTransport:
    """A rank's UCX worker and the endpoints to its peers: one per peer incarnation and rank, kept until it is known dead."""

    scheme = "ucx"

    def __init__(
        self,
        *,
        host_id: str,
        spin_s: float = 10.0,
        same_host: SameHost = "contained",
        net_devices: str = "",
        staging: Memory = None,
        shares: bool = False,
    ) -> None:
        """`staging`: on a GPU, the thread that drives UCX works on that GPU, so that UCX finds it and no other. `shares`: this
        rank's staging is host memory that peers can map, and with "mapped" it maps theirs."""
        self._host_id = host_id
        self._spin_s = spin_s
        self._direct_copy = same_host == "direct"
        self._one_copy = same_host in ("mapped", "one_copy") and not on_device(staging)
        self._maps = same_host == "mapped" and shares
        self._same_host = same_host
        self._core = UcxCore(net_devices, functools.partial(use_device_of, staging))
        self._asks = Asks(self._core)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="splitpoint-read")
        self._stopping = threading.Event()
        self._watch = ProcessWatch()
        self._refused: dict[ProcessId, str] = {}
        self._read_from_here: dict[str, weakref.WeakSet[UcxSendChannel]] = {}
        self._counters: Counter[str] = Counter()
        self._mappings = Mappings(self._counters)

    async def start(self) -> None:
        await self._core.start()

    async def until_failed(self) -> str:
        """As `CanFail`."""
        return await self._core.until_failed()

    def worker_address(self) -> bytes:
        if not self._core.address:
            return b""
        process = self._process()
        return WorkerAddress(self._core.address, self._direct_copy, process=process, asks=self._asks.served).encode()

    def serve(self, serves: Serves) -> None:
        """As `TakesAsks`."""
        self._asks.serve(serves, self._way_back)

    def open_send(self, request: pb.FetchRequest) -> UcxSendChannel:
        """Raises `TransportError("refused")` when the receiver's address is missing or not of this UCX."""
        theirs = WorkerAddress.decode(request.ucx_worker_address)
        here = request.receiver_host_id == self._host_id
        peer = self._receiver(request, theirs)
        reads = theirs.reads and self._one_copy and here
        channel = UcxSendChannel(self._core, peer, theirs.channel, self._spin_s, read_by_peer=reads, counters=self._counters)
        if reads:
            incarnation = request.receiver_incarnation
            self._read_from_here.setdefault(incarnation, weakref.WeakSet()).add(channel)
            if not self._watch.watch(incarnation, theirs.process, functools.partial(self.peer_died, incarnation)):
                self._counters["peers_not_watched"] += 1
        return channel

    def open_answer(self, request: pb.FetchRequest) -> UcxSendChannel:
        """As `TakesAsks`. Payload goes by UCX: a receiver that reads this side's memory asks by gRPC."""
        theirs = WorkerAddress.decode(request.ucx_worker_address)
        peer = self._receiver(request, theirs)
        return UcxSendChannel(self._core, peer, theirs.channel, self._spin_s, read_by_peer=False, counters=self._counters)

    def _receiver(self, request: pb.FetchRequest, theirs: WorkerAddress) -> Peer:
        direct = theirs.direct_copy and self._direct_copy and request.receiver_host_id == self._host_id
        return Peer(request.receiver_incarnation, theirs.address, error_handling=not direct)

    def _way_back(self, request: pb.FetchRequest) -> Answers:
        theirs = WorkerAddress.decode(request.ucx_worker_address)
        if theirs.channel == WARM_CHANNEL:
            raise TransportError("refused", "the ask names no channel for its answers")
        return Answers(self._asks, self._receiver(request, theirs), theirs.channel, request.grant)

    def open_receive(self, sender: pb.RankEndpoint, request: pb.FetchRequest) -> UcxReceiveChannel:
        """Fills `request.ucx_worker_address`. Raises `TransportError("refused")` like `open_send`."""
        theirs = WorkerAddress.decode(sender.ucx_worker_address)
        here = sender.host_id == self._host_id
        direct = theirs.direct_copy and self._direct_copy and here
        peer = Peer(sender.incarnation, theirs.address, error_handling=not direct)
        # What is cut passes through a room that is written again before the peer hears that it was read.
        reads = here and not request.cut and self._readable(sender.incarnation, theirs.process)
        source = theirs.process if reads else None
        channel = self._core.open_channel()
        mine = WorkerAddress(self._core.address, direct, channel, self._process(), reads=source is not None)
        request.ucx_worker_address = mine.encode()
        if not here:
            request.max_chunk_bytes = min(request.max_chunk_bytes or ACROSS_CHUNK_BYTES, ACROSS_CHUNK_BYTES)
        return UcxReceiveChannel(
            self._core,
            peer,
            channel,
            source=source,
            mapping=functools.partial(self._mappings.of, sender, theirs.process) if self._maps and reads else None,
            readers=self._readers,
            stopping=self._stopping,
            counters=self._counters,
            asks=self._asks if theirs.asks and source is None else None,
        )

    def peer_died(self, incarnation: str) -> None:
        self._core.peer_died(incarnation)
        self._mappings.forget(incarnation)
        for channel in self._read_from_here.pop(incarnation, ()):
            channel.peer_done()

    def counters(self) -> dict[str, int]:
        """Since start. UCX: endpoints, endpoints_closed, completed, failed, warmed, sunk, abandoned, asks, answers_withheld,
        answers_not_believed, thread_ended, stop_timeouts, leaked_attachments, queue_stuck. Read by the receiver itself:
        chunks_offered, chunks_not_readable, peers_not_watched (sender), chunks_read, bytes_read, one_copy_refused (receiver).
        Left where the sender staged it: chunks_mapped, bytes_mapped, mapping_refused, mappings_not_watched (receiver);
        mappings: those held now."""
        held = {"mappings": len(self._mappings)} if self._maps else {}
        return dict(self._core.counters) | dict(self._counters) | held

    def _process(self) -> ProcessId:
        return this_process() if self._one_copy else NO_PROCESS

    def _readable(self, incarnation: str, process: ProcessId) -> bool:
        """Asked once per peer process; where the answer is no, UCX carries the payload, and that is counted and logged."""
        if not self._one_copy or process.pid == 0:
            return False
        why = self._refused.get(process)
        if why is None:
            why = self._refused[process] = why_unreadable(process)
            if why:
                logger.warning("ucx: memory of incarnation %r cannot be read, UCX copies it twice: %s", incarnation, why)
            else:
                logger.info("ucx: memory of incarnation %r is read by process_vm_readv", incarnation)
        if why:
            self._counters["one_copy_refused"] += 1
        return not why

    def _way(self) -> SameHost:
        """What is really used inside one host."""
        if self._same_host not in ("mapped", "one_copy"):
            return self._same_host
        return "mapped" if self._maps else "one_copy" if self._one_copy else "contained"

    def describe(self) -> dict[str, str]:
        devices = re.findall(r"-- (\S+/\S+)", self._core.info)
        verbs, rdmacm = _rdma_compiled_in()
        return {
            "scheme": self.scheme,
            "ucx_version": ".".join(str(part) for part in UCX_VERSION),
            "devices": " ".join(devices),
            "same_host": _SAME_HOST_TEXT[self._way()],
            "cross_host": "network devices with UCX error handling",
            "lanes_in_use": "not measured here; `python -m kvtransfer.transports.ucx_probe` measures them",
            "queue_watched": "yes" if self._core.queue_watched else "no",
            "verbs": verbs,
            "rdmacm": rdmacm,
        }

    async def stop(self) -> None:
        self._stopping.set()
        self._watch.close()
        self._mappings.close()
        await asyncio.to_thread(self._readers.shutdown)
        await self._core.stop()


def _rdma_compiled_in() -> tuple[str, str]:
    """Whether the UCX that is loaded brings verbs and rdmacm: "yes", "no", or "unknown" when its folder cannot be found."""
    found = re.search(r"(/\S*)/libucp[-.\w]*\.so", Path("/proc/self/maps").read_text())
    if found is None:
        return "unknown", "unknown"
    modules = [path.name for path in (Path(found[1]) / "ucx").glob("libuct_*.so*")]
    return tuple("yes" if any(name.startswith(start) for name in modules) else "no" for start in ("libuct_ib", "libuct_rdmacm"))  # type: ignore[return-value]
