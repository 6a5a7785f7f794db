"""Prompts that share beginnings: pools of prefixes, and conversations whose turns grow. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from coordinator.compare.shapes import RequestShape, Segment
from coordinator.compare.workload import SALT_TOKENS


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pool(_Spec):
    """`count` prefixes of `tokens` each; a request takes one of them and adds its own `input` tokens.

    Prefix k is taken in proportion to 1 / k^`skew`: 0 is even, 1 is Zipf's law.
    """

    kind: Literal["pool"]
    count: int = Field(ge=1, le=1_000_000)
    tokens: int = Field(ge=SALT_TOKENS, le=10_000_000)
    skew: float = Field(0.0, ge=0, le=5)


class Turns(_Spec):
    """Conversations of `turns` requests, `open` of them at a time: each turn's prompt is all before it and `input` new tokens.

    The answers before are part of it, as stand-in tokens of the same length: a cache finds them from the second time on. `system`
    tokens, the same for all conversations, go first.
    """

    kind: Literal["turns"]
    turns: int = Field(ge=2, le=1000)
    open: int = Field(8, ge=1, le=1_000_000)
    system: int = Field(0, ge=0, le=10_000_000)


Prefix = Annotated[Pool | Turns, Field(discriminator="kind")]


def assign(spec: Prefix, requests: Sequence[RequestShape], generator: np.random.Generator) -> list[RequestShape]:
    """The requests with their shared beginnings; `input_tokens` grows by these."""
    if isinstance(spec, Pool):
        weights = 1.0 / np.arange(1, spec.count + 1) ** spec.skew
        chosen = generator.choice(spec.count, len(requests), p=weights / weights.sum()).tolist()
        return [_with(request, (Segment(f"pool/{k}", spec.tokens),)) for request, k in zip(requests, chosen, strict=True)]
    system = (Segment("system", spec.system),) if spec.system >= SALT_TOKENS else ()
    begun = 0
    talks: list[tuple[int, list[Segment]]] = []
    made = []
    for request in requests:
        place = int(generator.integers(0, spec.open))
        while len(talks) <= place:
            talks.append((begun, []))
            begun += 1
        talk, past = talks[place]
        turn = len(past) // 2
        question = Segment(f"talk/{talk}/{turn}/question", request.input_tokens)
        grown = (*system, *past, question)
        made.append(dataclasses.replace(request, input_tokens=sum(segment.tokens for segment in grown), shared=grown))
        past += [question, Segment(f"talk/{talk}/{turn}/answer", request.output_tokens)]
        if turn + 1 == spec.turns:
            talks[place] = (begun, [])
            begun += 1
    return made


def note(spec: Prefix) -> str:
    """For people, one line."""
    if isinstance(spec, Pool):
        return f"shared prefixes: {spec.count} of {spec.tokens} tokens, before each prompt's own"
    return f"conversations of {spec.turns} turns, {spec.open} open at a time; each prompt repeats what was said before"


def _with(request: RequestShape, shared: tuple[Segment, ...]) -> RequestShape:
    tokens = sum(segment.tokens for segment in shared) + request.input_tokens
    return dataclasses.replace(request, input_tokens=tokens, shared=shared)
