"""In which order the arms run. Pure.

A block is one seed at one rate: every arm, then every arm in reverse (ABBA for two). A steady drift then costs all arms the
same, whatever its size. From seed to seed the first arm changes, so that no arm always has the fresh machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One probe to run. `half` is 0 for an arm's first probe of its block and 1 for its second."""

    seed: int
    rate_per_s: float
    arm: str
    half: int


def block(arms: Sequence[str], first: int = 0) -> tuple[tuple[str, int], ...]:
    """(arm, half) in order, beginning with the arm at index `first`.

    Raises:
        ValueError: fewer than two arms, or one named twice.
    """
    if len(arms) < 2 or len(set(arms)) != len(arms):
        raise ValueError(f"a block needs two arms or more, each named once, got {list(arms)}")
    turned = [*arms[first % len(arms) :], *arms[: first % len(arms)]]
    return (*((arm, 0) for arm in turned), *((arm, 1) for arm in reversed(turned)))


def schedule(
    arms: Sequence[str], seeds: Sequence[int], rates_per_s: Sequence[float], *, by_seed: bool = False
) -> tuple[Turn, ...]:
    """All blocks, seed by seed: a run that is cut short lacks its last seeds, not an arm.

    With `by_seed` an arm runs all rates before the next begins, for arms that are costly to change: drift over a block is longer
    then, and still the same for all.

    Raises:
        ValueError: as `block`; no seeds or rates; a rate that is not positive.
    """
    if not seeds or not rates_per_s or any(rate <= 0 for rate in rates_per_s):
        raise ValueError("a schedule needs seeds and positive rates")
    turns: list[Turn] = []
    for place, seed in enumerate(seeds):
        order = block(arms, place)
        if by_seed:
            turns += [Turn(seed, rate, arm, half) for arm, half in order for rate in rates_per_s]
        else:
            turns += [Turn(seed, rate, arm, half) for rate in rates_per_s for arm, half in order]
    return tuple(turns)
