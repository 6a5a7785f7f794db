"""`WorkerService` on the wire: the stream's two directions, and translation of errors at the edge."""

from __future__ import annotations

import asyncio
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from engine.worker.legs import LegCall, LegHandler
from engine.worker.mux import EventQueue
from protos.errors import SplitpointError
from protos.grpc_errors import abort
from protos.ids import TransferId
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from engine.worker.server import WorkerServer

_log = logging.getLogger(__name__)

CONTROL_TOKEN_METADATA = "x-splitpoint-control-token"

_RELEASES_AT_ONCE = 16
_ENDING_LEGS = ("prefill", "decode")
"""Legs after which their worker holds nothing of the transfer, unless they were sealed."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves gateways and this worker's own ranks."""

    def __init__(self, worker: WorkerServer) -> None:
        self._worker = worker
        self._numbers = itertools.count(1)
        self._streams: set[_GatewayStream] = set()

    async def DescribeWorker(  # noqa: N802
        self, request: worker_pb2.DescribeWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DescribeWorkerResponse:
        try:
            return self._worker.describe()
        except SplitpointError as error:
            return await abort(context, error)

    async def RegisterRank(  # noqa: N802
        self, request: worker_pb2.RegisterRankRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.RegisterRankResponse:
        token = dict(context.invocation_metadata() or ()).get(CONTROL_TOKEN_METADATA, "")
        try:
            self._worker.registry.register(request, str(token))
        except SplitpointError as error:
            self._worker.metrics.event("register_refused")
            _log.warning("rank refused address=%s: %s", request.endpoint.address, error)
            await abort(context, error)
        return worker_pb2.RegisterRankResponse()

    async def Stream(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        stream = _GatewayStream(self._worker, next(self._numbers))
        self._streams.add(stream)
        try:
            await stream.serve(context)
        finally:
            self._streams.discard(stream)
            stream.broken()

    def finish_streams(self) -> None:
        """End every stream after what is queued on it."""
        for stream in self._streams:
            stream.finish()


class _GatewayStream:
    """One gateway's stream, from its first leg to its end."""

    def __init__(self, worker: WorkerServer, number: int) -> None:
        self._worker = worker
        self._number = number
        self._queue = EventQueue(worker.settings.max_pending_events, worker.settings.max_message_bytes)

    async def serve(self, context: grpc.aio.ServicerContext) -> None:
        """Read legs and write frames until both are done with: the gateway closed its side and its legs have ended, or the
        worker stops. gRPC cancels this when the stream breaks."""
        reader = asyncio.create_task(self._read(context), name=f"{self._worker.identity.worker_id}-stream-{self._number}")
        try:
            await self._queue.drain(context.write)
        finally:
            reader.cancel()
            (ended,) = await asyncio.gather(reader, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended

    def finish(self) -> None:
        """The worker stops: write what is queued, then end the stream."""
        self._queue.finish()

    def broken(self) -> None:
        """The stream is over: abort what it still carries and release its transfers."""
        worker = self._worker
        self._queue.close()
        aborted = worker.attempts.abort_stream(self._queue, "stream_broken")
        transfers = worker.transfers.take(self._number)
        if aborted or transfers:
            worker.metrics.event("stream_broken")
            _log.warning("gateway stream broke: aborts %d legs, releases %d transfers", aborted, len(transfers))
        if transfers:
            worker.attempts.spawn(self._release_all(transfers))

    async def _read(self, context: grpc.aio.ServicerContext) -> None:
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                self._dispatch(request)
            await self._worker.attempts.stream_idle(self._queue)
        finally:
            self._queue.finish()

    def _dispatch(self, request: worker_pb2.StreamRequest) -> None:
        worker, name = self._worker, request.WhichOneof("leg")
        if name is None:
            worker.metrics.event("leg_empty")
            return
        message = getattr(request, name)
        if name == "abort":
            worker.attempts.abort(message.attempt_id, message.reason)
            return
        if name == "release":
            worker.attempts.spawn(self._release(TransferId(message.transfer_id), message.reason))
            return
        try:
            handler = worker.handler(name)
        except SplitpointError as refusal:
            worker.attempts.refuse(name, message.header, refusal, self._queue)
            return
        transfer_id = _transfer_of(name, message)
        if transfer_id:
            worker.transfers.note(self._number, TransferId(transfer_id), message.header.remaining_s)
            if name in _ENDING_LEGS:
                handler = self._forgetting(handler, TransferId(transfer_id))
        worker.attempts.start(name, handler, message, self._queue, transfer_id)

    def _forgetting(self, handler: LegHandler, transfer_id: TransferId) -> LegHandler:
        """`handler`, and the transfer is off the roster when its leg has ended it: it need not be released once more."""

        async def forget(call: LegCall) -> None:
            if not call.was_sealed:
                self._worker.transfers.forget(transfer_id)

        async def run(call: LegCall, message: Any) -> None:
            call.defer(partial(forget, call))
            await handler(call, message)

        return run

    async def _release(self, transfer_id: TransferId, reason: str) -> None:
        if not await self._worker.release(transfer_id, reason):
            self._worker.metrics.event("release_unknown")

    async def _release_all(self, transfers: list[TransferId]) -> None:
        gate = asyncio.Semaphore(_RELEASES_AT_ONCE)

        async def one(transfer_id: TransferId) -> None:
            async with gate:
                await self._worker.release(transfer_id, "stream_broken")

        await asyncio.gather(*(one(t) for t in transfers))


def _transfer_of(name: str, message: Any) -> bytes:
    if name in ("prefill", "prepare"):
        return bytes(message.grant.transfer_id)
    return bytes(message.transfer_id) if name == "decode" else b""
