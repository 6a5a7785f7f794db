"""Routing: who is chosen, who is passed over and why, and how long a decision takes."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from coordinator.routing.breaker import Breakers, PairKey
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import (
    FailedRoute,
    LocalGoal,
    PairGoal,
    PairRoute,
    Refusal,
    SoloGoal,
    SoloRoute,
    first_goals,
    goals_after_failure,
    workers_of,
)
from coordinator.routing.pairs import PairFinder
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerState, WorkerView
from protos.errors import Code
from tests.support.views import worker_view

NOW = 100.0


def router(*views: WorkerView, **settings) -> Router:
    made = Router(RoutingSettings(**settings), random.Random(1), transports=("ucx", "grpc"))
    made.update(views)
    return made


def decode_view(name: str, **changes) -> WorkerView:
    return worker_view(name, Role.DECODE, **changes)


def pair_key(prefill: str, decode: str, transport: str) -> PairKey:
    return PairKey(worker_view(prefill).incarnation, worker_view(decode).incarnation, transport)


def pair(made: Router, **goal) -> PairRoute:
    route = made.choose((PairGoal(prompt_tokens=goal.pop("prompt_tokens", 10), **goal),), NOW)
    assert isinstance(route, PairRoute), route
    return route


def refused(made: Router, *goals) -> Refusal:
    refusal = made.choose(goals or (PairGoal(prompt_tokens=10),), NOW)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def test_a_pair_is_a_prefill_and_a_decode_worker_of_one_fingerprint() -> None:
    made = router(worker_view("p1", fingerprint=b"a"), worker_view("p2", fingerprint=b"b"), decode_view("d2", fingerprint=b"b"))
    route = pair(made)
    assert (route.prefill.worker_id, route.decode.worker_id, route.transport) == ("p2", "d2", "ucx")


def test_no_compatible_pair_is_refused_by_name() -> None:
    refusal = refused(router(worker_view("p", fingerprint=b"a"), decode_view("d", fingerprint=b"b")))
    assert refusal.reasons["incompatible"] == 1
    assert refusal.to_error().code is Code.NO_WORKER
    assert "incompatible" in refusal.message


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING, WorkerState.DEAD])
def test_only_ready_workers_are_offered_legs(state: WorkerState) -> None:
    made = router(worker_view("p", state=state), decode_view("d"))
    assert isinstance(made.choose((PairGoal(prompt_tokens=1),), NOW), Refusal)
    assert not made.has_pair()


def test_a_spare_is_offered_nothing_until_it_is_none_and_may_end_what_it_has() -> None:
    spare = replace(worker_view("p1"), spare=True)
    made = router(spare, worker_view("p2"), decode_view("d1"))
    assert {pair(made).prefill.worker_id for _ in range(20)} == {"p2"}
    assert isinstance(made.choose((LocalGoal(incarnation=spare.incarnation),), NOW), SoloRoute)
    assert refused(router(spare, decode_view("d1")))
    made.update([worker_view("p1"), decode_view("d1")])
    assert pair(made).prefill.worker_id == "p1"


def test_a_cordoned_worker_is_offered_nothing_new_and_may_end_what_it_has() -> None:
    view = worker_view("p1", cordoned=True)
    made = router(view, worker_view("p2"), decode_view("d1"))
    assert {pair(made).prefill.worker_id for _ in range(20)} == {"p2"}
    assert isinstance(made.choose((LocalGoal(incarnation=view.incarnation),), NOW), SoloRoute)
    assert refused(router(view, decode_view("d1")))


def test_excluded_workers_are_not_chosen_again() -> None:
    made = router(worker_view("p1"), worker_view("p2"), decode_view("d"))
    for _ in range(20):
        assert pair(made, exclude=frozenset({worker_view("p1").incarnation})).prefill.worker_id == "p2"
    refusal = refused(made, PairGoal(prompt_tokens=1, exclude=frozenset({worker_view("d").incarnation})))
    assert refusal.reasons["excluded"] >= 1


def test_the_preferred_prefill_worker_is_taken_whatever_its_load() -> None:
    made = router(worker_view("p1"), worker_view("p2"), decode_view("d"))
    p1 = worker_view("p1").incarnation
    made.load.charge(p1, 10_000)
    assert pair(made).prefill.worker_id == "p2"
    assert pair(made, prefer_prefill=p1).prefill.worker_id == "p1"
    assert pair(made, prefer_prefill=p1, exclude=frozenset({p1})).prefill.worker_id == "p2"


def test_transport_is_the_first_that_both_ends_have_and_a_later_one_is_noted() -> None:
    made = router(worker_view("p"), decode_view("d", transports=("grpc",)))
    route = pair(made)
    assert (route.transport, route.notes) == ("grpc", ("transport_fallback",))
    assert pair(made, transport="grpc").notes == (), "asked for is no fallback"
    assert refused(made, PairGoal(prompt_tokens=1, transport="ucx")).reasons["transport_missing"] >= 1


def test_a_pair_with_the_preferred_transport_wins_over_a_less_loaded_one_without() -> None:
    made = router(worker_view("p"), decode_view("d1", transports=("grpc",)), decode_view("d2", running=5))
    assert pair(made).decode.worker_id == "d2"


def test_a_prompt_that_staging_cannot_hold_takes_one_worker_and_says_so() -> None:
    made = router(worker_view("p"), decode_view("d", max_transfer_tokens=8))
    goals = first_goals("split", prompt_tokens=9, transport=None, strict=False)
    route = made.choose(goals, NOW)
    assert isinstance(route, SoloRoute)
    assert route.notes == ("prompt_exceeds_transfer",)
    assert isinstance(made.choose(first_goals("split", prompt_tokens=9, transport=None, strict=True), NOW), Refusal)
    assert isinstance(made.choose(first_goals("split", prompt_tokens=8, transport=None, strict=False), NOW), PairRoute)


def test_without_a_pair_one_worker_serves_and_it_is_noted() -> None:
    route = router(decode_view("d")).choose(first_goals("split", prompt_tokens=9, transport=None, strict=False), NOW)
    assert isinstance(route, SoloRoute)
    assert route.notes == ("no_pair",)


def test_whole_requests_go_to_colocated_workers_first() -> None:
    made = router(worker_view("p"), decode_view("d"), worker_view("c", Role.COLOCATED, running=50))
    assert made.choose((SoloGoal(),), NOW).worker.worker_id == "c"  # type: ignore[union-attr]
    seen: Counter[str] = Counter()
    made = router(worker_view("p"), decode_view("d"))
    for _ in range(100):
        seen[made.choose((SoloGoal(),), NOW).worker.worker_id] += 1  # type: ignore[union-attr]
    assert min(seen["p"], seen["d"]) > 25, "the same two workers serve both paths"


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "round_robin", "prefix_aware", "session_affinity"])
def test_a_label_for_a_whole_request_is_kept_while_some_worker_has_it(policy: str) -> None:
    made = router(worker_view("p1"), worker_view("p2", running=9), decode_view("d", running=90), policy=policy)
    ask = made.ask(range(64), "session")
    goals = first_goals("colocated", prompt_tokens=64, transport=None, strict=False, solo_role=Role.DECODE)
    assert {workers_of(made.choose(goals, NOW, ask))[0].worker_id for _ in range(20)} == {"d"}  # type: ignore[arg-type]
    found = made.preview_solo(SoloGoal(), NOW, ask)
    assert sorted(route.worker.role for route in found) == [Role.DECODE, Role.PREFILL], "one of each label"
    made.update([worker_view("p1"), decode_view("d", state=WorkerState.DRAINING)])
    assert workers_of(made.choose(goals, NOW, ask))[0].worker_id == "p1"  # type: ignore[arg-type]
    assert [route.worker.worker_id for route in made.preview_solo(SoloGoal(), NOW, ask)] == ["p1"]


def test_labels_of_later_tiers_and_suspected_workers_are_offered_where_nobody_else_is_left() -> None:
    made = router(worker_view("p"), decode_view("d"), worker_view("c", Role.COLOCATED), breaker_failures=1)
    ask = made.ask(range(8))

    def offered(**goal) -> list[str]:
        return [route.worker.worker_id for route in made.preview_solo(SoloGoal(**goal), NOW, ask)]

    assert offered() == ["c"]
    assert offered(pools=frozenset({"prefill"})) == ["p"]
    assert offered(exclude=frozenset({worker_view("c").incarnation})) == ["d", "p"]
    made.breakers.failed(worker_view("c").incarnation, NOW)
    made.breakers.failed(worker_view("d").incarnation, NOW)
    assert offered() == ["p"], "a healthy worker of a later tier goes before a suspected one"
    made.breakers.failed(worker_view("p").incarnation, NOW)
    assert offered() == ["c"], "with everybody suspected the order is the tiers' again"
    assert offered(pools=frozenset({"nobody"})) == []


def test_local_goal_needs_the_very_worker_ready() -> None:
    d = worker_view("d").incarnation
    assert router(decode_view("d")).choose((LocalGoal(incarnation=d),), NOW).local  # type: ignore[union-attr]
    drained = router(decode_view("d", state=WorkerState.DRAINING))
    assert isinstance(drained.choose((LocalGoal(incarnation=d),), NOW), Refusal)


# Load -----------------------------------------------------------------------------------------------------------------


def test_light_traffic_is_shared_between_equals() -> None:
    made = router(worker_view("p1"), worker_view("p2"), decode_view("d"))
    seen: Counter[str] = Counter(pair(made).prefill.worker_id for _ in range(200))
    assert 80 <= seen["p1"] <= 120


def test_tokens_in_flight_decide_and_are_given_back() -> None:
    made = router(worker_view("p1"), worker_view("p2"), decode_view("d"))
    p1 = worker_view("p1").incarnation
    made.load.charge(p1, 100)
    assert {pair(made).prefill.worker_id for _ in range(10)} == {"p2"}
    made.load.discharge(p1, 100)
    assert {pair(made).prefill.worker_id for _ in range(30)} == {"p1", "p2"}
    assert made.load.total_in_flight_tokens() == 0


def test_heartbeats_count_what_other_gateways_send() -> None:
    made = router(worker_view("p1", waiting=3), worker_view("p2"), decode_view("d"), heartbeat_request_tokens=100)
    assert pair(made).prefill.worker_id == "p2"
    made.load.charge(worker_view("p2").incarnation, 301)
    assert pair(made).prefill.worker_id == "p1"


def test_a_slow_worker_gets_its_share_of_the_work() -> None:
    """Two workers, one five times slower: in-flight tokens alone must send most work to the fast one."""
    made = router(worker_view("fast"), worker_view("slow"), decode_view("d"))
    left: dict[str, list[float]] = {"fast-i": [], "slow-i": []}
    seen: Counter[str] = Counter()
    for tick in range(600):
        for name, ends in left.items():
            for end in [e for e in ends if e <= tick]:
                ends.remove(end)
                made.load.discharge(name, 100)
        chosen = pair(made).prefill.incarnation
        seen[chosen] += 1
        made.load.charge(chosen, 100)
        left[chosen].append(tick + (10 if chosen == "fast-i" else 50))
    assert seen["slow-i"] / 600 <= 0.3


def test_a_worker_whose_stream_is_down_is_the_last_choice_but_one() -> None:
    made = router(worker_view("p1"), worker_view("p2"), decode_view("d"))
    p1 = worker_view("p1").incarnation
    made.load.set_reachable(p1, False)
    made.load.charge(worker_view("p2").incarnation, 10**6)
    assert pair(made).prefill.worker_id == "p2"
    assert pair(made, exclude=frozenset({worker_view("p2").incarnation})).prefill.worker_id == "p1"
    made.load.set_reachable(p1, True)
    assert pair(made).prefill.worker_id == "p1"


def test_a_worker_that_answers_the_coordinator_nothing_is_the_last_choice() -> None:
    views = [worker_view("p1"), worker_view("p2"), decode_view("d")]
    made = router(replace(views[0], silent=True), *views[1:])
    made.load.charge(views[1].incarnation, 10**6)
    assert pair(made).prefill.worker_id == "p2"
    assert pair(made, exclude=frozenset({views[1].incarnation})).prefill.worker_id == "p1", "better than none"
    made.load.set_reachable(views[0].incarnation, True)
    assert pair(made).prefill.worker_id == "p2", "its stream may not have noticed yet"
    made.update(views)
    assert pair(made).prefill.worker_id == "p1"


def silent(view: WorkerView) -> WorkerView:
    return replace(view, silent=True)


def solo(made: Router, role: Role | None = None) -> SoloRoute:
    route = made.choose((SoloGoal(role=role),), NOW)
    assert isinstance(route, SoloRoute), route
    return route


def test_one_that_answers_is_taken_in_whatever_tier() -> None:
    colocated = worker_view("c", Role.COLOCATED)
    made = router(silent(colocated), worker_view("p"), decode_view("d"))
    seen = Counter(solo(made).worker.worker_id for _ in range(50))
    assert set(seen) == {"p", "d"}
    assert solo(made).notes == ()
    alone = router(silent(colocated), silent(worker_view("p")), silent(decode_view("d")))
    assert solo(alone).worker.worker_id == "c", "where all are silent, tiers are what they were"
    assert solo(alone).notes == ("last_resort_taken",)


def test_a_pair_that_answers_is_taken_in_whatever_group_and_over_whatever_transport() -> None:
    a, b = (worker_view("pa", fingerprint=b"a"), decode_view("da", fingerprint=b"a")), (
        worker_view("pb", fingerprint=b"b", transports=("grpc",)), decode_view("db", fingerprint=b"b")
    )  # fmt: skip
    for first in ((a[0], silent(a[1])), (silent(a[0]), a[1])):
        route = pair(router(*first, *b))
        assert (route.prefill.worker_id, route.decode.worker_id) == ("pb", "db")
        assert route.notes == ("transport_fallback",)
    one_each = pair(router(silent(worker_view("p1")), worker_view("p2"), silent(decode_view("d"))))
    assert (one_each.prefill.worker_id, one_each.notes) == ("p2", ("last_resort_taken",)), "of the ends as few as can be"


def test_a_prompt_that_is_computed_stays_where_it_is() -> None:
    p1, p2 = silent(worker_view("p1")), worker_view("p2")
    made = router(p1, p2, decode_view("d1"), decode_view("d2"))
    assert pair(made, prefer_prefill=p1.incarnation).prefill.worker_id == "p1", "it has just answered this gateway"


def test_silence_is_no_reason_of_a_refusal() -> None:
    made = router(silent(worker_view("p")), decode_view("d", transports=("grpc",)))
    refusal = made.choose((PairGoal(prompt_tokens=1, transport="ucx"),), NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.reasons["transport_missing"] == 1
    assert "last_resort" not in refusal.reasons


# Breakers -------------------------------------------------------------------------------------------------------------


def test_a_breaker_opens_after_faults_in_a_row_and_lets_one_try_after_its_cooldown() -> None:
    breakers = Breakers(failures=3, cooldown_s=10.0)
    for _ in range(2):
        assert not breakers.failed("w", 0.0)
    breakers.succeeded("w")
    for _ in range(2):
        breakers.failed("w", 0.0)
    assert breakers.allows("w", 0.0)
    assert breakers.failed("w", 0.0), "the third in a row opens it"
    assert not breakers.allows("w", 9.9)
    assert breakers.allows("w", 10.0)
    breakers.chosen("w", 10.0)
    assert not breakers.allows("w", 10.1), "only one request tries"
    assert breakers.allows("w", 20.0), "an attempt that never reports does not keep it out for ever"
    assert breakers.succeeded("w")
    assert breakers.allows("w", 20.0)
    assert not breakers
    assert not breakers.succeeded("w")


def test_a_broken_pair_is_avoided_and_its_members_are_not() -> None:
    made = router(worker_view("p1"), worker_view("p2"), decode_view("d1"), decode_view("d2"), breaker_failures=1)
    broken = pair_key("p1", "d1", "ucx")
    made.breakers.failed(broken, NOW)
    seen = {(r.prefill.incarnation, r.decode.incarnation, r.transport) for r in (pair(made) for _ in range(100))}
    assert broken not in seen
    assert len(seen) == 3
    assert {transport for _, _, transport in seen} == {"ucx"}


def test_a_pair_whose_ucx_is_broken_goes_on_over_grpc_and_returns_when_a_probe_succeeds() -> None:
    made = router(worker_view("p1"), decode_view("d1"), breaker_failures=2, breaker_cooldown_s=10.0)
    ucx = pair_key("p1", "d1", "ucx")
    made.breakers.failed(ucx, NOW)
    assert (pair(made).transport, pair(made).notes) == ("ucx", ())
    made.breakers.failed(ucx, NOW)
    downgraded = pair(made)
    assert (downgraded.transport, downgraded.notes) == ("grpc", ("transport_downgraded",))
    wish = made.choose((PairGoal(prompt_tokens=1, transport="ucx"),), NOW)
    assert isinstance(wish, Refusal), "a client that asks for the broken one does not get another"

    def later(after_s: float) -> PairRoute:
        route = made.choose((PairGoal(prompt_tokens=10),), NOW + after_s)
        assert isinstance(route, PairRoute)
        return route

    assert later(9.9).transport == "grpc"
    probe = later(10.0)
    assert (probe.transport, probe.notes) == ("ucx", ("transport_probed",))
    assert later(10.0).transport == "grpc", "one request probes"
    made.breakers.failed(ucx, NOW + 10.1)
    assert later(30.0).transport == "grpc", "a probe that failed makes the pause longer"
    assert later(30.1).transport == "ucx"
    made.breakers.succeeded(ucx)
    assert (later(30.2).transport, later(30.2).notes) == ("ucx", ())


def test_with_auto_the_order_is_the_one_that_all_workers_advertise() -> None:
    made = Router(RoutingSettings(), random.Random(1), transports=("ucx", "nixl", "grpc"), follow_workers=True)
    three = ("nixl", "ucx", "grpc")
    made.update([worker_view("p1", transports=three), decode_view("d1", transports=three)])
    assert (pair(made).transport, pair(made).notes) == ("nixl", ())
    made.update([worker_view("p1", transports=three), decode_view("d1", transports=("grpc", "ucx"))])
    assert pair(made).transport == "ucx", "they disagree: the configured order"


def test_only_broken_pairs_left_means_one_worker() -> None:
    made = router(worker_view("p1"), decode_view("d1"), breaker_failures=1)
    for transport in ("ucx", "grpc"):
        made.breakers.failed(pair_key("p1", "d1", transport), NOW)
    route = made.choose(first_goals("split", prompt_tokens=1, transport=None, strict=False), NOW)
    assert isinstance(route, SoloRoute)
    assert refused(made).reasons["pair_breaker_open"] >= 1


def test_the_last_worker_is_used_even_when_its_breaker_is_open() -> None:
    made = router(worker_view("p1"), worker_view("p2"), decode_view("d1"), breaker_failures=1)
    made.breakers.failed(worker_view("p1").incarnation, NOW)
    assert {pair(made).prefill.worker_id for _ in range(20)} == {"p2"}
    made.breakers.failed(worker_view("p2").incarnation, NOW)
    assert pair(made).notes == ("breaker_overridden",), "one poisonous prompt must not take the pool down"


def test_a_gone_worker_takes_its_circuits_along() -> None:
    made = router(worker_view("p1"), decode_view("d1"), breaker_failures=1)
    made.breakers.failed(worker_view("p1").incarnation, NOW)
    made.breakers.failed(pair_key("p1", "d1", "grpc"), NOW)
    made.update([decode_view("d1")])
    assert not made.breakers


# Which goals follow which failure ------------------------------------------------------------------------------------

P, D, C = worker_view("p"), decode_view("d"), worker_view("c", Role.COLOCATED)
PAIR = PairRoute(prefill=P, decode=D, transport="ucx")


@pytest.mark.parametrize(
    ("code", "on_decode", "exclude", "kinds"),
    [
        (Code.WORKER_LOST, False, {P.incarnation}, [PairGoal, LocalGoal, SoloGoal]),
        (Code.QUEUE_FULL, False, {P.incarnation}, [PairGoal, LocalGoal, SoloGoal]),
        (Code.TRANSFER_FAILED, True, {P.incarnation}, [PairGoal, LocalGoal, SoloGoal]),
        (Code.WORKER_LOST, True, {D.incarnation}, [PairGoal, SoloGoal]),
        (Code.STAGING_FULL, True, {D.incarnation}, [PairGoal, LocalGoal, SoloGoal]),
    ],
)
def test_goals_after_a_failed_pair(code: Code, on_decode: bool, exclude: set, kinds: list[type]) -> None:
    failed = FailedRoute(route=PAIR, code=code, on_decode=on_decode, exclude=frozenset(exclude))
    goals = goals_after_failure(failed, prompt_tokens=3, transport="grpc", strict=False)
    assert [type(g) for g in goals] == kinds
    assert isinstance(goals[0], PairGoal)
    assert goals[0].transport == "grpc", "the client's wish stands"
    strict = goals_after_failure(failed, prompt_tokens=3, transport=None, strict=True)
    assert [type(g) for g in strict] == [PairGoal]


def test_goals_after_a_failed_single_worker() -> None:
    failed = FailedRoute(route=SoloRoute(worker=C), code=Code.WORKER_LOST, on_decode=False, exclude=frozenset({C.incarnation}))
    goals = goals_after_failure(failed, prompt_tokens=3, transport=None, strict=False)
    assert goals == (SoloGoal(exclude=frozenset({C.incarnation})),)


# Speed ----------------------------------------------------------------------------------------------------------------


def p99_of(made: Router, goals: tuple, rounds: int = 300) -> float:
    taken = []
    for _ in range(rounds):
        began = time.thread_time()
        route = made.choose(goals, NOW)
        taken.append(time.thread_time() - began)
        assert not isinstance(route, Refusal)
        if isinstance(route, PairRoute):
            made.load.charge(route.prefill.incarnation, 100)
            made.load.charge(route.decode.incarnation, 200)
    return sorted(taken)[int(rounds * 0.99)]


def test_a_decision_among_1000_workers_is_quick() -> None:
    """The target is a p99 of 1 ms. Time of this thread, so that a busy machine does not count."""
    views = [worker_view(f"p{i}", running=i % 7) for i in range(500)] + [decode_view(f"d{i}", running=i % 5) for i in range(500)]
    made = router(*views)
    assert p99_of(made, first_goals("split", prompt_tokens=100, transport=None, strict=False)) < 0.001
    assert p99_of(made, (SoloGoal(),)) < 0.001


def test_a_request_that_names_pools_is_served_by_no_other() -> None:
    views = (
        worker_view("p", pool="prefill"),
        decode_view("d1", pool="decode"),
        decode_view("d2", pool="other"),
        worker_view("c", Role.COLOCATED, pool="colocated"),
    )
    made = router(*views)
    made.load.charge(views[1].incarnation, 1000)
    goals = first_goals("split", prompt_tokens=10, transport=None, strict=False, pools=frozenset({"prefill", "decode"}))
    route = made.choose(goals, NOW)
    assert isinstance(route, PairRoute)
    assert route.decode.worker_id == "d1"
    solo = made.choose((SoloGoal(pools=frozenset({"other"})),), NOW)
    assert isinstance(solo, SoloRoute)
    assert solo.worker.worker_id == "d2"


def test_no_fallback_and_no_retry_leaves_the_named_pools() -> None:
    views = (
        worker_view("p", pool="prefill"),
        decode_view("d", pool="decode"),
        worker_view("c", Role.COLOCATED, pool="colocated"),
    )
    made = router(*views)
    pools = frozenset({"prefill"})
    first = made.choose(first_goals("split", prompt_tokens=10, transport=None, strict=False, pools=pools), NOW)
    assert isinstance(first, SoloRoute)
    assert first.worker.worker_id == "p"
    failed = FailedRoute(route=first, code=Code.INTERNAL, on_decode=False, exclude=frozenset({first.worker.incarnation}))
    refusal = made.choose(goals_after_failure(failed, prompt_tokens=10, transport=None, strict=False, pools=pools), NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.reasons["other_pool"] == 2


def test_a_suspected_worker_comes_after_every_healthy_one_of_later_tiers_and_other_kinds() -> None:
    broken = worker_view("c", Role.COLOCATED)
    made = router(broken, worker_view("p", fingerprint=b"a"), decode_view("d", fingerprint=b"a"), breaker_failures=1)
    made.breakers.failed(broken.incarnation, NOW)
    solo = made.choose((SoloGoal(),), NOW)
    assert isinstance(solo, SoloRoute)
    assert solo.worker.worker_id in ("p", "d")
    # Two kinds of pairs, the idle one broken.
    views = [
        *(worker_view(f"p-{kind}", fingerprint=kind.encode()) for kind in ("a", "b")),
        *(decode_view(f"d-{kind}", fingerprint=kind.encode()) for kind in ("a", "b")),
    ]
    made = router(*views, breaker_failures=1)
    made.breakers.failed(views[0].incarnation, NOW)
    made.load.charge(views[1].incarnation, 10_000)
    assert pair(made).prefill.worker_id == "p-b"


def test_a_pair_that_no_decode_worker_can_complete_is_not_looked_for_prefill_by_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    views = [
        *(worker_view(f"p{i}", pool="prefill") for i in range(50)),
        *(decode_view(f"d{i}", pool="decode") for i in range(50)),
    ]
    made = router(*views)
    asked = Counter[str]()
    accept_end = PairFinder._accept_end

    def counted(self: PairFinder, *arguments, **named):
        asked["ends"] += 1
        return accept_end(self, *arguments, **named)

    monkeypatch.setattr(PairFinder, "_accept_end", counted)
    goals = first_goals("split", prompt_tokens=10, transport=None, strict=True, pools=frozenset({"prefill"}))
    assert isinstance(made.choose(goals, NOW), Refusal)
    assert asked["ends"] <= 2 * 3, "two transports; prefill, decode, and prefill again"
