"""What each worker has in either phase: prompts that wait, sequences that decode, and how much of its time prompts took. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice

from coordinator.routing.auto import Neighbour, PathLoad
from coordinator.routing.goals import PairRoute, Route
from coordinator.routing.views import WorkerView
from protos.ids import Incarnation

WINDOW_S = 5.0
"""Over which the share of an engine's time that prompts take is remembered: a few prompts long, and shorter than a drift."""


@dataclass(slots=True)
class _Prompts:
    """Prompt tokens computed by one worker, fading with the window; as of `at_s`."""

    tokens: float = 0.0
    at_s: float = -math.inf

    def faded(self, now_s: float) -> float:
        return self.tokens * math.exp(-max(0.0, now_s - self.at_s) / WINDOW_S)

    def add(self, tokens: int, now_s: float) -> None:
        self.tokens, self.at_s = self.faded(now_s) + tokens, now_s


NEIGHBOURS = 32
"""Of one worker at most; where more decode, each stands for several."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a request is expected to answer, seconds between tokens that it may take, and how far it has come: `first_s` is when
    its first token came."""

    tokens: int
    tpot_s: float
    got_tokens: int = 0
    first_s: float | None = None

    def came(self, now_s: float, tokens: int) -> None:
        """So many tokens more."""
        if not tokens:
            return
        self.first_s = now_s if self.first_s is None else self.first_s
        self.got_tokens += tokens

    def neighbour(self, now_s: float, count: float) -> Neighbour:
        """As others on its engine see it. One that answers more than expected is expected to answer one token more."""
        got = max(1, self.got_tokens)
        left = max(1, self.tokens - got)
        passed_s = 0.0 if self.first_s is None else now_s - self.first_s
        return Neighbour(left, self.tpot_s * (got + left - 1) - passed_s, self.first_s is not None, count)


@dataclass(frozen=True, slots=True)
class _Leg:
    incarnation: Incarnation
    prompt_tokens: int
    decodes: bool


