"""Target against actual, level by level; every case is one pass of a pure function."""

from __future__ import annotations

import pytest

from coordinator.pools.reconcile import (
    Actual,
    Backoff,
    DrainWorker,
    Ending,
    FenceWorker,
    ForgetWorker,
    ProbeWorker,
    RelabelWorker,
    Rules,
    StartWorker,
    StopWorker,
    check_scale,
    reconcile,
)
from coordinator.pools.records import PoolTarget, WorkerRecord
from coordinator.routing.views import Role, WorkerState
from protos.errors import Code, SplitpointError
from protos.ids import WorkerId

NOW = 1000.0
RULES = Rules(
    heartbeat_interval_s=1.0,
    heartbeat_limit_s=3.0,
    probe_interval_s=5.0,
    max_failed_probes=3,
    restart_backoff_s=1.0,
    restart_backoff_max_s=60.0,
    partition_grace_s=20.0,
)
ALL_ROLES = frozenset(Role)


def target(name: str = "decode", replicas: int = 1, role: Role = Role.DECODE) -> PoolTarget:
    return PoolTarget(name=name, role=role, replicas=replicas)


def worker(name: str = "decode-1", state: WorkerState = WorkerState.READY, **known: object) -> WorkerRecord:
    pool = name.rpartition("-")[0]
    role = Role(pool) if pool in {r.value for r in Role} else Role.DECODE
    defaults: dict[str, object] = {"pool": pool, "role": role, "created_s": NOW - 100}
    if state is not WorkerState.STARTING:
        defaults |= {"heartbeat_s": NOW - 0.5, "probed_s": NOW - 1}
    return WorkerRecord(worker_id=WorkerId(name), state=state, **{**defaults, **known})  # type: ignore[arg-type]


def run(targets: list[PoolTarget], workers: list[WorkerRecord], backoff: dict[str, Backoff] | None = None) -> list[object]:
    return list(reconcile(targets, Actual(workers=workers, backoff=backoff or {}), NOW, RULES))


def test_nothing_to_do() -> None:
    assert run([target()], [worker()]) == []


def test_what_is_missing_is_started_at_once() -> None:
    assert run([target(replicas=3)], [worker()]) == [StartWorker("decode")] * 2


def test_pools_are_independent() -> None:
    both = [target("prefill", 1, Role.PREFILL), target("decode", 2)]
    assert run(both, [worker("prefill-1"), worker("decode-1")]) == [StartWorker("decode")]


def test_a_starting_worker_counts() -> None:
    assert run([target()], [worker(state=WorkerState.STARTING)]) == []


def test_a_dead_worker_is_forgotten_and_replaced_in_one_pass() -> None:
    actions = run([target()], [worker(state=WorkerState.DEAD, dead_reason="killed")])
    assert actions == [ForgetWorker(WorkerId("decode-1"), "killed"), StartWorker("decode")]


def test_surplus_is_drained_newest_first() -> None:
    old, new = worker("decode-1", created_s=NOW - 100), worker("decode-2", created_s=NOW - 50)
    [action] = run([target(replicas=1)], [old, new])
    assert isinstance(action, DrainWorker)
    assert action.worker_id == "decode-2"


def test_a_starting_worker_goes_before_a_ready_one_and_is_stopped_outright() -> None:
    starting = worker("decode-1", WorkerState.STARTING)
    [action] = run([target(replicas=1)], [starting, worker("decode-2")])
    assert isinstance(action, StopWorker)
    assert action.worker_id == "decode-1"


def test_a_worker_that_is_drained_before_it_serves_is_stopped_outright() -> None:
    """It beats once before its engine loads: as a draining one it would be silent, and fenced for it."""
    early = worker(state=WorkerState.STARTING, created_s=NOW - 10, draining_until_s=NOW + 100)
    (action,) = run([target()], [early])
    assert isinstance(action, StopWorker)
    assert (action.worker_id, action.timed_out) == ("decode-1", False)


def test_a_draining_worker_keeps_its_place_until_it_is_gone() -> None:
    draining = worker(state=WorkerState.DRAINING, drain_since_s=NOW - 1, draining_until_s=NOW + 60)
    assert run([target(replicas=1)], [draining]) == []


