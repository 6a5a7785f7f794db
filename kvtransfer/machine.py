"""A state machine is one literal table. An illegal pair raises with the story of how it came there."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class InvalidTransition(RuntimeError):  # noqa: N818 - the name the design uses
    """A fault of ours: whoever fires an event asks first whether it is legal, or knows."""


class Machine(Generic[S, E]):
    """Where one thing of a kind is. `now` is any monotonic clock, seconds."""

    def __init__(self, name: str, table: Mapping[tuple[S, E], S], start: S, now: float) -> None:
        self.name = name
        self.state = start
        self._table = table
        self._story: deque[str] = deque([f"{start} at {now:.3f}"], maxlen=32)

    def allows(self, event: E) -> bool:
        return (self.state, event) in self._table

    def fire(self, event: E, now: float, detail: str = "") -> S:
        """Take the transition and return the new state. Raises `InvalidTransition` when the table has none."""
        target = self._table.get((self.state, event))
        note = f"{event}({detail})" if detail else str(event)
        if target is None:
            raise InvalidTransition(f"{self.name}: {note} in {self.state}; story: {self.story()}")
        self._story.append(f"{note} -> {target} at {now:.3f}")
        self.state = target
        return target

    def story(self) -> str:
        """The last transitions, oldest first."""
        return ", ".join(self._story)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message of a peer or an actor changes nothing. `reason` is a metric label."""

    reason: str
    message: str


class Tombstones:
    """The last `limit` transfers that are over, and how they ended, so that a late message is told from an early one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ended: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, transfer_id: bytes, how: str) -> None:
        """The first ending stays: a release after a delivery does not rewrite it."""
        self._ended.setdefault(transfer_id, how)
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def get(self, transfer_id: bytes) -> str | None:
        return self._ended.get(transfer_id)
