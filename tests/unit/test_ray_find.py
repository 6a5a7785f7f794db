"""The coordinator is looked for once at a time, and nobody waits longer than asked for a GCS that is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import ray

from coordinator.pools.ray_find import Finder


class Gcs:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.back = threading.Event()
        self.asked = 0
        self.fault: Exception | None = None

    def get_actor(self, name: str, namespace: str) -> str:
        self.asked += 1
        assert self.back.wait(20)
        if self.fault is not None:
            raise self.fault
        return f"{namespace}/{name}"


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gcs]:
    gcs = Gcs()
    monkeypatch.setattr(ray, "get_actor", gcs.get_actor)
    yield gcs
    gcs.back.set()


async def test_many_who_ask_a_gcs_that_is_away_hold_one_thread_and_give_up_in_time(gcs: Gcs) -> None:
    finder = Finder()
    ends = await asyncio.gather(*(finder.find(0.05) for _ in range(20)), return_exceptions=True)
    assert {type(end) for end in ends} == {TimeoutError}
    with pytest.raises(TimeoutError):
        await finder.find(0.05)
    assert gcs.asked == 1
    gcs.back.set()
    assert await finder.find(5) == "splitpoint/coordinator"


async def test_each_look_is_a_new_one(gcs: Gcs) -> None:
    gcs.back.set()
    finder = Finder()
    gcs.fault = ValueError("no such actor")
    with pytest.raises(ValueError, match="no such actor"):
        await finder.find(5)
    gcs.fault = None
    assert await finder.find(5) == "splitpoint/coordinator"
    assert gcs.asked == 2
