"""The public gRPC front end: GenerationService, health and reflection over the core."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.gateway.api import Core
from coordinator.gateway.choice import Choice, Delta
from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.fanout import run_choices
from coordinator.gateway.faults import internal_error
from coordinator.gateway.frontend import FrontEnd
from coordinator.gateway.grpc_request import check_request, parse_message
from coordinator.gateway.health import GENERATION_SERVICE, ReadinessHealthServicer
from coordinator.gateway.prepare import Prompt, prepare_choices
from coordinator.gateway.validate import Metadata, Sampling, check_metadata
from protos.errors import Code, SplitpointError
from protos.grpc_errors import abort
from protos.ids import new_request_id
from protos.splitpoint.v1 import generation_pb2

Context: TypeAlias = grpc.aio.ServicerContext


class GenerationServicer:
    """`Generate` and `ListModels`. No initial metadata leaves before the first message, so that clients may retry."""

    def __init__(self, core: Core, frontend: FrontEnd) -> None:
        self._core = core
        self._frontend = frontend

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's handler. Requests arrive as bytes: a broken message is the client's fault and is said so."""
        return grpc.method_handlers_generic_handler(
            GENERATION_SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate, response_serializer=generation_pb2.GenerateResponse.SerializeToString
                ),
                "ListModels": grpc.unary_unary_rpc_method_handler(
                    self.list_models,
                    request_deserializer=generation_pb2.ListModelsRequest.FromString,
                    response_serializer=generation_pb2.ListModelsResponse.SerializeToString,
                ),
            },
        )

    async def list_models(self, request: generation_pb2.ListModelsRequest, context: Context) -> generation_pb2.ListModelsResponse:
        del request, context
        model = self._frontend.model
        info = generation_pb2.ModelInfo(id=model.id, root=model.root, max_model_len=model.max_model_len, created=model.created_s)
        return generation_pb2.ListModelsResponse(models=[info])

    async def generate(self, raw: bytes, context: Context) -> None:
        received_s = time.monotonic()
        code = "ok"
        failure: SplitpointError | None = None
        try:
            with self._frontend.door.entered():
                await self._generate(raw, context, received_s)
        except SplitpointError as error:
            failure = error
        except asyncio.CancelledError:
            # The client left, or its deadline passed; grpc ends the call itself.
            code = Code.CANCELLED.value
            raise
        except Exception as exc:
            # The boundary: whatever is left is a fault of ours, logged whole and shown to the client by its id.
            failure = internal_error(exc, "Generate")
        finally:
            if failure is not None:
                code = failure.code.value
            self._frontend.metrics.request_ended(front="grpc", endpoint="generate", code=code)
        if failure is not None:
            await abort(context, failure)

    async def _generate(self, raw: bytes, context: Context, received_s: float) -> None:
        frontend = self._frontend
        metadata = _metadata(context, frontend)
        if len(raw) <= frontend.settings.tokenize_inline_chars:
            request, prompt, sampling = self._parse(raw)
        else:
            # A schema or a template can keep a thread busy for long; tokens of other requests must not wait for it.
            request, prompt, sampling = await asyncio.to_thread(self._parse, raw)
        label = request.request_id or metadata.client_request_id or new_request_id()
        choices = await prepare_choices(
            [prompt],
            sampling,
            metadata,
            frontend,
            client_request_id=label,
            received_s=received_s,
            default_max_tokens=None,
        )
        async with contextlib.aclosing(run_choices(self._core, choices)) as events:
            if request.stream:
                await self._stream(events, label, context)
            else:
                await self._collect(events, choices, label, context)

    def _parse(self, raw: bytes) -> tuple[generation_pb2.GenerateRequest, Prompt, Sampling]:
        request = parse_message(raw)
        return request, *check_request(request, self._frontend)

    async def _stream(self, events: Any, label: str, context: Context) -> None:
        output_ids: dict[int, list[int]] = {}
        texts: dict[int, list[str]] = {}
        async for choice, deltas in events:
            ids = output_ids.setdefault(choice.index, [])
            text = texts.setdefault(choice.index, [])
            for delta in deltas:
                if delta.token_id is not None:
                    ids.append(delta.token_id)
                text.append(delta.text)
            chunk = _chunk(choice, deltas, completion_tokens=len(ids))
            if chunk is not None:
                await context.write(generation_pb2.GenerateResponse(request_id=label, chunk=chunk))
            if deltas[-1].finish_reason is not None:
                complete = await _complete(choice, ids, "".join(text), deltas[-1])
                await context.write(generation_pb2.GenerateResponse(request_id=label, complete=complete))

    async def _collect(self, events: Any, choices: Sequence[Choice], label: str, context: Context) -> None:
        collected: list[list[Delta]] = [[] for _ in choices]
        try:
            async for choice, deltas in events:
                collected[choice.index].extend(deltas)
        except SplitpointError as error:
            error.tokens_sent = 0
            raise
        for choice in choices:
            deltas = collected[choice.index]
            ids = [d.token_id for d in deltas if d.token_id is not None]
            complete = await _complete(choice, ids, "".join(d.text for d in deltas), deltas[-1])
            complete.logprobs.extend(d.logprobs for d in deltas if d.logprobs is not None)
            await context.write(generation_pb2.GenerateResponse(request_id=label, complete=complete))


