"""One comparison of two arms of simulated engines, by the runner of true comparisons: only client and time are not real."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.compare.experiment import Arm, Candidate, Experiment
from coordinator.compare.faults import Fault
from coordinator.compare.goodput import floor, ratios
from coordinator.compare.proof.engine_world import (
    BASELINE,
    CHALLENGER,
    REQUESTS,
    SLO,
    EngineCell,
    candidate_name,
    pool_name,
    workload,
    world,
)
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.runner import run
from coordinator.compare.tools import Tools
from coordinator.compare.verdict import Judgement, judge
from coordinator.compare.workload import TUNING_SEEDS_FROM, Workload

TURN_S = 0.0005
"""What a turn of the loop costs: the client polls its last millisecond."""
MEASURED_FROM, TUNED_FROM = 2_000_000, 500_000_000
SEED_STRIDE = 10
"""Workload seeds of two experiments lie so far apart. Those of tuning are nobody else's, or all experiments would err alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one experiment came to.

    `judged` is the runner's; `without` is what the statistics alone say, faults or not. `clock_s` is how long it took on the
    engines' clock.
    """

    rates_per_s: tuple[float, ...]
    chosen: tuple[str, ...]
    differences: tuple[float, ...]
    floor: tuple[float, ...]
    faults: tuple[Fault, ...]
    judged: Judgement
    without: Judgement
    clock_s: float


def plan(cell: EngineCell, seed: int) -> Experiment:
    """The comparison as its file would say it."""

    def arm(name: str, path: str) -> Arm:
        return Arm.model_validate(
            {"path": path, "candidates": {candidate_name(n): Candidate(pools=(pool_name(name, n),)) for n in cell.chunks(name)}}
        )

    return Experiment.model_validate(
        {
            "workload": "in-memory",
            "arms": {BASELINE: arm(BASELINE, "colocated"), CHALLENGER: arm(CHALLENGER, cell.kind)},
            "slo": f"ttft={SLO.ttft_s:g}s,tpot={SLO.tpot_s:g}s",
            "requests": REQUESTS,
            "edge_e2es": 0.0,  # The truth is of whole probes too.
            "rates": cell.rates,
            "looks": cell.looks,
            "start_rate_per_s": 4.0,
            "first_seed": MEASURED_FROM + SEED_STRIDE * seed,
        }
    )


def run_experiment(cell: EngineCell, seed: int) -> Found:
    """One experiment in a virtual loop of its own; `seed` from 1 on. The same arguments give the same result.

    Raises what `coordinator.compare.runner.run` raises.
    """
    return run_virtual(_experiment(cell, seed), TURN_S)


async def _experiment(cell: EngineCell, seed: int) -> Found:
    experiment, made = plan(cell, seed), world(cell, seed)

    def workloads(number: int, requests: int) -> Workload:
        if TUNING_SEEDS_FROM <= number < TUNING_SEEDS_FROM + SEED_STRIDE:
            number += TUNED_FROM + SEED_STRIDE * seed - TUNING_SEEDS_FROM
        return workload(number, requests)

    async with made.client:
        tools = Tools(client=made.client, know=made.client.know, now=made.now, salt=f"{seed}")
        record = await run(experiment, workloads, tools, target="simulated", model="simulated", digest="")
    differences, itself = ratios(record.knees, CHALLENGER, BASELINE), floor(record.knees, BASELINE)
    return Found(
        rates_per_s=tuple(record.rates_per_s),
        chosen=tuple(arm.candidate for arm in record.arms),
        differences=tuple(differences),
        floor=tuple(itself),
        faults=tuple(record.faults),
        judged=record.judgement,
        without=judge(differences, itself, experiment.margin, looks=experiment.looks, bootstrap=False),
        clock_s=record.wall_s,
    )
