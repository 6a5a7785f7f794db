"""A worker whose every answer the test gives: a real gRPC server, no engine. It keeps each leg until the test speaks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from coordinator.routing.views import Role, WorkerView
from protos.errors import Code, SplitpointError
from protos.ids import token_hash
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2, worker_pb2_grpc
from tests.support.views import worker_view

PATIENCE_S = 10.0


class _Stream:
    """One gateway's stream. `out` None or a status ends it."""

    def __init__(self) -> None:
        self.out: asyncio.Queue[worker_pb2.StreamResponse | grpc.StatusCode | None] = asyncio.Queue()


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Start with `start`, speak with `tokens`, `sealed`, ...; `lose` breaks every stream as a dying process would."""

    def __init__(self, name: str, role: Role, **view: Any) -> None:
        self.view: WorkerView = worker_view(name, role, **view)
        self.answers_as = self.view.incarnation
        self.received: list[worker_pb2.StreamRequest] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.connected = asyncio.Event()
        self._streams: list[_Stream] = []
        self._arrived = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._port = 0

    async def start(self) -> WorkerView:
        """Listens, on the same port as before after a `stop`."""
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        await server.start()
        self._server = server
        self.view = replace(self.view, address=f"127.0.0.1:{self._port}")
        return self.view

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def lose(self) -> None:
        """The process dies."""
        await self.stop()

    def end_streams(self, status: grpc.StatusCode | None = None) -> None:
        """Every stream ends, in good order or with `status`; the server goes on listening."""
        for stream in self._streams:
            stream.out.put_nowait(status)

    # The service --------------------------------------------------------------------------------------------------------

    async def DescribeWorker(self, request: Any, context: Any) -> worker_pb2.DescribeWorkerResponse:
        return worker_pb2.DescribeWorkerResponse(worker_id=self.view.worker_id, incarnation=self.answers_as)

    async def Stream(
        self, requests: AsyncIterator[worker_pb2.StreamRequest], context: Any
    ) -> AsyncIterator[worker_pb2.StreamResponse]:
        stream = _Stream()
        self._streams.append(stream)
        self.connected.set()
        reader = asyncio.create_task(self._read(requests))
        try:
            while (frame := await stream.out.get()) is not None:
                if isinstance(frame, grpc.StatusCode):
                    await context.abort(frame, "as the test wants it")
                yield frame
        finally:
            self._streams.remove(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[worker_pb2.StreamRequest]) -> None:
        await self.reading.wait()
        async for request in requests:
            async with self._arrived:
                self.received.append(request)
                self._arrived.notify_all()
            await self.reading.wait()

    # What arrived -------------------------------------------------------------------------------------------------------

    def of(self, kind: str) -> list[Any]:
        """All legs, aborts or releases of one kind so far."""
        return [getattr(r, kind) for r in self.received if r.WhichOneof("leg") == kind]

    async def leg(self, kind: str, number: int = 1) -> Any:
        """The `number`-th of its kind, waiting for it."""
        async with asyncio.timeout(PATIENCE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.of(kind)) >= number)
        return self.of(kind)[number - 1]

    # What it says -------------------------------------------------------------------------------------------------------

    def say(self, *events: worker_pb2.LegEvent) -> None:
        """One frame, to every gateway."""
        for stream in self._streams:
            stream.out.put_nowait(worker_pb2.StreamResponse(events=events))

    def tokens(self, leg: Any, *token_ids: int, **extra: Any) -> None:
        tokens = worker_pb2.TokensEvent(token_ids=token_ids, **extra)
        self.say(worker_pb2.LegEvent(attempt_id=leg.header.attempt_id, tokens=tokens))

    def sealed(self, leg: Any, first: int, *, cached_tokens: int = 0, times: worker_pb2.LegTimes | None = None) -> None:
        seal = kv_transfer_pb2.Seal(
            transfer_id=leg.grant.transfer_id,
            prompt_tokens=len(leg.prompt_token_ids),
            token_hash=token_hash(list(leg.prompt_token_ids)),
            incarnation=self.view.incarnation,
        )
        tokens = worker_pb2.TokensEvent(token_ids=[first], cached_tokens=cached_tokens)
        event = worker_pb2.SealedEvent(first=tokens, seal=seal, times=times)
        self.say(worker_pb2.LegEvent(attempt_id=leg.header.attempt_id, sealed=event))

    def staged(self, leg: Any) -> None:
        staged = worker_pb2.StagedEvent(bytes=4096, seconds=0.001, transport=leg.transport)
        self.say(worker_pb2.LegEvent(attempt_id=leg.header.attempt_id, staged=staged))

    def finished(self, leg: Any, *token_ids: int, reason: str = "length", **extra: Any) -> None:
        last = worker_pb2.TokensEvent(token_ids=token_ids)
        event = worker_pb2.FinishedEvent(finish_reason=reason, last=last, **extra)
        self.say(worker_pb2.LegEvent(attempt_id=leg.header.attempt_id, finished=event))

    def failed(self, leg: Any, code: Code, message: str = "scripted") -> None:
        detail = SplitpointError(code, message).to_proto()
        self.say(worker_pb2.LegEvent(attempt_id=leg.header.attempt_id, failed=detail))


async def start_all(workers: Sequence[ScriptedWorker]) -> list[WorkerView]:
    return [await worker.start() for worker in workers]
