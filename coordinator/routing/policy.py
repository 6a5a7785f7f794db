"""Load, and the least-loaded choice among candidates. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coordinator.routing.views import WorkerView

_NOTHING = 1 << 63


class Load:
    """One worker's load in tokens. `score` is kept up to date, so that a scan reads one number; smaller is better.
    Beside it, whether it is a last resort: its stream is down, or it answers the coordinator nothing.

    Of a member the score stands in `column[place]` as well: who compares all members at once reads one array.
    """

    __slots__ = ("_heartbeat_tokens", "_reachable", "_silent", "column", "in_flight_tokens", "place", "score")

    def __init__(self) -> None:
        self.in_flight_tokens = 0
        self._heartbeat_tokens = 0
        self._reachable = True
        self._silent = False
        self.score = 0
        self.column: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self.place = 0

    def set(
        self,
        *,
        in_flight_by: int = 0,
        heartbeat_tokens: int | None = None,
        reachable: bool | None = None,
        silent: bool | None = None,
    ) -> None:
        """Change what is given; `in_flight_by` is added."""
        self.in_flight_tokens += in_flight_by
        if heartbeat_tokens is not None:
            self._heartbeat_tokens = heartbeat_tokens
        if reachable is not None:
            self._reachable = reachable
        if silent is not None:
            self._silent = silent
        self.score = self.in_flight_tokens + self._heartbeat_tokens
        self.column[self.place] = self.score

    @property
    def last_resort(self) -> bool:
        """It comes after every other worker, but it may be about to come up."""
        return self._silent or not self._reachable


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker and its load."""

    view: WorkerView
    load: Load


class LoadBook:
    """What this gateway knows of its workers' load, beside their heartbeats.

    Tokens in flight are exact and immediate but only this gateway's; heartbeats hold everybody's load but are old. Their sum
    counts this gateway's own requests twice, for every worker alike.
    """

    def __init__(self, *, heartbeat_request_tokens: int) -> None:
        self._heartbeat_request_tokens = heartbeat_request_tokens
        self._loads: dict[str, Load] = {}
        self._members: frozenset[str] = frozenset()
        self.last_resort: frozenset[str] = frozenset()
        """The members to be offered only what nobody else can take."""

    def candidates(self, views: Iterable[WorkerView]) -> list[Candidate]:
        """The members from now on, with their heartbeats' load and silence. What left and has nothing in flight is forgotten."""
        members = list(views)
        column = np.zeros(len(members), dtype=np.int64)
        made = []
        for place, view in enumerate(members):
            load = self._loads.get(view.incarnation)
            if load is None:
                load = self._loads[view.incarnation] = Load()
            load.column, load.place = column, place
            tokens = (view.running + view.waiting) * self._heartbeat_request_tokens
            load.set(heartbeat_tokens=tokens, silent=view.silent)
            made.append(Candidate(view, load))
        self._members = frozenset(c.view.incarnation for c in made)
        self.last_resort = frozenset(c.view.incarnation for c in made if c.load.last_resort)
        self._loads = {k: load for k, load in self._loads.items() if k in self._members or load.in_flight_tokens}
        return made

    def charge(self, incarnation: str, tokens: int) -> None:
        """A leg of `tokens` tokens was sent."""
        self._loads.setdefault(incarnation, Load()).set(in_flight_by=tokens)

    def discharge(self, incarnation: str, tokens: int) -> None:
        """It ended, however."""
        load = self._loads.get(incarnation)
        if load is None:
            return
        load.set(in_flight_by=-tokens)
        if not load.in_flight_tokens and incarnation not in self._members:
            del self._loads[incarnation]

    def set_reachable(self, incarnation: str, reachable: bool) -> None:
        """This gateway's own stream to a member is up, or not."""
        if incarnation in self._members:
            load = self._loads[incarnation]
            load.set(reachable=reachable)
            others = self.last_resort - {incarnation}
            self.last_resort = others | {incarnation} if load.last_resort else others

    def in_flight_tokens(self, incarnation: str) -> int:
        load = self._loads.get(incarnation)
        return load.in_flight_tokens if load is not None else 0

    def total_in_flight_tokens(self) -> int:
        return sum(load.in_flight_tokens for load in self._loads.values())


Accept = Callable[[WorkerView], str | None]
"""Why a worker cannot be chosen, or None when it can."""


def acceptable(candidates: Sequence[Candidate], accept: Accept | None, reasons: Counter[str]) -> list[bool]:
    """Which candidates `accept` lets pass, in their order; `reasons` counts its answers about the others."""
    if accept is None:
        return [True] * len(candidates)
    answers = [accept(candidate.view) for candidate in candidates]
    reasons.update(answer for answer in answers if answer is not None)
    return [answer is None for answer in answers]


def least_loaded(
    candidates: Iterable[Candidate], rng: random.Random, accept: Accept | None, reasons: Counter[str]
) -> Candidate | None:
    """The acceptable candidate with the smallest score; a fair draw among equals, or the first would get all light traffic.

    `accept` is asked only about candidates that would win; when None of them is acceptable it was asked about all, and
    `reasons` counts its answers.
    """
    best_score = _NOTHING
    best: list[Candidate] = []
    for candidate in candidates:
        score = candidate.load.score
        if score > best_score:
            continue
        if accept is not None:
            reason = accept(candidate.view)
            if reason is not None:
                reasons[reason] += 1
                continue
        if score < best_score:
            best_score = score
            best = [candidate]
        else:
            best.append(candidate)
    if not best:
        return None
    return best[0] if len(best) == 1 else rng.choice(best)
