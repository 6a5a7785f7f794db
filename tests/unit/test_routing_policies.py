"""The routing policies: who gets a prompt, and what is remembered of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import PairGoal, PairRoute, Refusal, Route, SoloGoal, SoloRoute
from coordinator.routing.policies import Ask
from coordinator.routing.prefix_index import block_hashes
from coordinator.routing.retry_budget import RetryBudget
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerView
from protos.ids import Incarnation
from tests.support.views import worker_view

NOW = 100.0
BLOCK = 16
PREFILL = [worker_view(f"p{i}") for i in range(4)]
DECODE = [worker_view(f"d{i}", Role.DECODE) for i in range(2)]


def router(*views: WorkerView, policy: str = "prefix_aware", seed: int = 1, **settings) -> Router:
    values = {"prefix_block_tokens": BLOCK, "idle_tokens": 1000, **settings}
    made = Router(RoutingSettings(policy=policy, **values), random.Random(seed), transports=("ucx", "grpc"))
    made.update(views or (*PREFILL, *DECODE))
    return made


def prompt(name: int, tokens: int = 10 * BLOCK) -> list[int]:
    return [name] * tokens


def pair(
    made: Router, ids: list[int], *, now_s: float = NOW, session: str = "", salt: bytes = b"", answered: bool = True, **goal
) -> PairRoute:
    """A pair for these tokens, whose prefill worker computes them at once."""
    ask = made.ask(ids, session, salt)
    route = made.choose((PairGoal(prompt_tokens=len(ids), **goal),), now_s, ask)
    assert isinstance(route, PairRoute), route
    if answered:
        expected = route.expected_cached_tokens
        made.prompt_computed(route.prefill.incarnation, ask, expected_cached_tokens=expected, cached_tokens=expected)
    return route


def worker_of(route: Route | Refusal) -> str:
    assert isinstance(route, PairRoute | SoloRoute)
    return route.prefill.worker_id if isinstance(route, PairRoute) else route.worker.worker_id


# Prefix-aware ---------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_is() -> None:
    made = router()
    first = pair(made, prompt(7))
    assert first.expected_cached_tokens == 0
    for extra in range(1, 6):
        longer = prompt(7) + prompt(100 + extra, 3 * BLOCK)
        route = pair(made, longer)
        assert route.prefill == first.prefill
        assert route.expected_cached_tokens == 10 * BLOCK


def test_prompts_that_come_together_go_together_but_are_expected_only_once_computed() -> None:
    made = router()
    first = pair(made, prompt(7), answered=False)
    again = pair(made, prompt(7), answered=False)
    assert again.prefill == first.prefill
    assert again.expected_cached_tokens == 0, "an engine that computes both is not one that evicts early"
    ask = made.ask(prompt(7), "")
    made.prompt_computed(first.prefill.incarnation, ask, expected_cached_tokens=0, cached_tokens=0)
    made.prompt_lost(again.prefill.incarnation, ask)
    assert pair(made, prompt(7)).expected_cached_tokens > 0, "the first one was computed"


def test_a_whole_prompt_that_is_cached_still_computes_a_token() -> None:
    made = router()
    pair(made, prompt(7))
    assert pair(made, prompt(7)).expected_cached_tokens == 10 * BLOCK - 1


def test_a_tail_that_is_no_whole_block_is_not_expected() -> None:
    made = router()
    pair(made, prompt(7, BLOCK + 5))
    assert pair(made, prompt(7, BLOCK + 5)).expected_cached_tokens == BLOCK


def test_tenants_do_not_see_each_others_prefixes() -> None:
    made = router()
    pair(made, prompt(7), salt=b"one")
    assert pair(made, prompt(7), salt=b"two").expected_cached_tokens == 0
    assert pair(made, prompt(7), salt=b"one").expected_cached_tokens > 0
    assert not set(block_hashes(prompt(7), BLOCK, b"one")) & set(block_hashes(prompt(7), BLOCK, b"two"))


def test_equal_blocks_after_unequal_beginnings_are_unequal() -> None:
    one, two = (block_hashes(prompt(name, BLOCK) + prompt(5, BLOCK), BLOCK) for name in (1, 2))
    assert one[1] != two[1]
    assert len(set(block_hashes(prompt(5), BLOCK))) == 10, "one repeated block is another block each time"


def test_without_a_hit_the_work_is_spread() -> None:
    made = router(idle_tokens=0)
    seen = Counter(pair(made, prompt(name)).prefill.worker_id for name in range(400))
    assert set(seen.values()) == {100}


def test_a_worker_that_has_had_its_share_is_passed_over_for_a_while() -> None:
    made = router(idle_tokens=0, max_load_ratio=1.2)
    shared = prompt(7, 2 * BLOCK)
    home = pair(made, shared).prefill.worker_id
    seen: Counter[str] = Counter()
    for name in range(400):
        seen[pair(made, shared + prompt(1000 + name, 20 * BLOCK)).prefill.worker_id] += 1
    # Every worker has the shared beginning in the end, and none was given more than the ratio allows.
    assert max(seen.values()) <= 1.2 * 100 + 1
    assert home in seen


@pytest.mark.parametrize(("blocks", "returning", "new"), [(6, "home", "home"), (13, "home", "away"), (22, "away", "away")])
def test_the_end_of_a_workers_share_is_kept_for_prompts_that_come_back(blocks: int, returning: str, new: str) -> None:
    """Home has had 100 blocks, the other worker 80. What is to be computed lifts home above the mean by 14, 17 or 21 %."""
    for cached, expected in ((20, returning), (0, new)):
        made = router(worker_view("home"), worker_view("away"), *DECODE, idle_tokens=0, max_load_ratio=1.2)
        away = frozenset({Incarnation("away-i")})
        pair(made, prompt(1, 20 * BLOCK), exclude=away)
        pair(made, prompt(2, 80 * BLOCK), exclude=away)
        pair(made, prompt(3, 80 * BLOCK), exclude=frozenset({Incarnation("home-i")}))
        made.load.charge(Incarnation("away-i"), 1000 * BLOCK)
        assert worker_of(pair(made, prompt(1, cached * BLOCK) + prompt(4, blocks * BLOCK))) == expected


def two_pools(**settings: Any) -> Router:
    """Four workers of pool `busy`, two of pool `named`."""
    busy = [worker_view(f"b{i}", pool="busy") for i in range(4)]
    named = [worker_view(f"n{i}", pool="named") for i in range(2)]
    return router(*busy, *named, worker_view("d", Role.DECODE, pool="named"), idle_tokens=0, **settings)


@pytest.mark.parametrize(("busy_blocks", "home_blocks", "other_blocks", "stays"), [(0, 55, 40, True), (200, 55, 10, False)])
def test_workers_that_the_request_may_not_use_do_not_move_the_bound_of_recent_work(
    busy_blocks: int, home_blocks: int, other_blocks: int, stays: bool
) -> None:
    """The two of `named` decide: 70 of 110 blocks are below one and a half times their mean, 70 of 80 are above it."""
    made, named = two_pools(max_load_ratio=1.5), frozenset({"named"})
    home = pair(made, prompt(7, home_blocks * BLOCK), pools=named).prefill
    without = frozenset({home.incarnation})
    other = pair(made, prompt(7, other_blocks * BLOCK), pools=named, exclude=without).prefill
    pair(made, prompt(9, 5 * BLOCK), pools=named, exclude=frozenset({other.incarnation}))
    for name in range(100, 104 if busy_blocks else 100):
        pair(made, prompt(name, busy_blocks * BLOCK), pools=frozenset({"busy", "named"}), exclude=without | {other.incarnation})
    longer = prompt(7, home_blocks * BLOCK) + prompt(9)
    assert pair(made, longer, pools=named).prefill == (home if stays else other)


def test_workers_that_the_request_may_not_use_do_not_move_the_bound_of_a_session() -> None:
    for load_of_the_others in (0, 1_000_000):
        made, named = two_pools(policy="session_affinity", max_load_ratio=1.5), frozenset({"named"})
        home = pair(made, prompt(1), session="s", pools=named).prefill
        for view in made.ready_workers(Role.PREFILL):
            if view.pool == "busy":
                made.load.charge(view.incarnation, load_of_the_others)
        (other,) = (v for v in made.ready_workers(Role.PREFILL) if v.pool == "named" and v != home)
        made.load.charge(other.incarnation, 10_000)
        made.load.charge(home.incarnation, 12_000)
        assert pair(made, prompt(1), session="s", pools=named).prefill == home, "a tenth above the mean of the two"
        made.load.charge(home.incarnation, 30_000)
        assert pair(made, prompt(1), session="s", pools=named).prefill == other, "six tenths above it"


def test_below_the_idle_load_a_hit_always_wins() -> None:
    made = router(idle_tokens=1_000_000)
    home = pair(made, prompt(7)).prefill.worker_id
    seen = {pair(made, prompt(7) + prompt(name, 4 * BLOCK)).prefill.worker_id for name in range(100, 140)}
    assert seen == {home}


def test_a_long_queue_outweighs_a_short_hit() -> None:
    made = router(prefix_hit_weight=1.0, idle_tokens=1_000_000)
    home = pair(made, prompt(7)).prefill
    made.load.charge(home.incarnation, 20 * BLOCK)
    assert pair(made, prompt(7) + prompt(9)).prefill != home
    made = router(prefix_hit_weight=1.0, idle_tokens=1_000_000)
    home = pair(made, prompt(7)).prefill
    made.load.charge(home.incarnation, 5 * BLOCK)
    assert pair(made, prompt(7) + prompt(9)).prefill == home


def test_filters_come_before_the_prefix() -> None:
    made = router()
    home = pair(made, prompt(7)).prefill
    route = pair(made, prompt(7), exclude=frozenset({home.incarnation}))
    assert route.prefill != home
    refusal = made.choose(
        (PairGoal(prompt_tokens=1, transport="ucx", exclude=frozenset(v.incarnation for v in PREFILL)),),
        NOW,
        made.ask(prompt(7), ""),
    )
    assert isinstance(refusal, Refusal)
    assert refusal.reasons["excluded"] == len(PREFILL)


def test_a_worker_that_cannot_be_reached_comes_last_in_spite_of_its_hit() -> None:
    made = router()
    home = pair(made, prompt(7)).prefill
    made.load.set_reachable(home.incarnation, False)
    assert pair(made, prompt(7)).prefill != home
    for view in PREFILL:
        made.load.set_reachable(view.incarnation, False)
    assert pair(made, prompt(7)).prefill in PREFILL


def test_a_refused_request_leaves_nothing_behind() -> None:
    lonely = router(*PREFILL)
    ask = lonely.ask(prompt(7), "")
    assert isinstance(lonely.choose((PairGoal(prompt_tokens=ask.tokens),), NOW, ask), Refusal)
    lonely.update((*PREFILL, *DECODE))
    assert pair(lonely, prompt(7)).expected_cached_tokens == 0


def test_whole_requests_follow_their_prefix_too() -> None:
    made = router(*(worker_view(f"c{i}", Role.COLOCATED) for i in range(4)))
    home = worker_of(made.choose((SoloGoal(),), NOW, made.ask(prompt(7), "")))
    for _ in range(5):
        assert worker_of(made.choose((SoloGoal(),), NOW, made.ask(prompt(7), ""))) == home


def test_a_worker_that_left_is_forgotten_and_its_place_starts_empty() -> None:
    made = router()
    home = pair(made, prompt(7)).prefill
    made.update((*(v for v in PREFILL if v != home), worker_view("new"), *DECODE))
    assert pair(made, prompt(7)).expected_cached_tokens == 0


def test_what_a_worker_lost_before_it_computed_is_not_expected_of_it() -> None:
    made = router()
    ask = made.ask(prompt(7), "")
    route = made.choose((PairGoal(prompt_tokens=ask.tokens),), NOW, ask)
    assert isinstance(route, PairRoute)
    made.prompt_lost(route.prefill.incarnation, ask)
    assert pair(made, prompt(7)).expected_cached_tokens == 0


def test_engines_that_evict_earlier_than_they_say_are_believed() -> None:
    # Room for ten prompts by its own word; it reports twenty times that nothing was cached of what should have been.
    p, nothing = worker_view("p").incarnation, Ask()
    made = router(worker_view("p"), *DECODE, prefix_worker_tokens=100 * BLOCK)
    for name in range(10):
        pair(made, prompt(name))
    assert pair(made, prompt(0)).expected_cached_tokens > 0
    for _ in range(20):
        made.prompt_computed(p, nothing, expected_cached_tokens=0, cached_tokens=0)
    assert pair(made, prompt(1)).expected_cached_tokens > 0, "nothing was expected, so nothing was missed"
    for _ in range(20):
        made.prompt_computed(p, nothing, expected_cached_tokens=10 * BLOCK, cached_tokens=0)
    assert pair(made, prompt(5)).expected_cached_tokens == 0, "of ten prompts the last is left"
    assert pair(made, prompt(5)).expected_cached_tokens > 0


def test_a_prompt_that_is_computed_whole_tells_nothing_of_the_cache() -> None:
    made = router(worker_view("p"), *DECODE, prefix_worker_tokens=100 * BLOCK)
    for name in range(10):
        pair(made, prompt(name))
    for _ in range(20):
        ask = made.ask(prompt(9), reads_cache=False)
        route = made.choose((PairGoal(prompt_tokens=ask.tokens),), NOW, ask)
        assert isinstance(route, PairRoute)
        assert route.expected_cached_tokens == 0
        expected = route.expected_cached_tokens
        made.prompt_computed(route.prefill.incarnation, ask, expected_cached_tokens=expected, cached_tokens=0)
    assert [pair(made, prompt(name)).expected_cached_tokens for name in range(10)] == [10 * BLOCK - 1] * 10


def test_a_prompt_that_is_computed_whole_weighs_whole_and_is_cached_where_it_was_computed() -> None:
    made = router()
    home = pair(made, prompt(7)).prefill
    made.load.charge(home.incarnation, 1)
    whole = made.ask(prompt(7), reads_cache=False)
    route = made.choose((PairGoal(prompt_tokens=whole.tokens),), NOW, whole)
    assert isinstance(route, PairRoute)
    assert route.prefill != home, "its hit is worth nothing"
    made.prompt_computed(route.prefill.incarnation, whole, expected_cached_tokens=0, cached_tokens=0)
    again = pair(made, prompt(7))
    assert (again.prefill, again.expected_cached_tokens) == (route.prefill, 10 * BLOCK - 1)


def test_the_capacity_a_worker_states_is_used() -> None:
    small = worker_view("p", kv_capacity_tokens=20 * BLOCK)
    made = router(small, *DECODE)
    for name in range(3):
        pair(made, prompt(name))
    assert pair(made, prompt(0)).expected_cached_tokens == 0, "two prompts of ten blocks fit"


# The others -----------------------------------------------------------------------------------------------------------


def test_power_of_two_takes_the_less_loaded_of_two_and_never_the_worst() -> None:
    made = router(policy="power_of_two")
    made.load.charge(PREFILL[0].incarnation, 1000)
    seen = Counter(pair(made, prompt(1)).prefill.worker_id for _ in range(300))
    assert "p0" not in seen
    assert min(seen[view.worker_id] for view in PREFILL[1:]) > 60


def test_power_of_two_finds_the_last_acceptable_worker() -> None:
    made = router(policy="power_of_two")
    exclude = frozenset(v.incarnation for v in PREFILL[1:])
    for _ in range(20):
        assert pair(made, prompt(1), exclude=exclude).prefill == PREFILL[0]


def test_round_robin_gives_everybody_the_same_number() -> None:
    made = router(policy="round_robin")
    made.load.charge(PREFILL[0].incarnation, 1000)
    seen = Counter(pair(made, prompt(1)).prefill.worker_id for _ in range(40))
    assert set(seen.values()) == {10}


def test_a_session_stays_and_every_gateway_agrees() -> None:
    homes: dict[str, str] = {}
    for seed in (1, 2):
        made = router(policy="session_affinity", seed=seed, idle_tokens=10**9)
        for name in range(50):
            session = f"s{name}"
            first = pair(made, prompt(1), session=session).prefill.worker_id
            assert homes.setdefault(session, first) == first
            assert pair(made, prompt(2), session=session).prefill.worker_id == first
    assert len(set(homes.values())) == len(PREFILL)


def test_a_worker_that_leaves_moves_only_its_own_sessions() -> None:
    made = router(policy="session_affinity", idle_tokens=10**9)
    sessions = [f"s{i}" for i in range(60)]
    before = {s: pair(made, prompt(1), session=s).prefill.worker_id for s in sessions}
    made.update((*PREFILL[1:], *DECODE))
    after = {s: pair(made, prompt(1), session=s).prefill.worker_id for s in sessions}
    assert {s for s in sessions if before[s] != after[s]} == {s for s in sessions if before[s] == "p0"}


def test_a_session_leaves_a_worker_that_cannot_be_reached_and_the_others_stay_balanced() -> None:
    made = router(policy="session_affinity", idle_tokens=0)
    home = pair(made, prompt(1), session="s").prefill
    made.load.set_reachable(home.incarnation, False)
    assert pair(made, prompt(1), session="s").prefill != home
    second = pair(made, prompt(1), session="t").prefill
    made.load.charge(second.incarnation, 100_000)
    assert pair(made, prompt(1), session="t").prefill not in (home, second)


def test_a_session_leaves_a_loaded_worker_for_its_next_one() -> None:
    made = router(policy="session_affinity", idle_tokens=0)
    home = pair(made, prompt(1), session="s").prefill
    made.load.charge(home.incarnation, 100_000)
    away = {pair(made, prompt(1), session="s").prefill.worker_id for _ in range(10)}
    assert len(away) == 1
    assert home.worker_id not in away


# Silence --------------------------------------------------------------------------------------------------------------

POLICIES = ("least_loaded", "power_of_two", "round_robin", "session_affinity", "prefix_aware")
THREE = [worker_view(f"c{i}", Role.COLOCATED) for i in range(3)]


def takes(made: Router, number: int, session: str = "") -> str:
    ask = made.ask([number] * BLOCK, session)
    return worker_of(made.choose((SoloGoal(),), NOW + number, ask))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("silent", [{0}, {0, 1}, {1, 2}])
def test_who_is_silent_gets_nothing_while_another_is_not(policy: str, silent: set[int]) -> None:
    made = router(*(replace(view, silent=place in silent) for place, view in enumerate(THREE)), policy=policy)
    others = {view.worker_id for place, view in enumerate(THREE) if place not in silent}
    for name in others:
        made.load.charge(f"{name}-i", 10**6)
    assert {takes(made, number, f"s{number % 7}") for number in range(200)} == others


@pytest.mark.parametrize("policy", POLICIES)
def test_where_all_are_silent_every_policy_does_what_it_did(policy: str) -> None:
    """By load, turn, session and prefix. What is drawn may be drawn otherwise."""
    made, silent = router(*THREE, policy=policy), router(*(replace(view, silent=True) for view in THREE), policy=policy)
    for one in (made, silent):
        one.load.charge(THREE[0].incarnation, 900)
    seen: list[list[str]] = [[], []]
    for number in range(600):
        session = f"s{number % 7}" if number % 2 else ""
        for took, one in zip(seen, (made, silent), strict=True):
            took.append(takes(one, number % 20, session))
    if policy != "power_of_two":
        assert seen[0] == seen[1]
    shares = [Counter(took) for took in seen]
    assert set(shares[0]) == set(shares[1])
    assert all(shares[1][name] == pytest.approx(count, rel=0.2) for name, count in shares[0].items())


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("policy", "cache_aware"), ("decode_policy", "prefix_aware"), ("max_load_ratio", 0.5), ("prefix_block_tokens", 0)],
)
def test_a_setting_that_is_not_accepted_is_named(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        RoutingSettings(**{field: value})
    assert caught.value.errors()[0]["loc"] == (field,)


def test_only_a_policy_that_needs_them_has_blocks_hashed() -> None:
    assert router(policy="least_loaded").ask(prompt(1), "s") == Ask(tokens=10 * BLOCK, session="s")
    assert len(router().ask(prompt(1), "").blocks) == 10


# Retries --------------------------------------------------------------------------------------------------------------


def test_retries_are_a_tenth_of_the_requests_and_a_reserve() -> None:
    budget = RetryBudget(share=0.1, reserve=5)
    assert [budget.take() for _ in range(6)] == [True] * 5 + [False]
    granted = 0
    for _ in range(1000):
        budget.began()
        granted += budget.take()
    assert granted == 100


def test_quiet_times_save_no_more_than_the_reserve() -> None:
    budget = RetryBudget(share=0.1, reserve=2)
    for _ in range(1000):
        budget.began()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert not RetryBudget(share=0.1, reserve=0).take()


def test_a_session_keeps_its_worker_whatever_the_length_of_its_prompt() -> None:
    made = router(policy="session_affinity", idle_tokens=100)
    long = prompt(1, 100 * BLOCK)
    chosen = {worker_of(pair(made, long, session="s", now_s=NOW + turn)) for turn in range(8)}
    assert len(chosen) == 1


def test_round_robin_passes_over_what_cannot_be_reached_while_others_can() -> None:
    made = router(policy="round_robin")
    made.load.set_reachable(PREFILL[0].incarnation, False)
    assert {worker_of(pair(made, prompt(n))) for n in range(12)} == {"p1", "p2", "p3"}
    for view in PREFILL:
        made.load.set_reachable(view.incarnation, False)
    assert worker_of(pair(made, prompt(99))) in {"p0", "p1", "p2", "p3"}
