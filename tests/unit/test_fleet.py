"""The coordinator's table of workers: what heartbeats, probes and deaths make of it, and whom a change wakes."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.pools.fleet import Fleet
from coordinator.pools.reports import Beat, ProcessRef
from coordinator.routing.views import Role, WorkerState, WorkerView
from protos.ids import Incarnation, WorkerId

D1 = WorkerId("decode-1")


def beat(
    state: WorkerState = WorkerState.READY, *, refusing: bool = False, slot: int = 0, uptime_s: float = 0.0, **view: object
) -> Beat:
    values: dict[str, object] = {
        "worker_id": D1, "incarnation": Incarnation("aa"), "pool": "decode", "role": Role.DECODE, "state": state,
        "address": "127.0.0.1:1", "pid": 7, "fingerprint": b"f", "ranks": (), "max_transfer_tokens": 9, "transports": ("grpc",),
    }  # fmt: skip
    return Beat(
        view=WorkerView(**{**values, **view}),  # type: ignore[arg-type]
        slot=slot, node_id="n", processes=(ProcessRef(7, 1.0),), refusing=refusing,
        uptime_s=uptime_s,
    )  # fmt: skip


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


async def test_a_worker_is_ready_with_its_first_ready_heartbeat(fleet: Fleet) -> None:
    fleet.created(D1, "decode", Role.DECODE, 0, 0.0)
    assert fleet.heard(beat(WorkerState.STARTING), 1.0)
    assert fleet.views(1.0)[0].state is WorkerState.STARTING
    assert fleet.heard(beat(), 2.0)
    view = fleet.views(5.0)[0]
    assert (view.state, view.heartbeat_age_s, view.address) == (WorkerState.READY, 3.0, "127.0.0.1:1")


async def test_an_unknown_worker_is_learned_from_its_heartbeat(fleet: Fleet) -> None:
    assert fleet.heard(beat(slot=3), 1.0)
    assert fleet.members[D1].record.state is WorkerState.READY
    assert fleet.members[D1].slot == 3


async def test_an_unknown_worker_keeps_its_age(fleet: Fleet) -> None:
    """Which one is the newest decides who goes when a pool shrinks, also after the coordinator was restarted."""
    fleet.heard(beat(uptime_s=90.0), 100.0)
    assert fleet.members[D1].record.created_s == 10.0


async def test_a_dead_or_forgotten_worker_that_still_beats_is_told_to_end(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    assert fleet.died(D1, "killed", 2.0)
    assert not fleet.died(D1, "again", 2.0)
    assert not fleet.heard(beat(), 3.0)
    fleet.forget(D1)
    assert not fleet.heard(beat(), 4.0)
    assert fleet.views(4.0) == ()


async def test_loads_raise_the_version_without_waking_anybody(fleet: Fleet) -> None:
    fleet.heard(beat(running=0), 1.0)
    version = fleet.version
    watcher = asyncio.create_task(fleet.newer(fleet.epoch, version, 30.0))
    await asyncio.sleep(0)
    fleet.heard(beat(running=5), 2.0)
    await asyncio.sleep(0)
    assert not watcher.done()
    assert fleet.version > version
    fleet.died(D1, "killed", 3.0)
    await asyncio.wait_for(watcher, 1.0)


async def test_a_watcher_of_another_epoch_or_an_older_change_is_answered_at_once(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    await asyncio.wait_for(fleet.newer("other", fleet.version, 30.0), 1.0)
    await asyncio.wait_for(fleet.newer(fleet.epoch, 0, 30.0), 1.0)


async def test_a_drain_hides_the_worker_at_once_and_counts_idleness_only_after_it_is_confirmed(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    fleet.drain(D1, 60.0)
    assert fleet.views(1.0)[0].state is WorkerState.DRAINING
    fleet.heard(beat(), 2.0)
    record = fleet.members[D1].record
    assert (record.state, record.drain_since_s, record.idle_since_s) == (WorkerState.DRAINING, None, None)
    fleet.heard(beat(refusing=True, leases=1), 3.0)
    assert fleet.members[D1].record.idle_since_s is None
    fleet.heard(beat(refusing=True), 4.0)
    fleet.heard(beat(refusing=True), 5.0)
    assert fleet.members[D1].record.idle_since_s == 4.0
    fleet.heard(beat(refusing=True, waiting=1), 6.0)
    assert fleet.members[D1].record.idle_since_s is None


async def test_a_drain_of_a_worker_that_starts_leaves_it_starting_and_never_ready(fleet: Fleet) -> None:
    fleet.created(D1, "decode", Role.DECODE, 0, 0.0)
    fleet.heard(beat(WorkerState.STARTING), 1.0)
    fleet.drain(D1, 60.0)
    record = fleet.members[D1].record
    assert (record.state, record.draining_until_s) == (WorkerState.STARTING, 60.0)
    fleet.heard(beat(), 2.0)
    assert fleet.members[D1].record.state is WorkerState.DRAINING


async def test_a_drain_keeps_the_earlier_end(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    fleet.drain(D1, 60.0)
    fleet.drain(D1, 600.0)
    assert fleet.members[D1].record.draining_until_s == 60.0


async def test_a_restarted_coordinator_takes_a_refusing_worker_as_draining(fleet: Fleet) -> None:
    fleet.heard(beat(refusing=True), 1.0)
    assert fleet.members[D1].record.state is WorkerState.DRAINING


async def test_a_coordinator_that_restarts_in_a_drain_keeps_its_time(fleet: Fleet) -> None:
    """Heartbeats are heard before the store's drains are read again; what runs must not be cut off for it."""
    fleet.heard(beat(refusing=True, running=1), 1.0)
    fleet.drain(D1, 100.0)
    fleet.heard(beat(refusing=True, running=1), 2.0)
    assert fleet.members[D1].record.draining_until_s == 100.0


