"""Where the two workers of a pair are: in one place, apart, or anywhere, before load and after what is required."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from coordinator.routing.breaker import PairKey
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import PairGoal, PairRoute, Refusal, SoloRoute, first_goals
from coordinator.routing.policies import Ask
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerView
from protos.errors import Code
from tests.support.views import worker_view

NOW = 100.0


def at(name: str, node: str, rack: str = "", **changes) -> WorkerView:
    """`p…` is a prefill worker, `d…` a decode worker."""
    return worker_view(name, Role.PREFILL if name.startswith("p") else Role.DECODE, node_id=node, rack=rack, **changes)


TWO_NODES = (at("p1", "a"), at("p2", "b"), at("d1", "a"), at("d2", "b"))


def router(*views: WorkerView, **settings) -> Router:
    made = Router(RoutingSettings(**settings), random.Random(1), transports=("ucx", "grpc"))
    made.update(views)
    return made


def load(made: Router, **tokens: int) -> None:
    for name, count in tokens.items():
        made.load.charge(worker_view(name).incarnation, count)


def pair(made: Router, **goal) -> tuple[str, str, tuple[str, ...]]:
    route = made.choose((PairGoal(prompt_tokens=10, **goal),), NOW)
    assert isinstance(route, PairRoute), route
    return str(route.prefill.worker_id), str(route.decode.worker_id), route.notes


def test_by_default_load_alone_decides() -> None:
    made = router(*TWO_NODES)
    load(made, p1=1, d2=1)
    assert pair(made) == ("p2", "d1", ())


@pytest.mark.parametrize("placement", ["prefer_node", "require_node", "prefer_rack", "require_rack"])
def test_both_are_on_one_node_before_load_decides(placement: str) -> None:
    made = router(*TWO_NODES, placement=placement)
    load(made, p1=1, d2=1)
    assert pair(made) in {("p1", "d1", ()), ("p2", "d2", ())}
    load(made, p1=20)
    assert pair(made) == ("p2", "d2", ()), "among pairs that are placed well the policies choose"


def test_a_place_is_passed_over_for_its_decode_workers_load_too() -> None:
    """The least loaded prefill worker is no good choice where its only partner is swamped."""
    made = router(*TWO_NODES, placement="require_node", placement_imbalance_tokens=100)
    load(made, p2=50, d1=1000)
    assert pair(made) == ("p2", "d2", ())


def test_a_preference_gives_way_beyond_its_imbalance_and_says_so() -> None:
    made = router(at("p1", "a"), at("d1", "a"), at("d2", "b"), placement="prefer_node", placement_imbalance_tokens=100)
    load(made, d1=100)
    assert pair(made) == ("p1", "d1", ())
    load(made, d1=1)
    assert pair(made) == ("p1", "d2", ("placement_missed",))


def test_what_is_required_gives_way_to_no_load() -> None:
    made = router(at("p1", "a"), at("d1", "a"), at("d2", "b"), placement="require_node", placement_imbalance_tokens=0)
    load(made, d1=1_000_000)
    assert pair(made) == ("p1", "d1", ())


def test_a_required_placement_that_nobody_meets_is_refused_by_name() -> None:
    made = router(at("p1", "a"), at("p2", "b"), at("d1", "c"), placement="require_node")
    refusal = made.choose((PairGoal(prompt_tokens=10),), NOW)
    assert isinstance(refusal, Refusal)
    error = refusal.to_error()
    assert error.code is Code.NO_WORKER
    assert "placement_require_node" in error.message
    assert "gateway.routing.placement is require_node" in error.message
    assert not {"excluded", "breaker_open"} & set(refusal.reasons)


def test_without_such_a_pair_a_request_that_may_takes_one_worker_and_says_why() -> None:
    made = router(at("p1", "a"), at("d1", "b"), placement="require_rack")
    route = made.choose(first_goals("split", prompt_tokens=10, transport=None, strict=False), NOW)
    assert isinstance(route, SoloRoute)
    assert route.notes == ("placement_require_rack",)
    strict = made.choose(first_goals("split", prompt_tokens=10, transport=None, strict=True), NOW)
    assert isinstance(strict, Refusal), "strict deviates from nothing"


def test_what_stands_in_the_way_is_named_before_the_placement() -> None:
    made = router(at("p1", "a"), at("d1", "a"), placement="require_node")
    refusal = made.choose((PairGoal(prompt_tokens=10, exclude=frozenset({worker_view("d1").incarnation})),), NOW)
    assert isinstance(refusal, Refusal)
    assert "excluded" in refusal.message
    assert "placement" not in refusal.message


def test_a_rack_is_a_label_and_a_node_without_one_is_a_rack_of_its_own() -> None:
    views = (at("p1", "a", "r1"), at("d1", "b", "r1"), at("d2", "c"), at("p2", "d"), at("d3", "d"))
    made = router(*views, placement="require_rack")
    assert {pair(made)[:2] for _ in range(30)} == {("p1", "d1"), ("p2", "d3")}
    assert pair(router(*views, placement="require_node")) == ("p2", "d3", ())


def test_a_worker_whose_node_is_not_known_is_beside_nobody() -> None:
    made = router(at("p1", ""), at("d1", ""), placement="require_node")
    assert isinstance(made.choose((PairGoal(prompt_tokens=10),), NOW), Refusal)


def test_spread_takes_another_node_where_there_is_one() -> None:
    made = router(*TWO_NODES, placement="spread")
    assert {pair(made) for _ in range(30)} == {("p1", "d2", ()), ("p2", "d1", ())}
    load(made, d1=5, p1=1)
    assert pair(made) == ("p2", "d1", ()), "the placement comes before load"
    one_node = router(at("p1", "a"), at("d1", "a"), placement="spread")
    assert pair(one_node) == ("p1", "d1", ("placement_missed",))


def test_kinds_are_compared_with_each_other() -> None:
    """The pair of one fingerprint that is placed well is not taken when one of another fingerprint has far less load."""
    views = (at("p1", "a", fingerprint=b"x"), at("d1", "a", fingerprint=b"x"), at("p2", "b"), at("d2", "c"))
    made = router(*views, placement="prefer_node", placement_imbalance_tokens=100)
    assert pair(made) == ("p1", "d1", ())
    load(made, p1=60, d1=60)
    assert pair(made) == ("p2", "d2", ("placement_missed",))


def test_a_prompt_that_was_computed_stays_where_it_is() -> None:
    """After a decode worker failed its prefill worker is kept: a preference gives way, a requirement does not."""
    views = (at("p1", "a"), at("p2", "b"), at("d2", "b"))
    kept = worker_view("p1").incarnation
    assert pair(router(*views, placement="prefer_node"), prefer_prefill=kept) == ("p1", "d2", ("placement_missed",))
    assert pair(router(*views, placement="require_node"), prefer_prefill=kept) == ("p2", "d2", ())
    beside = (*views, at("d1", "a"))
    made = router(*beside, placement="require_node")
    load(made, p1=1_000_000)
    assert pair(made, prefer_prefill=kept) == ("p1", "d1", ())


def test_a_broken_pair_leaves_the_place_to_its_next_prefill_worker() -> None:
    made = router(at("p1", "a"), at("p2", "b"), at("d1", "a"), at("d2", "b"), placement="require_node", breaker_failures=1)
    load(made, p2=10)
    for transport in ("ucx", "grpc"):
        made.breakers.failed(PairKey(worker_view("p1").incarnation, worker_view("d1").incarnation, transport), NOW)
    assert pair(made)[:2] == ("p2", "d2")


def test_a_worker_out_of_reach_is_the_last_of_its_place() -> None:
    made = router(*TWO_NODES, placement="require_node")
    made.load.set_reachable(worker_view("d1").incarnation, False)
    assert {pair(made)[:2] for _ in range(10)} == {("p2", "d2")}


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "prefix_aware", "session_affinity", "round_robin"])
def test_every_policy_chooses_among_the_pairs_that_are_placed_well(policy: str) -> None:
    views = [at(f"{kind}{i}", f"n{i % 3}") for i in range(9) for kind in "pd" if (kind, i % 3) != ("d", 2)]
    made = router(*views, placement="require_node", policy=policy, decode_policy="power_of_two")
    node = {v.worker_id: v.node_id for v in views}
    taken = set()
    for number in range(60):
        ask = Ask(tokens=10, session=f"s{number}")
        route = made.choose((PairGoal(prompt_tokens=10),), NOW, ask)
        assert isinstance(route, PairRoute)
        assert node[route.prefill.worker_id] == node[route.decode.worker_id] != "n2"
        taken.add(route.prefill.worker_id)
    assert len(taken) > 1, "one place is not all there is"


def test_an_unknown_placement_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match=r"prefer_node.*require_rack.*spread"):
        RoutingSettings(placement="same_host")
