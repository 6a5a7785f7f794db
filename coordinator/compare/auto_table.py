"""Path `auto` beside both fixed paths, from a record of `splitpoint compare run`: goodput, ratios, choices, predictions. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.compare.goodput import ratios
from coordinator.compare.load import Outcome
from coordinator.compare.quantile import percentile
from coordinator.compare.record import ArmRecord, Record
from coordinator.compare.slo import in_words
from coordinator.compare.stats import Interval, t_interval
from coordinator.routing.auto import AUTO, COLOCATED, EXPLORED, PATHS, SPLIT

NON_INFERIOR = 0.98
"""Of the better fixed path: the target of the ratio's lower 95 % bound."""


class NoAutoError(ValueError):
    """The record has not one arm of each path; the text says what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What path `auto` did on judged seeds. `errors`: measured over predicted in rising order, by path and then by time."""

    decided: int
    split: int
    explored: int
    errors: dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoTable:
    """`arms` is the name of each path's arm, `tuned` its mean goodput on tuning seeds, `better` the fixed path with the higher.
    `ratios`: auto over each fixed path, as logarithms, None below two seeds."""

    arms: dict[str, str]
    tuned: dict[str, float]
    better: str
    ratios: dict[str, Interval | None]
    choices: Choices

    @property
    def held(self) -> bool | None:
        """Whether the target is reached; None where no interval says so."""
        interval = self.ratios[self.better]
        return None if interval is None else math.exp(interval.low) > NON_INFERIOR


def has_auto(record: Record) -> bool:
    return any(arm.path == AUTO for arm in record.arms)


def summarise(record: Record) -> AutoTable:
    """What the record says of path `auto`. Raises `NoAutoError`."""
    arms = {path: _arm(record, path) for path in (*PATHS, AUTO)}
    tuned = {path: statistics.fmean(arm.tried.get(arm.candidate) or [0.0]) for path, arm in arms.items()}
    names = {path: arm.name for path, arm in arms.items()}
    return AutoTable(
        arms=names,
        tuned=tuned,
        better=max(PATHS, key=lambda path: tuned[path]),
        ratios={path: t_interval(ratios(record.knees, names[AUTO], names[path])) for path in PATHS},
        choices=choices([o for p in record.probes if p.path == names[AUTO] and not p.void for o in p.outcomes if not o.failure]),
    )


def table(record: Record) -> str:
    """For people. Raises `NoAutoError`."""
    found = summarise(record)
    lines = [
        f"requests/s at {in_words(record.slo)}",
        f"{'seed':<9}{'split':>8}{'coloc.':>8}{'auto':>8}{'auto/split':>13}{'auto/coloc.':>13}",
        _row("tuning", {path: rate or None for path, rate in found.tuned.items()}),
    ]
    for entry in record.knees:
        lines.append(_row(str(entry["seed"]), {path: entry[name]["rate_per_s"] for path, name in found.arms.items()}))
    for path in PATHS:
        lines.append(f"auto/{path}: {_interval(found.ratios[path], len(record.knees))}")
    verdict = {True: "held", False: "missed", None: "no interval"}[found.held]
    lines.append(f"better fixed path on tuning seeds: {found.better}; target > {NON_INFERIOR} of it: {verdict}")
    made = found.choices
    if made.decided:
        split, explored = made.split / made.decided, made.explored / made.decided
        lines.append(f"{made.decided} decisions: split {split:.0%}, explored {explored:.1%}")
    for path, errors in made.errors.items():
        lines.append(f"measured over predicted, {path}: " + ", ".join(_error(name, values) for name, values in errors.items()))
    return "\n".join(lines)


def _arm(record: Record, path: str) -> ArmRecord:
    found = [arm for arm in record.arms if arm.path == path]
    if len(found) != 1:
        told = ", ".join(f"{arm.name} ({arm.path})" for arm in record.arms) or "none"
        raise NoAutoError(f"the table needs one arm of each path, split, colocated and auto; the record's are: {told}")
    return found[0]


def choices(outcomes: Sequence[Outcome]) -> Choices:
    """What their ledgers say; those that named their path were not decided on."""
    decided = [(outcome, outcome.ledger) for outcome in outcomes if outcome.ledger and outcome.ledger.get("path_reason")]
    errors: dict[str, dict[str, list[float]]] = {}
    for outcome, ledger in decided:
        measured = {"TTFT": (ledger["ttft_s"], ledger["predicted_ttft_s"]), "TPOT": (outcome.tpot_s, ledger["predicted_tpot_s"])}
        for name, (seconds, predicted) in measured.items():
            if seconds and predicted:
                errors.setdefault(ledger["path"], {}).setdefault(name, []).append(seconds / predicted)
    return Choices(
        decided=len(decided),
        split=sum(ledger["path"] == SPLIT for _, ledger in decided),
        explored=sum(ledger["path_reason"] == EXPLORED for _, ledger in decided),
        errors={path: {name: sorted(values) for name, values in errors[path].items()} for path in sorted(errors)},
    )


def _row(name: str, rates: dict[str, float | None]) -> str:
    shown = "".join(f"{_number(rates[path]):>8}" for path in (SPLIT, COLOCATED, AUTO))
    return f"{name:<9}{shown}" + "".join(f"{_ratio(rates[AUTO], rates[path]):>13}" for path in (SPLIT, COLOCATED))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.3f}" if over and under else "-"


def _interval(found: Interval | None, seeds: int) -> str:
    if found is None:
        return f"no interval from {seeds} seeds"
    mean, low, high = (math.exp(value) for value in (found.mean, found.low, found.high))
    return f"{mean:.3f}, 95 % interval {low:.3f} to {high:.3f}, {found.count} of {seeds} seeds"


def _error(name: str, values: Sequence[float]) -> str:
    low, high = percentile(values, 0.1), percentile(values, 0.9)
    return f"{name} {statistics.median(values):.2f} (p10 {low:.2f}, p90 {high:.2f}, of {len(values)})"
