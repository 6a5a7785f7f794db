"""States, legs and legal reports of one request. Pure values."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.routing.views import WorkerView
from protos.ids import AttemptId, TransferId


class State(enum.StrEnum):
    NEW = "new"
    ROUTING = "routing"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    COMPUTING = "computing"
    FINISHED = "finished"
    FAILED = "failed"
    CLOSED = "closed"


LIVE = (State.NEW, State.ROUTING, State.PREFILLING, State.DECODING, State.COMPUTING)
TERMINAL = (State.FINISHED, State.FAILED, State.CLOSED)


class LegKind(enum.StrEnum):
    PREFILL = "prefill"
    PREPARE = "prepare"
    DECODE = "decode"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Leg:
    """One live attempt."""

    attempt_id: AttemptId
    kind: LegKind
    worker: WorkerView


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer that is not known to be over."""

    transfer_id: TransferId
    prefill: WorkerView
    decode: WorkerView


class InvalidTransition(RuntimeError):  # noqa: N818 - the name the state machines of this project share
    """An event that the table does not know in this state: a fault of the gateway. `story` is the request's life so far."""

    def __init__(self, state: State, kind: str, story: Sequence[str]) -> None:
        super().__init__(f"{kind} in state {state}; story: {' | '.join(story)}")
        self.state = state
        self.kind = kind
        self.story = list(story)


# What each leg may report; anything else is a fault of the worker and fails the attempt.
REPORTS: dict[LegKind, frozenset[str]] = {
    LegKind.PREFILL: frozenset({"sealed", "finished", "failed"}),
    LegKind.PREPARE: frozenset({"staged", "failed"}),
    LegKind.DECODE: frozenset({"tokens", "finished", "failed"}),
    LegKind.COLOCATED: frozenset({"tokens", "finished", "failed"}),
}
