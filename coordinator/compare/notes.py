"""What a comparison lacks, and what would supply it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.compare.load import PATHS, Probe
from coordinator.compare.stats import TOO_FAR_APART

ABOVE = "above the highest rate tried"
BELOW = "below the lowest rate tried"
NOT_MEASURED = "not measured"


def void_notes(probes: Sequence[Probe], arms: Sequence[str] = PATHS) -> list[str]:
    """One per path that has void probes: how many, and the worst."""
    notes = []
    for path in arms:
        own = [probe for probe in probes if probe.path == path]
        void = [probe for probe in own if probe.void]
        if void:
            worst = max(void, key=lambda probe: probe.lag_p99_s)
            text = f"{len(void)} of {len(own)} {path} probes are void and decide nothing; at worst, {worst.void}"
            notes.append(text + ("; their figures are shown for want of others" if len(void) == len(own) else ""))
    return notes


def knee_notes(knees: Sequence[dict[str, Any]], arms: Sequence[str] = PATHS) -> list[str]:
    """Which seeds have no goodput on a path, and why; seeds with the same reason together."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for entry in knees:
        for path in arms:
            if why := entry[path]["why"]:
                seeds.setdefault((path, why), []).append(str(entry["seed"]))
    return [f"goodput {path} {why}, seed {', '.join(found)}" for (path, why), found in seeds.items()]


def to_settle(knees: Sequence[dict[str, Any]], probes: Sequence[Probe], arms: Sequence[str] = PATHS) -> list[str]:
    """What the seeds without a ratio need, as one note; none where every seed has one."""
    whys = [entry[path]["why"] for entry in knees for path in arms]
    needs = []
    above, below = (any(why.startswith(kind) for why in whys) for kind in (ABOVE, BELOW))
    if above or below:
        sides = " and ".join(side for side, is_so in (("higher", above), ("lower", below)) if is_so)
        needs.append(f"{sides} rates, so that both knees lie between them")
    if any(why.startswith(TOO_FAR_APART) for why in whys):
        needs.append("rates closer together")
    if any(why == NOT_MEASURED for why in whys):
        needs.append("a client with a core to itself" if any(probe.void for probe in probes) else "more time")
    return [f"to settle it: {', and '.join(needs)}"] if needs else []
