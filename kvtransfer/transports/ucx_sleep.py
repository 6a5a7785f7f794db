"""A thread's sleep that UCX, another thread or time ends."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable


class Sleeper:
    """`sleep` belongs to one thread; `wake` to any."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._event, select.EPOLLIN)
        self._asleep = False
        self._closed = False

    def watch(self, descriptor: int) -> None:
        """Wake when this descriptor is readable. Whoever owns it drains it."""
        self._poll.register(descriptor, select.EPOLLIN)

    def sleep(self, seconds: float | None, may: Callable[[], bool]) -> None:
        """At most so long (None: until woken; rounded up to milliseconds), unless `may()` says that there is something to do. It
        is asked when every later `wake` is certain to end the sleep."""
        self._asleep = True
        try:
            if may():
                self._poll.poll(seconds)
        finally:
            self._asleep = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)

    def wake(self) -> None:
        """End the sleep, or the next one that would begin before its `may` has looked."""
        if self._asleep and not self._closed:
            os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """When the thread has ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._poll.close()
        os.close(self._event)
