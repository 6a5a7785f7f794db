"""Asks a running system one question on one way, and says how two answers differ."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from coordinator.compare.quality.parity import first_divergence
from protos.splitpoint.v1 import admin_pb2, common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.system import Served, until

BLOCK_TOKENS = 128
"""vLLM's own block size on a CPU; the demo's configuration does not change it."""
BLOCK_BYTES = 23040 * BLOCK_TOKENS
"""SmolLM2-135M: 30 layers x 3 KV heads x 64 x K and V in bfloat16 are 23,040 bytes per token."""
CALL_TIMEOUT_S = 150.0

Prompt = str | tuple[int, ...] | list[dict[str, str]]
Logprobs = list[list[tuple[int, float, int]]]
"""Per position: (token, log-probability, rank), the chosen token first."""


@dataclass(frozen=True, slots=True)
class Way:
    """One path through the system."""

    path: str
    transport: str = ""

    def __str__(self) -> str:
        return f"{self.path}-{self.transport}" if self.transport else self.path

    @property
    def headers(self) -> dict[str, str]:
        asked = {"x-splitpoint-path": self.path}
        return asked | {"x-splitpoint-transport": self.transport} if self.transport else asked


COLOCATED = Way("colocated")
SPLITS = (Way("split", "ucx"), Way("split", "grpc"))


@dataclass(slots=True, kw_only=True)
class Answer:
    """What one request came to. `logprobs` are empty unless asked for."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stopped_by: int | str | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: Logprobs = field(default_factory=list)
    prompt_logprobs: Logprobs = field(default_factory=list)
    ledger: Mapping[str, Any] = field(default_factory=dict)


def ask(served: Served, prompt: Prompt, sampling: Mapping[str, Any], way: Way, *, stream: bool = False) -> Answer:
    """One request over gRPC. `sampling` has the message's own field names."""
    request = generation_pb2.GenerateRequest(
        model=served.model, stream=stream, sampling_params=common_pb2.SamplingParams(**sampling)
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, list):
        request.chat.messages.extend(generation_pb2.ChatMessage(**message) for message in prompt)
    else:
        request.tokenized.input_ids.extend(prompt)
    with grpc.insecure_channel(served.grpc) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            request, timeout=CALL_TIMEOUT_S, metadata=list(way.headers.items())
        )
        replies = list(call)
    chunks = [r.chunk for r in replies if r.HasField("chunk")]
    [complete] = [r.complete for r in replies if r.HasField("complete")]
    assert bool(chunks) <= stream
    if stream:
        assert [i for c in chunks for i in c.token_ids] == list(complete.output_ids)
        # What a stop string held back comes with the end or never: chunks hold the same text as the whole.
        assert "".join(c.text for c in chunks) == complete.text
    stopped = complete.WhichOneof("matched_stop")
    return Answer(
        token_ids=list(complete.output_ids),
        text=complete.text,
        finish_reason=complete.finish_reason,
        stopped_by=getattr(complete, stopped) if stopped else None,
        prompt_tokens=complete.prompt_tokens,
        cached_tokens=complete.cached_tokens,
        logprobs=_logprobs([p for c in chunks for p in c.logprobs] if stream else complete.logprobs),
        prompt_logprobs=_logprobs(complete.prompt_logprobs),
        ledger={f.name: getattr(complete.metrics, f.name) for f in complete.metrics.DESCRIPTOR.fields},
    )


def _logprobs(positions: Sequence[common_pb2.PositionLogprobs]) -> Logprobs:
    return [[(e.token_id, e.logprob, e.rank) for e in position.entries] for position in positions]


_STRUCTURED = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_object"}


def ask_http(served: Served, prompt: Prompt, sampling: Mapping[str, Any], way: Way) -> Answer:
    """The same over OpenAI's API: a chat or a completion. Log-probabilities are the chosen tokens', without ranks."""
    chat = isinstance(prompt, list)
    body: dict[str, Any] = {"model": served.model, "return_token_ids": True, "skip_special_tokens": True}
    body |= {"messages": prompt} if chat else {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    for name, value in sampling.items():
        if name in _STRUCTURED:
            inner = list(value.choices) if name == "choice" else value
            body["structured_outputs"] = {_STRUCTURED[name]: inner}
        elif name == "logprobs" and chat:
            body |= {"logprobs": True, "top_logprobs": value}
        else:
            body[name] = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value
    with served.client(CALL_TIMEOUT_S) as client:
        reply = client.post("/v1/chat/completions" if chat else "/v1/completions", json=body, headers=way.headers)
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    [choice] = whole["choices"]
    usage, said = whole["usage"], choice.get("logprobs")
    chosen: list[float] = []
    if said:
        chosen = [item["logprob"] for item in said["content"]] if chat else said["token_logprobs"]
    assert usage["completion_tokens"] == len(choice["token_ids"])
    return Answer(
        token_ids=choice["token_ids"],
        text=choice["message"]["content"] if chat else choice["text"],
        finish_reason=choice["finish_reason"],
        stopped_by=choice.get("stop_reason"),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        logprobs=[[(token, logprob, 0)] for token, logprob in zip(choice["token_ids"], chosen, strict=False)],
        ledger=whole["metrics"],
    )


def reset_caches(served: Served) -> None:
    """Every worker forgets its prefixes; waits for the last engine step of what has just ended."""

    def done() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(served.admin_call("ResetPrefixCaches", admin_pb2.ResetPrefixCachesRequest()).workers == 2)
        return False

    until("prefix caches reset", done, 20, 0.02)


def assert_same(answer: Answer, reference: Answer) -> None:
    """Everything a client sees is equal, log-probabilities to the last bit."""
    for name in ("token_ids", "text", "finish_reason", "stopped_by", "prompt_tokens", "logprobs", "prompt_logprobs"):
        ours, theirs = getattr(answer, name), getattr(reference, name)
        assert ours == theirs, f"{name} differ{_where(answer, reference)}"


def _where(answer: Answer, reference: Answer) -> str:
    position = first_divergence(answer, reference)
    if position is None:
        return " with equal tokens"
    candidates = reference.logprobs[position] if position < len(reference.logprobs) else "not asked for"
    return f"; first at token {position}, the reference's candidates: {candidates}"


def assert_took(answer: Answer, way: Way, *, forwards: bool) -> None:
    """The ledger says that the answer went the way that was asked for, and that its KV really moved.

    A request that ends with prefill's token has no decode; what it had staged by then may have moved or not.
    """
    ledger = answer.ledger
    assert (ledger["path"], ledger["transport"]) == (way.path, way.transport)
    assert not ledger["recomputed"]
    assert not ledger["retry_s" if "retry_s" in ledger else "retry_ms"]
    whole_bytes = -(-answer.prompt_tokens // BLOCK_TOKENS) * BLOCK_BYTES
    if way.path == "colocated":
        assert ledger["transfer_bytes"] == 0
        assert ledger["attempts"] == 1
        return
    assert ledger["prefill_worker"].startswith("prefill-")
    if len(answer.token_ids) > 1:
        assert ledger["decode_worker"].startswith("decode-")
        assert ledger["transfer_bytes"] == whole_bytes
        assert ledger["attempts"] == 3
        assert ledger["first_token_forwarded"] == forwards
    else:
        assert ledger["transfer_bytes"] in (0, whole_bytes)
        assert ledger["attempts"] <= 3
