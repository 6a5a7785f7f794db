"""An event loop whose clock jumps to the next thing that is due, and notices when nothing ever will be."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Hang(AssertionError):  # noqa: N818 - what it is
    """Everybody waits, and for nothing that has a time."""


class _Selector(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if self.loop.turn_s:
            # Nothing comes from outside: no file is looked at.
            self.loop.now_s += self.loop.turn_s if timeout == 0 else self._wait(timeout)
            return []
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        self.loop.now_s += self._wait(timeout)
        return []

    def _wait(self, timeout: float | None) -> float:
        if timeout is None:
            raise Hang("all tasks wait and no timer runs")
        return timeout


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody waits, and then at once. No threads, no sockets.

    With `turn_s` each turn of the loop costs that many seconds, as it does in real loops: who polls the clock gets on. Such a
    loop does not look at files either, so that nothing may call into it from another thread.
    """

    def __init__(self, turn_s: float = 0.0) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self
        self.now_s = 1000.0
        self.turn_s = turn_s

    def time(self) -> float:
        return self.now_s

    def stand_still(self, seconds: float) -> None:
        """Time passes and nobody in this loop runs, as in a process that collects garbage."""
        self.now_s += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Done at once, in this thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:
            future.set_exception(exc)
        return future


class Inline(Executor):
    """Work of threads, done at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future


def run_virtual(work: Coroutine[Any, Any, T], turn_s: float = 0.0) -> T:
    """`asyncio.run` on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(turn_s)) as runner:
        return runner.run(work)
