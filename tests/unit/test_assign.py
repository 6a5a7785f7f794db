"""Which worker serves which pool when the desired set changes, and what people are told of it. One pass of pure functions."""

from __future__ import annotations

import pytest

from coordinator.pools.assign import Assignment, Fate, assign
from coordinator.pools.desired import engine_key
from coordinator.pools.plan import Step, plan, unsettled
from coordinator.pools.records import PoolTarget, Restart, WorkerRecord
from coordinator.routing.views import Role, WorkerState
from engine.config import EngineSettings
from protos.ids import WorkerId

ALL_ROLES = frozenset(Role)
READY, STARTING, DRAINING = WorkerState.READY, WorkerState.STARTING, WorkerState.DRAINING


def pool(name: str, role: Role, replicas: int, engine: str = "a", ranks: int = 1) -> PoolTarget:
    return PoolTarget(name=name, role=role, replicas=replicas, engine=engine, ranks=ranks)


def worker(name: str, role: Role, state: WorkerState = READY, *, engine: str | None = "a", **known: object) -> WorkerRecord:
    """Of the pool in its name; the higher its number, the newer."""
    home, _, number = name.rpartition("-")
    defaults: dict[str, object] = {"pool": home, "created_s": float(number), "heartbeat_s": 100.0}
    if state is DRAINING:
        defaults["draining_until_s"] = 200.0
    return WorkerRecord(worker_id=WorkerId(name), role=role, state=state, engine=engine, **{**defaults, **known})  # type: ignore[arg-type]


P1, P2 = worker("prefill-1", Role.PREFILL), worker("prefill-2", Role.PREFILL)
D1, D2 = worker("decode-1", Role.DECODE), worker("decode-2", Role.DECODE)
SPLIT = (pool("prefill", Role.PREFILL, 1), pool("decode", Role.DECODE, 1))


def run(targets: tuple[PoolTarget, ...], workers: list[WorkerRecord], budget_ranks: int = 0) -> Assignment:
    return assign(targets, workers, budget_ranks=budget_ranks, whole_roles=ALL_ROLES)


def fates(assignment: Assignment) -> dict[str, str]:
    """`fate` or `fate pool` by worker."""
    return {
        worker_id: a.fate.value if a.target is None else f"{a.fate.value} {a.target.name}"
        for worker_id, a in assignment.workers.items()
    }


