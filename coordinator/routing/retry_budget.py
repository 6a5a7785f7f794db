"""How many further attempts one gateway may make. Pure."""

from __future__ import annotations


class RetryBudget:
    """A share of the requests, and a reserve.

    Every request adds `share` of an attempt and every retry takes one, so in the long run at most that share is added to the load
    of workers that fail because they have too much of it. `reserve` is what there is at first and at most: the requests
    that one lost worker had, which are tried again at once.
    """

    def __init__(self, *, share: float, reserve: int) -> None:
        self._share = share
        self._reserve = float(reserve)
        self._left = float(reserve)

    @property
    def left(self) -> float:
        """Attempts that may be made now."""
        return self._left

    def began(self) -> None:
        """A request began."""
        self._left = min(self._reserve, self._left + self._share)

    def take(self) -> bool:
        """Whether one more attempt may be made; it is counted then."""
        # Ten tenths are a little less than one.
        if self._left < 1.0 - 1e-9:
            return False
        self._left = max(0.0, self._left - 1.0)
        return True