def _chunk(choice: Choice, deltas: Sequence[Delta], *, completion_tokens: int) -> generation_pb2.GenerateStreamChunk | None:
    """New tokens as a message; None for an end that brings neither token nor text.

    `completion_tokens` counts what was sent: the choice itself may be ahead when several run.
    """
    ids = [d.token_id for d in deltas if d.token_id is not None]
    text = deltas[0].text if len(deltas) == 1 else "".join([d.text for d in deltas])
    if not ids and not text:
        return None
    return generation_pb2.GenerateStreamChunk(
        token_ids=ids,
        text=text,
        prompt_tokens=choice.prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=choice.cached_tokens,
        index=choice.index,
        logprobs=[d.logprobs for d in deltas if d.logprobs is not None],
    )


async def _complete(choice: Choice, ids: list[int], text: str, last: Delta) -> generation_pb2.GenerateComplete:
    if choice.generation is not None and isinstance(last.stop_reason, str):
        # A stop string: the generation is still to be closed, and its ledger is final only then.
        await choice.generation.close("stop")
    complete = generation_pb2.GenerateComplete(
        output_ids=ids,
        finish_reason=last.finish_reason,
        prompt_tokens=choice.prompt_tokens,
        completion_tokens=choice.completion_tokens,
        cached_tokens=choice.cached_tokens,
        index=choice.index,
        text=text,
        metrics=choice.ledger,
        prompt_logprobs=choice.prompt_logprobs or (),
    )
    if last.matched_token_id is not None:
        complete.matched_token_id = last.matched_token_id
    elif isinstance(last.stop_reason, str):
        complete.matched_stop_str = last.stop_reason
    return complete


def _metadata(context: Context, frontend: FrontEnd) -> Metadata:
    checked = check_metadata(
        context.invocation_metadata() or (),
        max_deadline_s=frontend.settings.max_deadline_s,
        transports=frontend.transports,
        paths=frontend.settings.paths,
        key_names=frontend.key_names,
    )
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return checked
    deadline_s = remaining_s if checked.deadline_s is None else min(checked.deadline_s, remaining_s)
    return replace(checked, deadline_s=deadline_s)


def server_options(settings: GatewaySettings) -> list[tuple[str, int]]:
    """Channel arguments of the public port: bounded messages, and pings as vLLM's server allows them."""
    return [
        ("grpc.max_receive_message_length", settings.grpc_max_receive_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", settings.grpc_keepalive_min_ping_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),  # a port that is taken must fail, not share its connections
    ]


def build_grpc_server(core: Core, frontend: FrontEnd) -> grpc.aio.Server:
    """The public gRPC server of one gateway, without a port: `add_insecure_port`, `start` and `stop(grace)` are the caller's.

    Call it inside the running event loop. Before `stop`, set `frontend.draining`; the grace must not be shorter than the drain.
    """
    settings = frontend.settings
    server = grpc.aio.server(options=server_options(settings))
    server.add_generic_rpc_handlers((GenerationServicer(core, frontend).handler(),))
    health = ReadinessHealthServicer(core.ready, poll_s=settings.readiness_poll_s, draining=frontend.draining)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if settings.grpc_reflection:
        names = (GENERATION_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return server
