"""The simulated engine's model: what each step computes, how long it takes, and what becomes of the KV blocks. Pure.

A continuous-batching scheduler with chunked prefill: running requests first, one token each or the next piece of their
prompt; then waiting requests in order, while the token budget and the run slots last. When blocks run out, the youngest
running request is preempted and recomputed later. Times go in and out as arguments; nothing here sleeps.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import SimulatedSettings
from engine.sim_blocks import BlockPool
from engine.sim_tokens import History


class SequenceState(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the model.

    `computed` tokens have KV in `blocks`; `arrived_s` and `scheduled_s` are by the caller's clock.
    """

    request_id: str
    tokens: list[int]
    history: History
    prompt_tokens: int
    arrived_s: float
    use_cache: bool = True
    state: SequenceState = SequenceState.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int = 0
    external_used: bool = False
    published: int = 0
    scheduled_s: float | None = None
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Work:
    """`tokens` new tokens of `sequence` in one step, beside `context` that already have KV."""

    sequence: Sequence
    tokens: int
    context: int

    @property
    def samples(self) -> bool:
        """The step reaches the end of the sequence, so that a token comes out."""
        return self.context + self.tokens == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class ExternalLoad:
    """`sequence` was admitted with KV from staging; its first `tokens` tokens count as computed."""

    sequence: Sequence
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what is loaded before it, what it computes, and who lost their blocks for it."""

    work: tuple[Work, ...]
    loads: tuple[ExternalLoad, ...]
    preempted: tuple[Sequence, ...]


def step_time_s(settings: SimulatedSettings, work: tuple[Work, ...]) -> float:
    """Model seconds of one step: a base, a cost for each prompt token, each decoding sequence and each token of context."""
    prefill_tokens = sum(w.tokens for w in work if w.tokens > 1)
    decoding = sum(1 for w in work if w.tokens == 1)
    context = sum(w.context + w.tokens for w in work)
    return (
        settings.step_base_s
        + settings.prefill_token_s * prefill_tokens
        + settings.decode_sequence_s * decoding
        + settings.context_token_s * context
    )


class SimScheduler:
    """Queues, run slots and blocks of one engine.

    `plan` picks a step's work, `complete` takes it in; `abort` and `finish` may come between the two, and the sequence's part of
    the step is then dropped. Every request leaves exactly once, and its blocks with it.
    """

    def __init__(self, pool: BlockPool, *, block_tokens: int, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._budget = max_num_batched_tokens
        self._slots = max_num_seqs
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        self._waiting.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Finished or aborted: gives up its place and its blocks. Idempotent."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._release_blocks(sequence)

    def plan(self, now_s: float, external_tokens: Callable[[Sequence], int]) -> StepPlan:
        """Choose the next step. `external_tokens` says how much of a sequence's prompt lies verified in staging (0: none); it
        is asked once per admission and never again after a preemption."""
        work: list[Work] = []
        loads: list[ExternalLoad] = []
        preempted: list[Sequence] = []
        budget = self._schedule_running(work, preempted)
        if not preempted:
            self._admit(now_s, budget, external_tokens, work, loads)
        return StepPlan(tuple(work), tuple(loads), tuple(preempted))

    def complete(self, plan: StepPlan) -> list[Work]:
        """The step was computed. Returns the work of sequences that are still running."""
        alive = [w for w in plan.work if w.sequence.state is SequenceState.RUNNING]
        for item in alive:
            item.sequence.computed = item.context + item.tokens
            self._publish_full_blocks(item.sequence)
        return alive

    def append(self, sequence: Sequence, token: int) -> None:
        """A token was sampled."""
        sequence.tokens.append(token)
        sequence.history.extend([token])

    def _schedule_running(self, work: list[Work], preempted: list[Sequence]) -> int:
        budget = self._budget
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            tokens = min(budget, len(sequence.tokens) - sequence.computed)
            while not self._grow(sequence, sequence.computed + tokens):
                # The youngest pays: it has the least to lose, and the oldest always gets through.
                victim = self._running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                work.append(Work(sequence, tokens, sequence.computed))
                budget -= tokens
                index += 1
        return budget

    def _admit(
        self,
        now_s: float,
        budget: int,
        external_tokens: Callable[[Sequence], int],
        work: list[Work],
        loads: list[ExternalLoad],
    ) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._slots:
            sequence = self._waiting[0]
            total = len(sequence.tokens)
            # At least one token is computed, or there would be nothing to sample from.
            hashes = sequence.history.block_hashes[: (total - 1) // self._block_tokens] if sequence.use_cache else []
            matched = self._pool.match(hashes)
            local = len(matched) * self._block_tokens
            external = 0 if sequence.external_used else min(external_tokens(sequence), total - 1)
            computed = max(local, external)
            tokens = min(budget, total - computed)
            self._pool.hold(matched)
            sequence.blocks = matched
            if not self._grow(sequence, computed + tokens):
                self._release_blocks(sequence)
                return
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.state = SequenceState.RUNNING
            sequence.computed = computed
            sequence.published = len(matched)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
                sequence.cached_tokens = computed
            sequence.external_used = True
            if external > local:
                loads.append(ExternalLoad(sequence, external))
                self._publish_full_blocks(sequence)
            work.append(Work(sequence, tokens, computed))
            budget -= tokens

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        missing = -(-tokens // self._block_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is None:
            return False
        sequence.blocks = [*sequence.blocks, *blocks]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release_blocks(sequence)
        sequence.state = SequenceState.WAITING
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)

    def _release_blocks(self, sequence: Sequence) -> None:
        self._pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.published = 0

    def _publish_full_blocks(self, sequence: Sequence) -> None:
        full = sequence.computed // self._block_tokens
        for index in range(sequence.published, full):
            self._pool.publish(sequence.blocks[index], sequence.history.block_hashes[index])
        sequence.published = max(sequence.published, full)