async def test_a_worker_that_was_told_to_stop_is_no_failure_when_it_ends(fleet: Fleet) -> None:
    """Its own last words may arrive before the coordinator notes the end that it asked for."""
    fleet.heard(beat(), 1.0)
    fleet.stopping(D1)
    assert fleet.died(D1, "drained: no requests, no leases", 5.0)
    assert fleet.backoff == {}
    assert fleet.failures == {}


async def test_probes_count_failures_in_a_row(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    fleet.probed(D1, False, 2.0)
    fleet.probed(D1, False, 3.0)
    assert fleet.members[D1].record.failed_probes == 2
    fleet.probed(D1, True, 4.0)
    assert fleet.members[D1].record.failed_probes == 0
    fleet.probed(WorkerId("gone"), False, 4.0)


async def test_gateways_hear_of_a_silence_when_it_begins_and_when_it_is_over(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    heard = []
    for answered, host_silent in ((False, True), (False, False), (True, False), (True, False)):
        before = fleet.last_change
        fleet.probed(D1, answered, 2.0, host_silent=host_silent)
        [view] = fleet.views(2.0)
        heard.append((fleet.last_change > before, view.silent, view.detail))
    assert heard == [
        (True, True, "its host does not answer"),
        (False, True, "its data plane does not answer"),
        (True, False, ""),
        (False, False, ""),
    ]


async def test_one_probe_that_fails_while_it_beats_takes_no_traffic_from_it(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    change = fleet.last_change
    fleet.probed(D1, False, 2.0)
    [view] = fleet.views(2.0)
    assert (view.silent, view.detail, fleet.last_change) == (False, "its data plane does not answer", change)
    fleet.probed(D1, False, 3.0)
    assert fleet.views(3.0)[0].silent, "the second in a row"
    assert fleet.last_change > change
    assert fleet.heard(beat(), 3.5)
    assert fleet.views(3.5)[0].silent, "a heartbeat is no answer of its data plane"


async def test_a_late_heartbeat_and_one_failed_probe_are_a_silence_until_it_beats(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    fleet.probed(D1, False, 1.0 + 3.1)
    assert fleet.views(4.1)[0].silent
    change = fleet.last_change
    fleet.heard(beat(), 4.2)
    assert not fleet.views(4.2)[0].silent
    assert fleet.last_change > change


async def test_a_host_that_cannot_be_dialled_is_offered_again_when_its_worker_beats_past_the_grace_time(fleet: Fleet) -> None:
    """A partition of one direction: nobody would ever fence the worker, and it would stand idle as `ready` for ever."""
    heard = []
    for second in range(40):
        before = fleet.last_change
        fleet.heard(beat(), float(second))
        fleet.probed(D1, False, second + 0.5, host_silent=True)
        heard += [(second, fleet.views(second + 0.5)[0].silent)] if fleet.last_change > before else []
    assert heard == [(0, True), (21, False)]
    assert "it beats, but the coordinator cannot reach its host" in fleet.views(40.0)[0].detail
    fleet.probed(D1, False, 39.0 + 3.1, host_silent=True)
    assert fleet.views(42.1)[0].silent, "when the heartbeats stay away as well, it is no longer one direction"
    fleet.heard(beat(), 43.0)
    fleet.probed(D1, True, 43.5)
    assert fleet.views(43.5)[0].detail == ""


async def test_only_short_lives_make_a_crash_loop(fleet: Fleet) -> None:
    fleet.created(D1, "decode", Role.DECODE, 0, 0.0)
    fleet.died(D1, "no memory", 5.0)
    fleet.forget(D1)
    assert fleet.backoff["decode"].failures == 1
    second = WorkerId("decode-2")
    fleet.heard(beat(worker_id=second), 10.0)
    fleet.died(second, "killed", 12.0)
    assert fleet.backoff["decode"].failures == 2
    third = WorkerId("decode-3")
    fleet.heard(beat(worker_id=third), 20.0)
    fleet.died(third, "killed", 20.0 + 3600.0)
    assert fleet.backoff["decode"].failures == 1


async def test_a_minute_of_service_ends_a_series_of_failures(fleet: Fleet) -> None:
    """Else `status` tells of a failed start for as long as the pool lives."""
    fleet.created(D1, "decode", Role.DECODE, 0, 0.0)
    elder = WorkerId("decode-0")
    fleet.heard(beat(worker_id=elder), 0.0)
    fleet.died(D1, "no memory", 5.0)
    fleet.forget(D1)
    second = WorkerId("decode-2")
    fleet.heard(beat(worker_id=second), 10.0)
    fleet.heard(beat(worker_id=elder), 69.0)  # served all the time: it says nothing about new ones
    fleet.heard(beat(worker_id=second), 69.0)
    assert fleet.backoff["decode"].failures == 1
    fleet.heard(beat(worker_id=second), 71.0)
    assert fleet.backoff == {}
    assert fleet.failures == {}


async def test_an_end_that_was_wanted_is_no_failure(fleet: Fleet) -> None:
    fleet.created(D1, "decode", Role.DECODE, 0, 0.0)
    fleet.died(D1, "scaled down", 5.0, wanted=True)
    assert fleet.backoff == {}


async def test_slots_are_the_smallest_free_numbers(fleet: Fleet) -> None:
    for slot, name in enumerate(("decode-1", "decode-2", "decode-3")):
        assert fleet.free_slot() == slot
        fleet.created(WorkerId(name), "decode", Role.DECODE, slot, 0.0)
    fleet.forget(WorkerId("decode-2"))
    assert fleet.free_slot() == 1


async def test_a_new_label_is_published_at_once_and_heard_later(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    before = fleet.last_change
    fleet.relabel(D1, "prefill", Role.PREFILL)
    view = fleet.views(1.0)[0]
    assert (view.pool, view.role, view.state) == ("prefill", Role.PREFILL, WorkerState.READY)
    assert fleet.last_change > before
    fleet.heard(beat(), 2.0)
    assert not fleet.members[D1].record.label_heard
    assert fleet.views(2.0)[0].role is Role.PREFILL, "what it still says of itself does not count"
    fleet.heard(beat(pool="prefill", role=Role.PREFILL), 3.0)
    assert fleet.members[D1].record.label_heard


async def test_the_same_label_again_wakes_nobody(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    before = fleet.last_change
    fleet.relabel(D1, "decode", Role.DECODE)
    fleet.relabel(WorkerId("gone"), "decode", Role.DECODE)
    assert fleet.last_change == before
    assert fleet.members[D1].record.label_heard


async def test_a_cordoned_worker_stays_ready_and_gateways_hear_of_it(fleet: Fleet) -> None:
    fleet.heard(beat(), 1.0)
    before = fleet.last_change
    fleet.cordon(D1, True)
    fleet.heard(beat(), 2.0)
    view = fleet.views(2.0)[0]
    assert (view.state, view.cordoned) == (WorkerState.READY, True)
    assert fleet.last_change > before
    fleet.cordon(D1, False)
    assert not fleet.views(2.0)[0].cordoned


async def test_a_watcher_that_is_cancelled_as_the_membership_changes_ends() -> None:
    """At whichever turn of the loop the two meet: a gateway that stops would else follow for ever."""
    for turns in range(4):
        fleet = Fleet()
        watcher = asyncio.create_task(fleet.next_change(30.0))
        await asyncio.sleep(0)
        fleet.heard(beat(), 1.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        if watcher.cancel():
            with pytest.raises(asyncio.CancelledError):
                await watcher
