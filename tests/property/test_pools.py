"""Whatever pools are asked for one after another, reconcile comes to them. A world of workers that start, relabel and drain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.pools.assign import assign
from coordinator.pools.plan import unsettled
from coordinator.pools.reconcile import (
    Actual,
    DrainWorker,
    ForgetWorker,
    ProbeWorker,
    PromoteWorker,
    RelabelWorker,
    ReservePlace,
    Rules,
    StandByWorker,
    StartWorker,
    StopWorker,
    reconcile,
)
from coordinator.pools.records import PoolTarget, SpareKind, WorkerRecord
from coordinator.routing.views import Role, WorkerState
from protos.ids import WorkerId

pytestmark = pytest.mark.timeout(120)

RULES = Rules(
    heartbeat_interval_s=1.0, heartbeat_limit_s=3.0, probe_interval_s=5.0, max_failed_probes=3, start_grace_s=1e6,
    restart_backoff_s=1.0, restart_backoff_max_s=60.0,
)  # fmt: skip
START_PASSES, DRAIN_PASSES, LIMIT = 3, 4, 200


class World:
    """Workers as the coordinator knows them, one step a pass; the engine of a worker is fixed for its life."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.started = 0
        self.stopped = 0

    def step(self, targets: list[PoolTarget], budget_ranks: int, max_unavailable: float = 0.0) -> None:
        self.now_s += 1.0
        actual = Actual(workers=list(self.workers.values()))
        actions = reconcile(targets, actual, self.now_s, RULES, budget_ranks=budget_ranks, max_unavailable=max_unavailable)
        touched = [action.worker_id for action in actions if not isinstance(action, StartWorker)]
        assert len(touched) == len(set(touched)), "one action per worker"
        by_name = {target.name: target for target in targets}
        for action in actions:
            match action:
                case StartWorker(pool, spare):
                    self._start(by_name[pool], spare)
                case DrainWorker(worker_id):
                    until_s = self.now_s + 1000.0
                    self._set(worker_id, state=WorkerState.DRAINING, draining_until_s=until_s, drain_since_s=self.now_s)
                case RelabelWorker(worker_id, pool, role, _, spare):
                    if self.workers[worker_id].state is WorkerState.PLACED:
                        self._set(worker_id, pool=pool, role=role)
                    else:
                        self._set(worker_id, pool=pool, role=role, spare=spare)
                case PromoteWorker(worker_id) if self.workers[worker_id].state is WorkerState.PLACED:
                    self._set(worker_id, spare=False, state=WorkerState.STARTING, created_s=self.now_s)
                case PromoteWorker(worker_id) | StandByWorker(worker_id):
                    self._set(worker_id, spare=isinstance(action, StandByWorker))
                case ReservePlace(worker_id):
                    self._set(worker_id, place_reserved=True)
                case StopWorker(worker_id):
                    del self.workers[worker_id]
                    self.stopped += 1
                case ProbeWorker(worker_id):
                    self._set(worker_id, probed_s=self.now_s)
                case ForgetWorker(worker_id):
                    del self.workers[worker_id]
                case _:
                    raise AssertionError(action)
        self._live()

    def _start(self, target: PoolTarget, spare: bool) -> None:
        self.started += 1
        placed = spare and target.spare_kind is SpareKind.PLACED
        worker_id = WorkerId(f"{target.name}-{self.started}")
        self.workers[worker_id] = WorkerRecord(
            worker_id=worker_id, pool=target.name, role=target.role, created_s=self.now_s, engine=target.engine,
            ranks=target.ranks, spare=spare, state=WorkerState.PLACED if placed else WorkerState.STARTING,
        )  # fmt: skip

    def _live(self) -> None:
        for worker_id, worker in list(self.workers.items()):
            if worker.state is WorkerState.STARTING and self.now_s - worker.created_s >= START_PASSES:
                self._set(worker_id, state=WorkerState.READY, probed_s=self.now_s)
            if worker.drain_since_s is not None and self.now_s - worker.drain_since_s >= DRAIN_PASSES:
                self._set(worker_id, idle_since_s=worker.idle_since_s or self.now_s)
            if worker.state is not WorkerState.PLACED:
                self._set(worker_id, heartbeat_s=self.now_s)

    def _set(self, worker_id: WorkerId, **known: object) -> None:
        self.workers[worker_id] = replace(self.workers[worker_id], **known)  # type: ignore[arg-type]

    def ranks(self) -> int:
        return sum(w.ranks for w in self.workers.values())

    def serving(self) -> int:
        return sum(w.state is WorkerState.READY for w in self.workers.values())

    def lose(self, number: int) -> None:
        """The process of one of them ends."""
        lost = [worker_id for worker_id, w in self.workers.items() if w.state is not WorkerState.PLACED]
        if lost:
            self._set(lost[number % len(lost)], state=WorkerState.DEAD, dead_reason="lost")

    def unsettled(self, targets: list[PoolTarget], budget_ranks: int) -> list[str]:
        alive = list(self.workers.values())
        return unsettled(assign(targets, alive, budget_ranks=budget_ranks, whole_roles=RULES.whole_roles), {})


