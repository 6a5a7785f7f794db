"""OpenAI bodies to and from the messages of `splitpoint.v1`. Pure: knows neither gRPC nor aiperf."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from protos.splitpoint.v1 import common_pb2, generation_pb2

SAMPLING = frozenset(field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields)
ALIASES = {"max_completion_tokens": "max_tokens"}
NOT_SENT = frozenset({"model", "stream", "stream_options", "prompt", "messages"})
"""Fields of the body that are no sampling parameters; `stream_options` has nothing left to choose, usage comes always."""


def request_of(body: Mapping[str, Any]) -> generation_pb2.GenerateRequest:
    """The message of an OpenAI completion or chat. Raises `ValueError` naming a field that has no place in it."""
    sampling: dict[str, Any] = {}
    for name, value in body.items():
        if name in NOT_SENT or value is None:
            continue
        name = ALIASES.get(name, name)
        if name not in SAMPLING:
            raise ValueError(f"{name} cannot be sent over gRPC")
        sampling[name] = [value] if name == "stop" and isinstance(value, str) else value
    try:
        params = json_format.ParseDict(sampling, common_pb2.SamplingParams())
    except json_format.ParseError as exc:
        raise ValueError(f"not sampling parameters: {exc}") from exc
    message = generation_pb2.GenerateRequest(
        model=body.get("model") or "", stream=bool(body.get("stream")), sampling_params=params
    )
    if "messages" in body:
        message.chat.messages.extend(_chat_message(entry) for entry in body["messages"])
        return message
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        message.text = prompt
    elif isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        message.tokenized.input_ids.extend(prompt)
    else:
        raise ValueError("prompt must be one text or the token ids of one prompt over gRPC")
    return message


def _chat_message(entry: Mapping[str, Any]) -> generation_pb2.ChatMessage:
    content = entry.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("messages may hold nothing but text over gRPC")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError("messages must have text as content over gRPC")
    return generation_pb2.ChatMessage(role=str(entry.get("role", "")), content=content)


def chunk(message: generation_pb2.GenerateStreamChunk, *, chat: bool) -> str:
    """The JSON of an OpenAI stream's chunk."""
    choice: dict[str, Any] = {"index": message.index, "finish_reason": None}
    if chat:
        choice["delta"] = {"content": message.text}
    else:
        choice["text"] = message.text
    return json.dumps({"object": "chat.completion.chunk" if chat else "text_completion", "choices": [choice]})


def end_of_stream(message: generation_pb2.GenerateComplete, *, chat: bool) -> str:
    """The JSON of the chunk after the last choice: usage, and the ledger in seconds under `metrics`."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    return json.dumps({"object": kind, "choices": [], "usage": _usage(message), "metrics": _metrics(message)})


def whole(message: generation_pb2.GenerateComplete, *, chat: bool) -> str:
    """The JSON of a whole answer."""
    choice: dict[str, Any] = {"index": message.index, "finish_reason": message.finish_reason}
    if chat:
        choice["message"] = {"role": "assistant", "content": message.text}
    else:
        choice["text"] = message.text
    kind = "chat.completion" if chat else "text_completion"
    return json.dumps({"object": kind, "choices": [choice], "usage": _usage(message), "metrics": _metrics(message)})


def _usage(message: generation_pb2.GenerateComplete) -> dict[str, Any]:
    return {
        "prompt_tokens": message.prompt_tokens,
        "completion_tokens": message.completion_tokens,
        "total_tokens": message.prompt_tokens + message.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": message.cached_tokens},
    }


def _metrics(message: generation_pb2.GenerateComplete) -> dict[str, Any]:
    return json_format.MessageToDict(message.metrics, preserving_proto_field_name=True)
