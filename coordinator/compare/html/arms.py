"""The arms of a record and what belongs to each, for records with named arms and for those of two paths. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PATHS = ("split", "colocated")
COLOURS = 6
"""Styles `arm-0` .. of the page; more arms take them round again."""

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm as the page shows it. `style` is its class.

    `candidate` is the configuration that tuning chose, `engine` its engines' arguments by pool, `tuning` the probes of the search
    and `tried` each candidate's goodput per tuning seed, requests/s.
    """

    name: str
    path: str
    style: str
    baseline: bool
    pools: tuple[str, ...] = ()
    transport: str = ""
    candidate: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    tuning: tuple[Mapping[str, Any], ...] = ()
    tried: Mapping[str, Sequence[float]] = field(default_factory=dict)


def arms_of(record: Record) -> list[Arm]:
    """In the record's order. A record without `arms` is of the two paths, and colocated is its baseline."""
    named = record.get("arms") or []
    if not named:
        return [Arm(name=path, path=path, style=path, baseline=path == "colocated") for path in PATHS]
    found: list[Arm] = []
    for place, each in enumerate(named):
        path = each.get("path", each["name"])
        # The first arm of a path has the colour that the path has everywhere.
        style = path if path in PATHS and path not in (arm.style for arm in found) else f"arm-{place % COLOURS}"
        found.append(
            Arm(
                name=each["name"],
                path=path,
                style=style,
                baseline=place == 0,
                pools=tuple(each.get("pools") or ()),
                transport=each.get("transport", ""),
                candidate=each.get("candidate", ""),
                engine=each.get("engine") or {},
                tuning=tuple(each.get("tuning") or ()),
                tried=each.get("tried") or {},
            )
        )
    return found


def baseline_of(record: Record) -> Arm:
    return next(arm for arm in arms_of(record) if arm.baseline)


def verdicts(record: Record) -> list[tuple[Arm, Mapping[str, Any]]]:
    """(arm, its judgement against the baseline), one for every other arm that was judged."""
    judged = record.get("verdicts") or {}
    others = [arm for arm in arms_of(record) if not arm.baseline]
    if not judged:
        return [(others[0], record["judgement"])]
    return [(arm, judged[arm.name]) for arm in others if arm.name in judged]


def name_of(probe: Mapping[str, Any]) -> str:
    """The arm of a probe or of a summary; where it names none, it is its path."""
    return str(probe.get("arm") or probe["path"])


def valid(record: Record, arm: Arm) -> list[Mapping[str, Any]]:
    """The arm's probes that are not void."""
    return [probe for probe in record["probes"] if name_of(probe) == arm.name and not probe["void"]]


def judged(probe: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The outcomes between the ends of the probe."""
    outcomes: Sequence[Mapping[str, Any]] = probe["outcomes"]
    return outcomes[probe.get("warm_up", 0) : len(outcomes) - probe.get("cool_down", 0)]


def summaries(record: Record) -> list[tuple[Arm, Mapping[str, Any]]]:
    """(arm, its figures under load), in the record's order."""
    known = {arm.name: arm for arm in arms_of(record)}
    return [(known[name], found) for found in record["loaded"] if (name := name_of(found)) in known]


def samples(record: Record) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(sample of what a worker held, its probe), for probes of the record that are not void."""
    probes = record["probes"]
    found = [(sample, probes[sample["probe"]]) for sample in record.get("usage") or [] if 0 <= sample["probe"] < len(probes)]
    return [(sample, probe) for sample, probe in found if not probe["void"]]
