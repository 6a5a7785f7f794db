"""Sampling parameters as Splitpoint's own frozen value, and their wire form. Pure.

Names and meanings are vLLM's. `None` means "not given": the engine's own default applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from protos.splitpoint.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Structured output; exactly one is set."""

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    json_object: bool = False
    choice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one engine request asks for. `stop` strings and `n` never reach an engine: the gateway applies them."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    constraint: Constraint | None = None

    def to_proto(self) -> common_pb2.SamplingParams:
        """The wire form; fields that are `None` stay absent."""
        message = common_pb2.SamplingParams()
        for name in _SCALARS:
            value = getattr(self, name)
            if value is not None:
                setattr(message, name, value)
        message.stop_token_ids.extend(self.stop_token_ids)
        message.allowed_token_ids.extend(self.allowed_token_ids)
        message.bad_words.extend(self.bad_words)
        message.logit_bias.update(self.logit_bias)
        if self.constraint is not None:
            for item in fields(self.constraint):
                value = getattr(self.constraint, item.name)
                if item.name == "choice":
                    if value:
                        message.choice.choices.extend(value)
                elif value:
                    setattr(message, item.name, value)
        return message

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        """The inverse of `to_proto`. Raises `ValueError` when `max_tokens` is absent: the gateway always sets it."""
        if not message.HasField("max_tokens"):
            raise ValueError("sampling_params.max_tokens is absent")
        values: dict[str, Any] = {n: getattr(message, n) for n in _SCALARS if message.HasField(n)}
        constraint = None
        which = message.WhichOneof("constraint")
        if which == "choice":
            constraint = Constraint(choice=tuple(message.choice.choices))
        elif which is not None:
            constraint = Constraint(**{which: getattr(message, which)})
        return cls(
            **values,
            stop_token_ids=tuple(message.stop_token_ids),
            allowed_token_ids=tuple(message.allowed_token_ids),
            bad_words=tuple(message.bad_words),
            logit_bias=dict(message.logit_bias),
            constraint=constraint,
        )


_SCALARS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "seed",
    "skip_special_tokens",
)
