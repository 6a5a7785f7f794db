"""The prefix-aware policy: cached tokens against load. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.routing.policies import Ask, Picked
from coordinator.routing.policy import Accept, Candidate, acceptable
from coordinator.routing.prefix_index import PrefixIndex
from coordinator.routing.recent import RecentWork
from coordinator.routing.views import WorkerView

WINDOW_S = 60.0
"""Over which no worker shall be given more than its share."""
HEADROOM = 0.05
"""Of the mean: the part of a worker's share that is kept for prompts whose beginning it has."""
RETURNING = 0.1
"""A prompt of which a worker has so large a part cached is one that comes back to it."""
_OVER = float(1 << 40)
"""Added to the cost of a worker that has had its share: it comes after all others."""
_FEW = 16


class _Panel(NamedTuple):
    """One tuple of candidates, indexed once per membership version."""

    column: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    seats: npt.NDArray[np.int64]
    bits: int
    place_of_seat: npt.NDArray[np.int64]


class PrefixAware:
    """The fewest tokens: those of the prompt that are not cached, times `hit_weight`, and those that the worker already has.

    A cached token is worth more than the computing it saves: computed on another worker, it would push out what that one has
    cached. A worker that would then have been given more than `limit` times the mean work of the last minute is passed over while
    another is not, a prompt that does not come back to it `HEADROOM` earlier; a minute's work up to `idle_tokens` counts as none.
    Work is prompt tokens that had to be computed.
    """

    def __init__(
        self,
        rng: random.Random,
        index: PrefixIndex,
        *,
        limit: float,
        idle_tokens: int,
        hit_weight: float,
        worker_tokens: int,
    ) -> None:
        self.index = index
        self._rng = rng
        self._limit = limit
        self._hit_weight = hit_weight
        self._idle_tokens = idle_tokens
        self._worker_tokens = worker_tokens
        self._recent = RecentWork(WINDOW_S)
        self._panels: dict[int, _Panel] = {}

    def members(self, candidates: Sequence[Candidate], asked: Iterable[Sequence[Candidate]]) -> None:
        """Every worker that is not dead; one that does not say what its cache holds is taken to hold `worker_tokens`."""
        capacities = ((c.view.incarnation, c.view.kv_capacity_tokens or self._worker_tokens) for c in candidates)
        for seat in self.index.members(capacities):
            self._recent.clear(seat)
        self._panels = {id(among): self._panel(among) for among in asked if among}

    def pick(
        self, among: Sequence[Candidate], ask: Ask, accept: Accept | None, reasons: Counter[str], now_s: float
    ) -> Picked | None:
        """See `Policy`."""
        if not among:
            return None
        panel = self._panels[id(among)]
        allowed = np.ones(len(among), dtype=bool) if accept is None else np.array(acceptable(among, accept, reasons))
        if not allowed.any():
            return None
        # One token at least is computed, however much is cached.
        work = np.maximum(ask.tokens - self._hits(panel, ask) * self.index.block_tokens, 1)
        scores = panel.column[panel.places]
        given, weighed = self._recent.of(panel.seats, now_s)
        # One that may not take it is no measure of load.
        mean = (given[allowed].sum() + work) / allowed.sum()
        limit = np.where(work <= ask.tokens * (1 - RETURNING), self._limit, max(1.0, self._limit - HEADROOM))
        over = given + work > np.maximum(self._idle_tokens, limit * mean)
        above_idle = np.maximum(weighed - self._idle_tokens, 0.0)
        cost = np.where(over, given + work + _OVER, above_idle + scores + self._hit_weight * work)
        cost[~allowed] = np.inf
        least = float(cost.min())
        equals = np.flatnonzero(cost == least)
        place = int(equals[0] if len(equals) == 1 else self._rng.choice(equals))
        return Picked(among[place], least)

    def expected(self, view: WorkerView, ask: Ask) -> int:
        """See `Policy`."""
        held = self.index.held(view.incarnation, ask.blocks) if ask.reads_cache else 0
        return min(held * self.index.block_tokens, max(0, ask.tokens - 1))

    def taken(self, view: WorkerView, ask: Ask, now_s: float) -> int:
        """See `Policy`."""
        hit_tokens = self.expected(view, ask)
        self.index.sent(view.incarnation, ask.blocks)
        self._recent.add(self.index.seat(view.incarnation), ask.tokens - hit_tokens, now_s)
        return hit_tokens

    def _panel(self, among: Sequence[Candidate]) -> _Panel:
        seats = np.array([self.index.seat(c.view.incarnation) for c in among], dtype=np.int64)
        place_of_seat = np.zeros(int(seats.max()) + 1, dtype=np.int64)
        place_of_seat[seats] = np.arange(len(seats))
        members = np.zeros(len(place_of_seat), dtype=np.uint8)
        members[seats] = 1
        bits = int.from_bytes(np.packbits(members, bitorder="little").tobytes(), "little")
        places = np.array([c.load.place for c in among], dtype=np.int64)
        return _Panel(among[0].load.column, places, seats, bits, place_of_seat)

    def _hits(self, panel: _Panel, ask: Ask) -> npt.NDArray[np.int64]:
        """Blocks of the prompt that each candidate of the panel need not compute."""
        hits = np.zeros(len(panel.seats), dtype=np.int64)
        if not ask.reads_cache:
            return hits
        for level in self.index.levels(ask.blocks, panel.bits):
            if level.seats.bit_count() <= _FEW:
                left = level.seats
                while left:
                    seat = left.bit_length() - 1
                    hits[panel.place_of_seat[seat]] = level.blocks
                    left ^= 1 << seat
            else:
                raw = level.seats.to_bytes(-(-level.seats.bit_length() // 8), "little")
                seats = np.flatnonzero(np.unpackbits(np.frombuffer(raw, dtype=np.uint8), bitorder="little"))
                hits[panel.place_of_seat[seats]] = level.blocks
        return hits
