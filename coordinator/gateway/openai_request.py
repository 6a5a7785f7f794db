"""An OpenAI request body, parsed and checked: what to generate and how to answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.gateway import constraint
from coordinator.gateway.fields import Fields, check_token_ids, check_unicode, nests_deeper, shown
from coordinator.gateway.openai_fields import refuse_known
from coordinator.gateway.prepare import Prompt
from coordinator.gateway.tokenizer import TextTokenizer
from coordinator.gateway.validate import (
    Limits,
    Sampling,
    check_chat,
    check_model,
    check_request_id,
    check_sampling,
)
from protos.errors import invalid

MAX_BODY_DEPTH = 128
COMPLETION_DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's default of /v1/completions; a chat may use all the room there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """One checked request. `prompts` are token ids or texts; a chat has one prompt, its rendered text."""

    chat: bool
    prompts: tuple[str | list[int], ...]
    add_special_tokens: bool
    sampling: Sampling
    top_logprobs: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    client_request_id: str | None


def parse_body(raw: bytes) -> Mapping[str, Any]:
    """The JSON object in a request body. Raises `SplitpointError` naming what is wrong and where."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise invalid("body", f"body is not valid UTF-8: {exc.reason} at byte {exc.start}") from exc
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as exc:
        problem = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise invalid("body", f"body is not valid JSON: {problem}") from exc
    # Only so many brackets can nest so deep; most bodies need no walk. What is let through can be walked by recursion.
    if text.count("[") + text.count("{") > MAX_BODY_DEPTH and nests_deeper(body, MAX_BODY_DEPTH):
        raise invalid("body", f"body must not nest deeper than {MAX_BODY_DEPTH} levels")
    if not isinstance(body, dict):
        raise invalid("body", f"body must be a JSON object, got {shown(body)}")
    return body


def parse_chat(body: Mapping[str, Any], limits: Limits, served_model: str, tokenizer: TextTokenizer) -> OpenAIRequest:
    """POST /v1/chat/completions."""
    fields = _common(body, served_model)
    if "messages" not in body:
        raise invalid("messages", "messages is missing: a list of at least 1 message")
    messages = check_chat(fields.get("messages"))
    continue_final = fields.boolean("continue_final_message", False)
    if continue_final and fields.boolean("add_generation_prompt", False):
        raise fields.refuse("continue_final_message", "and add_generation_prompt cannot both be true")
    arguments = fields.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping) or not arguments.keys().isdisjoint(_TEMPLATE_ARGUMENTS_OF_OURS):
        names = ", ".join(sorted(_TEMPLATE_ARGUMENTS_OF_OURS))
        raise fields.refuse("chat_template_kwargs", f"must be an object without {names}, got {shown(arguments)}")
    top_logprobs = fields.integer("top_logprobs", 0, limits.max_logprobs) or 0
    wants_logprobs = fields.boolean("logprobs", False)
    if top_logprobs and not wants_logprobs:
        raise fields.refuse("top_logprobs", f"needs logprobs to be true, got {top_logprobs} without it")
    text = tokenizer.render_chat(
        messages,
        add_generation_prompt=fields.boolean("add_generation_prompt", True) and not continue_final,
        continue_final_message=continue_final,
        template_arguments=arguments,
    )
    max_field = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    sampling = check_sampling(
        fields,
        limits,
        constraint=constraint.from_openai(fields),
        logprobs=top_logprobs if wants_logprobs else None,
        max_tokens_field=max_field,
    )
    return _request(fields, chat=True, prompts=(text,), sampling=sampling, top_logprobs=top_logprobs, special_tokens=False)


def parse_completion(body: Mapping[str, Any], limits: Limits, served_model: str) -> OpenAIRequest:
    """POST /v1/completions."""
    fields = _common(body, served_model)
    if body.get("prompt") is None:
        raise invalid("prompt", "prompt is missing: a text, a list of texts, token ids or a list of token ids")
    prompts = _prompts(body["prompt"], limits)
    logprobs = fields.integer("logprobs", 0, limits.max_logprobs)
    sampling = check_sampling(fields, limits, constraint=constraint.from_openai(fields), logprobs=logprobs)
    if len(prompts) * sampling.n > limits.max_choices:
        raise fields.refuse(
            "n", f"times the number of prompts must be at most {limits.max_choices}, got {sampling.n} x {len(prompts)}"
        )
    return _request(fields, chat=False, prompts=prompts, sampling=sampling, top_logprobs=logprobs or 0, special_tokens=True)


_TEMPLATE_ARGUMENTS_OF_OURS = frozenset(
    {"chat_template", "tokenize", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"return_tensors", "return_dict", "padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
)


def _common(body: Mapping[str, Any], served_model: str) -> Fields:
    refuse_known(body)
    fields = Fields(body)
    check_model(fields.text("model"), served_model)
    return fields


def _request(
    fields: Fields,
    *,
    chat: bool,
    prompts: tuple[str | list[int], ...],
    sampling: Sampling,
    top_logprobs: int,
    special_tokens: bool,
) -> OpenAIRequest:
    stream = fields.boolean("stream", False)
    options = fields.get("stream_options")
    if options is not None:
        if not isinstance(options, Mapping):
            raise fields.refuse("stream_options", f"must be an object, got {shown(options)}")
        if options and not stream:
            raise fields.refuse("stream_options", "needs stream to be true")
    wanted = Fields(options or {}, "stream_options.")
    if stream and sampling.params.prompt_logprobs is not None:
        raise fields.refuse("prompt_logprobs", "must be absent when stream is true")
    continuous = wanted.boolean("continuous_usage_stats", False)
    return OpenAIRequest(
        chat=chat,
        prompts=prompts,
        add_special_tokens=fields.boolean("add_special_tokens", special_tokens),
        sampling=sampling,
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=wanted.boolean("include_usage", False),
        continuous_usage=continuous,
        return_token_ids=fields.boolean("return_token_ids", False),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids", False),
        client_request_id=check_request_id("request_id", fields.text("request_id")),
    )


def _prompts(prompt: Any, limits: Limits) -> tuple[str | list[int], ...]:
    """The four forms of `prompt`."""
    if isinstance(prompt, str):
        items: Sequence[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(p, str | list) for p in prompt):
        items = prompt
    elif isinstance(prompt, list) and prompt:
        items = [prompt]
    else:
        raise invalid("prompt", f"prompt must be a non-empty text or list of texts or token ids, got {shown(prompt)}")
    if len(items) > limits.max_choices:
        raise invalid("prompt", f"prompt must hold at most {limits.max_choices} prompts, got {len(items)}")
    if len({type(p) for p in items}) > 1:
        raise invalid("prompt", "prompt must hold texts or lists of token ids, not both")
    for i, item in enumerate(items):
        path = "prompt" if len(items) == 1 else f"prompt[{i}]"
        if not item:
            raise invalid(path, f"{path} must be at least 1 token, got none")
        if isinstance(item, str):
            check_unicode(path, item)
        else:
            # A longer prompt is refused for its length, without a look at every id.
            check_token_ids(path, item[: limits.max_model_len], limits.vocab_size)
    return tuple(items)


def prompts_of(request: OpenAIRequest) -> list[Prompt]:
    """The request's prompts under the names that errors call them by."""
    if request.chat:
        return [Prompt(field="messages", content=request.prompts[0], add_special_tokens=request.add_special_tokens)]
    single = len(request.prompts) == 1
    return [
        Prompt(field="prompt" if single else f"prompt[{i}]", content=content, add_special_tokens=request.add_special_tokens)
        for i, content in enumerate(request.prompts)
    ]
