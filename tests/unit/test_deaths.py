"""Deaths are told to every worker that serves, also by a coordinator that was started after them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from coordinator.pools import ray_deaths
from coordinator.pools.fleet import Fleet
from coordinator.pools.ray_deaths import Deaths
from coordinator.pools.ray_nodes import NodeLostError
from coordinator.pools.reports import Beat, ProcessRef
from coordinator.pools.store import Store
from coordinator.routing.views import Role
from protos.ids import WorkerId
from tests.support.views import worker_view

DEAD, ALIVE, BESIDE = WorkerId("prefill-1"), WorkerId("decode-1"), WorkerId("decode-2")


class Handle:
    """A worker actor's: hears of deaths, after `refusals` that fail."""

    def __init__(self, refusals: int = 0) -> None:
        self.heard: list[str] = []
        self.refusals = refusals
        self.told = asyncio.Event()

    @property
    def peer_died(self) -> Any:
        return self

    def remote(self, incarnation: str) -> Any:
        async def answer() -> None:
            if self.refusals:
                self.refusals -= 1
                raise GetTimeoutError("busy")
            self.heard.append(incarnation)
            self.told.set()

        return answer()


def beat(worker_id: WorkerId) -> Beat:
    made = worker_view(worker_id, Role.DECODE)
    return Beat(view=made, slot=0, node_id="n", processes=(ProcessRef(7, 1.0),), refusing=False, uptime_s=1.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "state.sqlite3")
    store.begin_run("run", {})
    yield store
    store.close()


def fleet_of(*workers: WorkerId) -> Fleet:
    fleet = Fleet()
    for worker_id in workers:
        fleet.heard(beat(worker_id), 1.0)
    return fleet


async def settle(store: Store) -> None:
    async with asyncio.timeout(5):
        while store.fences() or any(k.worker_id == DEAD for k in store.processes()):  # noqa: ASYNC110 - of a store, no event
            await asyncio.sleep(0.001)


async def test_a_death_is_told_until_everybody_has_heard(store: Store) -> None:
    handles = {ALIVE: Handle(refusals=2), BESIDE: Handle()}
    deaths = Deaths(store, fleet_of(ALIVE, BESIDE), handles, pause_s=0.001)
    for worker_id in (DEAD, ALIVE, BESIDE):
        deaths.serves(beat(worker_id))
    deaths.died(DEAD, beat(DEAD))
    assert store.fences() == [f"{DEAD}-i"]
    deaths.tell()
    deaths.tell()
    await settle(store)
    assert [handle.heard for handle in handles.values()] == [[f"{DEAD}-i"]] * 2


async def test_a_coordinator_that_restarts_goes_on_telling(store: Store) -> None:
    before = Deaths(store, fleet_of(ALIVE), {ALIVE: Handle(refusals=10**6)}, pause_s=0.001)
    before.died(DEAD, beat(DEAD))
    handle = Handle()
    after = Deaths(store, fleet_of(ALIVE), {ALIVE: handle}, pause_s=0.001)
    after.resume([ALIVE])
    await settle(store)
    assert handle.heard == [f"{DEAD}-i"]


async def test_a_worker_that_died_while_no_coordinator_ran_is_made_sure_of_and_told(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Sequence[ProcessRef]] = []

    async def kill(node_id: str, refs: Sequence[ProcessRef], timeout_s: float) -> list[int]:
        killed.append(refs)
        if len(killed) == 1:
            raise TimeoutError("the node is busy")
        return [7] if len(killed) == 2 else []

    monkeypatch.setattr(ray_deaths, "kill_on_node", kill)
    former = Deaths(store, fleet_of(ALIVE, DEAD), {}, pause_s=0.001)
    for worker_id in (DEAD, ALIVE):
        former.serves(beat(worker_id))
    handle = Handle()
    fleet = Fleet()  # nobody has been heard yet: the one that served must be told all the same
    fleet.created(ALIVE, "decode", Role.DECODE, 0, 1.0)
    Deaths(store, fleet, {ALIVE: handle}, pause_s=0.001).resume([ALIVE])
    await settle(store)
    assert handle.heard == [f"{DEAD}-i"]
    assert killed == [(ProcessRef(7, 1.0),)] * 3
    assert [known.worker_id for known in store.processes()] == [ALIVE]


async def test_a_worker_that_never_served_has_nobody_to_tell(store: Store) -> None:
    deaths = Deaths(store, fleet_of(ALIVE), {ALIVE: Handle()}, pause_s=0.001)
    deaths.died(DEAD, None)
    assert store.fences() == []


class Lost:
    """A node that Ray has given up; `refuses`: its host says that nobody listens at the worker's address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = False
        self.asked = asyncio.Event()
        monkeypatch.setattr(ray_deaths, "kill_on_node", self.kill)
        monkeypatch.setattr(ray_deaths, "dial", self.dial)

    async def kill(self, node_id: str, refs: Sequence[ProcessRef], timeout_s: float) -> list[int]:
        raise NodeLostError("given up")

    async def dial(self, address: str, timeout_s: float) -> OSError:
        self.asked.set()
        return ConnectionRefusedError() if self.refuses else TimeoutError()


async def test_a_worker_of_a_lost_node_frees_nothing_before_its_death_is_known(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, handle = Lost(monkeypatch), Handle()
    deaths = Deaths(store, fleet_of(ALIVE), {ALIVE: handle}, pause_s=0.001)
    deaths.lost(DEAD, beat(DEAD))
    await asyncio.wait_for(lost.asked.wait(), 5)
    assert store.fences() == []
    assert deaths.silent_nodes == {"n"}
    assert [known.worker_id for known in store.processes()] == [DEAD], "the next coordinator goes on"
    lost.refuses = True
    await settle(store)
    assert handle.heard == [f"{DEAD}-i"]
    await asyncio.sleep(0)
    assert deaths.silent_nodes == set()


async def test_a_lost_node_that_stays_silent_is_dead_when_its_raylet_has_given_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lost(monkeypatch)
    monkeypatch.setattr(ray_deaths, "ORPHANED_S", 0.05)
    handle = Handle()
    deaths = Deaths(store, fleet_of(ALIVE), {ALIVE: handle}, pause_s=0.001)
    deaths.lost(DEAD, beat(DEAD))
    await settle(store)
    assert handle.heard == [f"{DEAD}-i"]
