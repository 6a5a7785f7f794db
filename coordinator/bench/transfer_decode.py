"""What transfers cost an engine that decodes beside them: turns alone (A) and beside transfers (B), in the order A B B A."""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.bench.transfer_summary import Rate, rate
from coordinator.manifest import git_commit, hardware, versions
from kvtransfer.bench.halves import Pair, PathSpec
from kvtransfer.bench.shape import MIB, REAL, Case

FORMAT = 1
ALONE = "alone"
BESIDE = "beside"
ORDER = (ALONE, BESIDE, BESIDE, ALONE)
SIZE_BYTES = 16 * MIB
"""Of one transfer: a prompt of some 700 tokens of SmolLM2-135M."""
SLACK_S = 1.0
"""The sender goes on for this long after the turn, which begins only when the stream's first tokens are there."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """`rate_bytes_per_s` asked of the transfers, `seconds` of one turn, `quads` times A B B A."""

    model: Path
    rate_bytes_per_s: float = 200e6
    seconds: float = 6.0
    quads: int = 4
    nice: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn's stream: seconds between its tokens, and what arrived beside it, bytes per second."""

    arm: str
    quad: int
    gaps_s: tuple[float, ...]
    bytes_per_s: float


def measure(plan: DecodePlan, say: Callable[[str], None]) -> list[Turn]:
    """Start an engine and its peer, run every turn. Raises `PathError`."""
    options = (
        ("model", str(plan.model)),
        ("rate_bytes_per_s", plan.rate_bytes_per_s),
        ("seconds", plan.seconds),
        ("omp_threads", max(1, len(os.sched_getaffinity(0)) - 1)),
        ("nice", plan.nice),
    )
    one_bytes = Case(REAL.name, SIZE_BYTES, 1).total_bytes
    count = math.ceil(plan.rate_bytes_per_s * (plan.seconds + SLACK_S) / one_bytes)
    beside = Case(REAL.name, SIZE_BYTES, count, what=BESIDE)
    by_arm = {ALONE: Case(REAL.name, SIZE_BYTES, 0, what=ALONE), BESIDE: beside}
    pair = Pair(PathSpec("decoding", "kvtransfer.connector.decoding", options))
    turns: list[Turn] = []
    try:
        say("starting the engine")
        pair.start()
        for arm in (BESIDE, ALONE):
            pair.run(by_arm[arm])
        pair.verify(beside)
        for quad in range(plan.quads):
            for arm in ORDER:
                say(f"turn {len(turns) + 1} of {plan.quads * len(ORDER)}: {arm}")
                pair.run(by_arm[arm])
                taken = pair.ask("receiver", "taken")
                turns.append(Turn(arm, quad, tuple(taken["gaps_s"]), taken["bytes_per_s"]))
    finally:
        pair.close()
    return turns


def change(turns: Sequence[Turn]) -> Rate:
    """Median ITL beside transfers over that alone, minus one, within each A B B A; median and quartiles over those."""
    found = []
    for quad in sorted({turn.quad for turn in turns}):
        medians = {arm: statistics.median(_gaps(turns, arm, quad)) for arm in (ALONE, BESIDE)}
        found.append(medians[BESIDE] / medians[ALONE] - 1)
    return rate(found)


def quantiles(turns: Sequence[Turn], arm: str) -> dict[str, float]:
    """Seconds between an arm's tokens over all its turns: p50, p99, max, and how many."""
    gaps = sorted(_gaps(turns, arm))
    return {
        "p50_s": statistics.median(gaps),
        "p99_s": gaps[min(len(gaps) - 1, math.ceil(0.99 * len(gaps)) - 1)],
        "max_s": gaps[-1],
        "count": len(gaps),
    }


def judged(turns: Sequence[Turn]) -> dict[str, Any]:
    """All that is said of a run."""
    return {
        "median ITL, change": asdict(change(turns)),
        ALONE: quantiles(turns, ALONE),
        BESIDE: quantiles(turns, BESIDE),
        "bytes_per_s": statistics.median(turn.bytes_per_s for turn in turns if turn.arm == BESIDE),
    }


def lines(turns: Sequence[Turn]) -> list[str]:
    """What to print; the last one is the summary."""
    said = []
    found = judged(turns)
    for arm in (ALONE, BESIDE):
        ms = {name: found[arm][f"{name}_s"] * 1e3 for name in ("p50", "p99", "max")}
        said.append(
            f"{arm}: ITL p50 {ms['p50']:.1f} ms, p99 {ms['p99']:.1f} ms, max {ms['max']:.1f} ms, {found[arm]['count']} tokens"
        )
    moved = found["median ITL, change"]
    said.append(
        f"median ITL {moved['median']:+.1%} (quartiles {moved['low']:+.1%} to {moved['high']:+.1%}) beside "
        f"{found['bytes_per_s'] / 1e6:.0f} MB/s, p99 stall {(found[BESIDE]['p99_s'] - found[ALONE]['p99_s']) * 1e3:+.1f} ms"
    )
    return said


def record(turns: Sequence[Turn], plan: DecodePlan) -> dict[str, Any]:
    """Everything, to be written as JSON."""
    return {
        "format": FORMAT,
        "kind": "bench transfer --decode",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["splitpoint", *sys.argv[1:]],
        "git_commit": git_commit(),
        "hardware": hardware(),
        "versions": versions(),
        "plan": {**asdict(plan), "model": str(plan.model)},
        "result": judged(turns),
        "summary": lines(turns)[-1],
        "turns": [asdict(turn) for turn in turns],
    }


def _gaps(turns: Sequence[Turn], arm: str, quad: int | None = None) -> list[float]:
    return [gap for turn in turns if turn.arm == arm and quad in (None, turn.quad) for gap in turn.gaps_s]