def total(targets: list[PoolTarget]) -> int:
    return sum(t.workers * t.ranks for t in targets)


NO_SPARES = st.just((0, SpareKind.WARM))
SPARES = st.tuples(st.integers(0, 2), st.sampled_from(SpareKind))


def pool_sets(
    engines: str, ranks: dict[str, int], spares: st.SearchStrategy[tuple[int, SpareKind]] = NO_SPARES
) -> st.SearchStrategy[list[PoolTarget]]:
    """Up to three pools, at least one replica in all."""
    pool = st.tuples(st.sampled_from(Role), st.integers(0, 4), st.sampled_from(engines), spares)
    chosen = st.dictionaries(st.sampled_from(["a", "b", "c"]), pool, min_size=1)
    made = chosen.map(
        lambda pools: [
            PoolTarget(name=name, role=role, replicas=count, engine=engine, ranks=ranks[engine], spares=reserve, spare_kind=kind)
            for name, (role, count, engine, (reserve, kind)) in pools.items()
        ]
    )
    return made.filter(lambda targets: total(targets) > 0)


SHARES = st.sampled_from([0.0, 0.25, 0.5, 1.0])
RANKS = st.sampled_from([{"x": 1, "y": 2}, {"x": 3, "y": 2}])


@given(
    RANKS.flatmap(lambda ranks: st.lists(st.tuples(pool_sets("xy", ranks, SPARES), st.integers(0, 12)), min_size=1, max_size=4)),
    SHARES,
)
@settings(max_examples=200, deadline=None)
def test_every_set_is_reached_and_the_accelerators_are_never_exceeded(
    asked: list[tuple[list[PoolTarget], int]], share: float
) -> None:
    """Each set is left alone for some passes, the last one until nothing is to be done."""
    world, held = World(), 0
    targets: list[PoolTarget] = []
    budget_ranks = 0
    for targets, passes in asked:
        budget_ranks = max(total(targets), held)
        for _ in range(passes):
            before = world.ranks()
            world.step(targets, budget_ranks, share)
            if any(w.engine not in {t.engine for t in targets} for w in world.workers.values()):
                assert world.ranks() <= max(before, budget_ranks)
        held = max(total(targets), world.ranks())
    for _ in range(LIMIT):
        if not world.unsettled(targets, budget_ranks):
            break
        world.step(targets, budget_ranks, share)
    assert world.unsettled(targets, budget_ranks) == []
    have = sorted((w.pool, w.role, w.engine, w.spare, w.state is WorkerState.PLACED) for w in world.workers.values())
    assert have == sorted(
        (t.name, t.role, t.engine, number >= t.replicas, number >= t.replicas and t.spare_kind is SpareKind.PLACED)
        for t in targets
        for number in range(t.workers)
    )
    known = dict(world.workers)
    world.step(targets, budget_ranks, share)
    assert world.workers.keys() == known.keys(), "and stays so"