class TestRelabel:
    def test_two_phases_become_one_pool_without_a_start(self) -> None:
        done = run((pool("both", Role.COLOCATED, 2),), [P1, D1])
        assert fates(done) == {"prefill-1": "relabel both", "decode-1": "relabel both"}
        assert (done.missing, done.startable) == ({"both": 0}, {"both": 0})

    def test_a_pool_that_grows_takes_from_one_that_shrinks(self) -> None:
        done = run((pool("prefill", Role.PREFILL, 1), pool("decode", Role.DECODE, 2)), [P1, P2, D1])
        assert fates(done) == {"prefill-1": "keep prefill", "prefill-2": "relabel decode", "decode-1": "keep decode"}

    def test_a_role_changes_in_its_own_pool(self) -> None:
        done = run((pool("prefill", Role.COLOCATED, 2),), [P1, P2])
        assert fates(done) == {"prefill-1": "relabel prefill", "prefill-2": "relabel prefill"}

    def test_another_engine_is_never_relabelled(self) -> None:
        done = run(
            (pool("decode", Role.DECODE, 2, "b"), pool("prefill", Role.PREFILL, 1)),
            [P1, P2, worker("decode-1", Role.DECODE, engine="b")],
        )
        assert fates(done)["prefill-2"] == "stop"
        assert done.missing == {"decode": 1, "prefill": 0}

    def test_a_worker_that_has_not_been_heard_stays_where_it_is(self) -> None:
        """What a restarted coordinator does not know yet of a worker must cost nobody its engine, nor give it a wrong role."""
        silent = worker("prefill-1", Role.PREFILL, STARTING, engine=None)
        assert fates(run(SPLIT, [silent, D1])) == {"prefill-1": "keep prefill", "decode-1": "keep decode"}
        gone = run((pool("decode", Role.DECODE, 2),), [silent, D1])
        assert fates(gone) == {"prefill-1": "stop", "decode-1": "keep decode"}

    def test_one_that_serves_is_taken_before_one_that_starts(self) -> None:
        early = worker("prefill-1", Role.PREFILL, STARTING)
        done = run((pool("decode", Role.DECODE, 1),), [early, P2])
        assert fates(done) == {"prefill-1": "stop", "prefill-2": "relabel decode"}

    def test_one_that_starts_is_taken_before_another_is_started(self) -> None:
        early = worker("prefill-1", Role.PREFILL, STARTING)
        assert fates(run((pool("decode", Role.DECODE, 1),), [early])) == {"prefill-1": "relabel decode"}

    def test_one_that_drains_is_left_alone_and_keeps_its_place(self) -> None:
        going = worker("prefill-1", Role.PREFILL, DRAINING)
        done = run(SPLIT, [going, D1])
        assert fates(done) == {"prefill-1": "leaving", "decode-1": "keep decode"}
        assert done.missing == {"prefill": 0, "decode": 0}

    def test_of_too_many_the_cordoned_go_first_then_those_that_start_then_the_newest(self) -> None:
        cordoned, early = worker("prefill-1", Role.PREFILL, cordoned=True), worker("prefill-2", Role.PREFILL, STARTING)
        old, new = worker("prefill-3", Role.PREFILL), worker("prefill-4", Role.PREFILL)
        everyone = [cordoned, early, old, new]
        left = [
            {name for name, fate in fates(run((pool("prefill", Role.PREFILL, n),), everyone)).items() if fate == "stop"}
            for n in (3, 2, 1)
        ]
        assert left == [{"prefill-1"}, {"prefill-1", "prefill-2"}, {"prefill-1", "prefill-2", "prefill-4"}]

    def test_a_cordoned_surplus_worker_goes_and_serves_no_other_pool(self) -> None:
        """To cordon a worker and shrink its pool is how one asks for its end."""
        bad = worker("decode-1", Role.DECODE, cordoned=True)
        done = run((pool("prefill", Role.PREFILL, 2), pool("decode", Role.DECODE, 1)), [P1, bad, D2])
        assert fates(done) == {"prefill-1": "keep prefill", "decode-1": "stop", "decode-2": "keep decode"}
        assert done.missing == {"prefill": 1, "decode": 0}

    def test_a_cordoned_worker_of_a_pool_that_is_gone_keeps_its_engine(self) -> None:
        bad = worker("decode-1", Role.DECODE, cordoned=True)
        done = run((pool("both", Role.COLOCATED, 2),), [P1, bad])
        assert fates(done) == {"prefill-1": "relabel both", "decode-1": "relabel both"}


