"""A system whose goodput is known, many experiments at once: what an open-loop probe of it would attain. Pure, numpy alone.

Attainment falls with the rate as exp(-ln(1/0.9) (rate/knee)^steepness): 90 % at the knee. What makes real experiments hard is in:

- successes of one probe hang together (queues last), so its attainment scatters several times more than that of independent
  requests;
- probes of one seed have the same arrivals, only faster or slower, so most of that scatter is common to arms and rates; the rest
  is each probe's own;
- seeds differ in how hard they are, for both arms, and a little in how hard they are for one arm;
- the machine drifts, steadily and in slow waves, while the probes run one after the other;
- the arms' curves have different steepness, and the rates are set from a coarse search that errs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]

LEVEL = 0.9
DENSITY_AT_LEVEL = 0.17549833193248688
"""Of the standard normal at its 90 % quantile: how much a shift of the latent moves an attainment of 90 %."""
ORDERS = (("colocated", "split", "split", "colocated"), ("split", "colocated", "colocated", "split"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One experiment's size: `requests` per probe, 4 probes per seed and rate."""

    name: str
    seeds: int
    requests: int
    rates: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How the system scatters. Shares and deviations of log goodput, unless said otherwise.

    `inflation` is the factor by which a probe's scatter exceeds that of independent requests at the knee; queueing models give
    2.6 to 8. `common` is the part of that variance which the probes of a seed and rate share, `common_across_rates` the part of
    this which all rates of a seed share.
    """

    inflation: float = 5.0
    common: float = 0.6
    common_across_rates: float = 0.8
    steepness_colocated: float = 9.0
    steepness_split: float = 7.0
    seed_spread: float = 0.06
    seed_arm_spread: float = 0.01
    drift: float = 0.05
    wave: float = 0.015
    wave_keeps: float = 0.9
    search_error: float = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """What is planted: the true effect, and faults. Factors on a knee; 1 is none.

    `second_probe_gain`: probes that come second in their block serve more, as with a cache that was filled by the first.
    `baseline_factor`: colocated serves less than it could. `losses`: share of the split arm's requests that fail.
    """

    ratio: float = 1.0
    second_probe_gain: float = 1.0
    baseline_factor: float = 1.0
    losses: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`experiments` of one cell. Attainments are [experiment, seed, rate, half], half 0 an arm's first probe of its block."""

    rates: Floats  # [experiment, rate]
    split: Floats
    colocated: Floats
    truth: float


def simulate(design: Design, plant: Plant, world: World, experiments: int, generator: np.random.Generator) -> Batch:
    """Attainments of `experiments` independent experiments; the colocated arm's best knee is 1 request a second."""
    shape = (experiments, design.seeds, design.rates, 4)
    base = np.log([plant.baseline_factor, plant.ratio])  # colocated, split
    found = base + world.search_error * generator.standard_normal((experiments, 2))
    steps = np.linspace(0.0, 1.0, design.rates)
    low, high = found.min(axis=1) + math.log(0.78), found.max(axis=1) + math.log(1.28)
    log_rates = low[:, None] + steps * (high - low)[:, None]

    seeds = world.seed_spread * generator.standard_normal((experiments, design.seeds, 1, 1))
    by_arm = world.seed_arm_spread * generator.standard_normal((experiments, design.seeds, 2))
    arm, half = _orders(design.seeds)  # [seed, place]
    log_knee = (
        base[arm][None, :, None, :] + seeds + np.take_along_axis(by_arm, arm[None].repeat(experiments, 0), 2)[:, :, None, :]
    )
    log_knee = log_knee + half[None, :, None, :] * math.log(plant.second_probe_gain) + _drift(world, shape, generator)

    steepness = np.array([world.steepness_colocated, world.steepness_split])[arm][None, :, None, :]
    hazard = -math.log(LEVEL) * np.exp(steepness * (log_rates[:, None, :, None] - log_knee))
    latent = special.ndtri(np.clip(np.exp(-hazard), 1e-12, 1 - 1e-12))
    # The scatter beyond independent requests', as a shift of the latent.
    width = math.sqrt(world.inflation**2 - 1) * math.sqrt(LEVEL * (1 - LEVEL) / design.requests) / DENSITY_AT_LEVEL
    together = math.sqrt(world.common_across_rates) * generator.standard_normal((experiments, design.seeds, 1, 1))
    by_rate = generator.standard_normal((experiments, design.seeds, design.rates, 1))
    together = together + math.sqrt(1 - world.common_across_rates) * by_rate
    apart = generator.standard_normal(shape)
    latent = latent + width * (math.sqrt(world.common) * together + math.sqrt(1 - world.common) * apart)
    attained = special.ndtr(latent) * np.where(arm == 1, 1.0 - plant.losses, 1.0)[None, :, None, :]
    attained = generator.binomial(design.requests, attained) / design.requests
    sorted_by_arm = [_pick(attained, arm, half, number) for number in (0, 1)]
    return Batch(
        rates=np.exp(log_rates),
        colocated=sorted_by_arm[0],
        split=sorted_by_arm[1],
        truth=math.log(plant.ratio / plant.baseline_factor),
    )


def _orders(seeds: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Arm (0 colocated, 1 split) and half of each place, per seed: ABBA, the first arm changing from seed to seed."""
    arm = np.array([[int(name == "split") for name in ORDERS[seed % 2]] for seed in range(seeds)])
    half = np.array([[0, 0, 1, 1]] * seeds)
    return arm, half


def _drift(world: World, shape: tuple[int, int, int, int], generator: np.random.Generator) -> Floats:
    """Log speed of the machine at each probe, in the order in which they run."""
    experiments, probes = shape[0], math.prod(shape[1:])
    slope = world.drift * generator.standard_normal((experiments, 1)) * np.linspace(-0.5, 0.5, probes)
    kicks = generator.standard_normal((probes, experiments)) * math.sqrt(1 - world.wave_keeps**2)
    wave = np.empty((probes, experiments))
    wave[0] = generator.standard_normal(experiments)
    for place in range(1, probes):
        wave[place] = world.wave_keeps * wave[place - 1] + kicks[place]
    return (slope + world.wave * wave.T).reshape(shape)


def _pick(attained: Floats, arm: npt.NDArray[np.int64], half: npt.NDArray[np.int64], number: int) -> Floats:
    """[experiment, seed, rate, half] of one arm."""
    picked = np.empty((*attained.shape[:3], 2))
    for seed in range(arm.shape[0]):
        for place in range(4):
            if arm[seed, place] == number:
                picked[:, seed, :, half[seed, place]] = attained[:, seed, :, place]
    return picked
