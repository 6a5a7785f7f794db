"""Other workers' ranks: one gRPC channel and one handshake per peer process, shared by all transfers with it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvtransfer.rpc import CHANNEL_OPTIONS
from kvtransfer.tls import TlsSettings
from kvtransfer.tls import channel as open_channel
from kvtransfer.wire import FETCH_METHOD, parse_fetch
from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

MAX_DEAD = 1024
"""Incarnations remembered as dead; they are never used again."""
MAX_PEERS = 256
"""Beyond this the peer that was used longest ago is forgotten; it costs a handshake to come back."""


@dataclass(slots=True)
class Peer:
    """A peer process. `handshake` gives its own word about itself, and what it says of its KV where that differs from ours."""

    channel: grpc.aio.Channel
    stub: pb_grpc.KvTransferServiceStub
    handshake: asyncio.Task[tuple[pb.RankEndpoint, pb.KvCompatibility | None]]
    users: int = 0
    forgotten: bool = False


class Peers:
    def __init__(
        self, compatibility: pb.KvCompatibility, fingerprint: bytes, handshake_timeout_s: float, tls: TlsSettings | None = None
    ) -> None:
        self._compatibility = compatibility
        self._fingerprint = fingerprint
        self._timeout_s = handshake_timeout_s
        self._tls = tls
        self._peers: OrderedDict[tuple[str, str], Peer] = OrderedDict()
        self._dead: OrderedDict[str, None] = OrderedDict()
        self.handshakes = 0

    def __len__(self) -> int:
        return len(self._peers)

    @asynccontextmanager
    async def use(self, endpoint: pb.RankEndpoint) -> AsyncIterator[tuple[pb_grpc.KvTransferServiceStub, pb.RankEndpoint]]:
        """As `agreed`, for whoever does not ask how the peer's KV lies."""
        async with self.agreed(endpoint) as (stub, theirs, _):
            yield stub, theirs

    @asynccontextmanager
    async def agreed(
        self, endpoint: pb.RankEndpoint
    ) -> AsyncIterator[tuple[pb_grpc.KvTransferServiceStub, pb.RankEndpoint, pb.KvCompatibility | None]]:
        """A peer that has agreed, for as long as the block runs: its stub, its own word about itself, and how its KV lies (None:
        byte for byte as ours).

        Raises:
            SplitpointError: INCOMPATIBLE_PEER naming the field; WORKER_LOST or DEADLINE_EXCEEDED when it does not answer.
        """
        key = (endpoint.address, endpoint.incarnation)
        if endpoint.incarnation in self._dead:
            raise SplitpointError(Code.INCOMPATIBLE_PEER, f"{endpoint.address}: incarnation {endpoint.incarnation!r} is dead")
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = self._dial(endpoint)
            await self._forget_oldest()
        self._peers.move_to_end(key)
        peer.users += 1
        try:
            # Shielded: others may wait for the same handshake when this transfer is cancelled.
            yield peer.stub, *await asyncio.shield(peer.handshake)
        except SplitpointError as error:
            if error.code in (Code.WORKER_LOST, Code.DEADLINE_EXCEEDED) or _disagreed_by_accident(peer):
                self._forget(key, peer)
            raise
        finally:
            peer.users -= 1
            await self._close_if_unused(peer)

    async def close(self) -> None:
        """Close every channel; what runs on them ends with an error."""
        while self._peers:
            _, peer = self._peers.popitem()
            peer.forgotten = True
            await self._shut(peer)

    def _dial(self, endpoint: pb.RankEndpoint) -> Peer:
        channel = open_channel(endpoint.address, self._tls, CHANNEL_OPTIONS)
        stub = pb_grpc.KvTransferServiceStub(channel)
        stub.Fetch = channel.unary_stream(
            FETCH_METHOD, request_serializer=pb.FetchRequest.SerializeToString, response_deserializer=parse_fetch
        )
        return Peer(channel, stub, asyncio.create_task(self._handshake(stub, endpoint)))

    async def _handshake(
        self, stub: pb_grpc.KvTransferServiceStub, endpoint: pb.RankEndpoint
    ) -> tuple[pb.RankEndpoint, pb.KvCompatibility | None]:
        self.handshakes += 1
        request = pb.HandshakeRequest(
            protocol_version=self._compatibility.protocol_version,
            fingerprint=self._fingerprint,
            expected_incarnation=endpoint.incarnation,
        )
        try:
            response = await stub.Handshake(request, timeout=self._timeout_s)
            if not response.accepted and not response.mismatch:
                request.compatibility.CopyFrom(self._compatibility)
                response = await stub.Handshake(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc
        if not response.accepted:
            raise SplitpointError(Code.INCOMPATIBLE_PEER, f"rank {endpoint.rank} at {endpoint.address}: {response.mismatch}")
        if (response.endpoint.rank, response.endpoint.incarnation) != (endpoint.rank, endpoint.incarnation):
            text = f"{endpoint.address} is rank {response.endpoint.rank} of {response.endpoint.incarnation}"
            raise SplitpointError(Code.INCOMPATIBLE_PEER, f"{text}, not rank {endpoint.rank} of {endpoint.incarnation}")
        result = pb.RankEndpoint()
        result.CopyFrom(response.endpoint)
        logger.info("peer rank %d at %s, incarnation %s, agreed", endpoint.rank, endpoint.address, endpoint.incarnation)
        return result, response.compatibility if response.HasField("compatibility") else None

    def _forget(self, key: tuple[str, str], peer: Peer) -> None:
        peer.forgotten = True
        if self._peers.get(key) is peer:
            del self._peers[key]

    async def forget(self, incarnation: str) -> None:
        """This incarnation is dead: nobody shakes hands with it again. What still runs with it ends by itself."""
        self._dead[incarnation] = None
        while len(self._dead) > MAX_DEAD:
            self._dead.popitem(last=False)
        for key, peer in [(key, peer) for key, peer in self._peers.items() if key[1] == incarnation]:
            self._forget(key, peer)
            await self._close_if_unused(peer)

    async def _forget_oldest(self) -> None:
        while len(self._peers) > MAX_PEERS:
            key, peer = next(iter(self._peers.items()))
            self._forget(key, peer)
            await self._close_if_unused(peer)

    async def _close_if_unused(self, peer: Peer) -> None:
        if peer.forgotten and peer.users == 0:
            await self._shut(peer)

    async def _shut(self, peer: Peer) -> None:
        peer.handshake.cancel()
        await asyncio.gather(peer.handshake, return_exceptions=True)
        await peer.channel.close()


def _disagreed_by_accident(peer: Peer) -> bool:
    """The handshake failed for another reason than what the peer is: the next transfer tries again."""
    if not peer.handshake.done() or peer.handshake.cancelled():
        return False
    failure = peer.handshake.exception()
    return isinstance(failure, SplitpointError) and failure.code is not Code.INCOMPATIBLE_PEER
