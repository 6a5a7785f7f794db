"""Asks one question through one arm over the public gRPC API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from coordinator.compare.load import ArmTarget, RequestFailedError
from coordinator.compare.quality.parity import Logprobs
from protos.splitpoint.v1 import common_pb2, generation_pb2, generation_pb2_grpc

DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm's name and how its requests are marked."""

    name: str
    target: ArmTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One greedy request. `logprobs` and `prompt_logprobs` are numbers of candidates per position; None asks for none."""

    text: str
    max_tokens: int
    stop: str = ""
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came. `path` is the one taken by the ledger; `recomputed`: decode computed the prompt itself, so no KV was moved."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: Logprobs = field(default=())
    prompt_logprobs: Logprobs = field(default=())
    path: str = ""
    recomputed: bool = False
    cached_tokens: int = 0


class Client(Protocol):
    """One way to ask."""

    async def ask(self, ask: Ask, arm: Arm) -> Answer:
        """Raises `RequestFailedError`."""


class QualityClient:
    """`GenerationService` of one gateway. Use it as an async context manager."""

    def __init__(self, target: str, *, model: str = "", api_key: str = "", deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s` is each request's own."""
        # The proxy of the environment is for the outside, not for the system under test.
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 * 1024 * 1024)]
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._model = model
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._deadline_s = deadline_s

    async def __aenter__(self) -> QualityClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def model(self, timeout_s: float) -> str:
        """The served model's id. Raises `RequestFailedError`."""
        try:
            reply = await self._stub.ListModels(generation_pb2.ListModelsRequest(), metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise RequestFailedError(f"{exc.code().name}: {exc.details()}") from exc
        if not reply.models:
            raise RequestFailedError("the service serves no model")
        self._model = str(reply.models[0].id)
        return self._model

    async def ask(self, ask: Ask, arm: Arm) -> Answer:
        """See `Client`. An answer that took another path than the arm's is a failure too."""
        sampling = common_pb2.SamplingParams(
            temperature=0.0,
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
            logprobs=ask.logprobs,
            prompt_logprobs=ask.prompt_logprobs,
            stop=[ask.stop] if ask.stop else [],
        )
        message = generation_pb2.GenerateRequest(model=self._model, text=ask.text, sampling_params=sampling, stream=False)
        metadata = (*self._metadata, *arm.target.headers())
        complete = None
        try:
            async for reply in self._stub.Generate(message, metadata=metadata, timeout=self._deadline_s):
                complete = reply.complete
        except grpc.aio.AioRpcError as exc:
            raise RequestFailedError(f"{exc.code().name}: {exc.details()}") from exc
        if complete is None:
            raise RequestFailedError("the answer was empty")
        answer = Answer(
            token_ids=tuple(complete.output_ids),
            text=complete.text,
            logprobs=_positions(complete.logprobs),
            prompt_logprobs=_positions(complete.prompt_logprobs),
            path=complete.metrics.path,
            recomputed=complete.metrics.recomputed,
            cached_tokens=complete.cached_tokens,
        )
        if answer.path != arm.target.path:
            raise RequestFailedError(f"the answer took the path {answer.path or 'unknown'!r}, not {arm.target.path!r}")
        return answer


def _positions(rows: Sequence[common_pb2.PositionLogprobs]) -> Logprobs:
    return tuple(tuple((entry.token_id, entry.logprob, entry.rank) for entry in row.entries) for row in rows)
