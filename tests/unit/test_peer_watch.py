"""Whom a node suspects, by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvtransfer.peer_watch import PeerWatch
from kvtransfer.transports.base import TransportError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

INTERVAL_S, MISSES = 1.0, 3
SENDER = pb.RankEndpoint(incarnation="sender", rank=1)


class Stub:
    """A sender's, that answers heartbeats or never."""

    def __init__(self, *, answers: bool) -> None:
        self.asked: list[pb.HeartbeatRequest] = []
        self.answers = answers

    async def Heartbeat(self, request: pb.HeartbeatRequest, timeout: float) -> pb.HeartbeatResponse:
        self.asked.append(request)
        if not self.answers:
            await asyncio.Event().wait()
        return pb.HeartbeatResponse()


class Watched:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.ended: list[tuple[bytes, str]] = []
        self.events: Counter[str] = Counter()
        self.watch = PeerWatch(
            "receiver",
            0,
            interval_s=INTERVAL_S,
            misses=MISSES,
            now=lambda: self.now_s,
            end_fetch=lambda transfer_id, reason: self.ended.append((transfer_id, reason)),
            on_event=lambda name: self.events.update([name]),
        )

    def passes(self, seconds: float) -> None:
        """Time, with a look at every quarter of an interval."""
        for _ in range(round(seconds / (INTERVAL_S / 4))):
            self.now_s += INTERVAL_S / 4
            self.watch.check()

    @asynccontextmanager
    async def pull(self, stub: Stub) -> AsyncIterator[asyncio.Task[None]]:
        entered = asyncio.Event()

        async def work() -> None:
            async with self.watch.pulling(stub, SENDER):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await entered.wait()
        await asyncio.sleep(0)  # the heartbeats have begun
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_sender_that_answers_no_heartbeat_ends_the_pull_in_three_intervals() -> None:
    watched = Watched()
    async with watched.pull(Stub(answers=False)) as task:
        watched.passes(MISSES * INTERVAL_S - INTERVAL_S / 4)
        await asyncio.sleep(0)
        assert not task.done()
        watched.passes(INTERVAL_S / 4)
        with pytest.raises(TransportError, match=r"rank 1 of incarnation 'sender' for 3\.0 s") as raised:
            await task
        assert raised.value.reason == "silent"
    assert watched.events == {"sender_silent": 1}


async def test_bytes_count_as_signs_of_life() -> None:
    watched = Watched()
    async with watched.pull(Stub(answers=False)) as task:
        for _ in range(10):
            watched.passes(2 * INTERVAL_S)
            watched.watch.heard_sender(SENDER)
        await asyncio.sleep(0)
        assert not task.done()
    assert not watched.events


async def test_a_pull_that_is_cancelled_is_cancelled_and_not_silent() -> None:
    watched = Watched()
    async with watched.pull(Stub(answers=True)) as task:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not watched.watch._pings


async def test_several_pulls_of_one_sender_share_its_heartbeats_and_end_together() -> None:
    watched, stub = Watched(), Stub(answers=False)
    async with watched.pull(stub) as first, watched.pull(stub) as second:
        async with asyncio.timeout(5):
            while not stub.asked:  # noqa: ASYNC110 - a list has no event
                await asyncio.sleep(0.005)
        assert [(r.incarnation, r.expected_incarnation) for r in stub.asked] == [("receiver", "sender")]
        watched.passes(MISSES * INTERVAL_S)
        for task in (first, second):
            with pytest.raises(TransportError):
                await task
    assert watched.events["sender_silent"] == 1
    assert not watched.watch._pings


async def test_heartbeats_go_over_a_connection_that_somebody_holds() -> None:
    """The first pull's connection may be closed when it ends."""
    watched = Watched()
    watched.watch._interval_s = 0.0
    first, second = Stub(answers=True), Stub(answers=True)
    async with watched.pull(second):
        async with watched.pull(first):
            pass
        before = len(first.asked)
        async with asyncio.timeout(5):
            while len(second.asked) < 3:  # noqa: ASYNC110 - a list has no event
                await asyncio.sleep(0)
        assert len(first.asked) == before


def test_a_silent_receiver_ends_its_transfers_once_and_no_other_ones() -> None:
    watched = Watched()
    with (
        watched.watch.fetching(b"a", ("inc", 0)),
        watched.watch.fetching(b"b", ("inc", 0)),
        watched.watch.fetching(b"c", ("inc", 1)),
    ):
        for _ in range(8):
            watched.passes(INTERVAL_S)
            watched.watch.heard_receiver(("inc", 1))
    assert sorted(watched.ended) == [(b"a", "receiver_silent"), (b"b", "receiver_silent")]
    watched.passes(10 * INTERVAL_S)
    assert len(watched.ended) == 2


def test_one_that_stood_still_itself_suspects_nobody() -> None:
    watched = Watched()
    with watched.watch.fetching(b"a", ("inc", 0)):
        watched.passes(INTERVAL_S)
        watched.now_s += 100.0
        watched.watch.check()
        assert not watched.ended
        watched.passes(INTERVAL_S)
        assert not watched.ended
        watched.passes(INTERVAL_S)
        assert watched.ended
    assert watched.events["watch_paused"] == 1


def test_a_receiver_without_a_name_is_not_watched() -> None:
    watched = Watched()
    with watched.watch.fetching(b"a", ("", 0)):
        watched.passes(20 * INTERVAL_S)
    assert not watched.ended
