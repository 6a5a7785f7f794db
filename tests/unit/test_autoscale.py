"""The autoscaler's decisions: scenarios as text in and out, and the parts they are made of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.gateway.latencies import FAILED, added, bucket_of, share_within, since
from coordinator.pools.autoscale import Delays, Outcome, decide
from coordinator.pools.autoscale_gain import Watched
from coordinator.pools.autoscale_policy import AutoscalePolicy
from coordinator.pools.autoscale_signals import Sample, observe
from coordinator.pools.records import PoolTarget
from coordinator.routing.views import Role

SCENARIOS = sorted((Path(__file__).parent / "autoscale_scenarios").glob("*.txt"))


class Story:
    """Plays one scenario. Lines that begin with `->` are what is expected after a `decide`.

    pool NAME ROLE replicas=1 [ranks=1] FIELD=VALUE...   an autoscaled pool and its policy
    budget N | others N                                  accelerators for all; those of other pools
    at T NAME ready=1 FIELD=VALUE...                     a sample; ttft=SECONDSxCOUNT,...; gap=TEXT_WITHOUT_BLANKS
    operator NAME N                                      somebody else sets the target
    decide T                                             a pass; its targets are taken over
    """

    def __init__(self) -> None:
        self.pools: dict[str, tuple[PoolTarget, AutoscalePolicy]] = {}
        self.samples: dict[str, list[Sample]] = {}
        self.delays: dict[str, Delays] = {}
        self.budget: int | None = None
        self.others = 0

    def play(self, text: str) -> Iterator[str]:
        """The scenario again, with what was decided."""
        for line in text.splitlines():
            if line.startswith("->"):
                continue
            yield line
            words = line.split()
            if words and not line.startswith("#"):
                yield from getattr(self, f"do_{words[0]}")(*words[1:]) or ()

    def do_pool(self, name: str, role: str, *pairs: str) -> None:
        fields = dict(pair.split("=") for pair in pairs)
        replicas, ranks = int(fields.pop("replicas")), int(fields.pop("ranks", "1"))
        target = PoolTarget(name=name, role=Role(role), replicas=replicas, ranks=ranks)
        self.pools[name] = (target, AutoscalePolicy.model_validate(fields))
        self.samples[name] = []

    def do_budget(self, accelerators: str) -> None:
        self.budget = int(accelerators)

    def do_at(self, at_s: str, name: str, *pairs: str) -> None:
        known: dict[str, Any] = {}
        for key, value in (pair.split("=") for pair in pairs):
            if key in ("ttft", "tpot"):
                parts = (part.split("x") for part in value.split(","))
                known[key] = added({bucket_of(float(seconds)): int(count)} for seconds, count in parts)
            elif key == "gap":
                known["gaps"] = (value.replace("_", " "),)
            else:
                known[key] = float(value) if key == "kv_used" else int(value)
        self.samples[name].append(Sample(at_s=float(at_s), **known))

    def do_operator(self, name: str, replicas: str) -> None:
        target, policy = self.pools[name]
        self.pools[name] = (replace(target, replicas=int(replicas)), policy)

    def do_decide(self, now_s: str) -> Iterator[str]:
        watched = [self._watched(name, float(now_s)) for name in self.pools]
        outcome = decide(watched, self.delays, float(now_s), other_accelerators=self.others, budget=self.budget)
        self.delays = dict(outcome.delays)
        for name, decision in outcome.decisions.items():
            self.do_operator(name, str(decision.replicas))
            yield f"-> {name}: {decision.action} {decision.current} to {decision.replicas}: {decision.reason}"
        if outcome.gains and self.budget is not None:
            yield self._next(outcome)

    def _watched(self, name: str, now_s: float) -> Watched:
        target, policy = self.pools[name]
        seen = observe(
            self.samples[name],
            now_s,
            period_s=policy.look_back_period_s,
            interval_s=policy.metrics_interval_s,
            aggregation=policy.aggregation_function,
        )
        return Watched(target=target, policy=policy, observed=seen)

    @staticmethod
    def _next(outcome: Outcome) -> str:
        shown = [
            f"{g.pool} +{g.goodput_per_s:.3g}/s ({g.legs_per_s:.3g}/s x ({g.share_more:.3g} - {g.share_now:.3g})"
            f" x {g.partner_share:.3g} by {g.basis})"
            for g in outcome.gains
        ]
        return f"-> next of {outcome.budget}, {outcome.taken} taken: {'; '.join(shown)}"

    def do_others(self, accelerators: str) -> None:
        self.others = int(accelerators)


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_scenario(file: Path) -> None:
    text = file.read_text()
    story = Story()
    assert "\n".join(story.play(text)) + "\n" == text


def test_shares_of_latencies_are_right_to_five_per_cent() -> None:
    rng = random.Random(5)
    seconds = [rng.lognormvariate(-2, 1) for _ in range(2000)]
    counts = added({bucket_of(s): 1} for s in seconds)
    for goal_s in (0.02, 0.1, 0.135, 0.5, 3.0):
        share = share_within(counts, goal_s)
        assert sum(s <= goal_s / 1.051 for s in seconds) <= share * len(seconds) <= sum(s <= goal_s for s in seconds)
    assert share_within({bucket_of(0.0): 1, bucket_of(0.1): 1, FAILED: 2}, 1e9) == 0.5, "what failed kept no goal"
    assert (share_within({}, 1.0), share_within({bucket_of(1e-9): 1}, 0.0)) == (1.0, 0.0)


def test_counts_of_two_moments_are_subtracted() -> None:
    before = {3: 2, 5: 1}
    assert since({3: 2, 5: 4, 9: 1}, before) == {5: 3, 9: 1}
    assert since(before, {}) == before


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "max_replicas"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"max_replicas": 4097}, "max_replicas"),
        ({"max_replicas": 2, "min_replicas": 3}, "max_replicas must be at least min_replicas (3), got 2"),
        ({"max_replicas": 2, "min_replicas": -1}, "min_replicas"),
        ({"max_replicas": 2, "target_kv_usage": 1.5}, "target_kv_usage"),
        ({"max_replicas": 2, "target_queued_tokens": float("nan")}, "target_queued_tokens"),
        ({"max_replicas": 2, "upscale_delay_s": float("inf")}, "upscale_delay_s"),
        ({"max_replicas": 2, "metrics_interval_s": 60}, "look_back_period_s must be at least metrics_interval_s (60), got 30"),
        ({"max_replicas": 2, "smoothing_factor": 1}, "smoothing_factor"),
    ],
)
def test_a_bad_policy_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AutoscalePolicy.model_validate(fields)
    assert named in str(caught.value)


def test_without_any_target_it_is_ray_serves_default() -> None:
    assert AutoscalePolicy(max_replicas=2).targets == {"target_ongoing_requests": 2.0}
    assert AutoscalePolicy(max_replicas=2, ttft_goal_s=1.0).targets == {}
    assert AutoscalePolicy(max_replicas=2, target_kv_usage=0.5).targets == {"target_kv_usage": 0.5}


@pytest.mark.parametrize(
    ("role", "field", "said"),
    [
        (Role.DECODE, "ttft_goal_s", True),
        (Role.DECODE, "target_queued_tokens", True),
        (Role.PREFILL, "tpot_goal_s", True),
        (Role.PREFILL, "target_decode_batch", True),
        (Role.COLOCATED, "tpot_goal_s", False),
        (Role.PREFILL, "ttft_goal_s", False),
    ],
)
def test_a_goal_of_the_other_phase_is_misplaced(role: Role, field: str, said: bool) -> None:
    problem = AutoscalePolicy.model_validate({"max_replicas": 2, field: 1.0}).misplaced(role)
    assert (field in problem) is said


def _watched(name: str, role: Role, **seen: Any) -> Watched:
    sample = {"ready": 1, "running": 1, **seen}
    samples = [Sample(at_s=float(t), **sample) for t in range(0, 50, 10)]
    policy = AutoscalePolicy(max_replicas=9, upscale_delay_s=0, target_ongoing_requests=1, target_attainment=0.9)
    observed = observe(samples, 40.0, period_s=30, interval_s=10, aggregation="mean")
    return Watched(target=PoolTarget(name=name, role=role, replicas=1), policy=policy, observed=observed)


def test_no_budget_is_ever_exceeded_and_none_is_left_while_somebody_wants_more() -> None:
    rng = random.Random(3)
    for _ in range(200):
        pools = []
        for n, role in enumerate((Role.PREFILL, Role.DECODE, Role.COLOCATED)):
            watched = _watched(f"p{n}", role, waiting=rng.randrange(6), legs=rng.randrange(5))
            target = replace(watched.target, ranks=rng.choice((1, 2)))
            pools.append(replace(watched, target=target))
        budget = rng.randrange(3, 16)
        outcome = decide(pools, {}, 40.0, other_accelerators=1, budget=budget)
        ranks = {w.target.name: w.target.ranks for w in pools}
        taken = 1 + sum(ranks[d.pool] * d.replicas for d in outcome.decisions.values())
        before = 1 + sum(ranks.values())
        assert taken == outcome.taken <= max(budget, before)
        for decision in outcome.decisions.values():
            assert decision.replicas >= decision.current
            if decision.replicas < decision.wanted:
                assert decision.action == "limited"
                assert taken + ranks[decision.pool] > budget


def test_the_next_accelerator_goes_where_goodput_gains_most_with_its_evidence() -> None:
    slow = {bucket_of(0.7): 30, bucket_of(0.1): 10}
    prefill = _watched("prefill", Role.PREFILL, legs=40, ttft=slow)
    prefill = replace(prefill, policy=prefill.policy.model_copy(update={"ttft_goal_s": 0.5}))
    decode = _watched("decode", Role.DECODE, legs=40, tpot={bucket_of(0.01): 32, bucket_of(0.03): 8})
    decode = replace(decode, policy=decode.policy.model_copy(update={"tpot_goal_s": 0.02}))
    first, second = decide([decode, prefill], {}, 40.0, other_accelerators=0, budget=2).gains
    assert (first.pool, first.basis, first.legs_per_s) == ("prefill", "latency", 4.0)
    assert (first.share_now, first.share_more, first.partner_share) == (0.25, 1.0, 0.8)
    assert first.goodput_per_s == pytest.approx(4.0 * 0.75 * 0.8)
    assert (second.pool, second.goodput_per_s) == ("decode", pytest.approx(4.0 * 0.2 * 0.25))


def test_whatever_happens_limits_hold_and_missing_data_takes_nobody_away() -> None:
    rng = random.Random(11)
    moved = {"up": 0, "down": 0}
    for _ in range(60):
        policy = AutoscalePolicy(
            min_replicas=rng.randrange(3),
            max_replicas=rng.randrange(3, 9),
            target_decode_batch=4,
            tpot_goal_s=rng.choice((None, 0.02)),
            upscale_delay_s=rng.choice((0, 15)),
            downscale_delay_s=rng.choice((0, 25)),
        )
        target, delays, samples = PoolTarget(name="d", role=Role.DECODE, replicas=rng.randrange(12)), {}, list[Sample]()
        for now_s in range(0, 600, 10):
            if rng.random() < 0.85:
                load = {"running": rng.randrange(30), "legs": rng.randrange(3), "lacking": rng.randrange(2)}
                tpot = {bucket_of(rng.choice((0.01, 0.03))): 40}
                gaps = ("somebody is away",) if rng.random() < 0.1 else ()
                samples.append(Sample(at_s=now_s, ready=target.replicas, tpot=tpot, gaps=gaps, **load))
            seen = observe(samples, now_s, period_s=30, interval_s=10, aggregation="mean")
            watched = Watched(target=target, policy=policy, observed=seen)
            outcome = decide([watched], delays, now_s, other_accelerators=0, budget=None)
            decision, delays = outcome.decisions["d"], dict(outcome.delays)
            assert policy.min_replicas <= decision.replicas <= policy.max_replicas
            assert decision.reason
            if decision.replicas < target.replicas <= policy.max_replicas:
                assert not seen.gaps
            if decision.action in moved:
                moved[decision.action] += 1
            target = replace(target, replicas=decision.replicas)
    assert min(moved.values()) > 50, moved