@dataclass(slots=True)
class PhaseBook:
    """Told of every leg of this gateway by its attempt's id. What other gateways sent is seen by heartbeats alone: sequences
    that wait or run beyond this gateway's own.

    Legs that decode, or will, bring their request's `Answer`, one object for all of its legs; None: it is nobody's neighbour.
    """

    _waiting: dict[str, _Leg] = field(default_factory=dict)
    _preparing: dict[str, Incarnation] = field(default_factory=dict)
    _decoding: dict[str, Incarnation] = field(default_factory=dict)
    _queued_tokens: Counter[Incarnation] = field(default_factory=Counter)
    _queued: Counter[Incarnation] = field(default_factory=Counter)
    _coming: Counter[Incarnation] = field(default_factory=Counter)
    """Sequences that will decode on a worker when their prompts are computed, or their KV is there."""
    _running: Counter[Incarnation] = field(default_factory=Counter)
    _answers: defaultdict[Incarnation, dict[str, Answer]] = field(default_factory=lambda: defaultdict(dict))
    """Of the legs that decode on a worker or will, by attempt."""
    _computed: defaultdict[Incarnation, _Prompts] = field(default_factory=lambda: defaultdict(_Prompts))

    def prompt_sent(
        self, attempt_id: str, incarnation: Incarnation, uncached_tokens: int, *, decodes: bool, answer: Answer | None = None
    ) -> None:
        """A leg that computes a prompt; `decodes`: it goes on with the answer."""
        self._waiting[attempt_id] = _Leg(incarnation, uncached_tokens, decodes)
        if decodes:
            self._coming[incarnation] += 1
            self._answers_at(attempt_id, incarnation, answer)
        self._queued_tokens[incarnation] += uncached_tokens
        self._queued[incarnation] += 1

    def prepare_sent(self, attempt_id: str, incarnation: Incarnation, answer: Answer | None = None) -> None:
        """A leg that waits for KV, to decode from it soon."""
        self._answers_at(attempt_id, incarnation, answer)
        self._preparing[attempt_id] = incarnation
        self._coming[incarnation] += 1

    def decode_sent(self, attempt_id: str, incarnation: Incarnation, answer: Answer | None = None) -> None:
        """A leg that decodes from KV."""
        self._answers_at(attempt_id, incarnation, answer)
        self._decoding[attempt_id] = incarnation
        self._running[incarnation] += 1

    def computed(self, attempt_id: str, now_s: float) -> None:
        """The leg's first token came. Further ones change nothing."""
        leg = self._waiting.get(attempt_id)
        if leg is None:
            return
        self._left(attempt_id, leg)
        self._computed[leg.incarnation].add(leg.prompt_tokens, now_s)
        if leg.decodes:
            self.decode_sent(attempt_id, leg.incarnation, self._answers[leg.incarnation].get(attempt_id))

    def over(self, attempt_id: str) -> None:
        """The leg ended, however. Idempotent."""
        leg = self._waiting.get(attempt_id)
        if leg is not None:
            self._left(attempt_id, leg)
            self._answers[leg.incarnation].pop(attempt_id, None)
        for legs, counts in ((self._decoding, self._running), (self._preparing, self._coming)):
            incarnation = legs.pop(attempt_id, None)
            if incarnation is not None:
                self._answers[incarnation].pop(attempt_id, None)
                _take(counts, incarnation, 1)

    def load(self, route: Route, prompt_token_s: float, now_s: float) -> PathLoad:
        """What a request that takes this route finds; `prompt_token_s`: what a prompt token takes on the decoding engine."""
        pair = isinstance(route, PairRoute)
        first, last = (route.prefill, route.decode) if isinstance(route, PairRoute) else (route.worker, route.worker)
        return PathLoad(
            queued_tokens=self._queued_by_all(first),
            running=self._running_by_all(last) + self._coming[last.incarnation],
            prompt_share=self._share(last, prompt_token_s, now_s),
            beside=self._running[first.incarnation] if pair else self._running_by_all(last),
            beside_share=self._share(first, prompt_token_s, now_s),
            cached_tokens=route.expected_cached_tokens,
            decodes_apart=pair,
            neighbours=self._neighbours(first, now_s),
            decode_neighbours=self._neighbours(last, now_s) if pair else (),
        )

    def forget(self, members: frozenset[Incarnation]) -> None:
        """Keep nothing of workers that are not `members`; their open legs end by themselves."""
        for incarnation in self._computed.keys() - members:
            del self._computed[incarnation]
        for incarnation in self._answers.keys() - members:
            del self._answers[incarnation]

    @property
    def idle(self) -> bool:
        """No leg is known."""
        legs = (self._waiting, self._preparing, self._decoding)
        counts = (self._queued_tokens, self._queued, self._coming, self._running)
        return not any((*legs, *counts, *self._answers.values()))

    def _answers_at(self, attempt_id: str, incarnation: Incarnation, answer: Answer | None) -> None:
        if answer is not None:
            self._answers[incarnation][attempt_id] = answer

    def _neighbours(self, view: WorkerView, now_s: float) -> tuple[Neighbour, ...]:
        answers = self._answers.get(view.incarnation)
        if not answers:
            return ()
        every = -(-len(answers) // NEIGHBOURS)
        sample = list(islice(answers.values(), 0, None, every))
        return tuple(answer.neighbour(now_s, len(answers) / len(sample)) for answer in sample)

    def _queued_by_all(self, view: WorkerView) -> int:
        """Others' prompts are taken to be as long as ours in the mean."""
        own, tokens = self._queued[view.incarnation], self._queued_tokens[view.incarnation]
        others = max(0, view.waiting - own)
        every, all_tokens = self._queued.total(), self._queued_tokens.total()
        return tokens + (others * all_tokens // every if every else 0)

    def _share(self, view: WorkerView, prompt_token_s: float, now_s: float) -> float:
        prompts = self._computed.get(view.incarnation)
        return 0.0 if prompts is None else prompts.faded(now_s) * prompt_token_s / WINDOW_S

    def _running_by_all(self, view: WorkerView) -> int:
        return max(self._running[view.incarnation], view.running)

    def _left(self, attempt_id: str, leg: _Leg) -> None:
        del self._waiting[attempt_id]
        _take(self._queued_tokens, leg.incarnation, leg.prompt_tokens)
        _take(self._queued, leg.incarnation, 1)
        if leg.decodes:
            _take(self._coming, leg.incarnation, 1)


def _take(counts: Counter[Incarnation], incarnation: Incarnation, by: int) -> None:
    counts[incarnation] -= by
    if not counts[incarnation]:
        del counts[incarnation]
