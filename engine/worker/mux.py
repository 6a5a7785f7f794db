"""The worker's end of one gateway's stream: events of many attempts, a frame per turn of the event loop.

Every event that the legs emit in one turn (one engine step wakes them all) leaves in one frame. A gateway that reads slowly
fills its own queue, and only its own legs wait; a leg's last event never waits, so that every attempt can end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from protos.splitpoint.v1 import worker_pb2

_EVENT_OVERHEAD_BYTES = 8
"""More than the tag and the length of an event inside its frame."""


class EventQueue:
    """Events on their way to one gateway, bounded for all but the last event of an attempt."""

    def __init__(self, max_pending: int, max_frame_bytes: int = 64 * 1024 * 1024) -> None:
        """`max_frame_bytes` is what one message may weigh; an event that weighs more by itself still goes, alone."""
        self._max_pending = max_pending
        self._max_frame_bytes = max_frame_bytes
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
                for frame in _frames(events, self._max_frame_bytes):
                    self.frames += 1
                    await write(frame)
            if self._finishing and not self._pending:
                return


def _frames(events: list[worker_pb2.LegEvent], max_bytes: int) -> Iterator[worker_pb2.StreamResponse]:
    """The events in order, in as few frames as the limit allows: beyond it gRPC ends the stream, and every leg with it."""
    whole = worker_pb2.StreamResponse(events=events)
    if whole.ByteSize() <= max_bytes:
        yield whole
        return
    frame, size = worker_pb2.StreamResponse(), 0
    for event in events:
        weight = event.ByteSize() + _EVENT_OVERHEAD_BYTES
        if frame.events and size + weight > max_bytes:
            yield frame
            frame, size = worker_pb2.StreamResponse(), 0
        frame.events.append(event)
        size += weight
    yield frame
