"""How many requests may wait in front of an engine. Pure; the caller brings the clock.

A request *waits* from its admission until its first token: it queues in the engine, or for staging, or computes its prompt.
Beyond the bounds it is refused at once, with a guess of when to come back, so that the gateway can try another worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import Code, SplitpointError

_SMOOTHING = 0.2
_RETRY_MIN_S, _RETRY_MAX_S, _RETRY_UNKNOWN_S = 0.05, 30.0, 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """One waiting request's place."""

    number: int
    tokens: int


class Admission:
    """Bounds on waiting requests and waiting prompt tokens."""

    def __init__(self, max_waiting_requests: int, max_waiting_tokens: int) -> None:
        self._max_requests = max_waiting_requests
        self._max_tokens = max_waiting_tokens
        self._waiting: dict[int, Ticket] = {}
        self._tokens = 0
        self._number = 0
        self._tokens_per_s: float | None = None
        self._last_start_s: float | None = None
        self.refused = 0

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    def admit(self, tokens: int) -> Ticket:
        """A place for a prompt of `tokens`. One prompt alone is always let in, however long.

        Raises:
            SplitpointError: QUEUE_FULL with `retry_after_s`.
        """
        full = ""
        if len(self._waiting) >= self._max_requests:
            full = f"{len(self._waiting)} requests wait, max_waiting_requests is {self._max_requests}"
        elif self._waiting and self._tokens + tokens > self._max_tokens:
            full = f"{self._tokens} prompt tokens wait, max_waiting_tokens is {self._max_tokens}"
        if full:
            self.refused += 1
            raise SplitpointError(Code.QUEUE_FULL, full, retry_after_s=self.retry_after_s())
        self._number += 1
        ticket = Ticket(self._number, tokens)
        self._waiting[ticket.number] = ticket
        self._tokens += tokens
        return ticket

    def started(self, ticket: Ticket, now_s: float) -> None:
        """The request has its first token and waits no more; teaches the refusal's guess. Idempotent."""
        previous_s = self._last_start_s
        if not self.left(ticket):
            return
        if previous_s is not None and now_s > previous_s:
            rate = ticket.tokens / (now_s - previous_s)
            known = self._tokens_per_s
            self._tokens_per_s = rate if known is None else known + _SMOOTHING * (rate - known)
        if self._waiting:
            self._last_start_s = now_s

    def left(self, ticket: Ticket) -> bool:
        """The request ended some other way. Idempotent; True when it was still waiting."""
        if self._waiting.pop(ticket.number, None) is None:
            return False
        self._tokens -= ticket.tokens
        if not self._waiting:
            # The next start comes after a pause that says nothing about the engine's speed.
            self._last_start_s = None
        return True

    def retry_after_s(self) -> float:
        """When half of what waits may be gone, by the recent rate of starts."""
        if not self._tokens_per_s:
            return _RETRY_UNKNOWN_S
        return min(_RETRY_MAX_S, max(_RETRY_MIN_S, 0.5 * self._tokens / self._tokens_per_s))
