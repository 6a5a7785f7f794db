"""From paired log ratios to one of four verdicts. Pure; the rules are those of docs/measurement.md."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.compare.stats import Interval, seeds_to_settle, t_interval

MARGIN = 0.05
MIN_SEEDS = 3


class Verdict(enum.StrEnum):
    SPLIT = "split"
    COLOCATE = "colocate"
    EQUIVALENT = "equivalent"  # so stay colocated, the simpler system
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict and everything it rests on.

    `ratio`, `low` and `high` are of goodput, split over colocated, with a 95 % interval; None when there are too few seeds
    for one. `floor_low` and `floor_high` are the baseline against itself. `seeds_needed` is in all, None when unknown.
    """

    verdict: Verdict
    reason: str
    margin: float
    seeds: int
    ratio: float | None
    low: float | None
    high: float | None
    floor_low: float | None
    floor_high: float | None
    seeds_needed: int | None

    def sentence(self) -> str:
        """For people, one line."""
        if self.ratio is None:
            measured = "no ratio was measured"
        elif self.low is None or self.high is None:
            measured = f"split/colocated {self.ratio:.2f}, no interval"
        else:
            measured = f"split/colocated {self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"
        seeds = f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"
        text = f"{self.verdict}: {self.reason} [{measured}, {seeds}, margin {self.margin:.0%}]"
        if self.verdict is Verdict.UNDECIDED and self.seeds_needed is not None:
            more = max(1, self.seeds_needed - self.seeds)
            if self.seeds < 2:
                text += f"; it takes at least {more} more"
            else:
                text += f"; about {more} more would settle it if they look like these"
        return text


def judge(differences: Sequence[float], floor: Sequence[float], margin: float = MARGIN) -> Judgement:
    """Judge `differences`, log(split / colocated) of goodput per seed, against `floor`, log(baseline / itself) per seed.

    Raises:
        ValueError: `margin` is not in (0, 1).
    """
    if not 0 < margin < 1:
        raise ValueError("margin must be between 0 and 1")
    bound = math.log1p(margin)
    interval, floor_interval = t_interval(differences), t_interval(floor)
    verdict, reason = _decide(len(differences), interval, floor_interval, bound)
    needed = None
    if verdict is Verdict.UNDECIDED:
        needed = seeds_to_settle(differences, bound, MIN_SEEDS) if len(differences) >= 2 else MIN_SEEDS
        if floor_interval is not None and len(floor) >= MIN_SEEDS and _unfit(floor_interval, bound):
            needed = None  # more seeds do not mend a rig
    mean = sum(differences) / len(differences) if differences else None
    return Judgement(
        verdict=verdict,
        reason=reason,
        margin=margin,
        seeds=len(differences),
        ratio=None if mean is None else math.exp(mean),
        low=None if interval is None else math.exp(interval.low),
        high=None if interval is None else math.exp(interval.high),
        floor_low=None if floor_interval is None else math.exp(floor_interval.low),
        floor_high=None if floor_interval is None else math.exp(floor_interval.high),
        seeds_needed=needed,
    )


def _decide(seeds: int, interval: Interval | None, floor: Interval | None, bound: float) -> tuple[Verdict, str]:
    """`bound` is the margin as a log ratio."""
    if seeds < MIN_SEEDS or interval is None:
        return Verdict.UNDECIDED, f"{seeds} usable seed{'' if seeds == 1 else 's'}; fewer than {MIN_SEEDS} never decide"
    if floor is None:
        return Verdict.UNDECIDED, "rig unfit: the baseline was not measured against itself"
    if why := _unfit(floor, bound):
        return Verdict.UNDECIDED, f"rig unfit: {why}"
    if interval.low > bound:
        return Verdict.SPLIT, "splitting serves more within the SLO"
    if interval.high < -bound:
        return Verdict.COLOCATE, "colocating serves more within the SLO"
    if interval.low > -bound and interval.high < bound:
        return Verdict.EQUIVALENT, "no difference beyond the margin; stay colocated, the simpler system"
    return Verdict.UNDECIDED, "the interval reaches across the margin"


def _unfit(floor: Interval, bound: float) -> str:
    """Why the baseline against itself fails, or ""."""
    if floor.low > 0 or floor.high < 0:
        return "the baseline differs from itself"
    if floor.half_width > bound:
        return "the baseline against itself spreads wider than the margin"
    return ""
