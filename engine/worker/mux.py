"""The worker's end of one gateway's stream: events of many attempts, a frame per turn of the event loop.

Every event that the legs emit in one turn (one engine step wakes them all) leaves in one frame. A gateway that reads slowly
fills its own queue, and only its own legs wait; a leg's last event never waits, so that every attempt can end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protos.splitpoint.v1 import worker_pb2


class EventQueue:
    """Events on their way to one gateway, bounded for all but the last event of an attempt."""

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._pending: list[worker_pb2.LegEvent] = []
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._finishing = False
        self.frames = 0

    @property
    def pending(self) -> int:
        return len(self._pending)

    async def put(self, event: worker_pb2.LegEvent) -> None:
        """Queue an event, waiting for room. After `close` events are dropped: nobody is there to read them."""
        while not self._room.is_set() and not self._closed:
            await self._room.wait()
        self.put_last(event)

    def put_last(self, event: worker_pb2.LegEvent) -> None:
        """Queue an attempt's last event, at once."""
        if self._closed:
            return
        self._pending.append(event)
        self._filled.set()
        if len(self._pending) >= self._max_pending:
            self._room.clear()

    def finish(self) -> None:
        """`drain` returns once everything queued so far is written."""
        self._finishing = True
        self._filled.set()

    def close(self) -> None:
        """The stream is gone: drop what is queued and let everyone go."""
        self._closed = True
        self._pending.clear()
        self._room.set()
        self._filled.set()

    async def drain(self, write: Callable[[worker_pb2.StreamResponse], Awaitable[None]]) -> None:
        """Write frames until `finish` or `close`. `write` blocks while the peer reads slowly."""
        while not self._closed:
            await self._filled.wait()
            self._filled.clear()
            if self._pending:
                events, self._pending = self._pending, []
                self._room.set()
                self.frames += 1
                await write(worker_pb2.StreamResponse(events=events))
            if self._finishing and not self._pending:
                return
