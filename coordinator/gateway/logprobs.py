"""Log-probabilities in the shapes of OpenAI's chat and completions replies. Pure but for the tokenizer's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.gateway.detokenize import REPLACEMENT
from coordinator.gateway.tokenizer import TextTokenizer
from protos.splitpoint.v1 import common_pb2

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say; vLLM's value."""


def _finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # also for NaN


def _spelled(token_id: int, tokenizer: TextTokenizer, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def _alternatives(position: common_pb2.PositionLogprobs, top: int) -> list[common_pb2.TokenLogprob]:
    """The `top` most likely tokens of a position, each once; the sampled one is there only if it is one of them."""
    by_id = {entry.token_id: entry for entry in reversed(position.entries)}
    return sorted(by_id.values(), key=lambda e: (e.rank, -e.logprob))[:top]


def chat_logprob(position: common_pb2.PositionLogprobs, top: int, tokenizer: TextTokenizer, *, as_id: bool) -> dict[str, Any]:
    """One item of `choices[].logprobs.content`."""

    def item(entry: common_pb2.TokenLogprob) -> dict[str, Any]:
        return {
            "token": _spelled(entry.token_id, tokenizer, as_id),
            "logprob": _finite(entry.logprob),
            "bytes": list(tokenizer.token_bytes(entry.token_id)),
        }

    return {**item(position.entries[0]), "top_logprobs": [item(e) for e in _alternatives(position, top)]}


def completion_logprobs(
    positions: Sequence[common_pb2.PositionLogprobs],
    top: int,
    tokenizer: TextTokenizer,
    *,
    as_id: bool,
    offset_chars: int,
    skip_special_tokens: bool,
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of a completion, and the offset of what follows.

    `offset_chars` is where the first token starts in the choice's text. A token that is a part of a character is spelled
    `bytes:\\xf0`, as OpenAI does: U+FFFD would make different tokens one key.
    """

    def spelled(token_id: int) -> str:
        text = _spelled(token_id, tokenizer, as_id)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{b:02x}" for b in tokenizer.token_bytes(token_id))

    tokens: list[str] = []
    offsets: list[int] = []
    chosen: list[float] = []
    tops: list[dict[str, float]] = []
    for position in positions:
        first = position.entries[0]
        tokens.append(spelled(first.token_id))
        offsets.append(offset_chars)
        if not (skip_special_tokens and first.token_id in tokenizer.special_ids):
            # A character belongs to the token that holds its first byte.
            offset_chars += sum((b & 0xC0) != 0x80 for b in tokenizer.token_bytes(first.token_id))
        chosen.append(_finite(first.logprob))
        # OpenAI's form: the sampled token is always among them, besides the `top` most likely.
        entries = [first, *_alternatives(position, top)]
        tops.append({spelled(e.token_id): _finite(e.logprob) for e in entries})
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": tops}, offset_chars


def prompt_logprobs(
    positions: Sequence[common_pb2.PositionLogprobs], tokenizer: TextTokenizer
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, which nothing predicts."""
    out: list[dict[str, dict[str, Any]] | None] = []
    for position in positions:
        out.append(
            {
                str(e.token_id): {
                    "logprob": _finite(e.logprob),
                    "rank": e.rank,
                    "decoded_token": tokenizer.token_text(e.token_id),
                }
                for e in position.entries
            }
            or None
        )
    return out
