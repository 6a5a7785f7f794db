"""The OpenAI HTTP front end: one ASGI application over the core."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.gateway.api import Core
from coordinator.gateway.choice import Choice, Delta
from coordinator.gateway.fanout import run_choices
from coordinator.gateway.faults import internal_error
from coordinator.gateway.frontend import FrontEnd
from coordinator.gateway.http_errors import error_headers, error_object
from coordinator.gateway.http_exchange import ClientLeftError, Exchange, Receive, Send, read_body, until_left
from coordinator.gateway.openai_request import (
    COMPLETION_DEFAULT_MAX_TOKENS,
    OpenAIRequest,
    parse_body,
    parse_chat,
    parse_completion,
    prompts_of,
)
from coordinator.gateway.openai_response import DONE, Reply
from coordinator.gateway.prepare import allowed_time_s, prepare_choices
from coordinator.gateway.validate import Metadata, check_metadata
from protos.errors import Code, SplitpointError
from protos.ids import new_request_id


class GenerationEndpoint:
    """POST /v1/chat/completions or /v1/completions on raw ASGI: the per-token path has no framework in it."""

    def __init__(self, core: Core, frontend: FrontEnd, *, chat: bool) -> None:
        self._core = core
        self._frontend = frontend
        self._chat = chat
        self._name = "chat_completions" if chat else "completions"

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        received_s = time.monotonic()
        exchange = Exchange(send)
        code = "ok"
        try:
            with self._frontend.door.entered():
                await self._answer(scope["headers"], receive, exchange, received_s)
        except (ClientLeftError, asyncio.CancelledError) as exc:
            code = Code.CANCELLED.value
            if isinstance(exc, asyncio.CancelledError):
                raise
        except SplitpointError as error:
            code = error.code.value
            if not exchange.streaming:
                error.tokens_sent = 0
            if exchange.unread and error.code in (Code.BODY_TOO_LARGE, Code.QUEUE_FULL):
                await exchange.fail_unread(error, receive)
            else:
                await exchange.fail(error)
        except Exception as exc:
            # The boundary: whatever is left is a fault of ours, logged whole and shown to the client by its id.
            fault = internal_error(exc, f"POST {self._name}")
            code = fault.code.value
            await exchange.fail(fault)
        finally:
            self._frontend.metrics.request_ended(front="http", endpoint=self._name, code=code)

    async def _answer(self, headers: list[tuple[bytes, bytes]], receive: Receive, exchange: Exchange, received_s: float) -> None:
        settings = self._frontend.settings
        label = new_request_id()
        exchange.headers = [(b"x-request-id", label.encode())]
        metadata = check_metadata(
            ((name.decode("latin-1").lower(), value) for name, value in headers),
            max_deadline_s=settings.max_deadline_s,
            transports=self._frontend.transports,
            paths=settings.paths,
            key_names=self._frontend.key_names,
        )
        client_request_id = metadata.client_request_id or label
        exchange.headers = [(b"x-request-id", client_request_id.encode())]
        allowed_s = allowed_time_s(metadata, settings)
        try:
            async with asyncio.timeout(allowed_s):
                raw = await read_body(headers, receive, settings.max_body_bytes)
                exchange.unread = False
        except TimeoutError:
            exchange.headers.append((b"connection", b"close"))  # the rest of the body may still come
            raise SplitpointError(
                Code.DEADLINE_EXCEEDED, f"body was not whole within the deadline of {allowed_s:g} s", param="body"
            ) from None
        serving = asyncio.create_task(self._serve(raw, metadata, client_request_id, exchange, received_s))
        leaving = asyncio.create_task(until_left(receive))
        try:
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise ClientLeftError
            await serving
        finally:
            serving.cancel()
            leaving.cancel()
            await asyncio.gather(serving, leaving, return_exceptions=True)

    async def _serve(self, raw: bytes, metadata: Metadata, client_request_id: str, exchange: Exchange, received_s: float) -> None:
        frontend = self._frontend
        if len(raw) <= frontend.settings.tokenize_inline_chars:
            request = self._parse(raw)
        else:
            # A schema or a template can keep a thread busy for long; tokens of other requests must not wait for it.
            request = await asyncio.to_thread(self._parse, raw)
        choices = await prepare_choices(
            prompts_of(request),
            request.sampling,
            metadata,
            frontend,
            client_request_id=metadata.client_request_id or request.client_request_id or client_request_id,
            received_s=received_s,
            default_max_tokens=None if self._chat else COMPLETION_DEFAULT_MAX_TOKENS,
        )
        reply = Reply(request, choices, frontend.model.id, frontend.tokenizer)
        if request.stream:
            await self._stream(request, choices, reply, exchange)
        else:
            await self._collect(choices, reply, exchange)

    def _parse(self, raw: bytes) -> OpenAIRequest:
        frontend = self._frontend
        body = parse_body(raw)
        if self._chat:
            return parse_chat(body, frontend.limits, frontend.model.id, frontend.tokenizer)
        return parse_completion(body, frontend.limits, frontend.model.id)

    async def _stream(self, request: OpenAIRequest, choices: list[Choice], reply: Reply, exchange: Exchange) -> None:
        async with (
            exchange.kept_alive(self._frontend.settings.sse_keepalive_s),
            contextlib.aclosing(run_choices(self._core, choices)) as events,
        ):
            async for choice, deltas in events:
                await exchange.events(reply.chunks(choice, deltas))
        await exchange.end_events(reply.usage_chunk() + DONE if request.include_usage else DONE)

    async def _collect(self, choices: list[Choice], reply: Reply, exchange: Exchange) -> None:
        collected: list[list[Delta]] = [[] for _ in choices]
        async with contextlib.aclosing(run_choices(self._core, choices)) as events:
            async for choice, deltas in events:
                collected[choice.index].extend(deltas)
        await exchange.whole(200, [(b"content-type", b"application/json")], reply.whole(collected))


def build_http_app(core: Core, frontend: FrontEnd) -> ASGIApp:
    """The ASGI application of one gateway. Serve it with uvicorn inside the gateway's running loop (`loop="none"`)."""
    model = frontend.model
    card = {
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": "splitpoint",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [],
    }

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        if name != model.id:
            return _error_response(SplitpointError(Code.UNKNOWN_MODEL, f"model {name!r} does not exist", param="model"))
        return JSONResponse(card)

    async def health(_: Request) -> Response:
        if frontend.draining.is_set():
            return _error_response(SplitpointError(Code.DRAINING, "this gateway is draining", retry_after_s=1))
        if core.ready():
            return Response(status_code=200)
        return _error_response(SplitpointError(Code.NO_WORKER, "no live worker in each phase", retry_after_s=1))

    async def metrics(_: Request) -> Response:
        body, content_type = frontend.metrics.exposition()
        return Response(body, headers={"content-type": content_type})

    async def version(_: Request) -> Response:
        versions = frontend.manifest().get("versions", {})
        return JSONResponse({"version": importlib.metadata.version("splitpoint"), "versions": versions})

    async def http_error(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return _plain_error(exc.status_code, str(exc.detail), dict(exc.headers or {}))

    endpoints = {
        "/v1/chat/completions": GenerationEndpoint(core, frontend, chat=True),
        "/v1/completions": GenerationEndpoint(core, frontend, chat=False),
    }
    others = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/version", version),
        ],
        exception_handlers={HTTPException: http_error},
    )

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        # Starlette's error middleware wraps `send` twice, for every token; these endpoints handle their errors themselves.
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in endpoints:
            await endpoints[scope["path"]](scope, receive, send)
        else:
            await others(scope, receive, send)

    return app


def _error_response(error: SplitpointError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return JSONResponse(error_object(error), status_code=error.status.http, headers=headers)


def _plain_error(status: int, message: str, headers: dict[str, str]) -> Response:
    """What routing itself refuses (404, 405), in the same form."""
    reason = (Code.NOT_FOUND if status == 404 else Code.INVALID_VALUE).value
    detail = {"message": message, "type": "invalid_request_error", "param": None, "code": status, "reason": reason}
    return JSONResponse({"error": detail}, status_code=status, headers=headers)
