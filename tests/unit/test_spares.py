"""Pools that keep spares: who stands in for whom, what operators see of it, what lasts, and what the autoscaler counts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.admin_call import state_of
from coordinator.config import PoolSettings, load, load_pools
from coordinator.config_layers import ConfigError
from coordinator.pools.admin import pool_specs, pool_status, pools_of, worker_status
from coordinator.pools.assign import assign
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.plan import plan, unsettled
from coordinator.pools.reconcile import (
    Actual,
    Backoff,
    FenceWorker,
    ForgetWorker,
    PromoteWorker,
    ReservePlace,
    StartWorker,
    reconcile,
)
from coordinator.pools.records import PoolTarget, Restart, SpareKind, WorkerRecord
from coordinator.pools.store import Store
from coordinator.pools_cli import _pool_behind
from coordinator.routing.views import Role, WorkerState
from protos.errors import SplitpointError
from protos.ids import WorkerId
from protos.splitpoint.v1 import admin_pb2
from tests.unit.test_assign import worker
from tests.unit.test_autoscaler import QUICK, Coordinator
from tests.unit.test_reconcile import RULES

READY, STARTING, PLACED = WorkerState.READY, WorkerState.STARTING, WorkerState.PLACED
ROLES = frozenset(Role)
D1, D2 = worker("decode-1", Role.DECODE, probed_s=99.0), worker("decode-2", Role.DECODE, probed_s=99.0)
SPARE = worker("decode-3", Role.DECODE, spare=True, probed_s=99.0)
PLACE = worker("decode-4", Role.DECODE, PLACED, spare=True, place_reserved=True, heartbeat_s=None)


def decode(replicas: int, spares: int, kind: SpareKind = SpareKind.WARM, engine: str = "a") -> PoolTarget:
    return PoolTarget(name="decode", role=Role.DECODE, replicas=replicas, engine=engine, spares=spares, spare_kind=kind)


def fates(targets: list[PoolTarget], workers: list[WorkerRecord], **known: Any) -> dict[str, str]:
    return {w: a.fate.value for w, a in assign(targets, workers, whole_roles=ROLES, **known).workers.items()}


class TestWhoStandsIn:
    def test_one_pass_forgets_the_dead_and_promotes_the_spare(self) -> None:
        dead = worker("decode-2", Role.DECODE, WorkerState.DEAD, dead_reason="killed")
        actual = Actual(workers=[D1, dead, SPARE], backoff={"decode": Backoff().failed(100.0)})
        [forget, promote] = reconcile([decode(2, 1)], actual, 100.0, RULES)
        assert isinstance(forget, ForgetWorker)
        assert promote == PromoteWorker(SPARE.worker_id, "pool decode lacks a worker that serves")
        later = Actual(workers=[D1, D2])
        assert reconcile([decode(2, 1)], later, 100.0, RULES) == [StartWorker("decode", spare=True)]

    def test_one_that_is_fenced_is_stood_in_for_before_its_death_is_made_sure_of(self) -> None:
        silent = worker("decode-2", Role.DECODE, heartbeat_s=0.0, probed_s=99.0, failed_probes=1)
        actions = reconcile([decode(2, 1)], Actual(workers=[D1, silent, SPARE]), 100.0, RULES)
        assert [type(action) for action in actions] == [FenceWorker, PromoteWorker]

    @pytest.mark.parametrize(
        "suspected",
        [
            worker("decode-2", Role.DECODE, heartbeat_s=90.0),
            worker("decode-2", Role.DECODE, failed_probes=1, probed_s=99.0),
            worker("decode-2", Role.DECODE, heartbeat_s=90.0, host_silent=True, failed_probes=9, probed_s=99.9),
            worker("decode-2", Role.DECODE, cordoned=True),
        ],
        ids=["late", "one probe failed", "partitioned", "cordoned"],
    )
    def test_nobody_for_one_that_is_suspected_or_cordoned(self, suspected: WorkerRecord) -> None:
        actions = reconcile([decode(2, 1)], Actual(workers=[D1, suspected, SPARE]), 100.0, RULES)
        assert not any(isinstance(action, PromoteWorker | StartWorker) for action in actions)

    @pytest.mark.parametrize("trouble", [{"host_silent": True}, {"failed_probes": 1}, {"cordoned": True}, {"node_id": "n2"}])
    def test_no_spare_that_is_not_fit(self, trouble: dict[str, Any]) -> None:
        unfit = worker("decode-3", Role.DECODE, spare=True, **trouble)
        done = assign([decode(2, 1)], [D1, unfit], whole_roles=ROLES, silent_nodes={"n2"})
        assert {w: a.fate.value for w, a in done.workers.items()} == {"decode-1": "keep", "decode-3": "keep"}
        assert (done.missing, done.to_serve) == ({"decode": 1}, {"decode": 1})

    def test_one_that_serves_is_taken_before_one_that_loads_and_both_before_a_place(self) -> None:
        loads = worker("decode-2", Role.DECODE, STARTING, spare=True)
        assert fates([decode(1, 2)], [loads, SPARE]) == {"decode-2": "keep", "decode-3": "promote"}
        placed = decode(2, 1, SpareKind.PLACED)
        assert fates([placed], [D1, worker("decode-2", Role.DECODE, STARTING), PLACE])["decode-4"] == "keep"
        assert fates([placed], [D1, PLACE])["decode-4"] == "promote"

    def test_a_spare_of_another_pool_only_where_the_engines_agree(self) -> None:
        prefill = PoolTarget(name="prefill", role=Role.PREFILL, replicas=1, engine="a")
        assert fates([prefill, decode(1, 1)], [D1, SPARE]) == {"decode-1": "keep", "decode-3": "relabel"}
        other = PoolTarget(name="prefill", role=Role.PREFILL, replicas=1, engine="b")
        assert fates([other, decode(1, 1)], [D1, SPARE]) == {"decode-1": "keep", "decode-3": "keep"}

    def test_a_pool_that_lacks_one_itself_lends_none(self) -> None:
        prefill = PoolTarget(name="prefill", role=Role.PREFILL, replicas=1, engine="a")
        assert fates([prefill, decode(2, 1)], [D1, SPARE]) == {"decode-1": "keep", "decode-3": "promote"}

    def test_the_only_worker_of_the_only_pool_can_be_restarted(self) -> None:
        due = worker("decode-1", Role.DECODE, restart=Restart.IN_PLACE)
        assert fates([decode(1, 1)], [due, SPARE]) == {"decode-1": "stop", "decode-3": "promote"}
        assert fates([decode(1, 0)], [due]) == {"decode-1": "keep"}

    def test_a_place_waits_with_a_row_of_failures_and_not_for_the_first(self) -> None:
        targets, workers = [decode(2, 1, SpareKind.PLACED)], [D1, PLACE]
        once = Backoff().failed(100.0)
        for backoff, promoted in ((once, 1), (once.failed(100.0), 0)):
            actions = reconcile(targets, Actual(workers=workers, backoff={"decode": backoff}), 100.0, RULES)
            assert sum(isinstance(action, PromoteWorker) for action in actions) == promoted

    def test_a_place_is_asked_for_until_it_is_there(self) -> None:
        waits = worker("decode-4", Role.DECODE, PLACED, spare=True, heartbeat_s=None)
        targets = [decode(2, 1, SpareKind.PLACED)]
        assert ReservePlace(waits.worker_id) in reconcile(targets, Actual(workers=[D1, D2, waits]), 100.0, RULES)
        assert not any(isinstance(a, ReservePlace) for a in reconcile(targets, Actual(workers=[D1, D2, PLACE]), 100.0, RULES))

    def test_those_that_are_to_serve_are_started_before_any_spare(self) -> None:
        prefill = PoolTarget(name="prefill", role=Role.PREFILL, replicas=1, engine="b")
        starts = reconcile([decode(1, 1), prefill], Actual(workers=[]), 100.0, RULES)
        assert starts == [StartWorker("decode"), StartWorker("prefill"), StartWorker("decode", spare=True)]

    def test_accelerators_that_are_short_go_to_those_that_serve(self) -> None:
        """The former set took two; one of its workers is left, so one of three can be started."""
        old = worker("old-1", Role.COLOCATED, engine="b")
        done = assign([decode(1, 1)], [old], budget_ranks=2, whole_roles=ROLES)
        assert (done.missing["decode"], done.startable["decode"], done.to_serve["decode"]) == (2, 1, 1)


class TestShown:
    def test_in_a_plan(self) -> None:
        steps = plan(assign([decode(2, 1)], [D1, SPARE], whole_roles=ROLES))
        assert [(s.action, s.worker_id) for s in steps] == [("keep", "decode-1"), ("promote", "decode-3"), ("start", "")]
        down = plan(assign([decode(1, 1)], [D1, D2], whole_roles=ROLES))
        assert [(s.action, s.worker_id, s.reason) for s in down][1:] == [("stand by", "decode-2", "pool decode lacks a spare")]

    @pytest.mark.parametrize(
        ("workers", "lines"),
        [
            ([D1, D2, SPARE], []),
            ([D1, SPARE], ["pool decode lacks 1 of its workers", "decode-3 serves from now on"]),
            ([D1, D2, worker("decode-3", Role.DECODE)], ["decode-3 stands by from now on"]),
        ],
    )
    def test_as_unsettled(self, workers: list[WorkerRecord], lines: list[str]) -> None:
        assert unsettled(assign([decode(2, 1)], workers, whole_roles=ROLES), {}) == lines

    def test_a_place_that_is_not_there_yet_is_unsettled(self) -> None:
        targets, waits = [decode(1, 1, SpareKind.PLACED)], worker("decode-4", Role.DECODE, PLACED, spare=True)
        assert unsettled(assign(targets, [D1, waits], whole_roles=ROLES), {}) == ["decode-4 waits for its place"]
        assert unsettled(assign(targets, [D1, PLACE], whole_roles=ROLES), {}) == []

    async def test_to_operators(self) -> None:
        fleet, target = Fleet(), decode(1, 2, SpareKind.PLACED)
        for name, spare in (("decode-1", False), ("decode-2", True), ("decode-3", True)):
            fleet.created(WorkerId(name), "decode", Role.DECODE, 0, 0.0, spare=spare, placed=spare)
        fleet.reserved(WorkerId("decode-2"), "n1", 1.0)
        views = fleet.views(1.0)
        status = pool_status(target, {}, views, 0, "")
        assert (status.target, status.ready, status.starting) == (1, 0, 1)
        assert (status.spares, status.spares_ready, status.spare_kind) == (2, 1, "placed")
        shown = [worker_status(view, None) for view in views]
        assert [state_of(s) for s in shown] == ["starting", "placed, spare", "placed, spare"]
        assert [s.detail for s in shown] == ["", "its place is reserved", "no node has its place free"]
        deaf = worker_status(replace(views[0], state=WorkerState.READY, silent=True), None)
        assert state_of(deaf) == "ready, silent"
        behind = _pool_behind(admin_pb2.GetStatusResponse(pools=[status]), "decode")
        assert behind == ["pool decode: 0 ready, 1 starting, 0 draining of 1, 1 of 2 spares"]


class TestAsked:
    def test_travels_both_ways(self) -> None:
        pools = {"decode": PoolSettings(role=Role.DECODE, replicas=3, spares=2, spare_kind=SpareKind.PLACED)}
        assert pools_of(pool_specs(pools)) == pools
        assert pools_of([admin_pb2.PoolSpec(name="decode", role="decode", spares=1)])["decode"].spare_kind is SpareKind.WARM

    @pytest.mark.parametrize(
        ("spec", "said"),
        [({"spare_kind": "hot"}, "pools.a.spare_kind: Input should be 'warm' or 'placed'"), ({"spares": 65}, "pools.a.spares")],
    )
    def test_a_bad_one_is_refused_by_name(self, spec: dict[str, Any], said: str) -> None:
        with pytest.raises(SplitpointError, match=said):
            pools_of([admin_pb2.PoolSpec(name="a", role="decode", **spec)])

    def test_a_bad_one_in_a_file_is_refused_by_name(self, tmp_path: Path) -> None:
        file = tmp_path / "pools.toml"
        file.write_text('[pools.decode]\nrole = "decode"\nspares = -1\nspare_kind = "cold"\n')
        with pytest.raises(ConfigError) as caught:
            load_pools(file)
        assert "pools.decode.spares" in str(caught.value)
        assert "pools.decode.spare_kind" in str(caught.value)


class TestLasts:
    def test_spares_of_both_kinds_over_the_coordinator_and_no_new_run(self, tmp_path: Path) -> None:
        sets = [f"pools.decode.{field}" for field in ("replicas=2", "spares=1", "spare_kind=placed")]
        settings = load(sets=["pools.prefill.spares=1", *sets], environment={})
        roles = rules_of(settings).whole_roles

        def life(run_id: str) -> tuple[Store, Fleet, DesiredPools]:
            store, fleet = Store(tmp_path / "state.sqlite3"), Fleet()
            store.begin_run(run_id, settings.pools)
            return store, fleet, DesiredPools(settings, store, fleet, roles)

        store, _, pools = life("run")
        warm, place = pools.new_worker("prefill", 0.0, spare=True), pools.new_worker("decode", 0.0, spare=True)
        promoted = pools.new_worker("decode", 0.0, spare=True)
        pools.stand_by(promoted, False, 1.0, "needed")
        assert pools.present.settings.pools == settings.pools, "what the set says of spares is on disk"
        store.close()
        store, fleet, pools = life("run")
        assert pools.present.settings.pools == settings.pools
        assert pools.places() == {place}
        fleet.created(warm, "prefill", Role.PREFILL, 0, 0.0)
        pools.resume_spares(2.0)
        known = {w: (m.record.spare, m.record.state, m.record.place_reserved) for w, m in fleet.members.items()}
        assert known == {warm: (True, STARTING, False), place: (True, PLACED, False)}
        assert pools.spec(place, tmp_path).engine == pools.targets[1].engine
        store.forget(place)
        assert set(store.spares()) == {warm}
        store.close()
        store, _, pools = life("another run")
        assert store.spares() == {}
        store.close()


class TestBudget:
    def test_spares_are_counted_in_what_autoscalers_share(self, tmp_path: Path) -> None:
        """Two decode workers, one of prefill and a spare of each fill the budget: no room to grow."""
        made = Coordinator(tmp_path, **{"pools.prefill.spares": "1", "pools.decode.spares": "1"})
        made.set("decode", budget=5, target_ongoing_requests=1.0, **QUICK)
        assert made.scaler.status(0.0).accelerators_taken == 5
        for name in ("decode-1", "decode-2"):
            made.beat(name, Role.DECODE, 1.0, running=4)
        made.run(1.0)
        assert made.replicas("decode") == 2
        assert made.decision("decode").action == "limited"
        made.set("decode", budget=6, target_ongoing_requests=1.0, **QUICK)
        made.run(2.0)
        assert made.replicas("decode") == 3
        made.store.close()

    def test_a_spare_is_no_part_of_a_pools_load(self, tmp_path: Path) -> None:
        made = Coordinator(tmp_path)
        made.set("decode", target_ongoing_requests=4.0, **QUICK)
        for name in ("decode-1", "decode-2", "decode-3"):
            made.beat(name, Role.DECODE, 1.0, running=1)
        made.fleet.stand_by(WorkerId("decode-3"), True, 1.0)
        made.run(1.0)
        assert made.scaler._sampler.samples["decode"][-1].ready == 2
        made.store.close()


def test_the_pool_of_the_guide_has_a_warm_spare(tmp_path: Path) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md").read_text()
    (block,) = re.findall(r"```toml\n(# A pool with spares.*?)```", guide, re.DOTALL)
    file = tmp_path / "pools.toml"
    file.write_text(block)
    pools, _ = load_pools(file)
    assert (pools["decode"].replicas, pools["decode"].spares, pools["decode"].spare_kind) == (2, 1, SpareKind.WARM)
    (rows,) = re.findall(r"^\| `spare_kind` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", guide, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == list(SpareKind)
