"""What a worker needs of an engine. vLLM and the simulated engine both satisfy it, held by one contract suite.

Token ids in, token ids out. An engine never sees text, stop strings, `n` or a peer's address.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from engine.sampling import SamplingParams
from protos.ids import RequestId, TransferId


@dataclass(frozen=True, slots=True)
class KvSend:
    """Gather this request's prompt KV into the rank's send staging, in the steps that compute it."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class KvReceive:
    """`staged_tokens` of this request's prompt lie verified in every rank's receive staging: load them, compute the rest."""

    transfer_id: TransferId
    staged_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request to one engine. `request_id` is unique per attempt: a retry is a new engine request."""

    request_id: RequestId | str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    kv: KvSend | KvReceive | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one engine step yields for one request.

    `token_ids` are new since the last output, usually one. `finish_reason` ("stop", "length", "abort", "error") is set on
    the last output alone. `matched_token_id` is the EOS or stop token that ended it.

    The times are exclusive and add up to the life of the request, from the call of `generate` to the reading of its last
    output: queued until the first step that has it, computing until the first token, both set on the first output;
    decoding until the last token, returning until it is read, both set on the last.
    """

    token_ids: list[int]
    logprobs: list[list[Logprob]] | None = None
    prompt_logprobs: list[list[Logprob]] | None = None
    finish_reason: str | None = None
    matched_token_id: int | None = None
    cached_tokens: int = 0
    queued_s: float = 0.0
    computing_s: float = 0.0
    decoding_s: float = 0.0
    returning_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A snapshot. `kv_usage` is the share of KV blocks that live requests hold (cached, unreferenced blocks count as free)."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts fixed at start."""

    model: str
    max_model_len: int
    vocab_size: int
    block_tokens: int
    num_kv_blocks: int
    world_size: int
    """Ranks that hold KV: tensor parallel times pipeline parallel."""
    start_arguments: dict[str, object]
    """Resolved arguments of the engine's constructor, for the run manifest."""


class Engine(Protocol):
    """One engine on one accelerator group. All methods belong to one event loop."""

    async def start(self) -> EngineInfo:
        """Load and warm up. Called once. When it returns, every rank's transfer node has registered (if KV transfer is on)."""

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request. Closing the iterator (`aclose`, cancellation) aborts the request within one engine step.

        Raises:
            ValueError: the engine refuses the request (names the field); nothing was started.
            EngineDeadError: the engine's process is gone; every running iterator raises it.
        """

    def load(self) -> EngineLoad: ...

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False when blocks are in use and nothing was reset."""

    async def check_health(self) -> None:
        """Raises `EngineDeadError` when the engine cannot serve."""

    async def stop(self) -> None:
        """End everything this engine started. Idempotent; safe after a failed `start`."""


class EngineDeadError(RuntimeError):
    """The engine's process died or hangs; the worker must be replaced."""
