"""Experiments of a known truth, judged by the instrument itself: what its intervals cover, what its verdicts are worth. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats as scipy_stats

from coordinator.compare.proof.knees import knees
from coordinator.compare.proof.model import Batch, Design, Plant, World, simulate
from coordinator.compare.stats import CONFIDENCE
from coordinator.compare.verdict import MARGIN, Verdict, judge, judge_family

Floats = npt.NDArray[np.float64]

STANDARD = Design(name="8 x 2000", seeds=8, requests=2000)
SMALL = Design(name="5 x 1000", seeds=5, requests=1000)
RATIOS = (1.0, 1.03, 1.05, 1.10, 1.30, 1 / 1.03, 1 / 1.05, 1 / 1.10, 1 / 1.30)
TRUTHS = tuple((design, ratio) for design in (STANDARD, SMALL) for ratio in RATIOS)
AGAIN = 4
LOOKS = (3, 5, 8)
FAMILY = 4
SURE = 0.99
"""Confidence of the intervals of shares in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many of `of` experiments, with the exact (Clopper-Pearson) interval of `SURE`."""

    count: int
    of: int

    @property
    def value(self) -> float:
        return self.count / self.of

    @property
    def interval(self) -> tuple[float, float]:
        found = scipy_stats.binomtest(self.count, self.of).proportion_ci(SURE, method="exact")
        return float(found.low), float(found.high)

    def as_dict(self) -> dict[str, float]:
        low, high = self.interval
        return {"share": self.value, "low": low, "high": high, "count": self.count, "of": self.of}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What one experiment hands to the verdict: log ratios per seed, of the baseline to itself, and of second probes to first."""

    differences: tuple[float, ...]
    floor: tuple[float, ...]
    gains: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One truth under one design. `right`: the share of the verdict that is true, None on the margin itself, where none is.

    `wrong`: any verdict that is not true. `half_width` is the median one of log ratio; `bias` of its mean.
    """

    design: str
    ratio: float
    bias: float
    half_width: float
    covered: Share
    verdicts: dict[str, Share]
    unfit: Share
    wrong: Share
    right: Share | None


def experiments(batch: Batch, requests: int) -> list[Experiment]:
    """Each experiment's figures as a comparison computes them; seeds without a bracketed knee give none."""
    rates = batch.rates[:, None, :]
    whole = [knees(rates, arm.mean(axis=-1), requests=requests) for arm in (batch.split, batch.colocated)]
    halves = [[knees(rates, arm[..., half], requests=requests) for half in (0, 1)] for arm in (batch.colocated, batch.split)]
    differences = np.log(whole[0] / whole[1])
    floor = np.log(halves[0][0] / halves[0][1])
    gains = (np.log(halves[0][1] / halves[0][0]) + np.log(halves[1][1] / halves[1][0])) / 2
    return [
        Experiment(differences=_known(d), floor=_known(f), gains=_known(g))
        for d, f, g in zip(differences, floor, gains, strict=True)
    ]


def true_verdicts(truth: float, margin: float = MARGIN) -> Verdict | None:
    """The one that is true of a log ratio; None on the margin."""
    bound = math.log1p(margin)
    if math.isclose(abs(truth), bound):
        return None
    if abs(truth) < bound:
        return Verdict.EQUIVALENT
    return Verdict.SPLIT if truth > 0 else Verdict.COLOCATE


