"""From probes to goodput: per seed the knee of every arm, and the ratios that a verdict rests on. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from coordinator.compare.load import Probe, Slo
from coordinator.compare.notes import ABOVE, BELOW, NOT_MEASURED
from coordinator.compare.stats import Knee, knee, log_ratios

FIRST, SECOND = "_first", "_second"
"""Behind an arm's name: its first and second probes of each block. The baseline's are the baseline against itself."""


def seed_knee(probes: Sequence[Probe], slo: Slo) -> Knee:
    """The goodput of one arm under one seed; without probes there is none."""
    if not probes:
        return Knee(None, NOT_MEASURED)
    judged = min(len(probe.judged) for probe in probes)
    return knee([probe.rate_per_s for probe in probes], [probe.attainment(slo) for probe in probes], requests=judged)


def seed_knees(probes: Sequence[Probe], seed: int, slo: Slo, arms: Sequence[str]) -> dict[str, Any]:
    """One seed's entry of a record: each arm's goodput, or why there is none, and the same of its first and second probes."""
    own = [probe for probe in probes if probe.seed == seed and not probe.void]
    entry: dict[str, Any] = {"seed": seed}
    chosen = {name: [probe for probe in own if probe.path == name] for name in arms}
    for name in arms:
        for half, suffix in enumerate((FIRST, SECOND)):
            chosen[name + suffix] = [probe for probe in own if probe.path == name and probe.half == half]
    for name, found in chosen.items():
        point = seed_knee(found, slo)
        entry[name] = {"rate_per_s": point.rate_per_s, "why": point.why}
    return entry


def missed(probes: Sequence[Probe], seed: int, slo: Slo, arms: Sequence[str]) -> list[str]:
    """Why each arm, and either half of the baseline (the first of `arms`), has no goodput on this seed; "" where it has."""
    entry = seed_knees(probes, seed, slo, arms)
    return [entry[name]["why"] for name in (*arms, arms[0] + FIRST, arms[0] + SECOND)]


def ratios(knees: Sequence[dict[str, Any]], over: str, under: str) -> list[float]:
    """log(over / under) of each seed that has both: a bound is not a measurement."""
    pairs = [(entry[over]["rate_per_s"], entry[under]["rate_per_s"]) for entry in knees]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    return log_ratios([a for a, _ in whole], [b for _, b in whole])


def bounded_ratios(knees: Sequence[dict[str, Any]], over: str, under: str) -> list[float]:
    """As `ratios`, and where the rates missed a knee it is put at the outer rate that it lies beyond. What was not measured, or
    lies between rates that are too far apart, gives none."""
    found = []
    for entry in knees:
        pair = [entry[name]["rate_per_s"] or _outer(entry[name]["why"]) for name in (over, under)]
        if pair[0] and pair[1]:
            found += log_ratios([pair[0]], [pair[1]])
    return found


def _outer(why: str) -> float | None:
    match = re.fullmatch(rf"(?:{ABOVE}|{BELOW}) \((.+)/s\)", why)
    return float(match[1]) if match else None


def floor(knees: Sequence[dict[str, Any]], baseline: str) -> list[float]:
    """The baseline against itself, as `ratios`."""
    return ratios(knees, baseline + FIRST, baseline + SECOND)


def gains(knees: Sequence[dict[str, Any]], arms: Sequence[str]) -> list[float]:
    """log(second / first probes) of each seed that has both of all arms, the arms' mean."""
    found = []
    for entry in knees:
        own = [ratios([entry], name + SECOND, name + FIRST) for name in arms if name + FIRST in entry]
        if len(own) == len(arms) and all(own):
            found.append(statistics.fmean(ratio for (ratio,) in own))
    return found
