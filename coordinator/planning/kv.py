"""How many bytes a model's KV cache and weights take, in all and per accelerator. Pure."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction

from coordinator.planning.shape import KvShape
from coordinator.planning.values import RefusedValueError, at_least, share


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """`element_bytes` of the format in which they are loaded."""

    parameters: int
    element_bytes: Fraction

    def __post_init__(self) -> None:
        at_least("--parameters", self.parameters, 1)

    @property
    def total_bytes(self) -> int:
        return math.ceil(self.parameters * self.element_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """`memory_share` of `memory_bytes` is the engine's; `reserve_bytes` of that go to activations and graphs, not to KV."""

    memory_bytes: int
    memory_share: float
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        at_least("--memory", self.memory_bytes, 1)
        share("--memory-share", self.memory_share)
        at_least("--reserve", self.reserve_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one worker (one group of TP x PP accelerators) holds beside its weights."""

    kv_bytes_per_accelerator: int
    tokens: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """Bytes are exact, of one copy, unless the name says per accelerator. `kv_copies` counts replicated KV heads.

    The accelerator figures are of the fullest one: the pipeline stage with the most layers. Weights are an even share;
    embeddings and norms that an engine replicates come on top. `notes` says what else to know.
    """

    shape: KvShape
    tokens: int
    requests: int
    tp: int
    pp: int
    block_tokens: int
    bytes_per_token: int
    bytes_per_request: int
    bytes_per_request_in_blocks: int
    bytes_for_requests: int
    kv_copies: int
    layers_per_stage: int
    kv_heads_per_rank: int
    bytes_per_token_per_accelerator: int
    weight_bytes: int | None
    weight_bytes_per_accelerator: int | None
    room: Room | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON; formats as plain numbers."""
        found = dataclasses.asdict(self)
        found["shape"]["element_bytes"] = float(self.shape.element_bytes)
        found["accelerators_per_worker"] = self.tp * self.pp
        return found


def plan_kv(
    shape: KvShape,
    *,
    tokens: int,
    requests: int = 1,
    tp: int = 1,
    pp: int = 1,
    block_tokens: int = 16,
    weights: Weights | None = None,
    accelerator: Accelerator | None = None,
) -> KvPlan:
    """The plan for requests of `tokens` each (prompt and output), served by workers of `tp` x `pp` accelerators.

    Raises:
        RefusedValueError: a value below its limit; heads that do not divide among the ranks; weights that leave no room.
    """
    at_least("--tokens", tokens, 1)
    at_least("--requests", requests, 1)
    at_least("--tp", tp, 1)
    at_least("--pp", pp, 1)
    at_least("--block-tokens", block_tokens, 1)
    if pp > shape.layers:
        raise RefusedValueError("--pp", f"must be at most the {shape.layers} layers, got {pp}")
    heads_per_rank, copies = _spread_heads(shape, tp)
    layers_per_stage = math.ceil(shape.layers / pp)
    per_rank = shape.vectors * layers_per_stage * heads_per_rank * shape.head_dim * shape.element_bytes
    per_token_here = math.ceil(per_rank)
    blocks = math.ceil(tokens / block_tokens)
    weight_bytes = None if weights is None else weights.total_bytes
    weight_bytes_here = None if weight_bytes is None else math.ceil(Fraction(weight_bytes, tp * pp))
    room = None
    if accelerator is not None:
        room = _room(accelerator, weight_bytes_here, per_token_here, blocks, block_tokens)
    return KvPlan(
        shape=shape,
        tokens=tokens,
        requests=requests,
        tp=tp,
        pp=pp,
        block_tokens=block_tokens,
        bytes_per_token=math.ceil(shape.bytes_per_token),
        bytes_per_request=math.ceil(shape.bytes_per_token * tokens),
        bytes_per_request_in_blocks=math.ceil(shape.bytes_per_token * blocks * block_tokens),
        bytes_for_requests=math.ceil(shape.bytes_per_token * tokens * requests),
        kv_copies=copies,
        layers_per_stage=layers_per_stage,
        kv_heads_per_rank=heads_per_rank,
        bytes_per_token_per_accelerator=per_token_here,
        weight_bytes=weight_bytes,
        weight_bytes_per_accelerator=weight_bytes_here,
        room=room,
        notes=_notes(shape, tp, pp, copies, accelerator is not None and weights is None),
    )


def _spread_heads(shape: KvShape, tp: int) -> tuple[int, int]:
    """KV heads of one rank, and how often each is held in all."""
    if tp <= shape.kv_heads:
        if shape.kv_heads % tp:
            raise RefusedValueError("--tp", f"must divide the {shape.kv_heads} KV heads, got {tp}")
        return shape.kv_heads // tp, 1
    if tp % shape.kv_heads:
        raise RefusedValueError("--tp", f"above the {shape.kv_heads} KV heads it must be a multiple of them, got {tp}")
    return 1, tp // shape.kv_heads


def _room(accelerator: Accelerator, weight_bytes: int | None, per_token: int, blocks: int, block_tokens: int) -> Room:
    usable = math.floor(accelerator.memory_bytes * accelerator.memory_share) - accelerator.reserve_bytes
    left = usable - (weight_bytes or 0)
    positive_left = left // (per_token * block_tokens)
    if positive_left < 1:
        text = (
            f"{accelerator.memory_bytes / 1e9:g} GB leave {left / 1e9:.3g} GB beside weights and reserve: less than one KV block"
        )
        raise RefusedValueError("--memory", text)
    return Room(
        kv_bytes_per_accelerator=left,
        tokens=positive_left * block_tokens,
        requests=positive_left // blocks,
    )


def _notes(shape: KvShape, tp: int, pp: int, copies: int, weights_missing: bool) -> tuple[str, ...]:
    notes = []
    if copies > 1 and shape.kind == "latent":
        notes.append(f"a latent cache (MLA) has no heads to divide: each of the {tp} tensor-parallel ranks holds all of it")
    elif copies > 1:
        notes.append(f"TP {tp} exceeds the {shape.kv_heads} KV heads: each head is held {copies} times")
    if shape.layers % pp:
        notes.append(f"{shape.layers} layers over {pp} stages are uneven; the accelerator figures are of the fullest stage")
    if weights_missing:
        notes.append("no weights were given: the room is without them")
    return tuple(notes)
