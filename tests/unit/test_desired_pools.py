"""The desired pools on disk and what they mean for the workers there are: drains, adoption after a restart, restarts by turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.config import Settings, load
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.store import Store
from coordinator.routing.views import WorkerState
from protos.ids import WorkerId
from tests.unit.test_fleet import D1, beat


class Rig:
    """One coordinator's memory over one file; `again` is the next life over the same file."""

    def __init__(self, folder: Path) -> None:
        self.settings: Settings = load(sets=["engine.kind=simulated", f"engine.model_path={folder}"], environment={})
        self._path = folder / "state.sqlite3"
        self._open()

    def _open(self) -> None:
        self.store, self.fleet = Store(self._path), Fleet()
        self.store.begin_run("run", self.settings.pools)
        self.pools = DesiredPools(self.settings, self.store, self.fleet, rules_of(self.settings).whole_roles)

    def again(self) -> None:
        self.store.close()
        self._open()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.store.close()


class TestDrain:
    async def test_is_shortened_by_a_second_one_and_never_lengthened(self, rig: Rig) -> None:
        rig.fleet.heard(beat(), 0.0)
        ends = []
        for timeout_s in (600.0, 5.0, 120.0):
            rig.pools.drain(D1, timeout_s, 100.0, "asked for")
            ends.append(rig.fleet.members[D1].record.draining_until_s)
            assert 0.0 < rig.store.draining()[D1] <= timeout_s
        assert ends == [700.0, 105.0, 105.0]
        assert rig.store.draining()[D1] <= 5.0
        assert rig.fleet.members[D1].record.state is WorkerState.DRAINING

    async def test_of_a_worker_that_is_gone_leaves_nothing(self, rig: Rig) -> None:
        rig.fleet.heard(beat(), 0.0)
        rig.fleet.died(D1, "killed", 1.0)
        rig.pools.drain(D1, 5.0, 2.0, "asked for")
        rig.pools.drain(WorkerId("decode-9"), 5.0, 2.0, "asked for")
        assert rig.store.draining() == {}


def test_a_pools_own_time_to_start_is_its_workers(rig: Rig) -> None:
    pools = {"decode": rig.settings.pools["decode"].model_copy(update={"engine": {"start_timeout_s": 900.0}})}
    rig.pools.apply({**rig.settings.pools, **pools})
    assert {t.name: t.start_timeout_s for t in rig.pools.targets} == {"prefill": 300.0, "decode": 900.0}