def test_scaling_up_and_down_again_before_the_start_is_done_leaves_the_ready_worker_alone() -> None:
    up = run([target(replicas=2)], [worker("decode-1")])
    assert up == [StartWorker("decode")]
    [down] = run([target(replicas=1)], [worker("decode-1"), worker("decode-2", WorkerState.STARTING)])
    assert isinstance(down, StopWorker)
    assert down.worker_id == "decode-2"


def test_workers_of_a_pool_that_is_gone_are_ended() -> None:
    actions = run([], [worker("decode-1"), worker("decode-2", WorkerState.STARTING)])
    assert [type(a) for a in actions] == [DrainWorker, StopWorker]


class TestEnding:
    """A shutdown: gateways first, and what they have taken is still served."""

    def test_while_gateways_finish_workers_stay_and_nothing_is_started(self) -> None:
        actual = Actual(workers=[worker()])
        targets = [target(replicas=2), target("prefill", 1, Role.PREFILL)]
        assert reconcile(targets, actual, NOW, RULES, ending=Ending.GATEWAYS) == []

    def test_then_all_workers_are_drained(self) -> None:
        actual = Actual(workers=[worker(), worker("prefill-1")])
        actions = reconcile([target(replicas=2)], actual, NOW, RULES, ending=Ending.WORKERS)
        assert [(type(a), a.worker_id) for a in actions] == [  # type: ignore[union-attr]
            (DrainWorker, "decode-1"),
            (DrainWorker, "prefill-1"),
        ]


class TestLiveness:
    @pytest.mark.parametrize(("lived_s", "fenced"), [(325.0, False), (900.0, False), (931.0, True)])
    def test_a_start_may_take_what_its_own_engine_may_take(self, lived_s: float, fenced: bool) -> None:
        slow = worker(state=WorkerState.STARTING, created_s=NOW - lived_s, start_timeout_s=900.0)
        assert [type(a) for a in run([target()], [slow])] == [FenceWorker] * fenced

    def test_a_late_heartbeat_is_followed_by_a_probe_not_by_death(self) -> None:
        late = worker(heartbeat_s=NOW - 3.1, probed_s=NOW - 3)
        assert run([target()], [late]) == [ProbeWorker(WorkerId("decode-1"))]

    def test_late_and_silent_is_fenced(self) -> None:
        silent = worker(heartbeat_s=NOW - 5, probed_s=NOW - 1, failed_probes=1)
        [action] = run([target()], [silent])
        assert isinstance(action, FenceWorker)
        assert "5.0 s" in action.reason

    def test_late_but_answering_lives(self) -> None:
        answering = worker(heartbeat_s=NOW - 5, probed_s=NOW - 0.5)
        assert run([target()], [answering]) == []

    def test_late_but_answering_is_probed_again(self) -> None:
        answering = worker(heartbeat_s=NOW - 9, probed_s=NOW - 1.5)
        assert run([target()], [answering]) == [ProbeWorker(WorkerId("decode-1"))]

    def test_a_probe_from_before_the_silence_does_not_condemn(self) -> None:
        old_failure = worker(heartbeat_s=NOW - 4, probed_s=NOW - 5, failed_probes=1)
        assert run([target()], [old_failure]) == [ProbeWorker(WorkerId("decode-1"))]

    def test_ready_workers_are_probed_from_time_to_time(self) -> None:
        assert run([target()], [worker(probed_s=NOW - 5.1)]) == [ProbeWorker(WorkerId("decode-1"))]

    def test_a_failed_probe_is_soon_repeated(self) -> None:
        assert run([target()], [worker(probed_s=NOW - 1.1, failed_probes=1)]) == [ProbeWorker(WorkerId("decode-1"))]

    def test_a_silent_host_is_given_time_and_probed_meanwhile(self) -> None:
        silent = {"heartbeat_s": NOW - 15, "failed_probes": 9, "host_silent": True}
        assert run([target()], [worker(probed_s=NOW - 2, **silent)]) == [ProbeWorker(WorkerId("decode-1"))]
        assert run([target()], [worker(probed_s=NOW - 0.5, **silent)]) == []

    def test_a_host_that_stays_silent_loses_its_workers(self) -> None:
        silent = worker(heartbeat_s=NOW - 21, probed_s=NOW - 0.5, failed_probes=9, host_silent=True)
        (action,) = run([target()], [silent])
        assert isinstance(action, FenceWorker)

    def test_one_that_drains_is_probed_until_it_answers_again(self) -> None:
        drains = {"state": WorkerState.DRAINING, "drain_since_s": NOW - 9, "draining_until_s": NOW + 99}
        assert run([target(replicas=0)], [worker(probed_s=NOW - 5.1, failed_probes=1, **drains)]) == [
            ProbeWorker(WorkerId("decode-1"))
        ]
        assert run([target(replicas=0)], [worker(probed_s=NOW - 1.1, failed_probes=1, **drains)]) == [], "its drain goes on"
        assert run([target(replicas=0)], [worker(probed_s=NOW - 5.1, **drains)]) == []

    def test_one_that_a_former_coordinator_knew_is_probed_at_once(self) -> None:
        assert run([target()], [worker(created_s=NOW, heartbeat_s=None, probed_s=None)]) == [ProbeWorker(WorkerId("decode-1"))]
        assert run([target()], [worker(created_s=NOW, heartbeat_s=None, probed_s=NOW)]) == []

    def test_beating_but_deaf_is_fenced(self) -> None:
        [action] = run([target()], [worker(failed_probes=3)])
        assert isinstance(action, FenceWorker)

    def test_a_starting_worker_owes_no_heartbeat(self) -> None:
        assert run([target()], [worker(state=WorkerState.STARTING, created_s=NOW - 329)]) == []

    def test_a_start_that_takes_too_long_is_fenced(self) -> None:
        [action] = run([target()], [worker(state=WorkerState.STARTING, created_s=NOW - 331)])
        assert isinstance(action, FenceWorker)

    def test_a_stopped_worker_is_fenced_while_it_drains(self) -> None:
        stopped = worker(
            state=WorkerState.DRAINING, drain_since_s=NOW - 9, draining_until_s=NOW + 99, heartbeat_s=NOW - 8,
            probed_s=NOW - 1, failed_probes=1,
        )  # fmt: skip
        assert [type(a) for a in run([target()], [stopped])] == [FenceWorker]

    def test_a_fenced_worker_keeps_its_place_until_its_death_is_confirmed(self) -> None:
        [action] = run([target()], [worker(failed_probes=3)])
        assert not isinstance(action, StartWorker)


