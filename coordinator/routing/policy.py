"""Least-loaded choice among candidates. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable

from coordinator.routing.views import WorkerView


class LoadBook:
    """What this gateway knows of its workers' load, beside their heartbeats.

    Tokens in flight are exact and immediate but only this gateway's; heartbeats hold everybody's load but are old. Their sum
    counts this gateway's own requests twice, for every worker alike.
    """

    def __init__(self, *, heartbeat_request_tokens: int) -> None:
        self._heartbeat_request_tokens = heartbeat_request_tokens
        self._in_flight_tokens: dict[str, int] = {}
        self._unreachable: set[str] = set()

    def charge(self, incarnation: str, tokens: int) -> None:
        """A leg of `tokens` tokens was sent."""
        self._in_flight_tokens[incarnation] = self._in_flight_tokens.get(incarnation, 0) + tokens

    def discharge(self, incarnation: str, tokens: int) -> None:
        """It ended, however."""
        left = self._in_flight_tokens.get(incarnation, 0) - tokens
        if left > 0:
            self._in_flight_tokens[incarnation] = left
        else:
            self._in_flight_tokens.pop(incarnation, None)

    def set_reachable(self, incarnation: str, reachable: bool) -> None:
        """This gateway's own stream to the worker is up, or not."""
        if reachable:
            self._unreachable.discard(incarnation)
        else:
            self._unreachable.add(incarnation)

    def forget(self, incarnation: str) -> None:
        """The worker is gone. Tokens still charged stay until their legs end."""
        self._unreachable.discard(incarnation)

    def in_flight_tokens(self, incarnation: str) -> int:
        return self._in_flight_tokens.get(incarnation, 0)

    def total_in_flight_tokens(self) -> int:
        return sum(self._in_flight_tokens.values())

    def score(self, view: WorkerView) -> tuple[bool, int]:
        """Smaller is better. A worker whose stream is down comes after every other: it may be about to come up."""
        tokens = self._in_flight_tokens.get(view.incarnation, 0)
        requests = view.running + view.waiting
        return view.incarnation in self._unreachable, tokens + requests * self._heartbeat_request_tokens


def least_loaded(candidates: Iterable[WorkerView], book: LoadBook, rng: random.Random) -> WorkerView | None:
    """The candidate with the smallest score; a fair draw among equals, or the first would take all light traffic."""
    best: WorkerView | None = None
    best_score = (True, 0)
    equals = 0
    for view in candidates:
        score = book.score(view)
        if best is None or score < best_score:
            best, best_score, equals = view, score, 1
        elif score == best_score:
            equals += 1
            if rng.random() * equals < 1.0:
                best = view
    return best
