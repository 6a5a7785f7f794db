"""The seam between the front ends (HTTP, gRPC) and the core that runs requests.

Front ends validate, tokenise, fan out `n`, detokenise, apply stop strings and shape replies. The core chooses a path and
workers, runs the legs, retries, and keeps the ledger. Neither knows the other's types.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from engine.sampling import SamplingParams
from protos.ids import RequestId
from protos.splitpoint.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One choice of one public request, validated and tokenised.

    `path`, `transport` and the objectives are None, `pools` and `session` empty, when the client did not ask.
    `key_name` is the configured name of its API key, "" for another key or none.
    `deadline_s` is the time left from now.
    `received_s` is the gateway's monotonic clock when the public request arrived, for TTFT and the ledger.
    """

    request_id: RequestId
    client_request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    received_s: float
    deadline_s: float
    path: str | None = None
    transport: str | None = None
    pools: frozenset[str] = frozenset()
    session: str = ""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    key_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens of one choice. `prompt_logprobs` and `cached_tokens` come with the first event alone."""

    token_ids: list[int]
    logprobs: list[common_pb2.PositionLogprobs] | None = None
    prompt_logprobs: list[common_pb2.PositionLogprobs] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event. `finish_reason` is "stop" or "length"."""

    finish_reason: str
    matched_token_id: int | None = None


class Generation(Protocol):
    """One running choice. Iterate it to the end or close it; both end every leg, lease and slot it started."""

    def __aiter__(self) -> AsyncIterator[Tokens | Finished]:
        """Raises `SplitpointError`; with `tokens_sent` set when tokens were already yielded."""

    async def close(self, reason: str) -> None:
        """End it early: "stop" (a stop string matched), "client_left", "failed" (another choice of the same request failed).

        Idempotent, also after the end.
        """

    def ledger(self) -> common_pb2.StageLedger:
        """The stages so far; final after the last event or `close`."""


class Core(Protocol):
    """Runs submissions."""

    def submit(self, submission: Submission) -> Generation:
        """Starts at the first iteration. Never raises by itself."""

    def ready(self) -> bool:
        """A live worker in each phase, or one that serves the colocated path."""
