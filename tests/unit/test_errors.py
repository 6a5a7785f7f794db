"""The one table of errors: complete, consistent, and unchanged by any way an error can travel."""

from __future__ import annotations

import pickle

import grpc
import pytest

from protos.errors import TABLE, Code, SplitpointError, invalid
from protos.splitpoint.v1 import common_pb2

# What the public API promises (docs/architecture.md); written out again so that a slip in the table is seen.
PROMISED = {
    Code.INVALID_VALUE: ("INVALID_ARGUMENT", 400),
    Code.PROMPT_TOO_LONG: ("INVALID_ARGUMENT", 400),
    Code.UNSUPPORTED_FIELD: ("INVALID_ARGUMENT", 400),
    Code.FORBIDDEN_FIELD: ("INVALID_ARGUMENT", 400),
    Code.UNKNOWN_MODEL: ("NOT_FOUND", 404),
    Code.UNAUTHENTICATED: ("UNAUTHENTICATED", 401),
    Code.PERMISSION_DENIED: ("PERMISSION_DENIED", 403),
    Code.QUOTA_EXCEEDED: ("RESOURCE_EXHAUSTED", 429),
    Code.QUEUE_FULL: ("RESOURCE_EXHAUSTED", 429),
    Code.NO_WORKER: ("UNAVAILABLE", 503),
    Code.DEADLINE_EXCEEDED: ("DEADLINE_EXCEEDED", 504),
    Code.CANCELLED: ("CANCELLED", 499),
    Code.INTERNAL: ("INTERNAL", 500),
}


def full(code: Code) -> SplitpointError:
    return SplitpointError(code, "why", param="max_tokens", retry_after_s=1.5, error_id="e1d", tokens_sent=7)


def fields(error: SplitpointError) -> tuple[object, ...]:
    return (error.code, error.message, error.param, error.retry_after_s, error.error_id, error.tokens_sent)


def test_every_code_has_a_row_and_no_row_is_left_over() -> None:
    assert set(TABLE) == set(Code)


@pytest.mark.parametrize(("code", "promised"), PROMISED.items())
def test_rows_are_what_the_public_api_promises(code: Code, promised: tuple[str, int]) -> None:
    assert (TABLE[code].grpc.name, TABLE[code].http) == promised


@pytest.mark.parametrize("code", Code)
def test_a_row_is_consistent(code: Code) -> None:
    row = TABLE[code]
    assert row.grpc is not grpc.StatusCode.OK
    assert 400 <= row.http <= 599
    assert row.openai_type
    assert not (row.client_fault and row.retryable), "what the client caused is the same on another worker (rule 9)"
    if row.http >= 500:
        assert not row.client_fault


@pytest.mark.parametrize("code", Code)
def test_an_error_crosses_a_process_as_a_message(code: Code) -> None:
    sent = full(code)
    wire = sent.to_proto().SerializeToString()
    assert fields(SplitpointError.from_proto(common_pb2.ErrorDetail.FromString(wire))) == fields(sent)


@pytest.mark.parametrize("code", Code)
def test_an_error_crosses_a_process_as_a_pickle(code: Code) -> None:
    sent = full(code)
    back = pickle.loads(pickle.dumps(sent))
    assert type(back) is SplitpointError
    assert fields(back) == fields(sent)


def test_a_code_of_a_newer_build_becomes_internal_and_keeps_its_name() -> None:
    back = SplitpointError.from_proto(common_pb2.ErrorDetail(code="from_the_future", message="why", tokens_sent=3))
    assert back.code is Code.INTERNAL
    assert "from_the_future" in back.message
    assert back.tokens_sent == 3


def test_an_internal_error_has_an_id_of_its_own_and_others_have_none() -> None:
    first, second = SplitpointError(Code.INTERNAL, "x"), SplitpointError(Code.INTERNAL, "x")
    assert first.error_id
    assert first.error_id != second.error_id
    assert SplitpointError(Code.QUEUE_FULL, "x").error_id == ""


def test_invalid_names_the_field() -> None:
    error = invalid("temperature", "must be at most 2")
    assert (error.code, error.param) == (Code.INVALID_VALUE, "temperature")
    assert str(error) == "invalid_value: must be at most 2"
