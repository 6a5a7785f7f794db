"""Workloads are sequences that repeat exactly, and salts that change only what a cache sees; plans that fit their time."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.compare.plan import MIN_REQUESTS, ORDER, plan_quick
from coordinator.compare.workload import SALT_TOKENS, WorkloadSpec, make

SPEC = WorkloadSpec(seed=7, requests=200, prompt_tokens=(64, 128), output_tokens=(16, 24))


def test_same_seed_same_workload_other_seed_another() -> None:
    assert make(SPEC) == make(SPEC)
    assert make(SPEC).digest == make(SPEC).digest
    assert make(dataclasses.replace(SPEC, seed=8)).digest != make(SPEC).digest


def test_lengths_and_tokens_keep_their_ranges() -> None:
    requests = make(SPEC).requests
    lengths = {len(request.prompt_token_ids) for request in requests}
    outputs = {request.output_tokens for request in requests}
    assert min(lengths) >= 64
    assert max(lengths) <= 128
    assert outputs == set(range(16, 25))
    tokens = {token for request in requests for token in request.prompt_token_ids}
    assert min(tokens) >= SPEC.first_token
    assert max(tokens) < SPEC.end_token


def test_gaps_have_unit_rate() -> None:
    for seed in range(20):
        gaps = [request.gap for request in make(dataclasses.replace(SPEC, requests=20, seed=seed)).requests]
        assert sum(gaps) == pytest.approx(20, rel=1e-12), "the offered rate is the one asked for, under every seed"


@given(st.floats(0.1, 100))
def test_a_rate_only_scales_time(rate_per_s: float) -> None:
    workload = make(dataclasses.replace(SPEC, requests=20))
    unit = workload.due_s(1.0)
    assert workload.due_s(rate_per_s) == pytest.approx([due / rate_per_s for due in unit])
    assert all(a <= b for a, b in itertools.pairwise(unit))


def test_salt_changes_heads_and_nothing_else() -> None:
    plain, salted = make(SPEC), make(SPEC).salted("a")
    assert salted == make(SPEC).salted("a")
    for before, after in zip(plain.requests, salted.requests, strict=True):
        assert (after.gap, after.output_tokens) == (before.gap, before.output_tokens)
        assert len(after.prompt_token_ids) == len(before.prompt_token_ids)
        assert after.prompt_token_ids[SALT_TOKENS:] == before.prompt_token_ids[SALT_TOKENS:]
        assert after.prompt_token_ids[:SALT_TOKENS] != before.prompt_token_ids[:SALT_TOKENS]


def test_a_sequence_on_end_keeps_its_rate_and_shares_nothing_with_itself() -> None:
    once = make(SPEC)
    twice = once.repeated(2)
    assert once.repeated(1) == once
    assert twice.due_s(2.0)[-1] == pytest.approx(2 * once.due_s(2.0)[-1])
    assert [len(request.prompt_token_ids) for request in twice.requests[200:]] == [
        len(request.prompt_token_ids) for request in once.requests
    ]
    assert len({request.prompt_token_ids[:SALT_TOKENS] for request in twice.salted("a").requests}) == 400
    grouped = dataclasses.replace(once, requests=tuple(dataclasses.replace(each, group="g") for each in once.requests))
    heads = [request.prompt_token_ids[:SALT_TOKENS] for request in grouped.repeated(2).salted("a").requests]
    assert (len(set(heads[:200])), len(set(heads[200:])), len(set(heads))) == (1, 1, 2), "what shares goes on sharing"


def test_no_two_prompts_of_any_probe_share_a_head() -> None:
    heads = [request.prompt_token_ids[:SALT_TOKENS] for salt in "abc" for request in make(SPEC).salted(salt).requests]
    assert len(set(heads)) == len(heads)


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": 0},
        {"prompt_tokens": (2, 10)},
        {"prompt_tokens": (20, 10)},
        {"output_tokens": (0, 1)},
        {"first_token": 5, "end_token": 5},
    ],
)
def test_bad_specs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        dataclasses.replace(SPEC, **changes)


@pytest.mark.parametrize("unloaded_e2e_s", [0.01, 0.3, 0.5, 1.0, 2.0])
def test_a_plan_is_abba_per_seed_and_rate_and_fits(unloaded_e2e_s: float) -> None:
    plan = plan_quick(unloaded_e2e_s, 70.0)
    assert plan.expected_s <= 70
    assert plan.requests >= MIN_REQUESTS
    for _, group in itertools.groupby(plan.steps, key=lambda step: (step.seed, step.rate_per_s)):
        assert tuple(step.path for step in group) == ORDER
    halves = [step.half for step in plan.steps[:4]]
    assert halves == [0, 0, 1, 1]
    assert len(plan.steps) == len(plan.seeds) * len(plan.rates_per_s) * len(ORDER)


@pytest.mark.parametrize(("unloaded_e2e_s", "seeds", "rates"), [(0.3, 3, 2), (0.9, 3, 1), (1.3, 2, 1), (2.0, 1, 1), (9.0, 1, 1)])
def test_a_slow_system_gets_one_rate_and_then_fewer_seeds(unloaded_e2e_s: float, seeds: int, rates: int) -> None:
    plan = plan_quick(unloaded_e2e_s, 70.0)
    assert (len(plan.seeds), len(plan.rates_per_s)) == (seeds, rates)


def test_the_slowest_system_gets_the_fewest_requests() -> None:
    assert plan_quick(9.0, 70.0).requests == MIN_REQUESTS
