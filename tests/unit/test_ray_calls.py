"""Calls of the GCS end in time and hold up nobody else, however many wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from coordinator.pools import ray_calls
from coordinator.pools.ray_calls import gcs_call, gcs_call_unbounded


@pytest.fixture
def back(monkeypatch: pytest.MonkeyPatch):
    """Set when the GCS is to answer."""
    monkeypatch.setattr(ray_calls, "GCS_TIMEOUT_S", 0.05)
    event = threading.Event()
    yield event
    event.set()


async def test_a_gcs_that_is_away_is_given_up_in_time_and_leaves_the_common_threads_alone(back: threading.Event) -> None:
    waiting = [gcs_call(back.wait, 20) for _ in range(40)]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(answer, TimeoutError) for answer in answers)
    # What kills processes by pid runs there, while every thread for the GCS still waits.
    name = await asyncio.wait_for(asyncio.to_thread(lambda: threading.current_thread().name), 10)
    assert not name.startswith("gcs")
    back.set()
    assert await gcs_call_unbounded(lambda a, *, b: a + b, 1, b=2) == 3


async def test_what_may_not_be_done_twice_is_waited_for(back: threading.Event) -> None:
    call = asyncio.create_task(gcs_call_unbounded(back.wait, 20))
    with pytest.raises(TimeoutError):
        await gcs_call(back.wait, 20)
    assert not call.done()
    back.set()
    assert await asyncio.wait_for(call, 10)


async def test_what_the_call_raises_comes_back(back: threading.Event) -> None:
    def refuse() -> None:
        raise ValueError("no such actor")

    with pytest.raises(ValueError, match="no such actor"):
        await gcs_call(refuse)
