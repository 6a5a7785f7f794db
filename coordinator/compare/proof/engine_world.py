"""What is planted in the simulated engines: one cell per truth or fault, and the two arms that have it.

`world(cell, seed)` gives a client, the clock to measure it by and the truth: enough for anything that compares two paths.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from coordinator.compare.load import Slo
from coordinator.compare.proof.engine_arms import ArmClock, Colocated, EngineClient, Pace, Pool, Split, Stall, Wander
from coordinator.compare.workload import Workload, WorkloadSpec, make

SLO = Slo(ttft_s=1.3, tpot_s=0.2)
REQUESTS = 80
PROMPT_TOKENS = (16, 128)
OUTPUT_TOKENS = (3, 8)
DEFAULT_CHUNK = 8192
CHUNKS = (12, 32, DEFAULT_CHUNK)
"""Token budgets of a step that are tried. The best of colocated engines is 32, the others are a fifth below it or more; for a
prefill and a decode engine 32 and the default are near each other, and which is found best is luck."""
MACHINE_SPREAD, MACHINE_KEEPS_S = 0.01, 300.0
"""Of what both arms' machine does to all durations, as a deviation of the log."""
ARM_SPREAD, ARM_KEEPS_S = 0.005, 60.0
"""Of each arm by itself."""
DRIFT_PER_S = 0.05 / 3000
"""Steady, for both: about 5 % in an experiment."""
STALL_LASTS_S, STALL_EVERY_S = 0.35, 2.0
BASELINE, CHALLENGER = "colocated", "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCell:
    """What is planted. The arm "split" is a second label of the colocated one unless `kind` says otherwise.

    `speed` is the second arm's, over the first's. `nominal` is the goodput ratio that was aimed at, None where nothing was.
    `fault` is the kind that must be found. Where `salted` is false, probes send again what caches have seen. `looks` is when it
    is judged, and `rates` how many are measured.
    """

    name: str
    nominal: float | None = None
    kind: Literal["colocated", "split"] = "colocated"
    speed: float = 1.0
    untuned: bool = False
    stalls: bool = False
    losses: float = 0.0
    pause_s: float = 0.0
    salted: bool = True
    fault: str = ""
    looks: tuple[int, ...] = (5,)
    rates: int = 3

    def chunks(self, arm: str) -> tuple[int, ...]:
        """The candidates of an arm."""
        return (DEFAULT_CHUNK,) if self.untuned and arm == BASELINE else CHUNKS


def pool_name(arm: str, chunk: int) -> str:
    """Of the engines that serve an arm's candidate."""
    return f"{arm}-{chunk}"


def candidate_name(chunk: int) -> str:
    """Of an arm's configuration with this token budget."""
    return f"chunk {chunk}"


@dataclass(frozen=True, slots=True)
class World:
    """`truth` says what was planted; its goodput ratio is what long runs find."""

    client: EngineClient
    now: Callable[[], float]
    truth: EngineCell


def world(cell: EngineCell, seed: int) -> World:
    """The arms of one experiment, on an idle machine; every candidate has engines of its own beside the others.

    Call it in a running virtual loop; `async with` the client starts the engines. The same cell and seed give the same durations.
    """
    loop = asyncio.get_running_loop()
    machine = Wander(MACHINE_SPREAD, MACHINE_KEEPS_S, f"{seed}/machine")
    pools: dict[str, Pool] = {}
    for arm in (BASELINE, CHALLENGER):
        second = arm == CHALLENGER
        pace = Pace((machine, Wander(ARM_SPREAD, ARM_KEEPS_S, f"{seed}/{arm}")), DRIFT_PER_S, loop.time())
        stall = Stall(STALL_LASTS_S, STALL_EVERY_S, phase_s=seed % 7 * 0.25) if second and cell.stalls else None
        kind = Split if second and cell.kind == "split" else Colocated
        for chunk in cell.chunks(arm):
            clocks = [ArmClock(pace, f"{seed}/{arm}/{chunk}/{number}", stall) for number in range(2)]
            pools[pool_name(arm, chunk)] = kind(clocks, speed=cell.speed if second else 1.0, chunk_tokens=chunk)
    client = EngineClient(
        pools, seed=f"{seed}/client", lossy=CHALLENGER, losses=cell.losses, pause_s=cell.pause_s, salted=cell.salted
    )
    return World(client, loop.time, cell)


@functools.lru_cache(maxsize=16)
def workload(seed: int, requests: int = REQUESTS) -> Workload:
    """What both arms are sent."""
    return make(WorkloadSpec(seed=seed, requests=requests, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS))
