"""The cells of the proof through simulated engines, their experiments as rows, what the rows come to. Pure but for `row`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.compare import faults
from coordinator.compare.proof.cells import Share
from coordinator.compare.proof.engine_experiment import run_experiment
from coordinator.compare.proof.engine_truth import Truth
from coordinator.compare.proof.engine_world import EngineCell
from coordinator.compare.run import ComparisonError
from coordinator.compare.verdict import MARGIN, Verdict

SPEEDS = {
    1.0: 1.0,
    1.03: 1.0202,
    1.05: 1.0345,
    1.10: 1.0681,
    1.30: 1.209,
    1 / 1.03: 0.9809,
    1 / 1.05: 0.9683,
    1 / 1.10: 0.9396,
    1 / 1.30: 0.857,
}
"""By the goodput ratio that is aimed at, the speed that has it, from long runs. Goodput moves by more than speed: a faster engine
also has more of the objective left."""
FAULT_LOOKS = (3,)
WIDE = 0.08
"""Of the log ratio: arms further apart need a rate more to reach both knees."""


def _name(ratio: float) -> str:
    if ratio == 1:
        return "identical"
    return f"x {ratio:.2f}" if ratio > 1 else f"x 1/{1 / ratio:.2f}"


TRUTHS = (
    *(
        EngineCell(name=_name(ratio), nominal=ratio, speed=speed, rates=4 if abs(math.log(ratio)) > WIDE else 3)
        for ratio, speed in SPEEDS.items()
    ),
    EngineCell(name="prefill and decode", kind="split", rates=4),
)
FAULTS = (
    EngineCell(name="mistuned baseline", fault=faults.MISTUNED, untuned=True),
    EngineCell(name="stall every 2 s", fault=faults.STALL, stalls=True, looks=FAULT_LOOKS),
    EngineCell(name="lossy arm", fault=faults.LOSSY, losses=0.02),
    EngineCell(name="lagging client", fault=faults.LATE_CLIENT, pause_s=0.1, looks=FAULT_LOOKS),
    EngineCell(name="carry-over", fault=faults.CARRY_OVER, salted=False, looks=FAULT_LOOKS),
)
CELLS = {cell.name: cell for cell in (*TRUTHS, *FAULTS)}


def row(name: str, seed: int) -> dict[str, Any]:
    """One experiment of a cell, for JSON. A comparison that cannot be made is an undecided one, with its reason."""
    try:
        found = run_experiment(CELLS[name], seed)
    except ComparisonError as error:
        return {
            "seed": seed,
            "verdict": Verdict.UNDECIDED.value,
            "without": Verdict.UNDECIDED.value,
            "reason": str(error),
            "faults": [] if error.fault is None else [{"kind": error.fault.kind, "text": error.fault.text}],
        }
    return {
        "seed": seed,
        "clock_s": found.clock_s,
        "rates_per_s": found.rates_per_s,
        "chosen": found.chosen,
        "differences": found.differences,
        "floor": found.floor,
        "low": found.without.low,
        "high": found.without.high,
        "verdict": found.judged.verdict.value,
        "without": found.without.verdict.value,
        "reason": found.judged.reason,
        "faults": [{"kind": fault.kind, "text": fault.text} for fault in found.faults],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the rows of one cell come to.

    `truths` are by the second arm's candidate, empty where a fault is planted; `covered`, `right` and `alarms` are None there,
    `caught` where none is. `right` is None on the
    margin too, where no verdict is true. `alarms` are experiments in which a fault was named: none is there.
    """

    cell: EngineCell
    truths: dict[str, Truth]
    experiments: int
    half_width: float | None
    covered: Share | None
    verdicts: dict[str, Share]
    without: dict[str, Share]
    unfit: Share
    wrong: Share
    right: Share | None
    caught: Share | None
    alarms: Share | None
    example: str


def result(cell: EngineCell, rows: Sequence[dict[str, Any]], truths: Mapping[str, Truth]) -> Result:
    """Count the rows of a cell. `truths` are by the second arm's candidate, none where a fault is planted: an experiment is about
    the arms as it tuned them.

    Raises:
        ValueError: no rows.
    """
    count = len(rows)
    if not count:
        raise ValueError(f"{cell.name}: no experiment was made")
    bounds = [(each["low"], each["high"], truths.get(each["chosen"][-1])) for each in rows if each.get("low") is not None]
    widths = sorted(math.log(high / low) / 2 for low, high, _ in bounds)
    reals = {true_verdict(each, cell.nominal) for each in truths.values()}
    # One verdict is true of the cell only where it is of every candidate that may be chosen.
    real = reals.pop() if len(reals) == 1 else None
    claims = [Verdict(each["verdict"]) for each in rows]
    alone = [Verdict(each["without"]) for each in rows]
    named = [fault["text"] for each in rows for fault in each["faults"] if fault["kind"] == cell.fault]
    caught = sum(any(fault["kind"] == cell.fault for fault in each["faults"]) for each in rows)
    return Result(
        cell=cell,
        truths=dict(truths),
        experiments=count,
        half_width=widths[len(widths) // 2] if widths else None,
        covered=None
        if not truths or not bounds
        # A candidate without a truth of its own is seldom chosen, and counts as missed.
        else Share(count=sum(own is not None and own.within(low, high) for low, high, own in bounds), of=len(bounds)),
        verdicts={verdict.value: Share(count=claims.count(verdict), of=count) for verdict in Verdict},
        without={verdict.value: Share(count=alone.count(verdict), of=count) for verdict in Verdict},
        unfit=Share(count=sum(each["reason"].startswith("rig unfit") for each in rows), of=count),
        wrong=Share(count=0 if not truths else sum(c is not Verdict.UNDECIDED and c is not real for c in claims), of=count),
        right=None if real is None else Share(count=claims.count(real), of=count),
        caught=Share(count=caught, of=count) if cell.fault else None,
        alarms=None if cell.fault else Share(count=sum(bool(each["faults"]) for each in rows), of=count),
        example=named[0] if named else "",
    )


def true_verdict(truth: Truth, nominal: float | None) -> Verdict | None:
    """The one that is true of this ratio; None where the margin was aimed at, or lies within what the long runs leave open."""
    bounds = (1 + MARGIN, 1 / (1 + MARGIN))
    if any(truth.low <= bound <= truth.high or nominal == bound for bound in bounds):
        return None
    if truth.ratio > bounds[0]:
        return Verdict.SPLIT
    return Verdict.COLOCATE if truth.ratio < bounds[1] else Verdict.EQUIVALENT