class TestDrain:
    def draining(self, **known: object) -> WorkerRecord:
        return worker("decode-1", WorkerState.DRAINING, **{"draining_until_s": NOW + 60, **known})

    def test_is_told_until_confirmed(self) -> None:
        [action] = run([target(replicas=0)], [self.draining()])
        assert isinstance(action, DrainWorker)

    def test_one_that_drains_by_itself_is_given_an_end(self) -> None:
        [action] = run([target()], [self.draining(drain_since_s=NOW - 3600, draining_until_s=None)])
        assert isinstance(action, DrainWorker)

    def test_waits_while_something_is_left(self) -> None:
        assert run([target(replicas=0)], [self.draining(drain_since_s=NOW - 30)]) == []

    def test_one_idle_heartbeat_is_not_enough(self) -> None:
        assert run([target(replicas=0)], [self.draining(drain_since_s=NOW - 30, idle_since_s=NOW - 1.9)]) == []

    def test_stops_when_idle(self) -> None:
        [action] = run([target(replicas=0)], [self.draining(drain_since_s=NOW - 30, idle_since_s=NOW - 2)])
        assert action == StopWorker(WorkerId("decode-1"), "drained: no requests, no leases")

    @pytest.mark.parametrize("since_s", [None, NOW - 30])
    def test_time_out_ends_it_and_says_so(self, since_s: float | None) -> None:
        [action] = run([target(replicas=0)], [self.draining(drain_since_s=since_s, draining_until_s=NOW - 0.1)])
        assert isinstance(action, StopWorker)
        assert action.timed_out


