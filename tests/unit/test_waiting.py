"""Waiting for room and for news, without losing a slot or a wake-up to a cancellation."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtransfer.staging import Slot, Staging
from kvtransfer.waiting import Bell, RoomQueue, Tasks

PAGE = 16
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def queue(pages: int) -> tuple[RoomQueue, Staging]:
    staging = Staging(pages * PAGE, PAGE)
    return RoomQueue(staging, threading.Lock()), staging


async def waiting(room: RoomQueue, transfer_id: bytes, pages: int, count: int) -> asyncio.Task[Slot]:
    """A task that has begun to wait as number `count`."""
    task = asyncio.create_task(room.acquire(transfer_id, pages * PAGE, 10.0))
    await asyncio.sleep(0)  # the task runs up to its wait
    assert len(room) == count
    return task


async def test_room_is_given_in_order_of_arrival() -> None:
    room, staging = queue(4)
    held = await room.acquire(A, 4 * PAGE, 1.0)
    large = await waiting(room, B, 3, 1)
    small = await waiting(room, C, 1, 2)
    room.pump()
    assert not large.done()
    staging.free(held)
    room.pump()
    first, second = await large, await small
    assert (first.offset, second.offset) == (0, 3 * PAGE)


async def test_a_small_wait_is_served_when_the_large_one_before_it_gives_up() -> None:
    room, staging = queue(4)
    held = await room.acquire(A, 3 * PAGE, 1.0)
    large = await waiting(room, B, 3, 1)
    small = await waiting(room, C, 1, 2)
    large.cancel()
    assert (await small).offset == 3 * PAGE
    with pytest.raises(asyncio.CancelledError):
        await large
    staging.free(held)


async def test_no_room_in_time() -> None:
    room, staging = queue(1)
    held = await room.acquire(A, PAGE, 1.0)
    with pytest.raises(TimeoutError):
        await room.acquire(B, PAGE, 0.0)
    assert len(room) == 0
    staging.free(held)
    assert staging.idle


async def test_a_slot_granted_to_a_cancelled_wait_comes_back() -> None:
    room, staging = queue(1)
    held = await room.acquire(A, PAGE, 1.0)
    task = await waiting(room, B, 1, 1)
    staging.free(held)
    room.pump()
    assert not staging.idle
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert staging.idle


async def test_abandon_ends_only_its_own_waits() -> None:
    room, staging = queue(1)
    held = await room.acquire(A, PAGE, 1.0)
    first = await waiting(room, B, 1, 1)
    second = await waiting(room, C, 1, 2)
    room.abandon(B)
    with pytest.raises(asyncio.CancelledError):
        await first
    staging.free(held)
    room.pump()
    assert (await second).offset == 0


async def test_a_bell_wakes_everybody_who_waits_for_this_transfer_once() -> None:
    bell = Bell()
    waits = [asyncio.create_task(bell.wait(A, 5.0)) for _ in range(3)]
    other = asyncio.create_task(bell.wait(B, 5.0))
    await asyncio.sleep(0)
    bell.ring(A)
    bell.ring(A)
    await asyncio.gather(*waits)
    assert not other.done()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    with pytest.raises(TimeoutError):
        await bell.wait(A, 0.0)


async def test_background_work_that_fails_is_reported_and_the_rest_is_cancelled() -> None:
    failures: list[tuple[str, str]] = []
    tasks = Tasks(lambda name, exc: failures.append((name, repr(exc))))

    async def fail() -> None:
        raise ValueError("x")

    tasks.spawn("failing", fail())
    tasks.spawn("endless", asyncio.Event().wait())
    await asyncio.sleep(0)  # both run up to their end or wait,
    await asyncio.sleep(0)  # and the failed one is noticed
    assert failures == [("failing", "ValueError('x')")]
    assert len(tasks) == 1
    await tasks.cancel_all()
    assert len(tasks) == 0
    assert len(failures) == 1
