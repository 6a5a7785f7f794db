"""Replay of a trace over equal groups of which one is lost at the peak, with and without spares, in virtual time.

Table of workers, reconcile, routing and retry budget are the real ones, with the default limits. Engines, processes and network
are modelled: a group is a queue (`failover_groups`), a lost process is known at once, a lost node is known by its silence alone.
The load rises to the planned rate in the middle of the run and falls again; there the group is lost, on each seed in another
phase of the probes' round.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.bench.failover_groups import Groups, Outcome
from coordinator.bench.failover_spec import FailoverSpec
from coordinator.compare.traces import Row, WorkloadError
from coordinator.planning.capacity import plan_capacity
from coordinator.pools.records import SpareKind

RAMP_FLOOR = 0.5
"""Of the planned rate, at both ends of the run."""
WINDOW_S = 300.0
"""Before the loss, and after it."""
BIN_S = 10.0
"""Of the figure; from one minute before the loss to the end of the window after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of the table: so many groups serve, so many stand by."""

    name: str
    groups: int
    spares: int = 0
    kind: SpareKind = SpareKind.WARM


def arms(spec: FailoverSpec) -> tuple[Arm, ...]:
    """The planned groups without and with spares, and as many groups as that takes which all serve."""
    return (
        Arm(name=f"{spec.groups}, no spare", groups=spec.groups),
        Arm(name=f"{spec.groups} + {spec.spares} placed", groups=spec.groups, spares=spec.spares, kind=SpareKind.PLACED),
        Arm(name=f"{spec.groups} + {spec.spares} warm", groups=spec.groups, spares=spec.spares),
        Arm(name=f"{spec.groups + spec.spares}, all serve", groups=spec.groups + spec.spares),
    )


def planned_rate(rows: Sequence[Row], spec: FailoverSpec) -> tuple[float, float]:
    """Requests per second that one group can take of this trace's mean request, and that the planned groups are to take at
    the peak."""
    one = 1.0 / (sum(spec.work_s(row.input_tokens, row.output_tokens) for row in rows) / len(rows))
    return one, spec.groups * one * spec.headroom


def arrivals(rows: Sequence[Row], spec: FailoverSpec, seed: int) -> list[Row]:
    """The trace's requests, over and over from a row that the seed says, their gaps stretched so that the rate rises from half
    the planned one to all of it in the middle of the run, and falls again."""
    _, peak_per_s = planned_rate(rows, spec)
    span_s = rows[-1].arrival_s * len(rows) / (len(rows) - 1)
    if span_s <= 0:
        raise WorkloadError("all requests of the trace arrive at once: their gaps say nothing")
    per_span = len(rows)
    begin = random.Random(f"failover/{seed}").randrange(per_span)
    made: list[Row] = []
    number = begin
    while True:
        lap, place = divmod(number, per_span)
        row = rows[place]
        # Requests at the peak's rate, as if it held all the time; `_warped` gives each the time by which so many have come.
        count = (lap * span_s + row.arrival_s - rows[begin].arrival_s) / span_s * per_span
        at_s = _warped(count / peak_per_s, spec.duration_s)
        if at_s is None:
            return made
        made.append(Row(at_s, row.input_tokens, row.output_tokens))
        number += 1


def _warped(peak_s: float, duration_s: float) -> float | None:
    """When as much has arrived as in `peak_s` seconds of the peak's rate; None after the end."""

    def arrived(at_s: float) -> float:
        swing = (1 - RAMP_FLOOR) * duration_s / math.pi * (1 - math.cos(math.pi * at_s / duration_s))
        return RAMP_FLOOR * at_s + swing

    if peak_s >= arrived(duration_s):
        return None
    low_s, high_s = 0.0, duration_s
    while high_s - low_s > 1e-6:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if arrived(middle_s) < peak_s else (low_s, middle_s)
    return high_s


def measure(rows: Sequence[Row], spec: FailoverSpec) -> dict[str, Any]:
    """Every arm, loss and seed. Raises `WorkloadError` for a trace whose requests all come at once."""
    one_per_s, peak_per_s = planned_rate(rows, spec)
    plan = plan_capacity(rate_per_s=peak_per_s, replica_rate_per_s=one_per_s, headroom=spec.headroom, spares=spec.spares)
    runs = []
    for seed in spec.seeds:
        timed = arrivals(rows, spec, seed)
        for loss in spec.losses:
            for arm in arms(spec):
                outcome = Groups(spec, arm.groups, arm.spares, arm.kind, loss, seed).run(timed)
                runs.append({"arm": arm.name, "loss": loss, "seed": seed, **judged(outcome, spec, arm.groups)})
    return {
        "kind": "bench-failover",
        "requests": len(rows),
        "spec": asdict(spec),
        "plan": {"rate_per_s": peak_per_s, "replica_rate_per_s": one_per_s, "replicas": plan.replicas, "spares": plan.spares},
        "runs": runs,
    }


