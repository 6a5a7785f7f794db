"""A worker's actor to all of its ranks at once. One rank's failure fails the call and releases the transfer on the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc

from kvtransfer.rpc import CHANNEL_OPTIONS, control_metadata
from kvtransfer.tls import TlsSettings
from kvtransfer.tls import channel as open_channel
from kvtransfer.waiting import all_or_first_failure
from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

R = TypeVar("R")

RELEASE_TIMEOUT_S = 2.0
STATUS_TIMEOUT_S = 2.0
MARGIN_S = 1.0
"""A rank answers by its own deadline; ours is only for one that hangs."""


class RankControl:
    """All ranks of one worker, in rank order. Belongs to one event loop; `close` it there."""

    def __init__(self, endpoints: Sequence[pb.RankEndpoint], token: str, tls: TlsSettings | None = None) -> None:
        self.endpoints = tuple(sorted(endpoints, key=lambda endpoint: endpoint.rank))
        if [endpoint.rank for endpoint in self.endpoints] != list(range(len(self.endpoints))):
            raise ValueError(f"ranks {[endpoint.rank for endpoint in self.endpoints]} are not 0 to n-1")
        self._metadata = control_metadata(token)
        self._channels = [open_channel(e.address, tls, CHANNEL_OPTIONS) for e in self.endpoints]
        self._stubs = [pb_grpc.KvControlServiceStub(channel) for channel in self._channels]
        self._releases: set[asyncio.Task[bool]] = set()

    async def reserve(
        self,
        grant: pb.TransferGrant,
        *,
        prompt_tokens: int,
        token_hash: bytes,
        remaining_s: float,
        staging_wait_s: float | None = None,
    ) -> list[pb.ReserveResponse]:
        """Lease send staging on every rank, waiting at most `staging_wait_s` for room (None: `remaining_s`).

        Raises:
            SplitpointError: STAGING_FULL, TRANSFER_REFUSED, DEADLINE_EXCEEDED or WORKER_LOST, naming the rank; no rank holds
                anything then.
        """

        def request(remaining_s: float, staging_wait_s: float | None) -> pb.ReserveRequest:
            return pb.ReserveRequest(
                grant=grant,
                prompt_tokens=prompt_tokens,
                token_hash=token_hash,
                remaining_s=remaining_s,
                staging_wait_s=staging_wait_s,
            )

        work = self._in_order("Reserve", lambda _, *left: request(*left), remaining_s, staging_wait_s)
        return await self._ended_together(grant, work)

    async def pull(
        self,
        grant: pb.TransferGrant,
        *,
        attempt_id: str,
        senders: Sequence[pb.RankEndpoint],
        prompt_tokens: int,
        token_hash: bytes,
        transport: str,
        remaining_s: float,
        staging_wait_s: float | None = None,
    ) -> list[pb.PullResponse]:
        """Have every rank pull its share from `senders`, all ranks of one worker in rank order. Returns when all are verified.

        Cancelling it ends the pulls and gives back what they staged.

        Raises:
            SplitpointError: the first rank's failure, naming the rank; no rank holds anything then. INCOMPATIBLE_PEER when the
                two workers cannot exchange KV, or have not the same number of ranks and one does not say what its ranks hold.
        """
        ranks = range(len(self.endpoints))
        holdings = [endpoint.holding for endpoint in self.endpoints if endpoint.HasField("holding")]
        mapped = len(holdings) == len(ranks)
        if len(senders) != len(ranks) and not (mapped and senders):
            raise SplitpointError(
                Code.INCOMPATIBLE_PEER, f"world size: {len(ranks)} here, {len(senders)} there; only equal ones exchange KV"
            )

        def request(rank: int, remaining_s: float, staging_wait_s: float | None) -> pb.PullRequest:
            return pb.PullRequest(
                grant=grant,
                attempt_id=attempt_id,
                sender=senders[rank] if rank < len(senders) else None,
                prompt_tokens=prompt_tokens,
                token_hash=token_hash,
                transport=transport,
                remaining_s=remaining_s,
                staging_wait_s=staging_wait_s,
                senders=senders if mapped else (),
                receivers=holdings if mapped else (),
            )

        async def every_rank() -> list[pb.PullResponse]:
            begun = asyncio.get_running_loop().time()
            if len(ranks) > 1:

                def prepare(rank: int, *left: Any) -> pb.PreparePullRequest:
                    return pb.PreparePullRequest(pull=request(rank, *left))

                await self._in_order("PreparePull", prepare, remaining_s, staging_wait_s)
            left_s = max(0.0, remaining_s - (asyncio.get_running_loop().time() - begun))
            requests = [request(rank, left_s, staging_wait_s) for rank in ranks]
            return await self._all(lambda rank: self._rpc(rank, "Pull", requests[rank], left_s + MARGIN_S))

        return await self._ended_together(grant, every_rank())

    async def release(self, transfer_id: bytes, reason: str) -> bool:
        """End a transfer on every rank, either side. Idempotent; never raises: what a rank does not hear, its lease's expiry
        does. True when some rank knew it."""
        request = pb.ReleaseRequest(transfer_id=transfer_id, reason=reason)
        calls = [self._rpc(rank, "Release", request, RELEASE_TIMEOUT_S) for rank in range(len(self.endpoints))]
        known = False
        for rank, answer in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            if isinstance(answer, BaseException):
                logger.warning("transfer %s: release (%s) did not reach rank %d: %s", transfer_id.hex(), reason, rank, answer)
            else:
                known = known or answer.known
        return known

    async def status(self) -> list[pb.GetNodeStatusResponse]:
        """Every rank's snapshot. Raises `SplitpointError` when a rank does not answer."""
        return await self._all(lambda rank: self._rpc(rank, "GetNodeStatus", pb.GetNodeStatusRequest(), STATUS_TIMEOUT_S))

    async def metrics(self) -> list[bytes | None]:
        """Every rank's Prometheus exposition, in rank order; None for one that does not answer."""
        request = pb.GetNodeStatusRequest(metrics=True)
        calls = [self._rpc(rank, "GetNodeStatus", request, STATUS_TIMEOUT_S) for rank in range(len(self.endpoints))]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [None if isinstance(answer, BaseException) else answer.metrics_text for answer in answers]

    async def fence(self, incarnation: str) -> None:
        """Tell every rank that the peer process `incarnation` is known dead: slots quarantined for its sake come back."""
        request = pb.FencePeerRequest(incarnation=incarnation)
        await self._all(lambda rank: self._rpc(rank, "FencePeer", request, STATUS_TIMEOUT_S))

    async def close(self) -> None:
        """Close the channels, after releases that still run."""
        await asyncio.gather(*self._releases, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def _in_order(
        self,
        method: str,
        request: Callable[[int, float, float | None], Any],
        remaining_s: float,
        staging_wait_s: float | None,
    ) -> list[Any]:
        """Ask one rank after the other for staging, all within the same time. In one order everywhere: were they asked at once,
        two transfers could get a rank each and wait for the other's until their time is over."""
        begun = asyncio.get_running_loop().time()
        answers = []
        for rank in range(len(self.endpoints)):
            spent_s = asyncio.get_running_loop().time() - begun
            left_s = max(0.0, remaining_s - spent_s)
            wait_s = None if staging_wait_s is None else max(0.0, staging_wait_s - spent_s)
            answers.append(await self._rpc(rank, method, request(rank, left_s, wait_s), left_s + MARGIN_S))
        return answers

    async def _ended_together(self, grant: pb.TransferGrant, work: Coroutine[Any, Any, list[R]]) -> list[R]:
        """The result of `work`, or its failure once every rank has heard that the transfer is over."""
        try:
            return await work
        except BaseException as exc:
            reason = exc.code if isinstance(exc, SplitpointError) else "cancelled"
            release = asyncio.create_task(self.release(grant.transfer_id, f"rank_failed:{reason}"))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
            await asyncio.shield(release)
            raise

    async def _all(self, call: Callable[[int], Coroutine[Any, Any, R]]) -> list[R]:
        """Every rank's answer, or the first failure with the others cancelled."""
        return await all_or_first_failure([call(rank) for rank in range(len(self.endpoints))])

    async def _rpc(self, rank: int, method: str, request: Any, timeout_s: float) -> Any:
        call: Callable[..., Awaitable[Any]] = getattr(self._stubs[rank], method)
        try:
            return await call(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            error = from_rpc_error(exc)
            error.message = f"rank {rank}: {error.message}"
            raise error from exc