def truth_cell(design: Design, ratio: float, world: World, count: int, generator: np.random.Generator) -> Cell:
    """`count` experiments of this effect."""
    truth = math.log(ratio)
    batch = simulate(design, Plant(ratio=ratio), world, count, generator)
    made = experiments(batch, design.requests)
    judged = [judge(one.differences, one.floor, bootstrap=False) for one in made]
    bounds = [(math.log(j.low), math.log(j.high)) for j in judged if j.low is not None and j.high is not None]
    means = [float(np.mean(one.differences)) for one in made if one.differences]
    real = true_verdicts(truth)
    claims = [j.verdict for j in judged]
    return Cell(
        design=design.name,
        ratio=ratio,
        bias=float(np.mean(means)) - truth,
        half_width=float(np.median([(high - low) / 2 for low, high in bounds])),
        covered=Share(count=sum(low <= truth <= high for low, high in bounds), of=len(bounds)),
        verdicts={verdict.value: Share(count=claims.count(verdict), of=count) for verdict in Verdict},
        unfit=Share(count=sum(j.reason.startswith("rig unfit") for j in judged), of=count),
        wrong=Share(count=sum(_false(claim, real) for claim in claims), of=count),
        right=None if real is None else Share(count=claims.count(real), of=count),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """What judging more than once costs: the share of experiments with any false verdict, without and with the correction."""

    name: str
    uncorrected: Share
    corrected: Share


def repeated_looks(ratio: float, world: World, count: int, generator: np.random.Generator) -> Repeat:
    """Judged at `LOOKS` seeds, stopping at the first verdict: as if each look were the only one, and with spent alpha."""
    design = Design(name="looks", seeds=LOOKS[-1], requests=STANDARD.requests)
    made = experiments(simulate(design, Plant(ratio=ratio), world, count, generator), design.requests)
    real = true_verdicts(math.log(ratio))

    def first(one: Experiment, looks: Sequence[int]) -> Verdict:
        for seeds in LOOKS:
            found = judge(one.differences[:seeds], one.floor[:seeds], looks=looks, bootstrap=False).verdict
            if found is not Verdict.UNDECIDED:
                return found
        return Verdict.UNDECIDED

    whole = [one for one in made if len(one.differences) == LOOKS[-1]]
    shares = [Share(count=sum(_false(first(one, looks), real) for one in whole), of=len(whole)) for looks in ((), LOOKS)]
    return Repeat(name=f"looks at {', '.join(map(str, LOOKS))} seeds", uncorrected=shares[0], corrected=shares[1])


def many_workloads(ratio: float, world: World, count: int, generator: np.random.Generator) -> Repeat:
    """`FAMILY` workloads of this effect each, judged one by one, and as a family by Holm."""
    made = experiments(simulate(STANDARD, Plant(ratio=ratio), world, count * FAMILY, generator), STANDARD.requests)
    real = true_verdicts(math.log(ratio))
    alone = together = 0
    for begin in range(0, len(made), FAMILY):
        family = {str(i): (one.differences, one.floor) for i, one in enumerate(made[begin : begin + FAMILY])}
        alone += any(_false(judge(d, f, bootstrap=False).verdict, real) for d, f in family.values())
        together += any(_false(found.verdict, real) for found in judge_family(family, bootstrap=False).values())
    return Repeat(
        name=f"{FAMILY} workloads",
        uncorrected=Share(count=alone, of=count),
        corrected=Share(count=together, of=count),
    )


def all_truths(count: int, world: World, seed: int, told: Callable[[str], None]) -> Iterator[Cell]:
    """Every design and effect, each from a seed of its own."""
    for number, (design, ratio) in enumerate(TRUTHS):
        told(f"{design.name}, true ratio {ratio:.3f}")
        yield truth_cell(design, ratio, world, count, np.random.default_rng([seed, number]))


def doubtful(found: Sequence[Cell], count: int, world: World, seed: int, told: Callable[[str], None]) -> Iterator[Cell]:
    """The cells whose interval misses the nominal coverage again: fresh seeds, `AGAIN` times as many experiments.

    Of eighteen intervals of 99 % one misses by chance in a sixth of all proofs. What is wrong misses the more surely with more.
    """
    for number, ((design, ratio), cell) in enumerate(zip(TRUTHS, found, strict=True)):
        if not covers(cell):
            told(f"{design.name}, true ratio {ratio:.3f}, again")
            yield truth_cell(design, ratio, world, AGAIN * count, np.random.default_rng([seed, number, 1]))


def covers(cell: Cell) -> bool:
    """Whether the coverage may be what the intervals claim."""
    low, high = cell.covered.interval
    return low <= CONFIDENCE <= high


def _false(claim: Verdict, real: Verdict | None) -> bool:
    return claim is not Verdict.UNDECIDED and claim is not real


def _known(values: Floats) -> tuple[float, ...]:
    return tuple(values[~np.isnan(values)].tolist())
