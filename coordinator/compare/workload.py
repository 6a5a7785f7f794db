"""One workload per seed: gaps at unit rate, prompts, output lengths. Pure.

The same sequence serves every arm and every rate: a rate only scales the gaps. Prompts are token ids, so their lengths are
exact. A salt of equal length makes each probe's prompts new to every prefix cache; within a probe, prompts that share a beginning
still do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.compare.draw import Poisson, gaps, percentile_row

SALT_TOKENS = 4
"""At the head of a prompt: a prefix cache finds nothing behind a first block that differs."""


TUNING_SEEDS_FROM = 1_000_001
"""Seeds that only tuning and the search for the rates use: what was chosen on them is confirmed on others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What a workload is made from. Ranges are inclusive; token ids are drawn from [`first_token`, `end_token`)."""

    seed: int
    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    first_token: int = 1000
    end_token: int = 20000

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError("requests must be at least 1")
        if not SALT_TOKENS <= self.prompt_tokens[0] <= self.prompt_tokens[1]:
            raise ValueError(f"prompt_tokens must be a range from {SALT_TOKENS} up")
        if not 1 <= self.output_tokens[0] <= self.output_tokens[1]:
            raise ValueError("output_tokens must be a range from 1 up")
        if not 0 <= self.first_token < self.end_token:
            raise ValueError("first_token must be below end_token")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`gap`: time since the request before, at one request a second: a workload's mean is 1. Requests of one `group` are salted
    alike."""

    gap: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    group: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """`source_digest` names the specification's sequence that it was made from, "" where there is none.

    `shared` is the share of prompt tokens that an ideal prefix cache finds within one sending.
    """

    spec: WorkloadSpec
    requests: tuple[PlannedRequest, ...]
    source_digest: str = ""
    shared: float = 0.0

    @property
    def digest(self) -> str:
        """SHA-256 over the whole sequence, salt included: equal digests are equal work."""
        content = [[request.gap, request.prompt_token_ids, request.output_tokens] for request in self.requests]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def due_s(self, rate_per_s: float) -> tuple[float, ...]:
        """When each request is due, seconds from the start. The first gap counts: arrivals are Poisson from zero on."""
        if rate_per_s <= 0:
            raise ValueError("rate_per_s must be positive")
        return tuple(itertools.accumulate(request.gap / rate_per_s for request in self.requests))

    def repeated(self, times: int) -> Workload:
        """The sequence so many times on end. Once salted, a repeat shares no beginning with what it repeats."""
        again = (
            dataclasses.replace(request, group=f"{request.group}/{number}" if request.group else "")
            for number in range(1, times)
            for request in self.requests
        )
        return dataclasses.replace(self, requests=(*self.requests, *again))

    def salted(self, salt: str) -> Workload:
        """The same lengths and gaps with prompts that begin anew; the same salt gives the same prompts."""
        salted = tuple(self._salt(i, request, salt) for i, request in enumerate(self.requests))
        return dataclasses.replace(self, requests=salted)

    def _salt(self, index: int, request: PlannedRequest, salt: str) -> PlannedRequest:
        digest = hashlib.sha256(f"{self.spec.seed}/{request.group or index}/{salt}".encode()).digest()
        span = self.spec.end_token - self.spec.first_token
        words = (int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(SALT_TOKENS))
        head = tuple(self.spec.first_token + word % span for word in words)
        return dataclasses.replace(request, prompt_token_ids=head + request.prompt_token_ids[SALT_TOKENS:])


def make(spec: WorkloadSpec) -> Workload:
    """The workload of a spec: Poisson arrivals at unit rate, lengths and tokens uniform in their ranges."""
    generator = np.random.default_rng(spec.seed)
    waits = gaps(Poisson(kind="poisson"), generator, spec.requests)
    prompts = generator.integers(spec.prompt_tokens[0], spec.prompt_tokens[1], spec.requests, endpoint=True)
    outputs = generator.integers(spec.output_tokens[0], spec.output_tokens[1], spec.requests, endpoint=True)
    requests = []
    for gap, prompt, output in zip(waits.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
        ids = generator.integers(spec.first_token, spec.end_token, prompt)
        requests.append(PlannedRequest(gap, tuple(ids.tolist()), output))
    return Workload(spec, tuple(requests))


def lengths(workloads: Sequence[Workload]) -> dict[str, dict[str, float]]:
    """Of all requests of these: mean, p50, p95 (observed values), min and max of `input` and `output` tokens."""
    requests = [request for workload in workloads for request in workload.requests]
    inputs = np.array([len(request.prompt_token_ids) for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    return {"input": percentile_row(inputs), "output": percentile_row(outputs)}
