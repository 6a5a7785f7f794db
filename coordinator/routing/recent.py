"""Work that each worker was given lately. Pure; the caller brings the time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SLICES = 60
"""The window moves in steps of a sixtieth."""


class RecentWork:
    """The work given to each seat during the last `window_s`: its sum, and the same weighed by how much longer it will count.

    Weighed, work that was given just now counts whole, work about to leave the window almost nothing: two workers with equal sums
    are not equal when one is about to lose its sum and the other is not, and an even choice now has to stay even until then.
    Grows as seats are used; a seat costs 0.5 KiB.
    """

    def __init__(self, window_s: float) -> None:
        self._step_s = window_s / SLICES
        self._slices = np.zeros((SLICES, 16), dtype=np.int64)
        self._sums = np.zeros(16, dtype=np.int64)
        self._weighed = np.zeros(16, dtype=np.int64)
        self._now = 0

    def add(self, seat: int, tokens: int, now_s: float) -> None:
        """`tokens` of work go to `seat` now."""
        self._advance(now_s)
        self._hold(seat + 1)
        self._slices[self._now % SLICES, seat] += tokens
        self._sums[seat] += tokens
        self._weighed[seat] += tokens * SLICES

    def of(self, seats: npt.NDArray[np.int64], now_s: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The tokens of each of `seats`, and the same weighed."""
        self._advance(now_s)
        if len(seats):
            self._hold(int(seats.max()) + 1)
        return self._sums[seats], self._weighed[seats] / SLICES

    def clear(self, seat: int) -> None:
        """The worker of `seat` has left."""
        if seat < len(self._sums):
            self._slices[:, seat] = self._sums[seat] = self._weighed[seat] = 0

    def _advance(self, now_s: float) -> None:
        # A clock that begins anywhere: after a whole window nothing is left, so no more steps than that are taken.
        now = int(now_s / self._step_s)
        for step in range(max(self._now + 1, now - SLICES + 1), now + 1):
            self._weighed -= self._sums
            oldest = self._slices[step % SLICES]
            self._sums -= oldest
            oldest[:] = 0
        self._now = max(self._now, now)

    def _hold(self, seats: int) -> None:
        if seats <= len(self._sums):
            return
        more = max(seats, 2 * len(self._sums)) - len(self._sums)
        self._slices = np.pad(self._slices, ((0, 0), (0, more)))
        self._sums = np.pad(self._sums, (0, more))
        self._weighed = np.pad(self._weighed, (0, more))
