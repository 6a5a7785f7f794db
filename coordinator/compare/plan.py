"""What a quick comparison measures, and in which order, so that it fits its time. Pure.

Per seed and rate the arms run in ABBA order (colocated, split, split, colocated): a steady drift of the machine costs both
the same, and the two colocated probes are the baseline against itself.
"""

from __future__ import annotations

from dataclasses import dataclass

ORDER = ("colocated", "split", "split", "colocated")
RATE_STEPS = (1.0, 2.5)
"""Of the rate that one-at-a-time serving reaches. Engines batch, so the knee is expected above 1."""
MIN_REQUESTS = 5
MAX_REQUESTS = 40
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


def plan_quick(unloaded_e2e_s: float, budget_s: float, first_seed: int = 1, seeds: int = 2) -> QuickPlan:
    """As many requests a probe as `budget_s` allows; fewer seeds when even the fewest requests do not fit.

    Raises:
        ValueError: `unloaded_e2e_s` is not positive.
    """
    if unloaded_e2e_s <= 0:
        raise ValueError("unloaded_e2e_s must be positive")
    rates = tuple(step / unloaded_e2e_s for step in RATE_STEPS)
    per_request_s = len(ORDER) * sum(1 / rate for rate in rates)
    tails_s = len(ORDER) * len(rates) * TAIL_E2ES * unloaded_e2e_s
    for count in range(seeds, 0, -1):
        requests = int((budget_s / count - tails_s) / per_request_s)
        if requests >= MIN_REQUESTS or count == 1:
            break
    requests = min(MAX_REQUESTS, max(MIN_REQUESTS, requests))
    chosen = tuple(range(first_seed, first_seed + count))
    steps = []
    for seed in chosen:
        for rate in rates:
            for place, path in enumerate(ORDER):
                steps.append(Step(seed, rate, path, place // 2))
    return QuickPlan(chosen, rates, requests, tuple(steps), count * (requests * per_request_s + tails_s))
