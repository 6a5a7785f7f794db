"""Who has gone silent: one deadline per watched key, restarted whenever it is heard. Pure; the caller brings the time.

Silence is a suspicion and no proof: it ends what waits for the key, and frees no memory that the key may still touch (rule 13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class _Watched:
    users: int
    heard_s: float
    suspected: bool = False


class FailureDetector(Generic[K]):
    """A key is watched while it has users: a peer with transfers under way, a transfer with bytes due."""

    def __init__(self, *, interval_s: float, misses: int) -> None:
        """`misses` intervals without a word make a key suspected."""
        if interval_s <= 0 or misses < 1:
            raise ValueError(f"interval {interval_s} s, {misses} misses")
        self.limit_s = interval_s * misses
        self._watched: dict[K, _Watched] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, key: K, now_s: float) -> None:
        """One more user. The first one counts as hearing from it: silence before it says nothing."""
        watched = self._watched.get(key)
        if watched is None:
            self._watched[key] = _Watched(1, now_s)
        else:
            watched.users += 1

    def leave(self, key: K) -> None:
        """One user less; with the last one the key is forgotten. A key that is not watched is ignored."""
        watched = self._watched.get(key)
        if watched is None:
            return
        watched.users -= 1
        if watched.users <= 0:
            del self._watched[key]

    def heard(self, key: K, now_s: float) -> bool:
        """A sign of life. True when it had been suspected and is not any more."""
        watched = self._watched.get(key)
        if watched is None:
            return False
        watched.heard_s = max(watched.heard_s, now_s)
        again, watched.suspected = watched.suspected, False
        return again

    def suspects(self, now_s: float) -> list[K]:
        """Keys that have become suspected since the last call; each is told once until it is heard again."""
        fresh = [k for k, w in self._watched.items() if not w.suspected and now_s - w.heard_s >= self.limit_s]
        for key in fresh:
            self._watched[key].suspected = True
        return fresh

    def pardon(self, gap_s: float) -> None:
        """The watcher itself did not run for so long: nobody's silence in that time counts."""
        for watched in self._watched.values():
            watched.heard_s += gap_s

    def silent_s(self, key: K, now_s: float) -> float:
        """How long it has not been heard; 0 for a key that is not watched."""
        watched = self._watched.get(key)
        return 0.0 if watched is None else max(0.0, now_s - watched.heard_s)
