"""Errors as OpenAI error objects, whole and inside a stream."""

from __future__ import annotations

import json
import math
from typing import Any

from protos.errors import Code, SplitpointError


def error_object(error: SplitpointError) -> dict[str, Any]:
    """`code` is the HTTP status as vLLM's; our stable name is `reason`."""
    detail: dict[str, Any] = {
        "message": error.message,
        "type": error.status.openai_type,
        "param": error.param or None,
        "code": error.status.http,
        "reason": error.code.value,
    }
    if error.error_id:
        detail["error_id"] = error.error_id
    if error.tokens_sent:
        detail["tokens_sent"] = error.tokens_sent
    return {"error": detail}


def error_body(error: SplitpointError) -> bytes:
    """The JSON body of an error reply."""
    return json.dumps(error_object(error)).encode("ascii")


def error_headers(error: SplitpointError) -> list[tuple[bytes, bytes]]:
    """`Retry-After` where trying later helps; `x-should-retry: false` where a client's own retry would repeat whole work."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_delay_s > 0 and error.status.http in (429, 503):
        headers.append((b"retry-after", str(math.ceil(error.retry_delay_s)).encode()))
    if error.code in (Code.INTERNAL, Code.DEADLINE_EXCEEDED, Code.STREAM_BROKEN, Code.CONFLICT):
        headers.append((b"x-should-retry", b"false"))
    return headers


def error_event(error: SplitpointError) -> bytes:
    """The end of a broken stream. Without the `event:` line some load generators count the request as a success."""
    return b"event: error\ndata: " + error_body(error) + b"\n\ndata: [DONE]\n\n"
