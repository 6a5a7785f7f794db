"""A simulated engine without tasks and without tokens' contents: its queue and its steps, as fast as Python counts.

It schedules as `engine.sim_model` does and takes as long (`tests/unit/test_bench_auto.py` compares them request by request), for
engines that never run out of blocks and prompts that share nothing.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

from coordinator.compare.proof.engine_arms import JITTER
from engine.config import SimulatedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One engine's: all its times swing by `swing` to either side, as a logarithm, once in `period_s`."""

    swing: float
    period_s: float
    phase: float

    def at(self, now_s: float) -> float:
        """The factor on durations."""
        return math.exp(self.swing * math.sin(2 * math.pi * (now_s / self.period_s + self.phase)))


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine: `known` tokens of which `computed` have KV, and `left` tokens to answer."""

    name: str
    known: int
    left: int
    computed: int = 0


class StepEngine:
    """Give it sequences; `begin` a step, and `end` it after the seconds that it takes."""

    def __init__(
        self,
        costs: SimulatedSettings,
        *,
        chunk_tokens: int,
        max_seqs: int,
        drift: Drift,
        rng: random.Random,
        jitter: float = JITTER,
    ) -> None:
        self._costs, self._chunk_tokens, self._max_seqs = costs, chunk_tokens, max_seqs
        self._drift, self._rng, self._jitter = drift, rng, jitter
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._step: list[tuple[Sequence, int]] = []

    @property
    def busy(self) -> bool:
        """A step is computed."""
        return bool(self._step)

    def add(self, sequence: Sequence) -> None:
        """Queue it."""
        self._waiting.append(sequence)

    def begin(self, now_s: float) -> float | None:
        """Plan a step: running sequences first, then waiting ones in order. Seconds until it ends; None: nothing to do."""
        budget, step = self._chunk_tokens, self._step
        for sequence in self._running:
            if budget <= 0:
                break
            tokens = min(budget, sequence.known - sequence.computed)
            step.append((sequence, tokens))
            budget -= tokens
        while self._waiting and budget > 0 and len(self._running) < self._max_seqs:
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            tokens = min(budget, sequence.known - sequence.computed)
            step.append((sequence, tokens))
            budget -= tokens
        if not step:
            return None
        prompts = decoding = context = 0
        for sequence, tokens in step:
            context += sequence.computed + tokens
            if tokens > 1:
                prompts += tokens
            else:
                decoding += 1
        costs = self._costs
        seconds = (
            costs.step_base_s
            + costs.prefill_token_s * prompts
            + costs.decode_sequence_s * decoding
            + costs.context_token_s * context
        )
        return seconds * self._drift.at(now_s) * math.exp(self._jitter * self._rng.gauss(0, 1))

    def end(self) -> list[Sequence]:
        """The step is computed. Those of its sequences that have a token more; without `left` ones they are gone."""
        sampled = []
        for sequence, tokens in self._step:
            sequence.computed += tokens
            if sequence.computed == sequence.known:
                sequence.known += 1
                sequence.left -= 1
                sampled.append(sequence)
        self._step = []
        if any(sequence.left == 0 for sequence in sampled):
            self._running = [sequence for sequence in self._running if sequence.left]
        return sampled
