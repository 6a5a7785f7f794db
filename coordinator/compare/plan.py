"""What a quick comparison measures, and in which order, so that it fits its time. Pure.

Per seed and rate the arms run in ABBA order (colocated, split, split, colocated): a steady drift of the machine costs both
the same, and the two colocated probes are the baseline against itself.
"""

from __future__ import annotations

from dataclasses import dataclass

ORDER = ("colocated", "split", "split", "colocated")
RATE_STEPS = (1.0, 4.0)
"""Of the rate that one-at-a-time serving reaches. Engines batch, so the knee is expected above 1."""
ONE_RATE = (2.0,)
"""Where two rates do not fit: it shows the paths side by side under load, and brackets no knee."""
SEEDS = 3
"""Fewer never decide."""
MIN_REQUESTS = 6
MAX_REQUESTS = 24
BUDGET_SHARE = 0.85
"""Of the time is planned: under load requests take longer than the unloaded ones that the plan is made from."""
TAIL_E2ES = 2.5
"""A probe ends this many unloaded request times after its last arrival, roughly."""


@dataclass(frozen=True, slots=True)
class Step:
    """One probe to run. `half` is 0 or 1: the first or second probe of its path at this seed and rate."""

    seed: int
    rate_per_s: float
    path: str
    half: int


@dataclass(frozen=True, slots=True)
class QuickPlan:
    seeds: tuple[int, ...]
    rates_per_s: tuple[float, ...]
    requests: int
    steps: tuple[Step, ...]
    expected_s: float


def plan_quick(unloaded_e2e_s: float, budget_s: float, first_seed: int = 1) -> QuickPlan:
    """As many requests a probe as `budget_s` allows. Where the fewest do not fit, one rate is given up, then seeds.

    Every seed is whole: a run that is cut short loses its last seeds, not the second arm of all.

    Raises:
        ValueError: `unloaded_e2e_s` is not positive.
    """
    if unloaded_e2e_s <= 0:
        raise ValueError("unloaded_e2e_s must be positive")
    for count, multiples in ((SEEDS, RATE_STEPS), *((count, ONE_RATE) for count in range(SEEDS, 0, -1))):
        rates = tuple(multiple / unloaded_e2e_s for multiple in multiples)
        per_request_s = len(ORDER) * sum(1 / rate for rate in rates)
        tails_s = len(ORDER) * len(rates) * TAIL_E2ES * unloaded_e2e_s
        requests = int((BUDGET_SHARE * budget_s / count - tails_s) / per_request_s)
        if requests >= MIN_REQUESTS:
            break
    requests = min(MAX_REQUESTS, max(MIN_REQUESTS, requests))
    chosen = tuple(range(first_seed, first_seed + count))
    steps = []
    for seed in chosen:
        for rate in rates:
            for place, path in enumerate(ORDER):
                steps.append(Step(seed, rate, path, place // 2))
    return QuickPlan(chosen, rates, requests, tuple(steps), count * (requests * per_request_s + tails_s))
