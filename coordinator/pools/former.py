"""What a worker still does of a role that it had before. Pure.

A request's legs come to a decode worker one after the other: its KV is prepared under the old label, and its decode leg may
come long after the new one. So it is followed by its transfer, whose id all its legs have in common.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.routing.views import Role
from engine.worker.attempts import Work

_OTHER_ROLES_LEGS = {
    Role.PREFILL: frozenset({"prepare", "decode"}),
    Role.DECODE: frozenset({"prefill"}),
    Role.COLOCATED: frozenset({"prefill", "prepare", "decode"}),
}
"""Legs that no gateway offers to a worker whose label it knows. Whole requests are offered to every role."""


class FormerWork:
    """Tell it of every change of the label, and ask it with every heartbeat."""

    def __init__(self) -> None:
        self._keys: frozenset[str] = frozenset()

    def relabelled(self, work: Collection[Work]) -> None:
        """All that is under way at this moment is of the former role."""
        self._keys |= {item.key for item in work}

    def left(self, work: Collection[Work], role: Role) -> int:
        """How much of what is under way is of a former role, also where a gateway that had not heard of the change sent it."""
        others = _OTHER_ROLES_LEGS[role]
        self._keys |= {item.key for item in work if item.leg in others}
        self._keys &= {item.key for item in work}
        return len(self._keys)