class TestBackoff:
    def test_doubles_up_to_its_limit(self) -> None:
        backoff, waits = Backoff(), []
        for _ in range(9):
            backoff = backoff.failed(NOW)
            waits.append(backoff.wait_s(NOW, RULES))
        assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    def test_no_start_before_its_time(self) -> None:
        assert run([target()], [], {"decode": Backoff(failures=2, last_failure_s=NOW - 1.9)}) == []

    def test_one_at_a_time_after_a_failure(self) -> None:
        assert run([target(replicas=3)], [], {"decode": Backoff(failures=2, last_failure_s=NOW - 2)}) == [StartWorker("decode")]

    def test_another_pool_is_not_held_up(self) -> None:
        pools = [target("decode"), target("prefill", 1, Role.PREFILL)]
        assert run(pools, [], {"decode": Backoff(failures=9, last_failure_s=NOW)}) == [StartWorker("prefill")]

    def test_very_many_failures_do_not_overflow(self) -> None:
        assert Backoff(failures=10**6, last_failure_s=NOW).wait_s(NOW, RULES) == 60


class TestScale:
    POOLS = (target("prefill", 1, Role.PREFILL), target("decode", 1, Role.DECODE))

    def refused(self, *arguments: object) -> SplitpointError:
        with pytest.raises(SplitpointError) as caught:
            check_scale(*arguments)  # type: ignore[arg-type]
        return caught.value

    def test_new_target(self) -> None:
        assert check_scale(self.POOLS, "decode", 3, None, ALL_ROLES) == target("decode", 3)

    def test_unknown_pool_names_the_known_ones(self) -> None:
        error = self.refused(self.POOLS, "decod", 3, None, ALL_ROLES)
        assert error.code is Code.NOT_FOUND
        assert "prefill, decode" in error.message

    def test_guard(self) -> None:
        assert check_scale(self.POOLS, "decode", 2, 1, ALL_ROLES).replicas == 2
        assert self.refused(self.POOLS, "decode", 2, 5, ALL_ROLES).code is Code.CONFLICT

    def test_a_phase_may_go_to_zero_while_the_other_serves_whole_requests(self) -> None:
        assert check_scale(self.POOLS, "prefill", 0, None, ALL_ROLES).replicas == 0

    def test_a_phase_may_not_go_to_zero_when_nobody_serves_whole_requests(self) -> None:
        error = self.refused(self.POOLS, "decode", 0, None, frozenset({Role.COLOCATED}))
        assert (error.code, error.param) == (Code.CONFLICT, "replicas")

    def test_the_last_pool_may_not_go_to_zero(self) -> None:
        pools = (target("prefill", 0, Role.PREFILL), target("decode", 1, Role.DECODE))
        assert self.refused(pools, "decode", 0, None, ALL_ROLES).code is Code.CONFLICT


class TestRelabel:
    POOL = (target("both", 2, Role.COLOCATED),)
    BOTH = (worker("prefill-1", engine=""), worker("decode-1", engine=""))

    def test_all_of_a_pass_change_together_also_one_whose_probe_is_due(self) -> None:
        due = worker("decode-1", engine="", probed_s=NOW - 5.1)
        actions = run(list(self.POOL), [self.BOTH[0], due])
        assert {(type(a), a.worker_id, a.pool, a.role) for a in actions} == {  # type: ignore[attr-defined]
            (RelabelWorker, "prefill-1", "both", Role.COLOCATED),
            (RelabelWorker, "decode-1", "both", Role.COLOCATED),
        }
        assert len(actions) == 2

    def test_one_that_is_to_be_fenced_is_fenced(self) -> None:
        actions = run(list(self.POOL), [self.BOTH[0], worker("decode-1", engine="", failed_probes=3)])
        assert {a.worker_id: type(a) for a in actions} == {"prefill-1": RelabelWorker, "decode-1": FenceWorker}  # type: ignore[attr-defined]

    def test_a_worker_is_told_until_its_heartbeats_carry_the_label(self) -> None:
        unheard = worker(label_heard=False)
        assert [type(a) for a in run([target()], [unheard])] == [RelabelWorker]
        early = worker(state=WorkerState.STARTING, label_heard=False)
        assert run([target()], [early]) == []

    def test_a_successor_is_started_when_there_is_room(self) -> None:
        new = target("both", 1, Role.COLOCATED)
        old = worker("decode-1", engine="other")
        assert [type(a) for a in run([new], [old])] == [DrainWorker]
        assert run([new], []) == [StartWorker("both")]