class TestReplace:
    """Pools whose engine arguments change: accelerators are freed first, and somebody serves meanwhile where that can be."""

    NEW = (pool("both", Role.COLOCATED, 2, "b"),)

    def test_one_goes_and_one_serves_until_a_successor_is_ready(self) -> None:
        first = run(self.NEW, [P1, D1])
        assert fates(first) == {"prefill-1": "stop", "decode-1": "hold"}
        assert (first.missing, first.startable) == ({"both": 2}, {"both": 0})
        freed = run(self.NEW, [D1])
        assert fates(freed) == {"decode-1": "hold"}
        assert freed.startable == {"both": 1}
        loading = run(self.NEW, [D1, worker("both-1", Role.COLOCATED, STARTING, engine="b")])
        assert fates(loading) == {"decode-1": "hold", "both-1": "keep both"}
        assert loading.startable == {"both": 0}
        served = run(self.NEW, [D1, worker("both-1", Role.COLOCATED, engine="b")])
        assert fates(served) == {"decode-1": "stop", "both-1": "keep both"}
        last = run(self.NEW, [worker("both-1", Role.COLOCATED, engine="b")])
        assert last.startable == {"both": 1}

    def test_nobody_is_held_back_where_no_successor_would_fit_beside_it(self) -> None:
        wide = (pool("both", Role.COLOCATED, 1, "b", ranks=2),)
        assert fates(run(wide, [P1, D1])) == {"prefill-1": "stop", "decode-1": "stop"}
        assert fates(run(wide, [P1, D1], budget_ranks=3)) == {"prefill-1": "stop", "decode-1": "hold"}

    def test_what_was_held_before_may_be_held_on_the_way(self) -> None:
        small = (pool("both", Role.COLOCATED, 1, "b"),)
        assert fates(run(small, [P1, D1])) == {"prefill-1": "stop", "decode-1": "hold"}
        assert fates(run(small, [D1])) == {"decode-1": "stop"}, "there is no room beside it"
        assert fates(run(small, [P1, D1], budget_ranks=2)) == {"prefill-1": "stop", "decode-1": "hold"}
        assert run(small, [D1], budget_ranks=2).startable == {"both": 1}

    def test_the_last_that_serves_of_a_pool_that_is_scaled_to_0_waits_for_its_successor(self) -> None:
        old = worker("old-1", Role.COLOCATED)
        targets = (pool("old", Role.COLOCATED, 0), pool("both", Role.COLOCATED, 1, "b"))
        first = run(targets, [old], budget_ranks=2)
        assert fates(first) == {"old-1": "hold"}
        assert first.startable == {"old": 0, "both": 1}
        loading = run(targets, [old, worker("both-2", Role.COLOCATED, STARTING, engine="b")], budget_ranks=2)
        assert fates(loading) == {"old-1": "hold", "both-2": "keep both"}
        served = run(targets, [old, worker("both-2", Role.COLOCATED, engine="b")], budget_ranks=2)
        assert fates(served) == {"old-1": "stop", "both-2": "keep both"}

    def test_a_phase_that_is_scaled_to_0_while_the_other_starts_again_waits_for_it(self) -> None:
        again = worker("prefill-3", Role.PREFILL, STARTING)
        targets = (pool("prefill", Role.PREFILL, 1), pool("decode", Role.DECODE, 0))
        assert fates(run(targets, [again, D1], budget_ranks=2)) == {"prefill-3": "keep prefill", "decode-1": "hold"}
        assert fates(run(targets, [P1, D1], budget_ranks=2)) == {"prefill-1": "keep prefill", "decode-1": "stop"}

    def test_a_phase_that_stays_alone_serves_only_where_it_is_offered_whole_requests(self) -> None:
        targets = (pool("prefill", Role.PREFILL, 1), pool("both", Role.COLOCATED, 1, "b"))
        whole = frozenset({Role.COLOCATED})
        old = worker("both-1", Role.COLOCATED)
        assert fates(assign(targets, [P1, old], budget_ranks=3, whole_roles=whole))["both-1"] == "hold"
        assert fates(assign(targets, [P1, old], budget_ranks=2, whole_roles=whole))["both-1"] == "stop", "no room beside it"
        assert fates(assign(targets, [P1, old], max_unavailable=1.0, whole_roles=ALL_ROLES))["both-1"] == "stop"

    def test_a_worker_that_stays_serves_so_another_may_be_away(self) -> None:
        done = run((pool("prefill", Role.PREFILL, 1), pool("decode", Role.DECODE, 1, "b")), [P1, D1])
        assert fates(done) == {"prefill-1": "keep prefill", "decode-1": "stop"}
        assert done.startable == {"prefill": 0, "decode": 0}

    def test_a_pool_that_only_grows_waits_for_nobody(self) -> None:
        going = worker("prefill-2", Role.PREFILL, DRAINING)
        done = run((pool("prefill", Role.PREFILL, 1), pool("decode", Role.DECODE, 3)), [P1, going, D1])
        assert done.startable == {"prefill": 0, "decode": 2}

    def test_without_targets_all_go(self) -> None:
        assert set(fates(run((), [P1, D1])).values()) == {"stop"}
        away = assign((), [P1, D1], whole_roles=ALL_ROLES, gateways_behind=True)
        assert set(fates(away).values()) == {"stop"}, "a system that ends waits for no gateway"

    def test_a_batch_waits_until_gateways_reach_the_successors(self) -> None:
        targets, fresh = (pool("decode", Role.DECODE, 2, "b"),), worker("decode-3", Role.DECODE, engine="b")
        for behind, fate in ((True, "hold"), (False, "stop")):
            done = assign(targets, [D1, fresh], max_unavailable=0.5, whole_roles=ALL_ROLES, gateways_behind=behind)
            assert fates(done) == {"decode-1": fate, "decode-3": "keep decode"}

    def test_a_pools_successors_take_the_accelerators_that_it_gave_up_itself(self) -> None:
        targets = (pool("prefill", Role.PREFILL, 4, "b"), pool("decode", Role.DECODE, 4, "b"))
        left = [worker(f"prefill-{n}", Role.PREFILL) for n in (1, 2, 3)] + [worker(f"decode-{n}", Role.DECODE) for n in (1, 2, 3)]
        done = assign(targets, left, max_unavailable=0.25, whole_roles=ALL_ROLES)
        assert (done.startable, set(fates(done).values())) == ({"prefill": 1, "decode": 1}, {"hold"})

    def test_of_two_small_pools_the_one_that_is_behind_goes_next(self) -> None:
        targets = (pool("prefill", Role.PREFILL, 2, "b"), pool("decode", Role.DECODE, 2, "b"))
        first = fates(run(targets, [P1, P2, D1, D2]))
        assert first == {"prefill-1": "hold", "prefill-2": "stop", "decode-1": "hold", "decode-2": "hold"}
        second = fates(run(targets, [P1, worker("prefill-3", Role.PREFILL, engine="b"), D1, D2]))
        assert second == {"prefill-1": "hold", "prefill-3": "keep prefill", "decode-1": "hold", "decode-2": "stop"}

    def test_who_serves_nobody_is_in_no_batch_and_goes_first(self) -> None:
        away = [worker("decode-3", Role.DECODE, cordoned=True), worker("decode-4", Role.DECODE, STARTING)]
        done = run((pool("decode", Role.DECODE, 4, "b"),), [D1, D2, *away])
        assert fates(done) == {"decode-1": "hold", "decode-2": "hold", "decode-3": "stop", "decode-4": "stop"}

    def test_a_cordoned_successor_holds_the_rest(self) -> None:
        fresh = [worker(f"decode-{n}", Role.DECODE, engine="b", cordoned=n == 3) for n in (3, 4)]
        done = assign((pool("decode", Role.DECODE, 3, "b"),), [D1, *fresh], max_unavailable=0.5, whole_roles=ALL_ROLES)
        assert fates(done) == {"decode-1": "hold", "decode-3": "keep decode", "decode-4": "keep decode"}
        assert done.startable == {"decode": 0}


