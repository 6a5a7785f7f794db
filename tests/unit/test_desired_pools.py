"""The desired pools on disk and what they mean for the workers there are: drains, adoption after a restart, restarts by turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import PoolSettings, Settings, load
from coordinator.pools.desired import Strategy
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.kept_beat import lasting
from coordinator.pools.reconcile import (
    Action,
    Actual,
    DrainWorker,
    FenceWorker,
    ProbeWorker,
    StartWorker,
    StopWorker,
    reconcile,
)
from coordinator.pools.records import Restart
from coordinator.pools.store import KnownProcess, Store
from coordinator.routing.views import RankView, Role, WorkerState
from protos.errors import Code, SplitpointError
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

    def actions(self, now_s: float) -> list[Action]:
        """One pass."""
        actual = Actual(workers=self.fleet.records())
        return list(reconcile(self.pools.targets, actual, now_s, rules_of(self.settings)))

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


class TestReplace:
    """How a change replaces workers is part of what is asked for."""

    def other(self, rig: Rig, seqs: int) -> dict[str, PoolSettings]:
        decode = rig.settings.pools["decode"].model_copy(update={"engine": {"max_num_seqs": seqs}, "replicas": 4})
        return {**rig.settings.pools, "decode": decode}

    async def test_is_kept_until_the_change_is_over_also_over_a_restart(self, rig: Rig) -> None:
        assert rig.pools.present.max_unavailable == 0.25
        rig.fleet.heard(beat(), 0.0)
        rig.pools.apply(self.other(rig, 5), strategy=Strategy(surge=True))
        assert (rig.pools.present.max_unavailable, rig.pools.present.budget_ranks) == (0.0, 6), "one beside the five of the set"
        rig.again()
        rig.fleet.heard(beat(), 50.0)
        rig.pools.scale("prefill", 2)
        assert (rig.pools.present.max_unavailable, rig.pools.present.budget_ranks) == (0.0, 6), "the change still runs"
        rig.pools.apply(self.other(rig, 6), strategy=Strategy(max_unavailable=1.0))
        assert rig.pools.present.max_unavailable == 1.0
        rig.again()
        rig.pools.scale("prefill", 1)
        assert rig.pools.present.max_unavailable == 0.25, "nobody is left to replace"

    async def test_those_that_have_the_new_arguments_are_counted_whether_they_serve_yet_or_not(self, rig: Rig) -> None:
        target = rig.pools.present.target("decode")
        assert target is not None
        for number, engine in enumerate([target.engine, target.engine, "other", target.engine], 1):
            rig.fleet.created(WorkerId(f"decode-{number}"), "decode", Role.DECODE, number, 0.0, engine=engine)
        rig.fleet.drain(WorkerId("decode-2"), 9.0)
        rig.fleet.died(WorkerId("decode-4"), "killed", 1.0)
        assert rig.pools.updated(target) == 1

    async def test_a_surge_takes_the_accelerators_of_one_worker_of_a_changed_pool(self, rig: Rig) -> None:
        wide = rig.settings.pools["decode"].model_copy(update={"engine": {"tensor_parallel_size": 2}})
        rig.pools.apply({**rig.settings.pools, "decode": wide}, strategy=Strategy(surge=True))
        assert rig.pools.present.budget_ranks == 1 + 2 + 2
        rig.pools.apply({**rig.settings.pools, "decode": wide}, strategy=Strategy(surge=True))
        assert rig.pools.present.budget_ranks == 3, "nothing changes"


class TestAdopt:
    """A coordinator that restarts: what it must not do to workers that serve and are late with a heartbeat."""

    def served(self, rig: Rig) -> WorkerId:
        heard = beat(ranks=(RankView(rank=0, address="h:1", host_id="h", ucx_worker_address=b"\x00u"),), running=3)
        rig.fleet.heard(heard, 0.0)
        known = KnownProcess(worker_id=D1, incarnation="aa", node_id="n", processes=heard.processes, beat=lasting(heard))
        rig.store.put_process(known)
        assert rig.store.processes() == [known]
        return D1

    async def test_one_that_served_is_published_as_it_was_so_that_gateways_keep_their_streams(self, rig: Rig) -> None:
        before = rig.fleet.views(0.0) if self.served(rig) in rig.fleet.members else ()
        rig.again()
        rig.pools.adopt({D1}, 50.0)
        assert rig.fleet.views(50.0) == tuple(replace(view, running=0) for view in before)
        asked = [a for a in rig.actions(50.5) if not isinstance(a, StartWorker)]
        assert asked == [ProbeWorker(D1)], "whether it is still there, is asked at once"
        rig.fleet.probed(D1, False, 52.5, host_silent=True)
        assert rig.fleet.views(52.5)[0].silent
        rig.fleet.heard(beat(uptime_s=40.0), 51.0)
        assert rig.fleet.members[D1].record.created_s == 11.0

    async def test_one_that_drains_is_given_the_rest_of_its_time_and_not_ended_as_if_it_loaded(self, rig: Rig) -> None:
        self.served(rig)
        rig.pools.drain(D1, 600.0, 1.0, "asked for")
        rig.again()
        rig.pools.adopt({D1}, 50.0)
        rig.fleet.drain(D1, 600.0)
        assert [type(a) for a in rig.actions(50.5) if not isinstance(a, StartWorker)] == [DrainWorker]

    async def test_one_that_is_surplus_is_drained_and_not_ended(self, rig: Rig) -> None:
        self.served(rig)
        rig.pools.scale("decode", 0)
        rig.again()
        rig.fleet.heard(beat(worker_id=WorkerId("prefill-1"), pool="prefill", role=Role.PREFILL), 50.0)
        rig.pools.adopt({D1}, 50.0)
        assert [type(a) for a in rig.actions(50.5) if getattr(a, "worker_id", "") == D1] == [DrainWorker]

    async def test_one_that_stays_silent_and_deaf_is_probed_then_fenced(self, rig: Rig) -> None:
        self.served(rig)
        rig.again()
        rig.pools.adopt({D1}, 50.0)
        assert [type(a) for a in rig.actions(53.5) if getattr(a, "worker_id", "") == D1] == [ProbeWorker]
        rig.fleet.probed(D1, False, 53.6)
        assert [type(a) for a in rig.actions(53.7) if getattr(a, "worker_id", "") == D1] == [FenceWorker]

    async def test_one_that_loads_for_a_pool_that_is_gone_is_ended(self, rig: Rig) -> None:
        rig.pools.adopt({WorkerId("old-1")}, 50.0)
        assert [type(a) for a in rig.actions(50.5) if getattr(a, "worker_id", "") == "old-1"] == [StopWorker]


class TestRestart:
    async def test_is_remembered_until_the_worker_is_gone(self, rig: Rig) -> None:
        rig.fleet.heard(beat(), 0.0)
        assert rig.pools.restart(["decode"], surge=False) == [D1]
        rig.again()
        rig.fleet.heard(beat(), 50.0)
        rig.pools.resume_restarts()
        assert rig.fleet.members[D1].record.restart is Restart.IN_PLACE
        rig.store.forget(D1)
        assert rig.store.restarts() == {}

    async def test_of_the_only_pool_that_serves_is_refused_unless_it_surges(self, rig: Rig) -> None:
        rig.pools.scale("prefill", 0)
        rig.fleet.heard(beat(), 0.0)
        with pytest.raises(SplitpointError) as caught:
            rig.pools.restart(["decode"], surge=False)
        assert (caught.value.code, caught.value.param) == (Code.CONFLICT, "pools")
        assert rig.store.restarts() == {}
        assert rig.pools.restart(["decode"], surge=True) == [D1]

    async def test_of_an_unknown_pool_is_refused_by_name(self, rig: Rig) -> None:
        with pytest.raises(SplitpointError, match=r"decod.*prefill, decode") as caught:
            rig.pools.restart(["decode", "decod"], surge=False)
        assert caught.value.code is Code.NOT_FOUND
