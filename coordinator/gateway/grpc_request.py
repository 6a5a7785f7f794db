"""A public gRPC request, checked: the same rules as over HTTP, under the message's own field names."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from coordinator.gateway import constraint
from coordinator.gateway.fields import Fields, check_token_ids
from coordinator.gateway.frontend import FrontEnd
from coordinator.gateway.prepare import Prompt
from coordinator.gateway.validate import Limits, Sampling, check_chat, check_model, check_request_id, check_sampling
from protos.errors import invalid
from protos.splitpoint.v1 import common_pb2, generation_pb2

SAMPLING_PREFIX = "sampling_params."


def parse_message(raw: bytes) -> generation_pb2.GenerateRequest:
    """The message in `raw`. Raises `SplitpointError`: grpc itself would call a broken message a fault of the server."""
    try:
        return generation_pb2.GenerateRequest.FromString(raw)
    except DecodeError as exc:
        raise invalid(
            "body", f"body is not a valid GenerateRequest (broken wire format, or a string that is not UTF-8): {exc}"
        ) from exc


def check_request(request: generation_pb2.GenerateRequest, frontend: FrontEnd) -> tuple[Prompt, Sampling]:
    """What to generate. Raises `SplitpointError` naming the field and the limit."""
    check_model(request.model, frontend.model.id)
    check_request_id("request_id", request.request_id)
    sampling = _sampling(request.sampling_params, frontend.limits)
    return _prompt(request, frontend), sampling


def _prompt(request: generation_pb2.GenerateRequest, frontend: FrontEnd) -> Prompt:
    kind = request.WhichOneof("input")
    if kind is None:
        raise invalid("input", "input is missing: 1 of tokenized, text, chat")
    if kind == "text":
        if not request.text:
            raise invalid("text", "text must be at least 1 token, got none")
        return Prompt(field="text", content=request.text)
    if kind == "tokenized":
        ids = list(request.tokenized.input_ids)
        if not ids:
            raise invalid("tokenized.input_ids", "tokenized.input_ids must be at least 1 token, got none")
        # A longer prompt is refused for its length, without a look at every id.
        check_token_ids("tokenized.input_ids", ids[: frontend.limits.max_model_len], frontend.limits.vocab_size)
        return Prompt(field="tokenized.input_ids", content=ids)
    messages = check_chat([{"role": m.role, "content": m.content} for m in request.chat.messages], "chat.messages")
    return Prompt(field="chat.messages", content=frontend.tokenizer.render_chat(messages), add_special_tokens=False)


def _sampling(message: common_pb2.SamplingParams, limits: Limits) -> Sampling:
    fields = Fields(_given(message), SAMPLING_PREFIX)
    which = message.WhichOneof("constraint")
    value: Any = None
    if which is not None:
        value = list(message.choice.choices) if which == "choice" else getattr(message, which)
    return check_sampling(
        fields,
        limits,
        constraint=constraint.from_proto(which, value, SAMPLING_PREFIX),
        logprobs=fields.integer("logprobs", 0, limits.max_logprobs),
    )


def _given(message: common_pb2.SamplingParams) -> Mapping[str, Any]:
    """The fields that the client set, as plain values. Floats keep the digits the client wrote, not those of float32."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.containing_oneof is not None and field.containing_oneof.name == "constraint":
            continue
        if field.name == "logit_bias":
            values[field.name] = dict(value)
        elif field.is_repeated:
            values[field.name] = list(value)
        elif field.cpp_type == field.CPPTYPE_FLOAT:
            values[field.name] = _shortest(value)
        else:
            values[field.name] = value
    return values


def _shortest(value: float) -> float:
    """The double with the fewest digits that is `value` as float32: 0.1 and not 0.10000000149."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value
