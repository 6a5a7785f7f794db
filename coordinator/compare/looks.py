"""Planned looks at a growing number of seeds: each spends part of the 5 % that all of them together may err by. Pure.

Spending follows O'Brien and Fleming in the form of Lan and DeMets: almost nothing early, almost all at the last look.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy import stats as scipy_stats

ALPHA = 0.05
"""Both sides together."""
GRID_POINTS = 801
Z_MAX = 30.0
"""Far beyond what any data reach."""


def spent(fraction: float, alpha: float = ALPHA) -> float:
    """How much of `alpha`, both sides, may be spent when this share of all planned seeds is in.

    Raises:
        ValueError: `fraction` is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"the share of seeds must be above 0 and at most 1, got {fraction:g}")
    quantile = float(scipy_stats.norm.isf(alpha / 4))
    return float(4 * scipy_stats.norm.sf(quantile / math.sqrt(fraction)))


@functools.cache
def boundaries(fractions: tuple[float, ...], alpha: float = ALPHA) -> tuple[float, ...]:
    """Per look the |z| from which on the interval decides, for looks at these shares of the seeds, the last of them 1.

    By recursive integration over the part of the first looks' outcomes that have not decided.

    Raises:
        ValueError: shares that do not rise to 1.
    """
    if not fractions or fractions[-1] != 1 or any(b <= a for a, b in itertools.pairwise((0.0, *fractions))):
        raise ValueError(f"the shares of seeds must rise from above 0 to 1, got {fractions}")
    found: list[float] = []
    grid = density = np.empty(0)
    before = 0.0
    for fraction in fractions:
        step, root = math.sqrt(fraction - before), math.sqrt(fraction)
        side = (spent(fraction, alpha) - (spent(before, alpha) if before else 0.0)) / 2
        z = _crossing(side, root, step, grid, density)
        found.append(z)
        # Beyond eight deviations there is nothing to integrate over.
        onward = np.linspace(-min(z, 8.0) * root, min(z, 8.0) * root, GRID_POINTS)
        if not len(grid):
            density = scipy_stats.norm.pdf(onward / step) / step
        else:
            kernel = scipy_stats.norm.pdf((onward[:, None] - grid[None, :]) / step) / step
            density = np.trapezoid(kernel * density[None, :], grid, axis=1)
        grid, before = onward, fraction
    return tuple(found)


def _crossing(side: float, root: float, step: float, grid: npt.NDArray[np.float64], density: npt.NDArray[np.float64]) -> float:
    """The z that a walk with this density at the look before passes, on one side, with the chance `side`."""

    def excess(z: float) -> float:
        if not len(grid):
            return float(scipy_stats.norm.sf(z)) - side
        return float(np.trapezoid(density * scipy_stats.norm.sf((z * root - grid) / step), grid)) - side

    # A look so early that its share is no number to speak of decides nothing.
    return float(optimize.brentq(excess, 0.0, Z_MAX)) if excess(Z_MAX) < 0 else Z_MAX


def confidences(planned_seeds: Sequence[int], alpha: float = ALPHA) -> dict[int, float]:
    """For each planned number of seeds the confidence of the interval that may decide there.

    The boundary's p-value is taken over to the t-interval, whose width knows the few seeds.

    Raises:
        ValueError: numbers of seeds that do not rise, or start below two.
    """
    if not planned_seeds or planned_seeds[0] < 2 or any(b <= a for a, b in itertools.pairwise(planned_seeds)):
        raise ValueError(f"planned looks must be rising numbers of seeds from 2 up, got {list(planned_seeds)}")
    fractions = tuple(count / planned_seeds[-1] for count in planned_seeds)
    limits = boundaries(fractions, alpha)
    return {count: float(1 - 2 * scipy_stats.norm.sf(z)) for count, z in zip(planned_seeds, limits, strict=True)}
