"""What a full comparison works with: given to it, so that the same code judges real and simulated systems."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.compare.load import Client
from coordinator.compare.record import Record
from coordinator.compare.rig import Rig, StandingRig

Place = Callable[[str], Awaitable[None]]
"""Given an arm's name."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What happens now, for people. `share` is of the whole, 0 to 1; `left_s` an estimate, None while unknown."""

    text: str
    share: float
    left_s: float | None = None
    done: int = 0
    of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a run works with. `now` is a monotonic clock in seconds; `save` is told of the record after every stage."""

    client: Client
    know: Callable[[str, Any], None]
    rig: Rig = field(default_factory=StandingRig)
    now: Callable[[], float] = time.perf_counter
    say: Callable[[Progress], None] = lambda progress: None
    save: Callable[[Record], None] = lambda record: None
    checks: Checks | None = None
    """Asked where the plan wants parity or quality; without, such a plan is refused."""
    salt: str = field(default_factory=lambda: f"{time.time_ns():x}")
    """Prefix caches outlive a comparison: this run's prompts must be new to them too."""


class Checks(Protocol):
    """What is asked of arms beside speed. `place` is awaited before an arm's turn: it stands then, with empty caches.

    Both raise `ComparisonError` where nothing can be said, and give what belongs into the record.
    """

    async def parity(self, arms: Sequence[str], seed: int, requests: int, place: Place) -> dict[str, Any]: ...

    async def quality(self, arms: Sequence[str], place: Place) -> dict[str, Any]: ...
