"""Faults planted on purpose: whether they are caught and named, and what the verdict would have said without. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coordinator.compare import faults
from coordinator.compare.load import MAX_SEND_LAG_SHARE
from coordinator.compare.proof.cells import STANDARD, Experiment, Share, experiments
from coordinator.compare.proof.model import Plant, World, simulate
from coordinator.compare.stats import percentile
from coordinator.compare.verdict import MARGIN, Verdict, judge

Floats = npt.NDArray[np.float64]
Generator = np.random.Generator

TTFT_SLO_S = 0.5
RATE_PER_S = 10.0
PAUSE_S, PAUSE_EVERY_S = 0.04, 1.0
"""Of the lagging client."""
CLIENT_PROBES, CLIENT_REQUESTS = 12, 300
STALL_S, STALL_EVERY_S = 0.15, 2.0
STEP_S = 0.03
STALL_PROBE_S = 60.0
STALL_REQUESTS = 300
STALL_PROBES = 2
LOSSES, CLEAN_LOSSES = 0.02, 0.0002
PROMPT_TOKENS = 1000
CARRIED = 0.3
"""Of the second probes' prompt tokens."""
SECOND_GAIN = 1.15
CHUNKS = {"chunk 512": 0.90, "chunk 1024": 0.97, "chunk 2048": 1.0, "chunk 4096": 0.93, "chunk 8192": 0.80}
"""Goodput of the colocated arm by its chunk budget, over the best."""
DEFAULT_CHUNK = "chunk 8192"
TUNING_SEEDS = 3
TUNING_SPREAD = 0.06
"""Of one goodput on one tuning seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One fault. `caught`: found and named as what it is; `false_alarms`: the same detector on experiments without the fault.

    `verdicts` is what the statistics alone would have said of the faulty experiments, true effect `ratio`.
    """

    name: str
    ratio: float
    verdicts: dict[str, Share]
    caught: Share
    false_alarms: Share
    example: str


Detector = Callable[[bool, Experiment, Generator], faults.Fault | None]
"""(planted or clean, the experiment, chance) to what is found."""


def all_planted(count: int, world: World, seed: int, told: Callable[[str], None]) -> Iterator[Planted]:
    """Every fault, `count` experiments with it and as many without."""
    for number, (name, kind, plant, detect) in enumerate(PLANTS):
        told(f"planted: {name}")
        generator = np.random.default_rng([seed, 1000 + number])
        faulty, clean = (
            experiments(simulate(STANDARD, each, world, count, generator), STANDARD.requests) for each in (plant, Plant())
        )
        found = [detect(True, one, generator) for one in faulty]
        alarms = [detect(False, one, generator) for one in clean]
        claims = [judge(one.differences, one.floor, bootstrap=False).verdict for one in faulty]
        named = [fault.text for fault in found if fault is not None and fault.kind == kind]
        yield Planted(
            name=name,
            ratio=plant.ratio,
            verdicts={verdict.value: Share(count=claims.count(verdict), of=count) for verdict in Verdict},
            caught=Share(count=len(named), of=count),
            false_alarms=Share(count=sum(fault is not None for fault in alarms), of=count),
            example=named[0] if named else "",
        )


def mistuned_baseline(planted: bool, _: Experiment, generator: Generator) -> faults.Fault | None:
    """The default chunk instead of the best on the tuning seeds."""
    seeds = TUNING_SPREAD * generator.standard_normal((len(CHUNKS), TUNING_SEEDS))
    found = {name: (share * np.exp(row)).tolist() for (name, share), row in zip(CHUNKS.items(), seeds, strict=True)}
    best = max(found, key=lambda name: sum(found[name]))
    return faults.mistuned("colocated", found, DEFAULT_CHUNK if planted else best, MARGIN)


def stalling_arm(planted: bool, _: Experiment, generator: Generator) -> faults.Fault | None:
    """Every gap of two probes: steps that vary, single slow tokens, hiccups of the whole engine at random, and the stall."""
    return faults.stalls("split", [_gaps(planted, generator) for _ in range(STALL_PROBES)])