@given(pool_sets("x", {"x": 1}), pool_sets("x", {"x": 1}))
@settings(max_examples=100, deadline=None)
def test_with_one_engine_only_the_difference_is_started_or_stopped(old: list[PoolTarget], new: list[PoolTarget]) -> None:
    world = World()
    for _ in range(START_PASSES + 2):
        world.step(old, total(old))
    assert world.unsettled(old, total(old)) == []
    started, serving = world.started, []
    for _ in range(LIMIT):
        if not world.unsettled(new, max(total(old), total(new))):
            break
        world.step(new, max(total(old), total(new)))
        serving.append(world.serving())
    assert world.unsettled(new, max(total(old), total(new))) == []
    assert world.started - started == max(0, total(new) - total(old))
    assert world.stopped == max(0, total(old) - total(new))
    assert all(count >= min(total(old), total(new)) for count in serving), "no more than the surplus ever leaves"


@given(pool_sets("x", {"x": 1}), SHARES, st.booleans())
@settings(max_examples=100, deadline=None)
def test_of_each_pool_no_more_is_away_than_may_be(pools: list[PoolTarget], share: float, surge: bool) -> None:
    """All pools get other engine arguments. With one accelerator more and no share nobody is missed."""
    new = [replace(target, engine="y") for target in pools]
    world, budget_ranks = World(), total(pools) + surge
    for _ in range(START_PASSES + 2):
        world.step(pools, total(pools))
    for _ in range(LIMIT):
        if not world.unsettled(new, budget_ranks):
            break
        world.step(new, budget_ranks, share)
        assert world.ranks() <= budget_ranks
        for target in pools:
            serving = sum(w.pool == target.name and w.state is WorkerState.READY for w in world.workers.values())
            may_be_away = 0 if surge and not share else max(1, int(share * target.replicas))
            assert serving >= target.replicas - may_be_away
    assert world.unsettled(new, budget_ranks) == []


@given(pool_sets("x", {"x": 1}), pool_sets("y", {"y": 1}))
@settings(max_examples=100, deadline=None)
def test_with_room_for_one_beside_it_somebody_always_serves(old: list[PoolTarget], new: list[PoolTarget]) -> None:
    world, budget_ranks = World(), max(total(old), total(new))
    for _ in range(START_PASSES + 2):
        world.step(old, total(old))
    served = []
    for _ in range(LIMIT):
        if not world.unsettled(new, budget_ranks):
            break
        world.step(new, budget_ranks)
        served.append(world.serving())
    assert world.unsettled(new, budget_ranks) == []
    if budget_ranks > 1:
        assert min(served, default=1) >= 1


@given(pool_sets("xy", {"x": 1, "y": 2}, SPARES), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), max_size=6))
@settings(max_examples=100, deadline=None)
def test_whoever_is_lost_and_when_a_ready_spare_serves_in_the_same_pass(
    targets: list[PoolTarget], losses: list[tuple[int, int]]
) -> None:
    """So many passes, then that one is lost, and so on. In the end everything is there again."""
    world = World()
    for passes, lost in [*losses, (LIMIT, -1)]:
        for _ in range(passes):
            if lost < 0 and not world.unsettled(targets, total(targets)):
                break
            world.step(targets, total(targets))
            for target in targets:
                ready = [w for w in world.workers.values() if w.pool == target.name and w.state is WorkerState.READY]
                serving = sum(not w.spare for w in ready)
                # Who became ready after the pass takes over in the next one.
                late = sum(w.probed_s == world.now_s for w in ready)
                assert serving >= min(target.replicas, len(ready) - late)
        if lost >= 0:
            world.lose(lost)
    assert world.unsettled(targets, total(targets)) == []
    assert sum(w.spare for w in world.workers.values()) == sum(t.workers - t.replicas for t in targets)
