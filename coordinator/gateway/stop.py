"""Stop strings over text that arrives in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in a growing text and holds back what may still become one.

    Of several matches the one that completes first wins; of two that complete together, the one listed first.
    """

    __slots__ = ("_first_chars", "_include", "_released", "_span", "_stops", "_window")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        """`stops` are non-empty. With `include_in_output` the matched string stays in the text, and nothing is held back."""
        self._stops = tuple(stops)
        self._include = include_in_output
        self._span = max((len(s) for s in self._stops), default=1) - 1
        self._first_chars = frozenset(s[0] for s in self._stops)
        self._window = ""  # the end of the text: what is held back, and enough before it to find a match across pieces
        self._released = 0  # characters of the window that were already given out

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add `text`; return what may be shown now, and the stop string that matched.

        Not `armed` (before `min_tokens`): a stop string that completes inside `text` does not count. After a match the object
        is spent.
        """
        before = len(self._window)
        self._window += text
        if armed and text:
            found = self._find(before)
            if found is not None:
                stop, start = found
                end = start + len(stop) if self._include else max(start, self._released)
                return self._window[self._released : end], stop
        end = len(self._window) - (0 if self._include else self._held_chars())
        shown = self._window[self._released : end]
        self._released = max(end, self._released)
        drop = min(self._released, len(self._window) - self._span)
        if drop > 0:
            self._window = self._window[drop:]
            self._released -= drop
        return shown, None

    def flush(self) -> str:
        """What is still held back; nothing more will come."""
        shown = self._window[self._released :]
        self._released = len(self._window)
        return shown

    def _find(self, before: int) -> tuple[str, int] | None:
        """The match that ends first, strictly after character `before` of the window."""
        best: tuple[str, int] | None = None
        best_end = len(self._window) + 1
        for stop in self._stops:
            start = self._window.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and start + len(stop) < best_end:
                best, best_end = (stop, start), start + len(stop)
        return best

    def _held_chars(self) -> int:
        """Length of the longest end of the window that begins a stop string."""
        window = self._window
        for start in range(max(0, len(window) - self._span), len(window)):
            if window[start] in self._first_chars:
                tail = window[start:]
                if any(len(tail) < len(s) and s.startswith(tail) for s in self._stops):
                    return len(window) - start
        return 0