class TestPlan:
    def test_every_word_of_it(self) -> None:
        targets = (
            pool("prefill", Role.PREFILL, 1),
            pool("decode", Role.DECODE, 2),
            pool("both", Role.COLOCATED, 2, "b"),
        )
        early = worker("old-1", Role.DECODE, engine="c")
        done = plan(run(targets, [P1, P2, D1, early]))
        assert [(s.action, s.worker_id, s.pool, s.new_pool) for s in done] == [
            ("keep", "prefill-1", "prefill", "prefill"),
            ("relabel", "prefill-2", "prefill", "decode"),
            ("keep", "decode-1", "decode", "decode"),
            ("restart", "old-1", "old", "both"),
            ("start", "", "", "both"),
        ]
        assert done[1].reason == "prefill (prefill) becomes decode (decode): its engine arguments are the same"
        assert done[3].reason == "pool old is gone; it serves until its turn"

    def test_a_worker_that_nobody_follows_is_stopped(self) -> None:
        assert plan(run((pool("decode", Role.DECODE, 1),), [D1, D2])) == [
            Step(action="keep", worker_id="decode-1", pool="decode", new_pool="decode"),
            Step(action="stop", worker_id="decode-2", pool="decode", reason="pool decode is scaled to 1"),
        ]

    def test_changed_arguments_say_so(self) -> None:
        [step] = plan(run((pool("decode", Role.DECODE, 1, "b"),), [D1]))
        assert (step.action, step.reason) == ("restart", "the engine arguments of pool decode have changed")


class TestUnsettled:
    def test_all_as_desired_is_settled(self) -> None:
        assert unsettled(run(SPLIT, [P1, D1]), {WorkerId("decode-1"): 0}) == []

    @pytest.mark.parametrize(
        ("workers", "legs", "line"),
        [
            ([P1], {}, "pool decode lacks 1 of its workers"),
            ([P1, worker("decode-1", Role.DECODE, STARTING)], {}, "decode-1 is starting"),
            ([P1, D1, worker("decode-2", Role.DECODE, DRAINING)], {}, "decode-2 drains"),
            ([P1, D1, D2], {}, "decode-2 goes: pool decode is scaled to 1"),
            ([P1, worker("decode-1", Role.DECODE, label_heard=False)], {}, "decode-1 takes the label decode"),
            ([P1, worker("both-1", Role.COLOCATED)], {}, "both-1 takes the label decode"),
            ([P1, D1], {WorkerId("decode-1"): 3}, "decode-1 still runs 3 legs of its former role"),
        ],
    )
    def test_what_is_missing_is_said(self, workers: list[WorkerRecord], legs: dict[WorkerId, int], line: str) -> None:
        assert unsettled(run(SPLIT, workers), legs) == [line]


def test_a_thousand_workers_are_assigned_to_the_pools_of_another_shape() -> None:
    crowd = [worker(f"prefill-{i}", Role.PREFILL) for i in range(500)] + [worker(f"decode-{i}", Role.DECODE) for i in range(500)]
    done = run((pool("prefill", Role.PREFILL, 100), pool("decode", Role.DECODE, 900)), crowd)
    said = list(fates(done).values())
    assert {fate: said.count(fate) for fate in set(said)} == {"keep prefill": 100, "relabel decode": 400, "keep decode": 500}
    assert Fate.STOP.value not in said


