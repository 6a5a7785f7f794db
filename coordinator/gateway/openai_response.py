"""OpenAI reply bodies: whole replies, and stream chunks with everything constant serialised once per request."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from coordinator.gateway.choice import Choice, Delta
from coordinator.gateway.logprobs import chat_logprob, completion_logprobs, prompt_logprobs
from coordinator.gateway.openai_request import OpenAIRequest
from coordinator.gateway.tokenizer import TextTokenizer
from protos.splitpoint.v1 import common_pb2

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def usage(choices: Sequence[Choice], completion_tokens: int | None = None) -> dict[str, Any]:
    """`usage` over all choices: a prompt counts once, however many choices it has.

    `completion_tokens` None: all there are; in the middle of a stream, those that were sent.
    """
    prompts = {id(c.submission.prompt_token_ids): c for c in reversed(choices)}
    prompt_tokens = sum(c.prompt_tokens for c in prompts.values())
    if completion_tokens is None:
        completion_tokens = sum(c.completion_tokens for c in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in prompts.values())},
    }


def metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """The stage ledger in milliseconds, with vLLM's names beside ours. Several choices: one record each under `choices`."""
    records = [_ledger(c.ledger, c.completion_tokens) for c in choices]
    return records[0] if len(records) == 1 else {"choices": records}


def _ledger(ledger: common_pb2.StageLedger, completion_tokens: int) -> dict[str, Any]:
    generating_s = max(0.0, ledger.e2e_s - ledger.ttft_s)
    record: dict[str, Any] = {
        "time_to_first_token_ms": ledger.ttft_s * 1e3,
        "queue_time_ms": (ledger.prefill_queue_s + ledger.decode_queue_s) * 1e3,
        "generation_time_ms": generating_s * 1e3,
        "mean_itl_ms": generating_s / (completion_tokens - 1) * 1e3 if completion_tokens > 1 else None,
        "tokens_per_second": completion_tokens / ledger.e2e_s if ledger.e2e_s > 0 else None,
    }
    for field in ledger.DESCRIPTOR.fields:
        value = getattr(ledger, field.name)
        if field.name.endswith("_s"):
            record[field.name[:-2] + "_ms"] = value * 1e3
        else:
            record[field.name] = value
    return record


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class Reply:
    """Shapes the answer to one request, streamed or whole."""

    def __init__(self, request: OpenAIRequest, choices: Sequence[Choice], model: str, tokenizer: TextTokenizer) -> None:
        self._request = request
        self._choices = choices
        self._tokenizer = tokenizer
        self._model = model
        self._created_s = int(time.time())
        self.id = ("chatcmpl-" if request.chat else "cmpl-") + secrets.token_hex(16)
        kind = (
            ("chat.completion.chunk" if request.chat else "text_completion")
            if request.stream
            else ("chat.completion" if request.chat else "text_completion")
        )
        self._head = {"id": self.id, "object": kind, "created": self._created_s, "model": model}
        self._open = _dumps(self._head)[:-1] + ',"choices":['
        # Without these a chunk is five constant pieces around the text.
        self._plain = request.sampling.params.logprobs is None and not request.return_token_ids and not request.continuous_usage
        text_key = '"delta":{"content":' if request.chat else '"text":'
        text_end = "}" if request.chat else ""
        self._before = ["data: " + self._open + f'{{"index":{c.index},{text_key}' for c in choices]
        self._after = text_end + ',"logprobs":null,"finish_reason":null}]}\n\n'
        self._started = [False] * len(choices)
        self._offset_chars = [0] * len(choices)
        self._sent_tokens = 0

    def chunks(self, choice: Choice, deltas: Sequence[Delta]) -> bytes:
        """Server-sent events for `deltas`, one per token."""
        if self._plain and self._started[choice.index]:
            before, after = self._before[choice.index], self._after
            return "".join(
                [
                    before + encode_basestring_ascii(d.text) + after if d.finish_reason is None else self._full_chunk(choice, d)
                    for d in deltas
                ]
            ).encode("ascii")
        return "".join([self._full_chunk(choice, d) for d in deltas]).encode("ascii")

    def _full_chunk(self, choice: Choice, delta: Delta) -> str:
        request, first = self._request, not self._started[choice.index]
        self._started[choice.index] = True
        item: dict[str, Any] = {"index": choice.index}
        if request.chat:
            content: dict[str, Any] = {"role": "assistant"} if first else {}
            item["delta"] = content | {"content": delta.text}
        else:
            item["text"] = delta.text
        item["logprobs"] = self._logprobs(choice, [delta]) if delta.logprobs is not None else None
        item["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            item["stop_reason"] = delta.stop_reason
        if request.return_token_ids:
            item["token_ids"] = [] if delta.token_id is None else [delta.token_id]
            if first and not request.chat:
                item["prompt_token_ids"] = choice.submission.prompt_token_ids
        tail = ""
        if request.return_token_ids and request.chat and first:
            tail = ',"prompt_token_ids":' + _dumps(choice.submission.prompt_token_ids)
        if request.continuous_usage:
            self._sent_tokens += delta.token_id is not None
            tail += ',"usage":' + _dumps(usage(self._choices, self._sent_tokens))
        return "data: " + self._open + _dumps(item) + "]" + tail + "}\n\n"

    def usage_chunk(self) -> bytes:
        """The chunk after the last choice: no choices, the usage and the ledger."""
        body = {**self._head, "choices": [], "usage": usage(self._choices), "metrics": metrics(self._choices)}
        return f"data: {_dumps(body)}\n\n".encode("ascii")

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """The whole reply; `deltas` by choice index."""
        items = [self._whole_choice(choice, deltas[choice.index]) for choice in self._choices]
        body = {**self._head, "choices": items, "usage": usage(self._choices), "metrics": metrics(self._choices)}
        if self._request.chat:
            # One prompt: vLLM puts what belongs to it beside the choices of a chat, and into those of a completion.
            body |= self._prompt_facts(self._choices[0])
        return _dumps(body).encode("ascii")

    def _whole_choice(self, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(d.text for d in deltas)
        last = deltas[-1]
        item: dict[str, Any] = {"index": choice.index}
        if self._request.chat:
            item["message"] = {"role": "assistant", "content": text}
        else:
            item["text"] = text
        with_logprobs = [d for d in deltas if d.logprobs is not None]
        item["logprobs"] = self._logprobs(choice, with_logprobs) if self._request.sampling.params.logprobs is not None else None
        item["finish_reason"] = last.finish_reason
        item["stop_reason"] = last.stop_reason
        if self._request.return_token_ids:
            item["token_ids"] = [d.token_id for d in deltas if d.token_id is not None]
        return item if self._request.chat else item | self._prompt_facts(choice)

    def _prompt_facts(self, choice: Choice) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self._request.return_token_ids:
            facts["prompt_token_ids"] = choice.submission.prompt_token_ids
        if choice.prompt_logprobs is not None:
            facts["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self._tokenizer)
        return facts

    def _logprobs(self, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        positions = [d.logprobs for d in deltas if d.logprobs is not None]
        top, as_id = self._request.top_logprobs, self._request.tokens_as_ids
        if self._request.chat:
            return {"content": [chat_logprob(p, top, self._tokenizer, as_id=as_id) for p in positions]}
        record, self._offset_chars[choice.index] = completion_logprobs(
            positions,
            top,
            self._tokenizer,
            as_id=as_id,
            offset_chars=self._offset_chars[choice.index],
            skip_special_tokens=self._request.sampling.params.skip_special_tokens,
        )
        return record
