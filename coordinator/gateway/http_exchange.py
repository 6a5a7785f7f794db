"""One HTTP exchange on raw ASGI: a bounded body in, a whole reply or a stream of events out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from coordinator.gateway.http_errors import error_body, error_event, error_headers
from coordinator.gateway.openai_response import KEEP_ALIVE
from protos.errors import Code, SplitpointError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LINGER_S = 5.0
LINGER_BYTES = 64 * 1024 * 1024
"""How long, and how far, the rest of a body that was refused is thrown away."""

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeftError(Exception):
    """The client closed the connection before its body was whole."""


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The request body. Raises `BODY_TOO_LARGE` as soon as the limit is passed, without keeping the rest."""
    declared = dict(headers).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(size, max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(size: int, max_bytes: int) -> SplitpointError:
    return SplitpointError(
        Code.BODY_TOO_LARGE, f"body must be at most {max_bytes} bytes (max_body_bytes), got {size} or more", param="body"
    )


async def until_left(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Exchange:
    """The reply of one exchange. The status is sent with the first byte of the body, so an earlier error still has its own."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last_write_s = time.monotonic()
        self.headers: Headers = []
        self.streaming = False
        self.unread = True
        """The request's body, or a part of it, may still come."""

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole reply at once."""
        length = (b"content-length", str(len(body)).encode())
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers, length]})
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, data: bytes) -> None:
        """Some server-sent events; the first call sends status 200."""
        if not self.streaming:
            self.streaming = True
            headers = _STREAM_HEADERS + self.headers
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._last_write_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes) -> None:
        """The last events of a stream."""
        await self.events(data)
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: SplitpointError) -> None:
        """End with `error`: its status if nothing was sent yet, else an error event."""
        if self.streaming:
            await self.end_events(error_event(error))
        else:
            await self.whole(error.status.http, error_headers(error), error_body(error))

    async def fail_unread(self, error: SplitpointError, receive: Receive) -> None:
        """End with `error` although the body was not read to its end, and close the connection.

        What still comes is thrown away for a while: closing with unread bytes would reset the connection, and a client that is
        still writing would never see the reply.
        """
        body = error_body(error)
        length = (b"content-length", str(len(body)).encode())
        headers = [*error_headers(error), *self.headers, length, (b"connection", b"close")]
        await self._send({"type": "http.response.start", "status": error.status.http, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                discarded = 0
                more = True
                while more and discarded < LINGER_BYTES:
                    message = await receive()
                    discarded += len(message.get("body", b""))
                    more = message.get("more_body", False)
        await self._send({"type": "http.response.body", "body": b""})

    @contextlib.asynccontextmanager
    async def kept_alive(self, interval_s: float) -> AsyncIterator[None]:
        """Inside, silence of `interval_s` is broken by an SSE comment: proxies cut a connection that waits for a long prefill.

        The first comment sends status 200; a later error is then an error event. 0: never.
        """
        if not interval_s:
            yield
            return
        task = asyncio.create_task(self._comment(interval_s), name="sse-keep-alive")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _comment(self, interval_s: float) -> None:
        while True:
            silent_s = time.monotonic() - self._last_write_s
            if silent_s >= interval_s:
                await self.events(KEEP_ALIVE)
                silent_s = 0.0
            await asyncio.sleep(interval_s - silent_s)
