"""The transport: one `Generate` call per request of aiperf, stamped as aiperf stamps HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
import orjson
from aiperf.common.exceptions import NotInitializedError
from aiperf.common.hooks import on_init, on_stop
from aiperf.common.models import ErrorDetails, RequestInfo, RequestRecord, SSEMessage, TextResponse
from aiperf.common.redact import redact_headers
from aiperf.plugin.schema.schemas import TransportMetadata
from aiperf.transports.base_transports import BaseTransport, FirstTokenCallback

from protos.splitpoint.v1 import generation_pb2, generation_pb2_grpc
from splitpoint_aiperf import translate

NAME = "splitpoint_grpc"
OF_HTTP = frozenset({"content-type", "accept", "accept-encoding", "user-agent", "connection", "host"})
"""Headers that gRPC sets itself."""
CANCELLED = 499


class SplitpointGrpcTransport(BaseTransport):
    """Sends aiperf's OpenAI bodies as `splitpoint.v1` messages, and hands the answers back as OpenAI chunks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._ready = False

    @classmethod
    def metadata(cls) -> TransportMetadata:
        """What `plugins.yaml` says of it."""
        return TransportMetadata(transport_type=NAME, url_schemes=["grpc"])

    @on_init
    async def _open(self) -> None:
        self._ready = True

    @on_stop
    async def _close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        self._ready = False
        for channel in channels:
            await channel.close()

    def get_url(self, request_info: RequestInfo) -> str:
        """Host and port of the gateway's gRPC door, whatever the scheme and path."""
        url = request_info.model_endpoint.endpoint.get_url(request_info.url_index)
        return urlsplit(url if "://" in url else f"grpc://{url}").netloc

    async def send_request(
        self,
        request_info: RequestInfo,
        payload: dict[str, Any] | bytes,
        *,
        first_token_callback: FirstTokenCallback | None = None,
    ) -> RequestRecord:
        """See `BaseTransport`. A refusal, a broken stream and a cancellation are errors of the record."""
        if not self._ready:
            raise NotInitializedError("initialize the transport before it sends")
        headers = self.build_headers(request_info)
        record = RequestRecord(request_headers=redact_headers(headers), start_perf_ns=time.perf_counter_ns())
        try:
            body = orjson.loads(payload) if isinstance(payload, bytes) else payload
            message = translate.request_of(body)
        except ValueError as exc:
            return _failed(record, ErrorDetails(code=400, type="InvalidRequest", message=str(exc)))
        metadata = tuple((name.lower(), value) for name, value in headers.items() if name.lower() not in OF_HTTP)
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel(self.get_url(request_info)))
        # aiperf reads both clocks together.
        record.start_perf_ns, record.timestamp_ns = time.perf_counter_ns(), time.time_ns()
        call = stub.Generate(message, metadata=metadata, timeout=request_info.model_endpoint.endpoint.timeout)
        left_s = None if request_info.cancel_after_ns is None else request_info.cancel_after_ns / 1e9
        try:
            async with asyncio.timeout(left_s):
                await _read(call, record, "messages" in body, first_token_callback)
        except TimeoutError:
            record.cancellation_perf_ns = time.perf_counter_ns()
            _failed(record, ErrorDetails(code=CANCELLED, type="RequestCancellationError", message="cancelled as planned"))
        except grpc.aio.AioRpcError as exc:
            _failed(record, ErrorDetails(code=exc.code().value[0], type=exc.code().name, message=exc.details() or ""))
        finally:
            call.cancel()
        return record

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            # The proxy of the environment is for the outside, not for the system under test.
            self._channels[address] = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        return self._channels[address]


async def _read(call: Any, record: RequestRecord, chat: bool, first_token_callback: FirstTokenCallback | None) -> None:
    streamed, waiting = False, first_token_callback is not None
    reply: generation_pb2.GenerateResponse
    async for reply in call:
        arrived = time.perf_counter_ns()
        record.recv_start_perf_ns = record.recv_start_perf_ns or arrived
        if reply.HasField("chunk"):
            streamed = True
            said = SSEMessage.parse(f"data: {translate.chunk(reply.chunk, chat=chat)}", arrived)
        elif streamed:
            said = SSEMessage.parse(f"data: {translate.end_of_stream(reply.complete, chat=chat)}", arrived)
        else:
            whole = translate.whole(reply.complete, chat=chat)
            record.responses.append(TextResponse(perf_ns=arrived, content_type="application/json", text=whole))
            continue
        record.responses.append(said)
        if waiting and first_token_callback is not None:
            waiting = not await first_token_callback(arrived - record.start_perf_ns, said)
    record.status = 200
    record.end_perf_ns = time.perf_counter_ns()


def _failed(record: RequestRecord, error: ErrorDetails) -> RequestRecord:
    record.error = error
    record.end_perf_ns = time.perf_counter_ns()
    return record