def _gaps(planted: bool, generator: Generator) -> tuple[Floats, Floats]:
    begins = np.sort(generator.uniform(0, STALL_PROBE_S, STALL_REQUESTS))
    tokens = generator.integers(24, 64, STALL_REQUESTS)
    gaps = STEP_S * np.exp(0.15 * generator.standard_normal(int(tokens.sum())))
    slow = generator.random(len(gaps)) < 0.005
    gaps = np.where(slow, gaps * generator.uniform(2, 6, len(gaps)), gaps)
    first = np.repeat(begins, tokens)
    walked = np.cumsum(gaps)
    before = np.repeat(walked[np.cumsum(tokens) - 1] - np.add.reduceat(gaps, np.cumsum(tokens) - tokens), tokens)
    ends = first + walked - before
    hiccups = np.sort(generator.uniform(0, STALL_PROBE_S, generator.poisson(0.2 * STALL_PROBE_S)))
    halts = [(at, 0.1) for at in hiccups]
    if planted:
        phase = generator.uniform(0, STALL_EVERY_S)
        jitter = 0.005 * generator.standard_normal(int(STALL_PROBE_S / STALL_EVERY_S))
        halts += [(phase + k * STALL_EVERY_S + late, STALL_S) for k, late in enumerate(jitter)]
    for at, lasts_s in halts:
        # What was being computed then ends later; what follows in the same requests is moved along only by the next steps' own
        # scatter, which the gaps already hold.
        held = (ends - gaps <= at) & (at < ends)
        gaps = np.where(held, gaps + lasts_s, gaps)
        ends = np.where(held, ends + lasts_s, ends)
    return ends, gaps


def lossy_arm(planted: bool, _: Experiment, generator: Generator) -> faults.Fault | None:
    """Requests that fail at the lowest rate of all seeds."""
    offered = 2 * STANDARD.seeds * STANDARD.requests
    return faults.lossy("split", int(generator.binomial(offered, LOSSES if planted else CLEAN_LOSSES)), offered)


def lagging_client(planted: bool, _: Experiment, generator: Generator) -> faults.Fault | None:
    """A client that stands still for a moment every second, as a collected one does; probes are void by the load loop's rule."""
    void = 0
    for _number in range(CLIENT_PROBES):
        lags = 0.0003 * np.exp(0.5 * generator.standard_normal(CLIENT_REQUESTS))
        if planted:
            due = np.cumsum(generator.exponential(1 / RATE_PER_S, CLIENT_REQUESTS))
            into = (due + generator.uniform(0, PAUSE_EVERY_S)) % PAUSE_EVERY_S
            lags = lags + np.maximum(0.0, PAUSE_S - into)
        void += percentile(lags.tolist(), 0.99) > MAX_SEND_LAG_SHARE * TTFT_SLO_S
    return faults.late_client(void, CLIENT_PROBES)


def reported_carry_over(planted: bool, _: Experiment, generator: Generator) -> faults.Fault | None:
    """Engines that say how much they found in their prefix caches, on distinct inputs."""
    prompts = 2 * STANDARD.seeds * STANDARD.rates * STANDARD.requests
    found = generator.binomial(prompts // 2, CARRIED) * PROMPT_TOKENS if planted else 0
    return faults.carried_over("colocated", int(found), prompts * PROMPT_TOKENS, 0.0)


def silent_carry_over(_: bool, one: Experiment, __: Generator) -> faults.Fault | None:
    """Nothing is reported; second probes just do better."""
    return faults.second_halves(one.gains)


PLANTS: tuple[tuple[str, str, Plant, Detector], ...] = (
    ("mistuned baseline", faults.MISTUNED, Plant(baseline_factor=CHUNKS[DEFAULT_CHUNK]), mistuned_baseline),
    ("stall every 2 s", faults.STALL, Plant(), stalling_arm),
    ("lossy arm", faults.LOSSY, Plant(losses=LOSSES), lossy_arm),
    ("lagging client", faults.LATE_CLIENT, Plant(), lagging_client),
    ("carry-over, reported", faults.CARRY_OVER, Plant(second_probe_gain=SECOND_GAIN), reported_carry_over),
    ("carry-over, unreported", faults.CARRY_OVER, Plant(second_probe_gain=SECOND_GAIN), silent_carry_over),
)
