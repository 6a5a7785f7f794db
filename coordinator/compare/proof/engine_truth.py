"""What is true of the simulated arms: goodput from long runs that no experiment uses.

An engine `speed` times as fast, its steps and its link, is the same engine in a shorter second: at rate r and an objective T it
does what the base does at r / speed and T x speed. So one long run of the base tells the goodput at every speed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coordinator.compare.load import ArmTarget, run_probe
from coordinator.compare.proof.engine_experiment import TURN_S
from coordinator.compare.proof.engine_world import BASELINE, CHALLENGER, REQUESTS, SLO, EngineCell, pool_name, workload, world
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.stats import CONFIDENCE, knee, t_interval

Floats = npt.NDArray[np.float64]

FIRST_SEED = 50_000_000
SEEDS = 400
"""With the workloads' scatter of 0.13 at most a truth has a standard error of 0.7 % or less."""
RATES = (2.0, 2.3, 2.6, 3.0, 3.4, 3.9, 4.4, 5.0, 5.7, 6.5)
TUNED = {"colocated": (32,), "split": (32, 8192)}
"""Token budgets that tuning may find best: for two colocated engines one is, for a prefill and a decode engine either."""
SURE = 0.99
NORMAL_REACH = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Truth:
    """The second arm's goodput over the first's, as the comparison means it: the mean log ratio of the two knees over workloads.

    `low` and `high` bound what `seeds` workloads leave open, with the confidence `SURE`; `error` is the standard error of its
    log. `pooled` is the ratio of the knees of the two mean curves.
    """

    ratio: float
    low: float
    high: float
    seeds: int
    pooled: float
    error: float = 0.0

    def within(self, low: float, high: float) -> bool:
        """Whether an experiment's interval holds it. What is not known of the truth itself is added to the interval, as
        independent errors add: without, a truth that is off would count against intervals that are right."""
        middle, half = (math.log(high) + math.log(low)) / 2, (math.log(high) - math.log(low)) / 2
        return abs(math.log(self.ratio) - middle) <= math.hypot(half, NORMAL_REACH * self.error)


def long_run(kind: str, chunk: int, seed: int) -> list[list[tuple[float, float]]]:
    """(TTFT, TPOT) in seconds of every judged request at every one of `RATES`, of one workload and token budget."""
    return run_virtual(_long_run(kind, chunk, FIRST_SEED + seed), TURN_S)


async def _long_run(kind: str, chunk: int, seed: int) -> list[list[tuple[float, float]]]:
    cell = EngineCell(name="truth", kind="split" if kind == "split" else "colocated")
    made = world(cell, seed)
    arm = CHALLENGER if kind == "split" else BASELINE
    made.client.know(arm, ArmTarget(arm, (pool_name(arm, chunk),)))
    found = []
    async with made.client:
        for number, rate in enumerate(RATES):
            sent = workload(seed, REQUESTS).salted(f"{number}")
            probe = await run_probe(made.client, sent, path=arm, rate_per_s=rate, deadline_s=120.0, now=made.now)
            found.append([(each.ttft_s or math.inf, each.tpot_s or math.inf) for each in probe.judged])
    return found


def goodput(times: Floats, speed: float = 1.0) -> float | None:
    """Requests a second at the objective, of an arm `speed` times as fast as the one with `times` [seed, rate, request, 2].

    None where the rates do not bracket it.
    """
    met = (times[..., 0] <= SLO.ttft_s * speed) & (times[..., 1] <= SLO.tpot_s * speed)
    found = knee(RATES, met.mean(axis=(0, 2)).tolist(), requests=met.shape[0] * met.shape[2])
    return None if found.rate_per_s is None else found.rate_per_s * speed


def truth(base: Floats, other: Floats, speed: float) -> Truth:
    """`other` at this speed over `base`, both [seed, rate, request, 2] of the same seeds.

    Raises `ValueError` where the rates bracket fewer than two seeds.
    """
    pairs = [(goodput(other[n : n + 1], speed), goodput(base[n : n + 1])) for n in range(len(base))]
    logs = [math.log(a / b) for a, b in pairs if a is not None and b is not None]
    interval, whole = t_interval(logs, SURE), (goodput(other, speed), goodput(base))
    if interval is None or whole[0] is None or whole[1] is None:
        raise ValueError(f"the rates {RATES} do not bracket the knees")
    low, high = math.exp(interval.low), math.exp(interval.high)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return Truth(math.exp(interval.mean), low, high, len(logs), whole[0] / whole[1], error)


def arrays(found: Sequence[list[list[tuple[float, float]]]]) -> Floats:
    """Long runs of several seeds as one array."""
    return np.array(found, dtype=np.float64)
