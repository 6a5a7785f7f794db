"""The worker's ranks: who has registered, what they have in common, and the control that reaches them all."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.layout import family, fingerprint
from protos.errors import Code, SplitpointError, invalid
from protos.ids import Incarnation, TransferId
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2


class RankControl(Protocol):
    """All ranks of one worker (`kvtransfer.control.RankControl`). One rank's failure fails a call and releases the others."""

    async def reserve(
        self,
        grant: kv_transfer_pb2.TransferGrant,
        *,
        prompt_tokens: int,
        token_hash: bytes,
        remaining_s: float,
        staging_wait_s: float | None = None,
    ) -> Sequence[kv_transfer_pb2.ReserveResponse]: ...

    async def pull(
        self,
        grant: kv_transfer_pb2.TransferGrant,
        *,
        attempt_id: str,
        senders: Sequence[kv_transfer_pb2.RankEndpoint],
        prompt_tokens: int,
        token_hash: bytes,
        transport: str,
        remaining_s: float,
        staging_wait_s: float | None = None,
    ) -> Sequence[kv_transfer_pb2.PullResponse]: ...

    async def release(self, transfer_id: TransferId, reason: str) -> bool: ...

    async def status(self) -> Sequence[kv_transfer_pb2.GetNodeStatusResponse]: ...

    async def metrics(self) -> Sequence[bytes | None]: ...

    async def close(self) -> None: ...


RankControlFactory = Callable[[Sequence[kv_transfer_pb2.RankEndpoint], str], RankControl | Awaitable[RankControl]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What all ranks of a worker together are able to move."""

    endpoints: tuple[kv_transfer_pb2.RankEndpoint, ...]
    compatibility: kv_transfer_pb2.KvCompatibility
    """Of rank 0."""
    fingerprint: bytes
    """Of rank 0."""
    family: bytes = b""
    """Equal for workers that can exchange KV, of whatever shape (`kvtransfer.layout.family`)."""
    rank_fingerprints: tuple[bytes, ...] = ()
    """Of each rank."""
    rank_block_bytes: tuple[int, ...] = ()
    """What a block takes in each rank's staging."""
    block_tokens: int
    bytes_per_block: int
    """Of rank 0."""
    max_transfer_tokens: int
    """The longest prompt whose KV fits the smallest staging pool of any rank."""
    transports: tuple[str, ...]
    """Those that every rank has."""

    def transfer_bytes(self, prompt_tokens: int, rank: int = 0) -> int:
        """What a prompt takes in a rank's staging."""
        blocks = -(-prompt_tokens // self.block_tokens)
        return blocks * (self.rank_block_bytes[rank] if self.rank_block_bytes else self.bytes_per_block)


class RankRegistry:
    """Collects `RegisterRank` calls until every rank of the engine has called."""

    def __init__(self, incarnation: Incarnation, control_token: str) -> None:
        self._incarnation = incarnation
        self._token = control_token.encode()
        self._ranks: dict[int, worker_pb2.RegisterRankRequest] = {}
        self._world_size = 0
        self._complete = asyncio.Event()

    def register(self, request: worker_pb2.RegisterRankRequest, token: str) -> None:
        """Note one rank. Repeating the same call changes nothing.

        Raises:
            SplitpointError: UNAUTHENTICATED, INVALID_VALUE (another incarnation, a rank outside the world, an empty
                address), CONFLICT (another node has registered as this rank, or with another world size).
        """
        if not hmac.compare_digest(token.encode(), self._token):
            raise SplitpointError(Code.UNAUTHENTICATED, "x-splitpoint-control-token is missing or wrong")
        endpoint = request.endpoint
        if endpoint.incarnation != self._incarnation:
            raise invalid("endpoint.incarnation", f"{endpoint.incarnation!r} is not this worker's {self._incarnation!r}")
        if not endpoint.rank < request.world_size:
            raise invalid("endpoint.rank", f"rank {endpoint.rank} of a world of {request.world_size}")
        if not endpoint.address or request.bytes_per_block == 0 or request.compatibility.block_tokens == 0:
            raise invalid("endpoint.address", "address, bytes_per_block and compatibility.block_tokens must be set")
        known = self._ranks.get(endpoint.rank)
        if known is not None and known != request:
            raise SplitpointError(Code.CONFLICT, f"rank {endpoint.rank} has registered from {known.endpoint.address}")
        if self._world_size not in (0, request.world_size):
            raise SplitpointError(Code.CONFLICT, f"world size {request.world_size}, others said {self._world_size}")
        self._world_size = request.world_size
        self._ranks[endpoint.rank] = request
        if len(self._ranks) == self._world_size:
            self._complete.set()

    @property
    def complete(self) -> bool:
        return self._complete.is_set()

    async def wait(self, timeout_s: float) -> RankFacts:
        """All ranks, once they are there. Raises `TimeoutError` naming how many are missing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            raise TimeoutError(f"{len(self._ranks)} of {self._world_size or '?'} ranks registered in {timeout_s:g} s") from None
        return self.facts()

    def facts(self) -> RankFacts:
        """What the registered ranks have in common. Only when `complete`."""
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        first = ranks[0]
        blocks = min(min(r.send_staging_bytes, r.receive_staging_bytes) // r.bytes_per_block for r in ranks)
        return RankFacts(
            endpoints=tuple(r.endpoint for r in ranks),
            compatibility=first.compatibility,
            fingerprint=fingerprint(first.compatibility),
            family=family(first.compatibility),
            rank_fingerprints=tuple(fingerprint(r.compatibility) for r in ranks),
            rank_block_bytes=tuple(r.bytes_per_block for r in ranks),
            block_tokens=first.compatibility.block_tokens,
            bytes_per_block=first.bytes_per_block,
            max_transfer_tokens=blocks * first.compatibility.block_tokens,
            transports=tuple(t for t in first.transports if all(t in r.transports for r in ranks)),
        )
