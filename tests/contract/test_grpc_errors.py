"""A `SplitpointError` raised behind a gRPC handler arrives whole; a bare status maps by the table."""

from __future__ import annotations

import grpc
import pytest

from protos.errors import TABLE, Code, SplitpointError
from protos.grpc_errors import MAX_MESSAGE_CHARS, abort, from_rpc_error
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc


class Refusing(pb_grpc.KvTransferServiceServicer):
    def __init__(self, error: SplitpointError) -> None:
        self.error = error

    async def Handshake(self, request, context):
        await abort(context, self.error)

    async def Fetch(self, request, context):
        yield pb.FetchResponse(payload=b"x")
        await abort(context, self.error)


async def drain(stub: pb_grpc.KvTransferServiceStub) -> None:
    async for _ in stub.Fetch(pb.FetchRequest(), timeout=5):
        pass


async def call(error: SplitpointError, *, stream: bool) -> grpc.aio.AioRpcError:
    server = grpc.aio.server()
    pb_grpc.add_KvTransferServiceServicer_to_server(Refusing(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.KvTransferServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (drain(stub) if stream else stub.Handshake(pb.HandshakeRequest(), timeout=5))
            return caught.value
    finally:
        await server.stop(0)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_every_field_survives(stream: bool) -> None:
    sent = SplitpointError(
        Code.QUEUE_FULL, "64 of 64 wait: größer", param="model", retry_after_s=1.5, error_id="e1", tokens_sent=7
    )
    raised = await call(sent, stream=stream)
    assert raised.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    got = from_rpc_error(raised)
    assert (got.code, got.message, got.param) == (sent.code, sent.message, "model")
    assert (got.retry_after_s, got.error_id, got.tokens_sent) == (1.5, "e1", 7)


async def test_every_code_has_its_status() -> None:
    for code in Code:
        raised = await call(SplitpointError(code, "why"), stream=False)
        assert raised.code() is TABLE[code].grpc
        assert from_rpc_error(raised).code is code


@pytest.mark.parametrize(
    ("error", "pushback"),
    [
        (SplitpointError(Code.NO_WORKER, "nobody"), "1000"),
        (SplitpointError(Code.QUEUE_FULL, "full", retry_after_s=2.5), "2500"),
        (SplitpointError(Code.INVALID_VALUE, "no"), None),
        (SplitpointError(Code.STREAM_BROKEN, "half"), None),
        (SplitpointError(Code.BODY_TOO_LARGE, "big"), None),
    ],
)
async def test_a_refusal_that_passes_says_when_to_come_back(error: SplitpointError, pushback: str | None) -> None:
    trailing = dict((await call(error, stream=False)).trailing_metadata() or ())
    assert trailing.get("grpc-retry-pushback-ms") == pushback


async def test_long_message_is_cut_not_lost() -> None:
    got = from_rpc_error(await call(SplitpointError(Code.INTERNAL, "é" * 50_000, error_id="abc"), stream=False))
    assert got.code is Code.INTERNAL
    assert got.error_id == "abc"
    assert len(got.message) == MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.UNAVAILABLE, Code.WORKER_LOST),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Code.DEADLINE_EXCEEDED),
        (grpc.StatusCode.CANCELLED, Code.CANCELLED),
        (grpc.StatusCode.UNIMPLEMENTED, Code.INCOMPATIBLE_PEER),
        (grpc.StatusCode.DATA_LOSS, Code.INTERNAL),
    ],
)
def test_bare_status(status: grpc.StatusCode, code: Code) -> None:
    exc = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone")
    got = from_rpc_error(exc)
    assert got.code is code
    assert "gone" in got.message


@pytest.mark.parametrize("details", [b"\xff\xfe no status", b""], ids=["garbage", "empty"])
def test_details_that_cannot_be_read_leave_the_bare_status(details: bytes) -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
    exc = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="gone")
    assert from_rpc_error(exc).code is Code.WORKER_LOST
