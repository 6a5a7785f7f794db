"""Policies: which of the acceptable workers takes a leg. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from coordinator.routing.policy import Accept, Candidate, acceptable, least_loaded
from coordinator.routing.views import WorkerView
from protos.ids import Incarnation

TRIES_OF_TWO = 8
"""Draws before power of two looks at everybody: so many refusals in a row mean that few workers are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a policy may know of a request: the tokens of its prompt, the hashes of its blocks (empty: not computed) and the
    client's name of the session ("": none). `reads_cache` is false for prompts that the engine computes whole, whatever it has
    cached of them; what it computes is cached all the same."""

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    session: str = ""
    reads_cache: bool = True


class Picked(NamedTuple):
    """A choice, and what it costs, to be compared with another choice of the same policy."""

    candidate: Candidate
    cost: float


class Policy(Protocol):
    """Chooses among candidates."""

    def members(self, candidates: Sequence[Candidate], asked: Iterable[Sequence[Candidate]]) -> None:
        """Every worker that is not dead, from now on, and the tuples of them that `pick` will be asked about: what it needs to
        know of each is made here, once, and in no request's time."""

    def pick(
        self, among: Sequence[Candidate], ask: Ask, accept: Accept | None, reasons: Counter[str], now_s: float
    ) -> Picked | None:
        """A candidate that `accept` lets pass, or None: then `reasons` counted its answers. Changes nothing that
        `taken` does not confirm."""

    def expected(self, view: WorkerView, ask: Ask) -> int:
        """How many tokens of the prompt this worker should have cached."""

    def taken(self, view: WorkerView, ask: Ask, now_s: float) -> int:
        """The prompt goes to this worker. Returns how many tokens of it that worker should have cached."""


class LeastLoaded:
    """The fewest tokens of work; a fair draw among equals."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def members(self, candidates: Sequence[Candidate], asked: Iterable[Sequence[Candidate]]) -> None:
        """Keeps nothing."""

    def pick(
        self, among: Sequence[Candidate], ask: Ask, accept: Accept | None, reasons: Counter[str], now_s: float
    ) -> Picked | None:
        """See `Policy`."""
        found = least_loaded(among, self._rng, accept, reasons)
        return None if found is None else Picked(found, found.load.score + ask.tokens)

    def expected(self, view: WorkerView, ask: Ask) -> int:
        """Expects no hit."""
        return 0

    def taken(self, view: WorkerView, ask: Ask, now_s: float) -> int:
        """Expects no hit."""
        return 0


class PowerOfTwo(LeastLoaded):
    """The less loaded of two drawn at random: several gateways with old heartbeats do not all run to the same worker."""

    def pick(
        self, among: Sequence[Candidate], ask: Ask, accept: Accept | None, reasons: Counter[str], now_s: float
    ) -> Picked | None:
        """See `Policy`."""
        count = len(among)
        if count > 2:
            drawn: list[Candidate] = []
            for _ in range(TRIES_OF_TWO):
                candidate = among[int(self._rng.random() * count)]
                if candidate not in drawn and (accept is None or accept(candidate.view) is None):
                    drawn.append(candidate)
                    if len(drawn) == 2:
                        return super().pick(drawn, ask, None, reasons, now_s)
        return super().pick(among, ask, accept, reasons, now_s)


class RoundRobin(LeastLoaded):
    """One after the other, whatever their load: what the others are measured against."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._turn = 0

    def pick(
        self, among: Sequence[Candidate], ask: Ask, accept: Accept | None, reasons: Counter[str], now_s: float
    ) -> Picked | None:
        """See `Policy`."""
        for step in range(len(among)):
            candidate = among[(self._turn + step) % len(among)]
            reason = None if accept is None else accept(candidate.view)
            if reason is not None:
                reasons[reason] += 1
            else:
                self._turn += step + 1
                return Picked(candidate, candidate.load.score + ask.tokens)
        return None


class SessionAffinity(LeastLoaded):
    """A session stays with its worker while that is not loaded above `limit` times the mean; then with its next one.

    The order of a session's workers is by rendezvous hashing: every gateway comes to the same one without talking, and a worker
    that comes or goes moves only its own sessions.
    """

    def __init__(self, rng: random.Random, *, limit: float, idle_tokens: int) -> None:
        super().__init__(rng)
        self._limit = limit
        self._idle_tokens = idle_tokens
        self._seeds: dict[Incarnation, int] = {}
        self._rows: dict[int, npt.NDArray[np.uint64]] = {}

    def members(self, candidates: Sequence[Candidate], asked: Iterable[Sequence[Candidate]]) -> None:
        """Keeps a hash of each."""
        known = self._seeds
        self._seeds = {
            c.view.incarnation: known.get(c.view.incarnation) or _hash64(c.view.incarnation.encode()) for c in candidates
        }
        self._rows = {
            id(among): np.array([self._seeds[c.view.incarnation] for c in among], dtype=np.uint64) for among in asked if among
        }

    def pick(
        self, among: Sequence[Candidate], ask: Ask, accept: Accept | None, reasons: Counter[str], now_s: float
    ) -> Picked | None:
        """See `Policy`. A request without a session goes to the least loaded."""
        if not ask.session or not among:
            return super().pick(among, ask, accept, reasons, now_s)
        order = np.argsort(_mix(self._rows[id(among)] ^ np.uint64(_hash64(ask.session.encode()))))
        allowed = acceptable(among, accept, reasons)
        open_to_it = [c for c, passes in zip(among, allowed, strict=True) if passes]
        # One that may not take it is no measure of load.
        scores = [c.load.score for c in open_to_it]
        bound = max(self._idle_tokens, self._limit * (sum(scores) + ask.tokens) / max(1, len(scores)))
        for place in order:
            candidate = among[int(place)]
            if allowed[place] and candidate.load.score <= bound:
                return Picked(candidate, candidate.load.score + ask.tokens)
        return super().pick(open_to_it, ask, None, reasons, now_s)


def _hash64(what: bytes) -> int:
    return int.from_bytes(blake2b(what, digest_size=8).digest(), "little")


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the result hangs on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
