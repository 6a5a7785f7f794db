"""Whatever the fleet and the policy: a route is whole and allowed, or there is none and nothing has changed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.routing.breaker import PairKey
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import Goal, LocalGoal, PairGoal, PairRoute, Refusal, SoloGoal, workers_of
from coordinator.routing.prefix_aware import PrefixAware
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerState, WorkerView
from tests.support.views import worker_view

POLICIES = ("least_loaded", "power_of_two", "prefix_aware", "session_affinity", "round_robin")
NAMES = [f"w{i}" for i in range(6)]
PROMPTS = st.lists(st.integers(0, 1), max_size=12)


def view(name: str) -> st.SearchStrategy[WorkerView]:
    return st.builds(
        lambda role, state, fingerprint, transports, pool, most: worker_view(
            name, role, state=state, fingerprint=fingerprint, transports=transports, pool=pool, max_transfer_tokens=most
        ),
        st.sampled_from(Role),
        st.sampled_from([WorkerState.READY] * 4 + list(WorkerState)),
        st.sampled_from([b"a", b"a", b"b"]),
        st.sampled_from([("ucx", "grpc"), ("grpc",)]),
        st.sampled_from(["one", "two"]),
        st.sampled_from([6, 4096]),
    )


FLEETS = st.builds(
    lambda views, gone: [v for i, v in enumerate(views) if i not in gone],
    st.tuples(*(view(name) for name in NAMES)),
    st.sets(st.integers(0, len(NAMES) - 1), max_size=2),
)
INCARNATIONS = [worker_view(name).incarnation for name in NAMES]
EXCLUDED = st.frozensets(st.sampled_from(INCARNATIONS), max_size=3)
POOLS = st.sampled_from([frozenset(), frozenset(), frozenset({"one"})])
REQUESTS = st.tuples(
    PROMPTS,
    st.sampled_from(["", "s", "t"]),
    EXCLUDED,
    POOLS,
    st.lists(st.sampled_from(["pair", "local", "solo"]), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(INCARNATIONS), st.sampled_from(INCARNATIONS)), max_size=2),
)


def goals_of(kinds: list[str], tokens: int, exclude: frozenset, pools: frozenset) -> list[Goal]:
    made: dict[str, Goal] = {
        "pair": PairGoal(prompt_tokens=tokens, exclude=exclude, pools=pools),
        "local": LocalGoal(incarnation=INCARNATIONS[0]),
        "solo": SoloGoal(exclude=exclude, pools=pools),
    }
    return [made[kind] for kind in kinds]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(fleets=st.lists(FLEETS, min_size=1, max_size=3), requests=st.lists(REQUESTS, min_size=1, max_size=8))
def test_a_route_is_whole_and_allowed_or_nothing_happened(policy: str, fleets: list, requests: list) -> None:
    router = Router(
        RoutingSettings.model_validate(
            {"policy": policy, "prefix_block_tokens": 1, "prefix_index_blocks": 40, "breaker_failures": 1, "idle_tokens": 0}
        ),
        random.Random(1),
        transports=("ucx", "grpc"),
    )
    for number, (prompt, session, exclude, pools, kinds, broken) in enumerate(requests):
        views = fleets[number % len(fleets)]
        router.update(views)
        known = {v.incarnation: v for v in views}
        blocked = {PairKey(p, d, "ucx") for p, d in broken}
        for key in blocked:
            router.breakers.failed(key, float(number))
        ask = router.ask(prompt, session)
        before = state_of(router)
        held = {i: router._policy.index.held(i, ask.blocks) for i in known} if isinstance(router._policy, PrefixAware) else {}
        route = router.choose(goals_of(kinds, len(prompt), exclude, pools), float(number), ask)
        if isinstance(route, Refusal):
            assert state_of(router) == before, "a refused request leaves nothing behind"
            continue
        workers = workers_of(route)
        assert all(known[w.incarnation] == w and w.state is WorkerState.READY for w in workers)
        assert 0 <= route.expected_cached_tokens <= held.get(workers[0].incarnation, 0)
        if isinstance(route, PairRoute):
            prefill, decode = workers
            assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
            assert prefill.fingerprint == decode.fingerprint
            assert all(route.transport in w.transports and len(prompt) <= w.max_transfer_tokens for w in workers)
            assert PairKey(prefill.incarnation, decode.incarnation, route.transport) not in blocked
        if isinstance(route, PairRoute) or not route.local:
            assert not exclude & {w.incarnation for w in workers}
            assert not pools or all(w.pool in pools for w in workers)
        if isinstance(router._policy, PrefixAware):
            assert len(router._policy.index) <= max(40, len(known))


def state_of(router: Router) -> tuple[int, list[int]]:
    policy = router._policy
    if not isinstance(policy, PrefixAware):
        return (0, [])
    recent = policy._recent
    return (len(policy.index), [int(n) for n in recent._sums])
