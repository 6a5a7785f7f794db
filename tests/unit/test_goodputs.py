"""From probes to per-seed goodput ratios, and an arm's figures."""

from __future__ import annotations

import math
import statistics

import pytest

from coordinator.compare.load import Outcome, Probe, Slo
from coordinator.compare.plan import QuickPlan, plan_quick
from coordinator.compare.run import goodputs
from coordinator.compare.summary import arm, summarise

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
REQUESTS = 100


def outcome(*, ttft_s: float = 0.5, tpot_s: float = 0.05, tokens: int = 11, failure: str = "") -> Outcome:
    return Outcome(
        index=0,
        due_s=0.0,
        lag_s=0.0,
        wanted_tokens=11,
        tokens=tokens,
        ttft_s=ttft_s,
        e2e_s=ttft_s + tpot_s * (tokens - 1),
        gaps_s=[tpot_s] * (tokens - 1),
        failure=failure,
        ledger={"prefill_s": ttft_s, "residual_s": 0.01, "e2e_s": 1.0, "transfer_bytes": 100},
    )


def probe(path: str, seed: int, rate_per_s: float, attained: float, void: str = "") -> Probe:
    outcomes = [outcome(ttft_s=0.5 if i < attained * REQUESTS else 2.0) for i in range(REQUESTS)]
    return Probe(path=path, seed=seed, rate_per_s=rate_per_s, workload_digest="", outcomes=outcomes, void=void)


def probes(plan: QuickPlan, fall: dict[str, float]) -> list[Probe]:
    """Everything attained at the lowest rate; at the highest, what `fall` says of the path."""
    lowest = plan.rates_per_s[0]
    return [
        probe(step.path, step.seed, step.rate_per_s, 1.0 if step.rate_per_s == lowest else fall[step.path]) for step in plan.steps
    ]


def crossing(plan: QuickPlan, at_high: float) -> float:
    """From everything but half a request at the low rate: a line in normal quantiles over log rate."""
    low, high = plan.rates_per_s
    most, least, level = (statistics.NormalDist().inv_cdf(share) for share in (1 - 0.5 / REQUESTS, at_high, 0.9))
    return low * (high / low) ** ((most - level) / (most - least))


def test_each_seed_gives_one_ratio_of_knees_and_one_of_the_baseline_with_itself() -> None:
    plan = plan_quick(0.3, 70.0)
    knees, differences, floor = goodputs(plan, probes(plan, {"split": 0.6, "colocated": 0.2}), SLO)
    expected = math.log(crossing(plan, 0.6) / crossing(plan, 0.2))
    assert differences == pytest.approx([expected] * len(plan.seeds))
    assert floor == pytest.approx([0.0] * len(plan.seeds))
    assert [entry["seed"] for entry in knees] == list(plan.seeds)


def test_a_knee_beyond_the_rates_gives_no_ratio() -> None:
    plan = plan_quick(0.3, 70.0)
    knees, differences, floor = goodputs(plan, probes(plan, {"split": 1.0, "colocated": 0.2}), SLO)
    assert differences == []
    assert len(floor) == len(plan.seeds)
    assert "above the highest" in knees[0]["split"]["why"]


def test_void_and_missing_probes_do_not_count() -> None:
    plan = plan_quick(0.3, 70.0)
    made = probes(plan, {"split": 0.6, "colocated": 0.2})
    for each in made[: len(made) // len(plan.seeds)]:
        each.void = "the client fell behind"
    knees, differences, _ = goodputs(plan, made[:-1], SLO)
    assert knees[0]["split"] == {"rate_per_s": None, "why": "not measured"}
    assert len(differences) == len(plan.seeds) - 1


@pytest.mark.parametrize(
    ("changes", "meets"),
    [
        ({}, True),
        ({"ttft_s": 1.001}, False),
        ({"tpot_s": 0.101}, False),
        ({"tpot_s": 0.2, "tokens": 1}, True),
        ({"failure": "UNAVAILABLE: no worker"}, False),
    ],
)
def test_a_request_meets_every_slo_or_misses(changes: dict[str, float], meets: bool) -> None:
    assert outcome(**changes).meets(SLO) is meets  # type: ignore[arg-type]


def test_itl_is_judged_where_asked() -> None:
    stalled = outcome()
    stalled.gaps_s[3] = 0.4
    assert stalled.meets(SLO)
    assert not stalled.meets(Slo(ttft_s=1.0, tpot_s=0.1, itl_p99_s=0.3))


def test_failures_count_as_offered_and_in_no_latency() -> None:
    summary = summarise("split", [outcome(), outcome(ttft_s=9.0, failure="late")], SLO)
    assert (summary.offered, summary.failed, summary.failures) == (2, 1, ("late",))
    assert summary.attainment == 0.5
    assert summary.ttft is not None
    assert summary.ttft.largest == 0.5
    assert summary.ledger_s["prefill_s"] == 0.5
    assert summary.residual_share == pytest.approx(0.01)
    assert summary.transfer_bytes == 100


def test_void_probes_are_shown_only_for_want_of_others() -> None:
    void = probe("split", 1, 1.0, 0.0, void="late")
    assert arm("split", [void, probe("split", 1, 1.0, 1.0)], SLO).attainment == 1.0
    assert arm("split", [void], SLO).attainment == 0.0


def test_a_thinned_probe_keeps_whatever_is_judged() -> None:
    def made(gaps_s: list[float]) -> Outcome:
        own = outcome()
        own.gaps_s, own.itl_p99_s, own.itl_largest_s = list(gaps_s), max(gaps_s), max(gaps_s)
        return own

    slow, fast = [0.01] * 499 + [0.4], [0.0100000001] * 500
    whole = Probe(
        path="p", seed=1, rate_per_s=1.0, workload_digest="", outcomes=[made(slow if i % 2 else fast) for i in range(40)]
    )
    slo = Slo(ttft_s=1.0, tpot_s=0.1, itl_p99_s=0.2)
    attained, largest_s = whole.attainment(slo), summarise("p", whole.outcomes, slo).itl_largest_s
    whole.thin()
    assert 0 < sum(len(each.gaps_s) for each in whole.outcomes) <= 4500
    assert whole.outcomes[0].gaps_s == [0.01] * 500
    assert whole.attainment(slo) == attained == 0.5
    assert summarise("p", whole.outcomes, slo).itl_largest_s == largest_s == 0.4