def judged(outcome: Outcome, spec: FailoverSpec, groups: int) -> dict[str, Any]:
    """One run's figures. A request counts where it arrived."""
    lost_s = outcome.lost_s
    windows = {"before": (lost_s - WINDOW_S, lost_s), "after": (lost_s, lost_s + WINDOW_S), "rest": (lost_s + WINDOW_S, math.inf)}
    found: dict[str, Any] = {}
    for name, (begin_s, end_s) in windows.items():
        mine = [r for r in outcome.requests if begin_s <= r.arrival_s < end_s]
        kept = sum(r.kept(spec) for r in mine)
        found[name] = kept / len(mine) if mine else 1.0
    late = [r.arrival_s - lost_s for r in outcome.requests if r.arrival_s >= lost_s and not r.kept(spec)]
    since = [(at_s, serving) for at_s, serving in outcome.serving if at_s >= lost_s]
    fell = next(place for place, (_, serving) in enumerate(since) if serving < groups)
    back_s = next((at_s for at_s, serving in since[fell:] if serving >= groups), None)
    return {
        **found,
        "lost_s": lost_s,
        "requests": len(outcome.requests),
        "failed": sum(r.failed for r in outcome.requests),
        "retried": sum(r.attempts > 1 and not r.failed for r in outcome.requests),
        "capacity_back_s": None if back_s is None else back_s - lost_s,
        "last_late_s": max(late, default=0.0),
        "holds": found["after"] >= spec.attainment,
        "bins": _bins(outcome, spec, lost_s),
    }


def _bins(outcome: Outcome, spec: FailoverSpec, lost_s: float) -> list[dict[str, float]]:
    """What came around the loss, and how much of that was kept; bins to which nothing came are not there."""
    came, kept = Counter[float](), Counter[float]()
    for request in outcome.requests:
        from_s = BIN_S * math.floor((request.arrival_s - lost_s) / BIN_S)
        if -60.0 <= from_s < WINDOW_S:
            came[from_s] += 1
            kept[from_s] += request.kept(spec)
    return [{"from_s": from_s, "came": came[from_s], "kept": kept[from_s]} for from_s in sorted(came)]


def table(record: dict[str, Any]) -> str:
    """The record for people: of each figure the worst of the seeds; of the five minutes after, the mean and each one too."""
    spec, plan, runs = record["spec"], record["plan"], record["runs"]
    seeds = ", ".join(map(str, spec["seeds"]))
    lines = [
        f"{record['requests']} rows of a trace over {spec['duration_s']:g} s, seeds {seeds}; one group takes "
        f"{plan['replica_rate_per_s']:.2f} requests/s",
        f"planned for {plan['rate_per_s']:.2f} requests/s at {spec['headroom']:g} of that: {plan['replicas']} + {plan['spares']} "
        f"spare; an engine starts in {spec['start_s']:g} s",
        f"one group is lost at the peak; kept: TTFT within {spec['ttft_s']:g} s and {spec['tpot_s'] * 1e3:g} ms per token; SLO: "
        f"{spec['attainment']:.0%} of those that come in the 5 minutes after",
        f"{'the worst of the seeds':<26}{'kept before':>12}{'5 min after':>12}{'(mean)':>8}{'then':>8}{'last late s':>12}"
        f"{'retried':>9}{'failed':>8}{'capacity back s':>17}{'SLO holds':>11}",
    ]
    for loss in spec["losses"]:
        lines.append(f"a {loss} is lost")
        for arm in dict.fromkeys(run["arm"] for run in runs):
            mine = [run for run in runs if (run["arm"], run["loss"]) == (arm, loss)]
            backs = [run["capacity_back_s"] for run in mine]
            holds = f"{sum(run['holds'] for run in mine)} of {len(mine)}"
            back = "not" if None in backs else f"{max(backs):.0f}"
            lines.append(
                f"  {arm:<24}{min(r['before'] for r in mine):>12.1%}{min(r['after'] for r in mine):>12.1%}"
                f"{sum(r['after'] for r in mine) / len(mine):>8.1%}{min(r['rest'] for r in mine):>8.1%}"
                f"{max(r['last_late_s'] for r in mine):>12.0f}{max(r['retried'] for r in mine):>9}"
                f"{max(r['failed'] for r in mine):>8}{back:>17}{holds:>11}"
            )
        lines.append("  5 min after, seed by seed; the loss comes so many seconds after half the time:")
        first = [run for run in runs if (run["arm"], run["loss"]) == (runs[0]["arm"], loss)]
        lines.append(f"{'':<26}" + "".join(f"{run['lost_s'] - spec['duration_s'] / 2:>8.1f}" for run in first))
        for arm in dict.fromkeys(run["arm"] for run in runs):
            mine = [run for run in runs if (run["arm"], run["loss"]) == (arm, loss)]
            lines.append(f"  {arm:<24}" + "".join(f"{run['after']:>8.1%}" for run in mine))
    return "\n".join(lines)
