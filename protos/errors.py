"""The one table from an error of ours to its gRPC status and its HTTP status.

Every refusal a client, a gateway or a worker can see is a `SplitpointError` with a `Code` of this table. Errors cross a
process as `ErrorDetail` messages and come back as the same class, so nothing is parsed from a text.
"""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass

import grpc

from protos.splitpoint.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Status:
    """How one code looks from outside.

    `retryable`: another worker may be tried with the same request before its first token. `client_fault`: caused by the
    request itself or its sender; trips no breaker and is never retried (rule 9 of docs/architecture.md).
    """

    grpc: grpc.StatusCode
    http: int
    openai_type: str
    retryable: bool = False
    client_fault: bool = False


class Code(enum.StrEnum):
    """Stable names; they appear in metrics labels, logs and `ErrorDetail.code`."""

    INVALID_VALUE = "invalid_value"
    PROMPT_TOO_LONG = "prompt_too_long"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_FIELD = "unsupported_field"
    FORBIDDEN_FIELD = "forbidden_field"
    UNKNOWN_MODEL = "unknown_model"
    NOT_FOUND = "not_found"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    QUOTA_EXCEEDED = "quota_exceeded"
    QUEUE_FULL = "queue_full"
    STAGING_FULL = "staging_full"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    WORKER_LOST = "worker_lost"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_REFUSED = "transfer_refused"
    INCOMPATIBLE_PEER = "incompatible_peer"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    STREAM_BROKEN = "stream_broken"
    CONFLICT = "conflict"
    INTERNAL = "internal"


DEFAULT_RETRY_AFTER_S = 1.0

_S = grpc.StatusCode

TABLE: dict[Code, Status] = {
    Code.INVALID_VALUE: Status(_S.INVALID_ARGUMENT, 400, "invalid_request_error", client_fault=True),
    Code.PROMPT_TOO_LONG: Status(_S.INVALID_ARGUMENT, 400, "invalid_request_error", client_fault=True),
    Code.BODY_TOO_LARGE: Status(_S.RESOURCE_EXHAUSTED, 413, "invalid_request_error", client_fault=True),
    Code.UNSUPPORTED_FIELD: Status(_S.INVALID_ARGUMENT, 400, "invalid_request_error", client_fault=True),
    Code.FORBIDDEN_FIELD: Status(_S.INVALID_ARGUMENT, 400, "invalid_request_error", client_fault=True),
    Code.UNKNOWN_MODEL: Status(_S.NOT_FOUND, 404, "invalid_request_error", client_fault=True),
    Code.NOT_FOUND: Status(_S.NOT_FOUND, 404, "invalid_request_error", client_fault=True),
    Code.UNAUTHENTICATED: Status(_S.UNAUTHENTICATED, 401, "authentication_error", client_fault=True),
    Code.PERMISSION_DENIED: Status(_S.PERMISSION_DENIED, 403, "permission_error", client_fault=True),
    Code.QUOTA_EXCEEDED: Status(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", client_fault=True),
    Code.QUEUE_FULL: Status(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", retryable=True),
    Code.STAGING_FULL: Status(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", retryable=True),
    Code.NO_WORKER: Status(_S.UNAVAILABLE, 503, "service_unavailable_error"),
    Code.DRAINING: Status(_S.UNAVAILABLE, 503, "service_unavailable_error", retryable=True),
    Code.WORKER_LOST: Status(_S.UNAVAILABLE, 503, "service_unavailable_error", retryable=True),
    Code.TRANSFER_FAILED: Status(_S.UNAVAILABLE, 503, "service_unavailable_error", retryable=True),
    Code.TRANSFER_REFUSED: Status(_S.UNAVAILABLE, 503, "service_unavailable_error", retryable=True),
    Code.INCOMPATIBLE_PEER: Status(_S.UNAVAILABLE, 503, "service_unavailable_error", retryable=True),
    Code.DEADLINE_EXCEEDED: Status(_S.DEADLINE_EXCEEDED, 504, "timeout_error"),
    Code.CANCELLED: Status(_S.CANCELLED, 499, "cancelled", client_fault=True),
    Code.STREAM_BROKEN: Status(_S.ABORTED, 503, "service_unavailable_error"),
    Code.CONFLICT: Status(_S.FAILED_PRECONDITION, 409, "invalid_request_error", client_fault=True),
    Code.INTERNAL: Status(_S.INTERNAL, 500, "internal_error", retryable=True),
}


class SplitpointError(Exception):
    """A refusal or failure with a place in the table.

    `param` names the field; `retry_after_s` 0 means "not said"; `error_id` is set for `INTERNAL` alone and stands in the
    log line of the fault; `tokens_sent` is what the client already had when a stream broke.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str = "",
        retry_after_s: float = 0.0,
        error_id: str = "",
        tokens_sent: int = 0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.error_id = error_id or (secrets.token_hex(8) if code is Code.INTERNAL else "")
        self.tokens_sent = tokens_sent

    @property
    def status(self) -> Status:
        """This error's row of the table."""
        return TABLE[self.code]

    @property
    def retry_delay_s(self) -> float:
        """When a client may try again: as said, or `DEFAULT_RETRY_AFTER_S` where waiting helps; 0 where it does not."""
        if self.retry_after_s > 0:
            return self.retry_after_s
        passes = self.status.http in (429, 503) and self.code is not Code.STREAM_BROKEN
        return DEFAULT_RETRY_AFTER_S if passes else 0.0

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        # Ray carries exceptions between actors; keyword-only arguments need spelling out.
        return (_rebuild, (self.code, self.message, self.param, self.retry_after_s, self.error_id, self.tokens_sent))

    def to_proto(self) -> common_pb2.ErrorDetail:
        """The message that carries this error across a process."""
        return common_pb2.ErrorDetail(
            code=self.code.value,
            message=self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            error_id=self.error_id,
            tokens_sent=self.tokens_sent,
        )

    @classmethod
    def from_proto(cls, detail: common_pb2.ErrorDetail) -> SplitpointError:
        """The inverse of `to_proto`; a code this build does not know becomes `INTERNAL` and keeps its name in the text."""
        try:
            code = Code(detail.code)
            message = detail.message
        except ValueError:
            code, message = Code.INTERNAL, f"[{detail.code}] {detail.message}"
        return cls(
            code,
            message,
            param=detail.param,
            retry_after_s=detail.retry_after_s,
            error_id=detail.error_id,
            tokens_sent=detail.tokens_sent,
        )


def _rebuild(code: Code, message: str, param: str, retry_after_s: float, error_id: str, tokens_sent: int) -> SplitpointError:
    return SplitpointError(code, message, param=param, retry_after_s=retry_after_s, error_id=error_id, tokens_sent=tokens_sent)


def invalid(param: str, message: str) -> SplitpointError:
    """A bad value of a request field; `message` names the limit."""
    return SplitpointError(Code.INVALID_VALUE, message, param=param)
