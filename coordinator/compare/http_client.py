"""Load over an OpenAI streaming API: this system's HTTP door, or any server that counts the tokens of each chunk.

Prompts go as token ids to `/v1/completions`, so lengths are exact; `continuous_usage_stats` says how many tokens a chunk brought,
whatever text is held back and however many tokens a server puts into one chunk.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from coordinator.compare.load import ArmTarget, Piece, RequestFailedError
from coordinator.compare.workload import PlannedRequest
from protos.splitpoint.v1 import common_pb2

COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
MAX_EVENT_BYTES = 1 << 20
SCHEMES = ("http://", "https://")


class HttpClient:
    """One OpenAI server at `url`, such as `http://127.0.0.1:8000`. Use it as an async context manager."""

    def __init__(self, url: str, *, model: str = "", api_key: str = "", arms: Mapping[str, ArmTarget] | None = None) -> None:
        """`arms`: as `GrpcClient`'s."""
        self._arms = dict(arms or {})
        self._url = url.rstrip("/")
        self._model = model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._open: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpClient:
        # Open loop: nothing waits for a connection of another request. The proxy of the environment is for the outside.
        self._open = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), trust_env=False, headers=self._headers, read_bufsize=MAX_EVENT_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            await self._open.close()
            self._open = None

    def know(self, name: str, target: ArmTarget) -> None:
        """From now on `ask` sends an arm's requests there."""
        self._arms[name] = target

    async def model(self, timeout_s: float) -> str:
        """The served model's id. Raises `RequestFailedError`."""
        try:
            async with self._session.get(self._url + MODELS, timeout=aiohttp.ClientTimeout(total=timeout_s)) as reply:
                raw = await reply.read()
                if reply.status != 200:
                    raise RequestFailedError(_refusal(reply.status, raw))
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise RequestFailedError(_broken(exc)) from exc
        models = _object(raw).get("data")
        if not isinstance(models, list) or not models:
            raise RequestFailedError("the service serves no model")
        self._model = str(models[0]["id"])
        return self._model

    def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        """See `Client`."""
        body = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        target = self._arms.get(path) or ArmTarget(path)
        headers = {
            "content-type": "application/json",
            "x-splitpoint-deadline-s": f"{deadline_s:.3f}",
            **dict(target.headers(len(request.prompt_token_ids))),
        }
        return self._replies(json.dumps(body, separators=(",", ":")).encode("ascii"), headers, deadline_s)

    async def _replies(self, body: bytes, headers: dict[str, str], deadline_s: float) -> AsyncIterator[Piece]:
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        url = self._url + COMPLETIONS
        try:
            async with self._session.post(url, data=body, headers=headers, timeout=timeout) as reply:
                if reply.status != 200:
                    raise RequestFailedError(_refusal(reply.status, await reply.read()))
                seen, whole = 0, False
                async for line in reply.content:
                    data = _data(line)
                    if data == b"[DONE]":
                        whole = True
                    elif data:
                        piece, seen = _piece(data, seen)
                        yield piece
                if not whole:
                    raise RequestFailedError("the stream ended without [DONE]")
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError, ValueError) as exc:
            # A line longer than the buffer is one of aiohttp's HTTP errors, and a ValueError before 3.14.
            raise RequestFailedError(_broken(exc)) from exc

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._open is not None, "use the client as an async context manager"
        return self._open


def _data(line: bytes) -> bytes:
    """What a line of a stream carries; comments, names of events and blank lines carry nothing."""
    return line[5:].strip() if line.startswith(b"data:") else b""


def _piece(data: bytes, seen: int) -> tuple[Piece, int]:
    """One event as a piece, and the tokens seen with it. Raises `RequestFailedError`."""
    event = _object(data)
    if "error" in event:
        raise RequestFailedError(_reason(event))
    usage = event.get("usage")
    if not isinstance(usage, dict):
        raise RequestFailedError("a chunk says no usage: the server must know stream_options.continuous_usage_stats")
    total = int(usage.get("completion_tokens") or 0)
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return Piece(max(0, total - seen), cached, _ledger(event.get("metrics"))), max(seen, total)


def _ledger(metrics: Any) -> dict[str, Any] | None:
    """The stage ledger under the names and units it has over gRPC; None from a server that keeps none."""
    if not isinstance(metrics, dict) or "path" not in metrics:
        return None
    ledger: dict[str, Any] = {}
    for spec in common_pb2.StageLedger.DESCRIPTOR.fields:
        if spec.name.endswith("_s"):
            ledger[spec.name] = float(metrics.get(spec.name[:-2] + "_ms", 0.0)) / 1e3
        else:
            ledger[spec.name] = metrics.get(spec.name, spec.default_value)
    return ledger


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RequestFailedError(f"not a JSON object: {raw[:100].decode(errors='replace')}")
    return value


def _refusal(status: int, raw: bytes) -> str:
    try:
        return f"HTTP {status}: {_reason(_object(raw))}"
    except RequestFailedError:
        return f"HTTP {status}: {raw[:200].decode(errors='replace')}"


def _reason(body: dict[str, Any]) -> str:
    """An OpenAI error object in words; ours has a stable name under `reason`."""
    error = body.get("error")
    if not isinstance(error, dict):
        return str(error or body)
    return f"{error.get('reason') or error.get('code') or error.get('type') or 'error'}: {error.get('message', '')}"


def _broken(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
