"""Membership: newer snapshots only, last known good, streams that come and go with their workers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import pytest

from coordinator.gateway.client_config import WorkerClientSettings
from coordinator.gateway.membership import Membership, MembershipSnapshot
from coordinator.routing.config import RoutingSettings
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerState, WorkerView
from protos.ids import Incarnation
from tests.support.scripted_worker import ScriptedWorker
from tests.support.views import worker_view

SETTINGS = WorkerClientSettings(connect_timeout_s=0.5, backoff_initial_s=0.01, backoff_max_s=0.05)


def snapshot(version: int, *views: WorkerView, epoch: str = "e") -> MembershipSnapshot:
    return MembershipSnapshot(version=version, workers=views, epoch=epoch)


@pytest.fixture
async def events() -> Counter[str]:
    return Counter()


@pytest.fixture
async def membership(events: Counter[str]) -> AsyncIterator[Membership]:
    made = Membership(
        Router(RoutingSettings(), random.Random(1), transports=("grpc",)), SETTINGS, on_event=lambda name: events.update([name])
    )
    yield made
    await made.close()
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("worker-")]


async def test_only_newer_snapshots_of_an_epoch_count(membership: Membership, events: Counter[str]) -> None:
    p, d = worker_view("p"), worker_view("d", Role.DECODE)
    assert membership.apply(snapshot(5, p))
    assert not membership.apply(snapshot(4, d))
    assert membership.views == (p,)
    assert events["membership_stale"] == 1
    assert not membership.apply(snapshot(5, d)), "the same version again is no news, and no fault"
    assert events["membership_stale"] == 1
    assert membership.apply(snapshot(1, d, epoch="restarted")), "a restarted coordinator counts from the beginning"
    assert membership.views == (d,)


async def test_streams_follow_their_workers(membership: Membership) -> None:
    worker = ScriptedWorker("c", Role.COLOCATED)
    view = await worker.start()
    membership.apply(snapshot(1, view))
    async with asyncio.timeout(10):
        await worker.connected.wait()
    client = membership.client(view.incarnation)
    assert client is not None
    membership.apply(snapshot(2, replace(view, state=WorkerState.DRAINING, running=3)))
    assert membership.client(view.incarnation) is client, "a drain lets its legs finish"
    membership.apply(snapshot(3, replace(view, state=WorkerState.DEAD)))
    assert membership.client(view.incarnation) is None
    reborn = replace(view, incarnation=Incarnation("reborn"))
    worker.answers_as = reborn.incarnation
    worker.connected.clear()
    membership.apply(snapshot(4, reborn))
    async with asyncio.timeout(10):
        await worker.connected.wait()
    assert membership.client(reborn.incarnation) is not None
    await worker.stop()


async def test_starting_workers_get_no_stream(membership: Membership) -> None:
    view = worker_view("p", state=WorkerState.STARTING)
    membership.apply(snapshot(1, view))
    assert membership.client(view.incarnation) is None


async def test_a_failing_poll_keeps_the_last_known_workers(
    membership: Membership, events: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.gateway.membership.POLL_BACKOFF_S", (0.001, 0.001))
    p, d = worker_view("p"), worker_view("d", Role.DECODE)
    asked: list[tuple[str, int]] = []
    done = asyncio.Event()

    async def poll(epoch: str, version: int) -> MembershipSnapshot | None:
        asked.append((epoch, version))
        match len(asked):
            case 1:
                return snapshot(1, p)
            case 2:
                raise ConnectionError("the coordinator restarts")
            case 3:
                assert membership.views == (p,)
                return None
            case 4:
                return snapshot(1, d, epoch="f")
            case _:
                done.set()
                await asyncio.Event().wait()
                raise AssertionError

    following = asyncio.create_task(membership.follow(poll))
    async with asyncio.timeout(10):
        await done.wait()
    assert asked == [("", -1), ("e", 1), ("e", 1), ("e", 1), ("f", 1)]
    assert membership.views == (d,)
    assert events["membership_poll_failed"] == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_closed_membership_takes_nothing(membership: Membership) -> None:
    await membership.close()
    assert not membership.apply(snapshot(1, worker_view("p")))
    assert membership.views == ()


async def test_a_snapshot_that_cannot_be_taken_is_asked_for_again(
    membership: Membership, events: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.gateway.membership.POLL_BACKOFF_S", (0.001, 0.001))
    p, d = worker_view("p"), worker_view("d", Role.DECODE)
    asked: list[tuple[str, int]] = []
    done = asyncio.Event()
    update = membership._router.update

    def fails_once(views: Iterable[WorkerView]) -> None:
        monkeypatch.setattr(membership._router, "update", update)
        raise ValueError("a view that makes no sense")

    async def poll(epoch: str, version: int) -> MembershipSnapshot | None:
        asked.append((epoch, version))
        if len(asked) == 2:
            monkeypatch.setattr(membership._router, "update", fails_once)
        if len(asked) <= 3:
            return snapshot(1, p) if len(asked) == 1 else snapshot(2, d)
        done.set()
        await asyncio.Event().wait()
        raise AssertionError

    following = asyncio.create_task(membership.follow(poll))
    async with asyncio.timeout(10):
        await done.wait()
    assert asked == [("", -1), ("e", 1), ("e", 1), ("e", 2)]
    assert membership.views == (d,)
    assert events["membership_poll_failed"] == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
