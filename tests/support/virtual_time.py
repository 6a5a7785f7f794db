"""An event loop whose clock jumps to the next thing that is due, and notices when nothing ever will be."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Hang(AssertionError):  # noqa: N818 - what it is
    """Everybody waits, and for nothing that has a time."""


class _Selector(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Hang("all tasks wait and no timer runs")
        self.loop.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody waits, and then at once. No threads, no sockets."""

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s


class Inline(Executor):
    """Work of threads, done at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
