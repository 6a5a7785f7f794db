"""From paired log ratios to one of four verdicts. Pure; the rules are those of docs/measurement.md."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.compare.looks import ALPHA, confidences
from coordinator.compare.stats import (
    CONFIDENCE,
    Interval,
    bootstrap_interval,
    claim_p,
    holm,
    seeds_to_narrow,
    seeds_to_settle,
    t_interval,
)

MARGIN = 0.05
BASELINE = "colocated"
MIN_SEEDS = 3
WIDE = "the baseline against itself spreads wider than the margin"


class Verdict(enum.StrEnum):
    SPLIT = "split"
    COLOCATE = "colocate"
    EQUIVALENT = "equivalent"  # so stay colocated, the simpler system
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict and everything it rests on. Between other arms than the two paths `split` stands for the challenger and
    `colocate` for the baseline.

    `ratio`, `low` and `high` are of goodput, challenger over baseline, with an interval of `confidence`; None when there are too
    few seeds for one. `floor_low` and `floor_high` are the baseline against itself. `bootstrap_low` and `bootstrap_high` stand
    beside and decide nothing. `p` is of the strongest claim, `p_adjusted` the same among several workloads. `seeds_needed` is in
    all, None when unknown. `looks` are the planned numbers of seeds, empty where a single look was planned.
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
    confidence: float = CONFIDENCE
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    looks: tuple[int, ...] = ()
    challenger: str = Verdict.SPLIT.value
    baseline: str = BASELINE

    @property
    def winner(self) -> str:
        """For people: the verdict, by the names of the arms."""
        named = {Verdict.SPLIT: self.challenger, Verdict.COLOCATE: self.baseline}
        usual = (self.challenger, self.baseline) == (Verdict.SPLIT.value, BASELINE)
        return self.verdict.value if usual else named.get(self.verdict, self.verdict.value)

    def sentence(self) -> str:
        """For people, one line."""
        if self.ratio is None:
            measured = "no ratio was measured"
        elif self.low is None or self.high is None:
            measured = f"{self.challenger}/{self.baseline} {self.ratio:.2f}, no interval"
        else:
            wide = "" if math.isclose(self.confidence, CONFIDENCE, abs_tol=5e-4) else f"{100 * self.confidence:.3g} %: "
            measured = f"{self.challenger}/{self.baseline} {self.ratio:.2f} ({wide}{self.low:.2f} to {self.high:.2f})"
        seeds = f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"
        text = f"{self.winner}: {self.reason} [{measured}, {seeds}, margin {self.margin:.0%}]"
        if self.verdict is Verdict.UNDECIDED and self.seeds_needed is not None:
            text += f"; {what_settles(self.seeds, self.seeds_needed, self.looks, self.reason)}"
        return text


def what_settles(seeds: int, needed: int, looks: Sequence[int], reason: str) -> str:
    """For people: what an undecided experiment of `seeds` takes, when it is expected to take `needed` in all."""
    more = max(1, needed - seeds)
    if seeds < 2:
        return f"it takes at least {more} more"
    new = bool(looks) and seeds >= looks[-1]
    text = f"a new experiment of about {needed} seeds would settle it" if new else f"about {more} more would settle it"
    return f"{text} if they look like these" + (", or fewer with more requests a probe" if WIDE in reason else "")


def judge(
    differences: Sequence[float],
    floor: Sequence[float],
    margin: float = MARGIN,
    looks: Sequence[int] = (),
    faults: Sequence[str] = (),
    bootstrap: bool = True,
    challenger: str = Verdict.SPLIT.value,
    baseline: str = BASELINE,
) -> Judgement:
    """Judge `differences`, log(challenger / baseline) of goodput per seed, against `floor`, log(baseline / itself) per seed.

    `faults` of method that were found leave nothing to judge; the first is the reason.

    With `looks`, the numbers of seeds at which it was planned beforehand to judge, only these decide, each with the interval that
    its share of the error allows. Without, this is the only look.

    Raises:
        ValueError: `margin` is not in (0, 1); `looks` do not rise from two up.
    """
    if not 0 < margin < 1:
        raise ValueError("margin must be between 0 and 1")
    bound, seeds = math.log1p(margin), len(differences)
    planned = confidences(looks) if looks else {}
    confidence = planned.get(seeds, CONFIDENCE)
    interval, floor_interval = t_interval(differences, confidence), t_interval(floor)
    verdict, reason = _decide(seeds, interval, floor_interval, bound)
    if (challenger, baseline) != (Verdict.SPLIT.value, BASELINE) and verdict in (Verdict.SPLIT, Verdict.COLOCATE):
        reason = "it serves more within the SLO"
    if faults:
        verdict, reason = Verdict.UNDECIDED, f"rig unfit: {faults[0]}"
    spread = floor_interval is not None and len(floor) >= MIN_SEEDS and bool(_unfit(floor_interval, bound))
    unfit = spread or bool(faults)
    if planned and seeds not in planned and not unfit:
        verdict, reason = Verdict.UNDECIDED, _between(seeds, planned)
    needed = None
    if verdict is Verdict.UNDECIDED and not faults:
        needed = _needed(differences, floor if spread else (), bound, tuple(planned))
    boot = bootstrap_interval(differences) if bootstrap else None
    mean = sum(differences) / seeds if differences else None
    return Judgement(
        verdict=verdict,
        reason=reason,
        margin=margin,
        seeds=seeds,
        ratio=None if mean is None else math.exp(mean),
        low=_exp(interval, -1),
        high=_exp(interval, 1),
        floor_low=_exp(floor_interval, -1),
        floor_high=_exp(floor_interval, 1),
        seeds_needed=needed,
        confidence=confidence,
        bootstrap_low=_exp(boot, -1),
        bootstrap_high=_exp(boot, 1),
        p=claim_p(differences, bound) if seeds >= 2 else None,
        looks=tuple(planned),
        challenger=challenger,
        baseline=baseline,
    )


def judge_family(
    experiments: Mapping[str, tuple[Sequence[float], Sequence[float]]], margin: float = MARGIN, bootstrap: bool = True
) -> dict[str, Judgement]:
    """One judgement per workload, (differences, floor) each, with at most a 5 % chance that any of them claims what is false.

    Holm's correction: a claim that its adjusted p-value does not carry becomes undecided. Raises `ValueError` as `judge`.
    """
    alone = {name: judge(differences, floor, margin, bootstrap=bootstrap) for name, (differences, floor) in experiments.items()}
    return among(alone, "workloads")


def among(alone: Mapping[str, Judgement], what: str) -> dict[str, Judgement]:
    """Judgements of several questions, by Holm's correction: what one alone claims and all together do not carry is undecided.

    Each p-value is first put on the scale of its look, where it is below 5 % exactly when that look decides. `what` the
    questions are, for people. What is undecided alone stays so.
    """
    tested = {
        name: found.p if found.confidence == CONFIDENCE else min(1.0, found.p * ALPHA / (1 - found.confidence))
        for name, found in alone.items()
        if found.p is not None
    }
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    judged = {}
    for name, found in alone.items():
        p = adjusted.get(name)
        found = dataclasses.replace(found, p_adjusted=p)
        if found.verdict is not Verdict.UNDECIDED and p is not None and p >= ALPHA:
            reason = f"{found.winner} by itself, but not among {len(tested)} {what} (Holm: p {p:.3f})"
            found = dataclasses.replace(found, verdict=Verdict.UNDECIDED, reason=reason, seeds_needed=None)
        judged[name] = found
    return judged


def judge_at_looks(
    differences: Sequence[float],
    floor: Sequence[float],
    margin: float,
    looks: Sequence[int],
    faults: Sequence[str] = (),
    challenger: str = Verdict.SPLIT.value,
    baseline: str = BASELINE,
) -> Judgement:
    """`judge` at every planned look that is reached, in the order of the seeds: the first that decides stands, whatever comes
    after it, and seeds beyond the last look are not used, of `floor` neither. Raises `ValueError` as `judge`."""

    def at(count: int) -> Judgement:
        return judge(differences[:count], floor[:count], margin, looks, faults, challenger=challenger, baseline=baseline)

    reached = [look for look in looks if look <= len(differences)]
    found = at(reached[-1] if reached and reached[-1] == looks[-1] else len(differences))
    return next((early for look in reached if (early := at(look)).verdict is not Verdict.UNDECIDED), found)


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


def _between(seeds: int, planned: Mapping[int, float]) -> str:
    looks = ", ".join(map(str, planned))
    later = [look for look in planned if look > seeds]
    if later:
        return f"no look was planned at {seeds} seeds ({looks}); the next is at {later[0]}"
    return f"all planned looks ({looks}) are past: seeds beyond them belong to a new experiment"


def _needed(differences: Sequence[float], wide: Sequence[float], bound: float, looks: tuple[int, ...]) -> int | None:
    """Seeds in all; with planned looks the first that is expected to settle it, after the last what a new plan needs. `wide`: the
    baseline against itself, where that is to become narrower too; where it differs from itself no number of seeds mends it."""
    if len(differences) < 2:
        return MIN_SEEDS
    needed = seeds_to_settle(differences, bound, MIN_SEEDS)
    if wide:
        interval = t_interval(wide)
        quiet = seeds_to_narrow(wide, bound, MIN_SEEDS) if interval is not None and interval.low <= 0 <= interval.high else None
        needed = max(needed, quiet) if needed is not None and quiet is not None else None
    if not looks:
        return needed
    later = [look for look in looks if look > len(differences)]
    if needed is None or not later:
        return needed
    return next((look for look in later if look >= needed), None)


def _unfit(floor: Interval, bound: float) -> str:
    """Why the baseline against itself fails, or ""."""
    if floor.low > 0 or floor.high < 0:
        return "the baseline differs from itself"
    if floor.half_width > bound:
        return WIDE
    return ""


def _exp(interval: Interval | None, side: int) -> float | None:
    """The lower (-1) or upper (1) bound as a ratio."""
    return None if interval is None else math.exp(interval.low if side < 0 else interval.high)
