"""Who waits for what on an event loop: room in a staging area, news of a transfer, several ends at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from kvtransfer.staging import Slot, Staging

R = TypeVar("R")


async def all_or_first_failure(works: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Run all at once. All results in order; or the first failure, raised when the others have been cancelled and have ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and (exc := task.exception()) is not None:
                raise exc
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RoomQueue:
    """Waits for staging in order of arrival: a large prompt is not starved by small ones that would fit before it."""

    def __init__(
        self,
        staging: Staging,
        lock: AbstractContextManager[object],
        waited: Callable[[str, float], None] = lambda outcome, seconds: None,
    ) -> None:
        """`waited` hears of everybody who found no room at once: "granted", "refused" or "abandoned", and for how long."""
        self._staging = staging
        self._lock = lock
        self._waited = waited
        self._waiting: deque[tuple[bytes, int, asyncio.Future[Slot]]] = deque()
        self._seen_frees = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def acquire(self, transfer_id: bytes, num_bytes: int, timeout_s: float) -> Slot:
        """A slot, the caller's to free. Cancelled or late, nothing is left allocated.

        Raises:
            TimeoutError: no room in time.
            asyncio.CancelledError: also when `abandon` ended the wait.
        """
        if not self._waiting:
            with self._lock:
                slot = self._staging.allocate(num_bytes)
            if slot is not None:
                return slot
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        entry = (transfer_id, num_bytes, future)
        self._waiting.append(entry)
        begin_s, outcome = time.monotonic(), "abandoned"
        try:
            async with asyncio.timeout(timeout_s):
                slot = await future
            outcome = "granted"
            return slot
        except BaseException as exc:
            if isinstance(exc, TimeoutError):
                outcome = "refused"
            if future.done() and not future.cancelled():
                with self._lock:
                    self._staging.free(future.result())
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            self._waited(outcome, time.monotonic() - begin_s)
            self._grant()

    def abandon(self, transfer_id: bytes) -> None:
        """End this transfer's waits."""
        for waiting_id, _, future in self._waiting:
            if waiting_id == transfer_id:
                future.cancel()

    def pump(self) -> None:
        """Bytes may have become free: serve who waits."""
        if self._seen_frees != self._staging.frees:
            self._seen_frees = self._staging.frees
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            _, num_bytes, future = self._waiting[0]
            if not future.done():
                with self._lock:
                    slot = self._staging.allocate(num_bytes)
                if slot is None:
                    return
                future.set_result(slot)
            self._waiting.popleft()


class Bell:
    """Wakes the tasks that wait for news of one transfer."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, set[asyncio.Future[None]]] = {}

    async def wait(self, transfer_id: bytes, timeout_s: float) -> None:
        """Until the next `ring`. Raises `TimeoutError`.

        Look at the state, then wait, with nothing awaited between: a ring from another thread arrives through the loop and
        cannot be missed.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(transfer_id, set())
        waiting.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        finally:
            waiting.discard(future)
            if not waiting and self._waiting.get(transfer_id) is waiting:
                del self._waiting[transfer_id]

    def ring(self, transfer_id: bytes) -> None:
        for future in self._waiting.pop(transfer_id, ()):
            if not future.done():
                future.set_result(None)


class Copies:
    """Work on threads that goes on when the task that waited for it is cancelled; `settled` says when none of it runs."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running: set[asyncio.Future[object]] = set()

    async def run(self, work: Callable[..., object], *args: object) -> None:
        """`work(*args)` on a thread. Raises what it raises."""
        future: asyncio.Future[object] = asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        await asyncio.shield(future)

    async def settled(self) -> None:
        """Until nothing runs any more."""
        while self._running:
            await asyncio.wait(self._running)


class Tasks:
    """Background work of a node, none of it lost: what fails is reported, what is left at the end is cancelled."""

    def __init__(self, on_failure: Callable[[str, BaseException], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, name: str, work: object) -> asyncio.Task[None]:
        """Run a coroutine to its end in the background."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name)  # type: ignore[arg-type]
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def cancel_all(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._on_failure(task.get_name(), exc)