def test_the_order_in_which_arguments_are_written_is_no_difference() -> None:
    first, second = (
        {"gpu_memory_utilization": 0.5, "enforce_eager": True},
        {"enforce_eager": True, "gpu_memory_utilization": 0.5},
    )
    assert engine_key(EngineSettings(extra_arguments=first)) == engine_key(EngineSettings(extra_arguments=second))
    assert engine_key(EngineSettings(seed=1)) != engine_key(EngineSettings(seed=2))


class TestRestart:
    """Workers that are to be replaced by fresh ones: one of each pool at a time, and never the one that others need."""

    @staticmethod
    def due(name: str, role: Role = Role.DECODE, state: WorkerState = READY, how: Restart = Restart.IN_PLACE) -> WorkerRecord:
        return worker(name, role, state, restart=how)

    def test_the_oldest_of_each_pool_goes_when_all_of_it_serve(self) -> None:
        targets = (pool("prefill", Role.PREFILL, 2), pool("decode", Role.DECODE, 2))
        everyone = [self.due("prefill-1", Role.PREFILL), self.due("prefill-2", Role.PREFILL)]
        everyone += [self.due("decode-1"), self.due("decode-2")]
        done = run(targets, everyone)
        assert [name for name, fate in fates(done).items() if fate == "stop"] == ["prefill-1", "decode-1"]
        assert done.missing == {"prefill": 0, "decode": 0}, "their places are free when they are gone"

    def test_the_next_one_waits_until_the_successor_serves_and_gateways_reach_it(self) -> None:
        targets = (pool("decode", Role.DECODE, 2),)
        second = self.due("decode-2")
        for state in (DRAINING, STARTING):
            fate = fates(run(targets, [worker("decode-3", Role.DECODE, state), second]))["decode-2"]
            assert fate == "keep decode"
        both = [worker("decode-3", Role.DECODE), second]
        assert fates(run(targets, [second]))["decode-2"] == "keep decode", "the first has gone, its successor is to be started"
        assert fates(assign(targets, both, whole_roles=ALL_ROLES, gateways_behind=True))["decode-2"] == "keep decode"
        assert fates(assign(targets, both, whole_roles=ALL_ROLES))["decode-2"] == "stop"

    def test_two_pools_that_need_each_other_take_turns(self) -> None:
        """One worker of each phase: whole requests are served by the other one meanwhile."""
        first = run(SPLIT, [self.due("prefill-1", Role.PREFILL), self.due("decode-1")])
        assert fates(first) == {"prefill-1": "stop", "decode-1": "keep decode"}
        pair_only = assign(
            SPLIT, [self.due("prefill-1", Role.PREFILL), self.due("decode-1")], whole_roles=frozenset({Role.COLOCATED})
        )
        assert set(fates(pair_only).values()) == {"keep prefill", "keep decode"}

    def test_with_surge_the_successor_comes_first(self) -> None:
        targets = (pool("both", Role.COLOCATED, 1),)
        old = self.due("both-1", Role.COLOCATED, how=Restart.SURGE)
        first = run(targets, [old])
        assert (fates(first), first.startable) == ({"both-1": "keep both"}, {"both": 1})
        loading = run(targets, [old, worker("both-2", Role.COLOCATED, STARTING)])
        assert (fates(loading)["both-1"], loading.missing) == ("keep both", {"both": 0})
        served = run(targets, [old, worker("both-2", Role.COLOCATED)])
        assert fates(served) == {"both-1": "stop", "both-2": "keep both"}
        leaving = worker("both-1", Role.COLOCATED, DRAINING, restart=Restart.SURGE)
        last = run(targets, [leaving, worker("both-2", Role.COLOCATED)])
        assert (fates(last), last.missing) == ({"both-1": "leaving", "both-2": "keep both"}, {"both": 0})

    def test_a_pool_that_shrinks_is_rid_of_them_first_and_no_other_pool_takes_them(self) -> None:
        done = run((pool("prefill", Role.PREFILL, 2), pool("decode", Role.DECODE, 1)), [P1, self.due("decode-1"), D2])
        assert fates(done) == {"prefill-1": "keep prefill", "decode-1": "stop", "decode-2": "keep decode"}
        assert done.missing == {"prefill": 1, "decode": 0}

    def test_who_waits_for_its_turn_is_unsettled(self) -> None:
        assert unsettled(run((pool("decode", Role.DECODE, 1),), [self.due("decode-1")]), {}) == ["decode-1 is to be restarted"]
