"""The prefill side towards peers: agree, send from staging, hear how it ended. Serves `KvTransferService`."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from kvtransfer.checksum import algorithm_for, gathered
from kvtransfer.layout import exchange_refusal, fingerprint
from kvtransfer.lease import Action, Lease, LeaseState
from kvtransfer.machine import Refusal
from kvtransfer.packing import Packer
from kvtransfer.plan import BlockRange, Cut, PlanError, cut_of, next_chunk
from kvtransfer.push_direct import DirectPush
from kvtransfer.rank_map import Holding
from kvtransfer.runtime import DRAIN_POLL_S, NodeRuntime
from kvtransfer.transports.base import Memory, ReadByPeer, SendChannel, TakesAsks, TransportError
from kvtransfer.wire import SERVICE, serialize_fetch
from protos.errors import Code, SplitpointError
from protos.grpc_errors import abort
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

MAX_OUTCOME_CHARS = 64


@dataclass(frozen=True, slots=True)
class _Chunk:
    blocks: BlockRange
    header: pb.ChunkHeader
    payload: Memory


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One receiver's stream. `block_bytes` is what it takes of a block, `packer` what cuts that out; None: all of the block."""

    lease: Lease
    receiver: int
    channel: SendChannel
    deadline: float
    block_bytes: int
    chunk_bytes: int
    packer: Packer | None


