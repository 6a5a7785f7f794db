"""The decode side's last word to each sender of a pull: that its share is verified, why it is not, or that nobody came for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc

from kvtransfer.runtime import DRAIN_POLL_S, NodeRuntime
from kvtransfer.session import ReceiveSession
from kvtransfer.sources import Source
from kvtransfer.transports.base import ReadsPeer
from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

FetchCall = Any
"""grpc.aio's stream of `FetchResponse`."""
COMPLETE_TIMEOUT_S = 2.0
COMPLETE_PAUSE_S = 1.0
COMPLETE_AGAIN_S = 600.0
"""How long a sender whose memory was read from here is told so again and again while its process lives: its slot waits for it."""


class Completer:
    """Everything here belongs to the node's loop."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self._rt = runtime

    async def complete(self, request: pb.PullRequest, source: Source, session: ReceiveSession) -> None:
        """Tell the sender how it ended. When that fails its lease ends by release or expiry. A sender whose memory was read hears
        it after the last read, and when it has lent its slot, when that is given back; and it is told again while it may only be
        slow: its slot is held until then."""
        channel, outcome, endpoint = source.channel, source.outcome, source.endpoint
        reader = channel if isinstance(channel, ReadsPeer) and channel.reads_peer else None
        if channel is not None and reader is not None:
            if outcome != "delivered":
                await channel.close()
            while not await channel.drained(DRAIN_POLL_S):
                pass
        message = pb.CompleteRequest(grant=request.grant, outcome=outcome, receiver_rank=source.receiver_rank)
        if outcome == "delivered":
            if source.tell is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COMPLETE_TIMEOUT_S):
                        if await source.tell(message):
                            return
                self._rt.metrics.event("complete_by_grpc")
            else:
                await self._end_of_stream(source.call)
        await self._rt.lending.given_back(session)
        give_up_at = self._rt.now() + COMPLETE_AGAIN_S
        while True:
            try:
                async with self._rt.peers.use(endpoint) as (stub, _):
                    try:
                        await stub.Complete(message, timeout=COMPLETE_TIMEOUT_S)
                        return
                    except grpc.aio.AioRpcError as exc:
                        raise from_rpc_error(exc) from exc
            except SplitpointError as error:
                another = error.code is Code.INCOMPATIBLE_PEER
                if reader is not None and reader.reads_peer and not another and self._rt.now() < give_up_at:
                    self._rt.metrics.event("complete_again")
                    await asyncio.sleep(COMPLETE_PAUSE_S)
                    continue
                self._rt.metrics.event("complete_failed")
                logger.warning(
                    "transfer %s: %s did not hear %r: %s", request.grant.transfer_id.hex(), endpoint.address, outcome, error
                )
                return

    async def _end_of_stream(self, call: FetchCall) -> None:
        """Let the sender end a stream that has brought everything: cancelling it would look like a receiver that left."""
        try:
            async with asyncio.timeout(COMPLETE_TIMEOUT_S):
                while await call.read() is not grpc.aio.EOF:
                    self._rt.metrics.late("chunk")
        except TimeoutError:
            self._rt.metrics.event("stream_not_ended")
        except grpc.aio.AioRpcError as exc:
            # Everything has come; the word of it may still arrive.
            self._rt.metrics.event("stream_broken_after_its_end")
            logger.info("a stream broke after its last chunk: %s", exc.code())
        finally:
            call.cancel()

    async def unneeded(self, request: pb.PullRequest, endpoint: pb.RankEndpoint) -> None:
        """Tell a sender whose heads others hold too that nobody will fetch. Only after a delivery: by then it has its lease."""
        self._rt.metrics.event("sender_unneeded")
        await self._nobody_comes(request, endpoint, "unneeded")

    async def too_late(self, request: pb.PullRequest) -> None:
        """The transfer was over here before its pull came, so nobody asked the senders and nobody will: their leases end now and
        not by their deadlines."""
        rt = self._rt
        rt.metrics.event("senders_told_of_late_pull")
        senders = list(request.senders) or [request.sender]
        alike = len(senders) == max(1, len(request.receivers)) and rt.rank < len(senders)
        for endpoint in senders[rt.rank : rt.rank + 1] if alike else senders:
            await self._nobody_comes(request, endpoint, "late pull")

    async def _nobody_comes(self, request: pb.PullRequest, endpoint: pb.RankEndpoint, outcome: str) -> None:
        rt = self._rt
        message = pb.CompleteRequest(grant=request.grant, outcome=outcome, receiver_rank=rt.rank)
        try:
            async with rt.peers.use(endpoint) as (stub, _):
                try:
                    await stub.Complete(message, timeout=COMPLETE_TIMEOUT_S)
                except grpc.aio.AioRpcError as exc:
                    raise from_rpc_error(exc) from exc
        except SplitpointError as error:
            rt.metrics.event("complete_failed")
            text = "transfer %s: %s did not hear %r: %s"
            logger.warning(text, request.grant.transfer_id.hex(), endpoint.address, outcome, error)
