"""One gateway's event queue: coalescing, bounds, ends. The peer is a write that a test can block."""

from __future__ import annotations

import asyncio

from engine.worker.mux import EventQueue
from protos.splitpoint.v1 import worker_pb2


def event(name: str) -> worker_pb2.LegEvent:
    return worker_pb2.LegEvent(attempt_id=name)


class Peer:
    """Takes frames; reads only while `reading` is set."""

    def __init__(self) -> None:
        self.frames: list[list[str]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.asked = asyncio.Event()

    async def write(self, frame: worker_pb2.StreamResponse) -> None:
        self.asked.set()
        await self.reading.wait()
        self.frames.append([e.attempt_id for e in frame.events])


async def test_events_of_one_turn_leave_in_one_frame() -> None:
    queue, peer = EventQueue(100), Peer()
    writer = asyncio.create_task(queue.drain(peer.write))
    await asyncio.gather(*(queue.put(event(str(i))) for i in range(5)))
    queue.finish()
    await writer
    assert peer.frames == [["0", "1", "2", "3", "4"]]


async def test_a_slow_peer_makes_its_own_legs_wait_and_loses_nothing() -> None:
    queue, peer = EventQueue(2), Peer()
    peer.reading.clear()
    writer = asyncio.create_task(queue.drain(peer.write))
    await queue.put(event("0"))
    await peer.asked.wait()
    await queue.put(event("1"))
    await queue.put(event("2"))
    blocked = [asyncio.create_task(queue.put(event(name))) for name in ("3", "4", "5")]
    done, waiting = await asyncio.wait(blocked, timeout=0.01)
    assert not done
    assert len(waiting) == 3
    queue.put_last(event("end"))  # an attempt can always end
    assert queue.pending == 3
    peer.reading.set()
    await asyncio.gather(*blocked)
    queue.finish()
    await writer
    assert [name for frame in peer.frames for name in frame] == ["0", "1", "2", "end", "3", "4", "5"]


async def test_closing_lets_everyone_go() -> None:
    queue, peer = EventQueue(1), Peer()
    peer.reading.clear()
    writer = asyncio.create_task(queue.drain(peer.write))
    await queue.put(event("0"))
    await peer.asked.wait()
    await queue.put(event("1"))
    blocked = asyncio.create_task(queue.put(event("2")))
    queue.close()
    await blocked
    queue.put_last(event("3"))
    assert queue.pending == 0
    peer.reading.set()
    await writer
    assert peer.frames == [["0"]]


async def test_finish_writes_what_is_queued() -> None:
    queue, peer = EventQueue(10), Peer()
    queue.put_last(event("0"))
    queue.finish()
    await queue.drain(peer.write)
    assert peer.frames == [["0"]]


async def test_events_too_large_for_one_frame_leave_in_several_and_in_order() -> None:
    big = "x" * 400
    queue, peer = EventQueue(100, max_frame_bytes=1000), Peer()
    for i in range(5):
        queue.put_last(event(f"{i}{big}"))
    queue.put_last(event("small"))
    queue.put_last(event("y" * 2000))  # alone too large: the peer's limit decides, not this queue
    queue.finish()
    await queue.drain(peer.write)
    assert [[name[0] for name in frame] for frame in peer.frames] == [["0", "1"], ["2", "3"], ["4", "s"], ["y"]]
    assert queue.frames == 4