class KvTransferServicer(pb_grpc.KvTransferServiceServicer):
    def __init__(self, runtime: NodeRuntime) -> None:
        self._rt = runtime
        self._read_by_peer: dict[tuple[bytes, int], tuple[Lease, ReadByPeer]] = {}
        self.direct: DirectPush | None = None

    def serve_directly(self) -> None:
        """Answer peers that ask beside gRPC too, where a transport takes that. Before anybody knows this rank.

        Not under mutual TLS: payload may be let through unencrypted there, a capability may not.
        """
        if self._rt.settings.tls is not None:
            return
        for transport in self._rt.transports.values():
            if isinstance(transport, TakesAsks):
                self.direct = DirectPush(self._rt, self, transport)
                transport.serve(self.direct)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`. `Fetch` gets the serializer that does not copy its payload."""
        # Not through the generated function: its handlers bring their own serializer.
        fetch = grpc.unary_stream_rpc_method_handler(
            self.Fetch, request_deserializer=pb.FetchRequest.FromString, response_serializer=serialize_fetch
        )
        handshake = grpc.unary_unary_rpc_method_handler(
            self.Handshake,
            request_deserializer=pb.HandshakeRequest.FromString,
            response_serializer=pb.HandshakeResponse.SerializeToString,
        )
        complete = grpc.unary_unary_rpc_method_handler(
            self.Complete,
            request_deserializer=pb.CompleteRequest.FromString,
            response_serializer=pb.CompleteResponse.SerializeToString,
        )
        heartbeat = grpc.unary_unary_rpc_method_handler(
            self.Heartbeat,
            request_deserializer=pb.HeartbeatRequest.FromString,
            response_serializer=pb.HeartbeatResponse.SerializeToString,
        )
        methods = {"Fetch": fetch, "Handshake": handshake, "Complete": complete, "Heartbeat": heartbeat}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeResponse:  # noqa: N802
        rt = self._rt
        mine = rt.compatibility
        if request.expected_incarnation != rt.incarnation:
            mismatch = f"incarnation: {rt.incarnation!r} here, {request.expected_incarnation!r} expected"
        elif request.protocol_version != mine.protocol_version:
            mismatch = f"protocol_version: {mine.protocol_version} here, {request.protocol_version} there"
        elif request.fingerprint == rt.fingerprint:
            return pb.HandshakeResponse(accepted=True, endpoint=rt.endpoint)
        elif not request.HasField("compatibility"):
            return pb.HandshakeResponse(accepted=False)  # phase two follows and is told which field
        elif fingerprint(request.compatibility) != request.fingerprint:
            mismatch = "fingerprint: is not that of the fields that came with it"
        else:
            mismatch = exchange_refusal(mine, request.compatibility)
            if not mismatch:
                return pb.HandshakeResponse(accepted=True, endpoint=rt.endpoint, compatibility=mine)
        rt.refused("handshake", mismatch, Code.INCOMPATIBLE_PEER)
        logger.warning("handshake refused: %s", mismatch)
        return pb.HandshakeResponse(accepted=False, mismatch=mismatch)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:  # noqa: N802
        rt = self._rt
        transfer_id = request.grant.transfer_id
        deadline = rt.now() + request.remaining_s
        try:
            self.require_this(request)
            transport = rt.transport(request.transport)
            cut = self._cut(request)
            lease = await self.leased(request, deadline)
        except SplitpointError as error:
            await abort(context, error)
        try:
            channel = transport.open_send(request)
        except TransportError as exc:
            await abort(context, self.unopened(request, lease, exc))
        if isinstance(channel, ReadByPeer):
            self._read_by_peer[transfer_id, request.receiver_rank] = lease, channel
        outgoing = self.outgoing(request, lease, cut, channel, deadline)
        failure = await self.until_sent(request, outgoing, self._send(outgoing, context))
        if failure is not None:
            await abort(context, failure)

    def require_this(self, request: pb.FetchRequest) -> None:
        """Raises `SplitpointError` INCOMPATIBLE_PEER when another process is meant."""
        rt = self._rt
        if request.sender_incarnation != rt.incarnation:
            text = f"incarnation {rt.incarnation!r}, not {request.sender_incarnation!r}"
            raise rt.refused("incarnation", text, Code.INCOMPATIBLE_PEER)

    def unopened(self, request: pb.FetchRequest, lease: Lease, exc: TransportError) -> SplitpointError:
        """End a lease whose receiver cannot be sent to; what to answer. Any thread."""
        rt = self._rt
        with rt.lock:
            actions = rt.leases.broken(lease, exc.reason, rt.now(), receiver=request.receiver_rank)
            rt.leases.drained(lease)
        rt.follow_from_engine(lease.transfer_id, actions)
        return rt.remember(SplitpointError(Code.TRANSFER_FAILED, f"{exc.reason}: {exc}"))

    async def until_sent(
        self, request: pb.FetchRequest, outgoing: Outgoing, work: Coroutine[Any, Any, None]
    ) -> SplitpointError | None:
        """Run the sending of one receiver's share with everything that can end it, and drain it afterwards. What to answer; None
        when all is on its way."""
        rt, lease, transfer_id = self._rt, outgoing.lease, outgoing.lease.transfer_id
        key = transfer_id, request.receiver_rank
        sending = rt.fetches[key] = asyncio.create_task(self._watched(request, work))
        failure: SplitpointError | None = None
        why = "the peer left"
        try:
            await sending
        except SplitpointError as error:
            failure, why = error, error.message
        except TransportError as exc:
            failure = rt.remember(SplitpointError(Code.TRANSFER_FAILED, f"{exc.reason}: {exc}"))
            why = exc.reason
        except asyncio.CancelledError:
            if lease.live:
                raise  # the peer's call ended
            if lease.state is not LeaseState.DELIVERED:
                failure = rt.refused("ended", f"this transfer is over: {lease.state} ({lease.reason})")
        finally:
            del rt.fetches[key]
            with rt.lock:
                actions = rt.leases.broken(lease, why, rt.now(), receiver=request.receiver_rank)
            if actions:
                rt.metrics.event("fetch_broken")
            rt.follow(transfer_id, actions)
            rt.tasks.spawn(f"drain {transfer_id.hex()}", self._drain(outgoing))
        return failure

    async def _watched(self, request: pb.FetchRequest, work: Coroutine[Any, Any, None]) -> None:
        """Send while the receiver gives signs of life; its silence ends the lease, and with it this stream."""
        # Whole blocks go between equal ranks and name receiver 0 on each of them; heartbeats name the rank itself.
        rank = request.receiver_rank if request.HasField("share") else self._rt.rank
        with self._rt.watch.fetching(request.grant.transfer_id, (request.receiver_incarnation, rank)):
            await work

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:  # noqa: N802
        if request.expected_incarnation != self._rt.incarnation:
            text = f"incarnation {self._rt.incarnation!r}, not {request.expected_incarnation!r}"
            await abort(context, self._rt.refused("incarnation", text, Code.INCOMPATIBLE_PEER))
        self._rt.watch.heard_receiver((request.incarnation, request.rank))
        return pb.HeartbeatResponse()

    async def Complete(self, request: pb.CompleteRequest, context: Any) -> pb.CompleteResponse:  # noqa: N802
        self._rt.follow(request.grant.transfer_id, self.ended(request))
        if self.direct is not None:
            self.direct.left(request)
        return pb.CompleteResponse()

    def ended(self, request: pb.CompleteRequest) -> list[Action]:
        """Take a receiver's last word; what follows from it. Any thread."""
        rt = self._rt
        transfer_id = request.grant.transfer_id
        with rt.lock:
            known = rt.leases.live(transfer_id) is not None
            # The peer's word is remembered as long as the transfer is, so it is kept short.
            outcome = request.outcome[:MAX_OUTCOME_CHARS]
            actions = rt.leases.completed(
                transfer_id, request.grant.capability, outcome, rt.now(), receiver=request.receiver_rank
            )
        if not known:
            rt.metrics.late("complete")
        # It frees bytes, also when the lease is over already, so it needs the capability.
        lease, channel = self._read_by_peer.get((transfer_id, request.receiver_rank), (None, None))
        if lease is not None and channel is not None and hmac.compare_digest(lease.capability, request.grant.capability):
            channel.peer_done()
        return actions

    def _cut(self, request: pb.FetchRequest) -> Cut | None:
        """What of a block this receiver takes; None: all of it. Raises `SplitpointError` TRANSFER_REFUSED."""
        if not request.HasField("share"):
            return None
        try:
            cut = cut_of(self._rt.compatibility, Holding.from_proto(request.share))
        except PlanError as exc:
            raise self._rt.refused("share", str(exc)) from exc
        return None if cut.whole else cut

    def outgoing(
        self, request: pb.FetchRequest, lease: Lease, cut: Cut | None, channel: SendChannel, deadline: float
    ) -> Outgoing:
        """What to send to this receiver and how."""
        rt = self._rt
        most = min(rt.chunk_bytes, request.max_chunk_bytes or rt.chunk_bytes)
        if cut is None:
            return Outgoing(lease, request.receiver_rank, channel, deadline, rt.block_bytes, most, None)
        packer = Packer(rt, lease, cut, channel, most, once=not request.cut)
        return Outgoing(lease, request.receiver_rank, channel, deadline, cut.block_bytes, packer.chunk_bytes, packer)

    async def leased(self, request: pb.FetchRequest, deadline: float) -> Lease:
        """The lease, with its capability spent; waits for a `Reserve` that is on its way."""
        rt = self._rt
        grant = request.grant
        # The peer's deadline is its own word: what nothing was reserved for holds a place no longer than this side says.
        deadline = min(deadline, rt.now() + rt.settings.fetch_wait_s)
        waited = False
        try:
            while True:
                with rt.lock:
                    found = self.fetched(request)
                if isinstance(found, Refusal):
                    raise rt.refusal(found)
                if found is not None:
                    return found
                if not waited:
                    if rt.pending_fetches >= rt.settings.max_pending_fetches:
                        raise rt.refused("pending", f"{rt.pending_fetches} fetches wait for a reservation already")
                    rt.pending_fetches += 1
                    waited = True
                try:
                    await rt.bell.wait(grant.transfer_id, max(0.0, deadline - rt.now()))
                except TimeoutError:
                    raise rt.refused("unknown", "nothing was reserved for this transfer in time") from None
        finally:
            if waited:
                rt.pending_fetches -= 1

    def fetched(self, request: pb.FetchRequest) -> Lease | Refusal | None:
        """As `LeaseTable.fetch`. Under the node's lock."""
        rt = self._rt
        return rt.leases.fetch(
            request.grant.transfer_id,
            request.grant.capability,
            rt.now(),
            receiver=request.receiver_rank,
            receivers=request.receivers or 1,
            token_hash=request.token_hash,
        )

    async def _send(self, out: Outgoing, context: Any) -> None:
        """Send every chunk in order; the next one is cut and its checksum computed meanwhile."""
        rt = self._rt
        upcoming: asyncio.Task[_Chunk] | None = asyncio.create_task(self._next(out, 0, 0))
        try:
            while upcoming is not None:
                chunk = await upcoming
                header, end = chunk.header, chunk.blocks.end
                upcoming = None
                if not header.last:
                    upcoming = asyncio.create_task(self._next(out, end, header.index + 1))
                async for response in out.channel.send(header, chunk.payload):
                    await context.write(response)
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
        with rt.lock:
            rt.leases.sent(out.lease, rt.now(), receiver=out.receiver)

    async def _next(self, out: Outgoing, first_block: int, index: int) -> _Chunk:
        """The chunk that begins at `first_block`, once some of it is staged."""
        rt, lease = self._rt, out.lease
        while True:
            with rt.lock:
                staged, live = lease.staged_blocks, lease.live
            if not live:
                raise rt.refused("ended", f"this transfer is over: {lease.state} ({lease.reason})")
            blocks = next_chunk(first_block, staged, out.block_bytes, out.chunk_bytes)
            if blocks is not None:
                if out.packer is None:
                    payload = self.payload(lease, blocks)
                    checksum = await self._checksum(lease, blocks, payload)
                else:
                    payload = await out.packer.payload(index, blocks, out.deadline)
                    checksum = await rt.checksum(payload)
                return _Chunk(blocks, self.header(out, index, blocks, checksum), payload)
            try:
                await rt.bell.wait(lease.transfer_id, max(0.0, out.deadline - rt.now()))
            except TimeoutError:
                text = f"{staged} of {lease.num_blocks} blocks were staged when the time was over"
                raise rt.remember(SplitpointError(Code.DEADLINE_EXCEEDED, text)) from None

    async def _checksum(self, lease: Lease, blocks: BlockRange, payload: Memory) -> pb.Checksum:
        """Of one chunk: out of what its gathers computed, or computed now."""
        return self.checksum_at_hand(lease, blocks, payload) or await self._rt.checksum(payload)

    def checksum_at_hand(self, lease: Lease, blocks: BlockRange, payload: Memory) -> pb.Checksum | None:
        """Of one chunk, where that takes no time: switched off, or computed by its gathers. None: it has to be computed."""
        algorithm = algorithm_for(self._rt.settings.checksum, payload)
        if algorithm == "off":
            return pb.Checksum(algorithm=algorithm)
        return gathered(lease.crcs, blocks.first, blocks.end, payload, algorithm) if lease.crcs else None

    def payload(self, lease: Lease, chunk: BlockRange) -> Memory:
        """The staged bytes of these blocks."""
        start = lease.slot.offset
        return self._rt.send_memory[start + chunk.first * self._rt.block_bytes : start + chunk.end * self._rt.block_bytes]

    def header(self, out: Outgoing, index: int, chunk: BlockRange, checksum: pb.Checksum) -> pb.ChunkHeader:
        """Of one chunk; with the seal, if it is the last one."""
        rt, lease = self._rt, out.lease
        header = pb.ChunkHeader(
            transfer_id=lease.transfer_id,
            generation=lease.slot.generation,
            index=index,
            first_block=chunk.first,
            num_blocks=chunk.count,
            offset=chunk.first * out.block_bytes,
            bytes=chunk.count * out.block_bytes,
            checksum=checksum,
            last=chunk.end == lease.num_blocks,
        )
        if header.last:
            header.seal.CopyFrom(
                pb.Seal(
                    transfer_id=lease.transfer_id,
                    prompt_tokens=lease.prompt_tokens,
                    token_hash=lease.token_hash,
                    fingerprint=rt.fingerprint,
                    incarnation=rt.incarnation,
                    num_chunks=index + 1,
                    bytes=lease.num_blocks * rt.block_bytes,
                    rank=rt.rank,
                )
            )
        return header

    async def _drain(self, out: Outgoing) -> None:
        """Hold the slot until the channel can read it no more: at once, or when the peer is done, or known dead (rule 13)."""
        rt, lease, channel = self._rt, out.lease, out.channel
        closed = False
        while True:
            if not lease.live and not closed:
                closed = True
                await channel.close()
            if await channel.drained(DRAIN_POLL_S):
                break
        if not closed:
            await channel.close()
        self._read_by_peer.pop((lease.transfer_id, out.receiver), None)
        if out.packer is not None:
            await out.packer.close()
        with rt.lock:
            rt.leases.drained(lease)
        rt.follow(lease.transfer_id, ())
