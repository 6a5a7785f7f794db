"""`SplitpointError` over gRPC: a rich status (`google.rpc.Status`) whose details hold our `ErrorDetail`.

Server side: `await abort(context, error)`. Client side: `raise from_rpc_error(exc)`. Standard clients that know nothing of us
read the status code, its message, `google.rpc.ErrorInfo`, and where they apply `RetryInfo` and `BadRequest`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import common_pb2

DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
ERROR_DOMAIN = "splitpoint"
MAX_MESSAGE_CHARS = 1024
"""Metadata beyond 8 KiB is dropped or fails the call; the text travels twice and non-ASCII costs three bytes a byte."""

_BARE_CODES = {
    grpc.StatusCode.UNAVAILABLE: Code.WORKER_LOST,
    grpc.StatusCode.DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: Code.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED: Code.INCOMPATIBLE_PEER,
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Code.PERMISSION_DENIED,
}


def error_metadata(error: SplitpointError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata that carries `error` whole, and tells a client with a retry policy how long to wait."""
    detail = error.to_proto()
    detail.message = detail.message[:MAX_MESSAGE_CHARS]
    status = status_pb2.Status(code=error.status.grpc.value[0], message=detail.message)
    status.details.add().Pack(detail)
    info = {"error_id": error.error_id, "tokens_sent": str(error.tokens_sent or "")}
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason=error.code.value.upper(), domain=ERROR_DOMAIN, metadata={k: v for k, v in info.items() if v}
        )
    )
    if error.param:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=detail.message[:200])
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    delay_s = error.retry_delay_s
    if delay_s > 0:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(delay_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    trailing: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if delay_s > 0:
        trailing.append((PUSHBACK_KEY, str(round(delay_s * 1000))))
    return tuple(trailing)


async def abort(context: Any, error: SplitpointError) -> NoReturn:
    """End a `grpc.aio` call with `error`. Raises grpc's own abort exception, which the handler must let through."""
    await context.abort(error.status.grpc, error.message[:MAX_MESSAGE_CHARS], error_metadata(error))
    raise AssertionError("abort returned")


def from_rpc_error(exc: grpc.RpcError) -> SplitpointError:
    """The `SplitpointError` that ended a call, sync or aio.

    A status without readable details (the peer is gone, the call's own deadline, an unknown method) maps by its code; anything
    else a peer did not explain is `INTERNAL`.
    """
    for key, value in exc.trailing_metadata() or ():
        if key != DETAILS_KEY:
            continue
        try:
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            for packed in status.details:
                detail = common_pb2.ErrorDetail()
                if packed.Unpack(detail):
                    return SplitpointError.from_proto(detail)
        except DecodeError:
            break  # whatever the peer meant, the status itself still says something
    grpc_code: grpc.StatusCode = exc.code()
    text = f"{grpc_code.name}: {exc.details() or ''}"
    return SplitpointError(_BARE_CODES.get(grpc_code, Code.INTERNAL), text[:MAX_MESSAGE_CHARS])
