"""The proof as one record: what was planted, what came out, and whether it holds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from coordinator.compare.proof.cells import (
    AGAIN,
    LOOKS,
    SMALL,
    STANDARD,
    Cell,
    Repeat,
    Share,
    all_truths,
    covers,
    doubtful,
    many_workloads,
    repeated_looks,
)
from coordinator.compare.proof.model import World
from coordinator.compare.proof.planted import Planted, all_planted
from coordinator.compare.record import utc_now
from coordinator.compare.stats import CONFIDENCE
from coordinator.compare.verdict import MARGIN, Verdict

SCHEMA_VERSION = 1
MOST_FALSE = 0.05
LEAST_CAUGHT = 0.95
BOUNDARY_RATIO = 1 + MARGIN
"""Where every claim is false and the chance of one is largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Everything of one run. `seed` and `experiments` (of each cell) make it again; `again`: see `doubtful`."""

    started_at: str
    wall_s: float
    seed: int
    experiments: int
    world: World
    cells: tuple[Cell, ...]
    again: tuple[Cell, ...]
    repeats: tuple[Repeat, ...]
    planted: tuple[Planted, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; shares with their intervals."""
        found = _plain(self)
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "proof",
            **found,
            "designs": [dataclasses.asdict(design) for design in (STANDARD, SMALL)],
            "margin": MARGIN,
            "looks": list(LOOKS),
            "criteria": dict(criteria(self)),
            "versions": {name: version(name) for name in ("splitpoint", "numpy", "scipy")},
        }


def prove(experiments: int, seed: int, told: Callable[[str, float], None] = lambda text, share: None) -> Proof:
    """Run every cell. `told` hears what runs now and the share that is done."""
    began, started_at, world = time.perf_counter(), utc_now(), World()
    steps = 26
    done = 0

    def say(text: str) -> None:
        nonlocal done
        told(text, done / steps)
        done += 1

    cells = tuple(all_truths(experiments, world, seed, say))
    again = tuple(doubtful(cells, experiments, world, seed, lambda text: told(text, done / steps)))
    say("several looks")
    looks = repeated_looks(BOUNDARY_RATIO, world, experiments, np.random.default_rng([seed, 500]))
    say("several workloads")
    family = many_workloads(BOUNDARY_RATIO, world, experiments, np.random.default_rng([seed, 501]))
    planted = tuple(all_planted(experiments, world, seed, say))
    return Proof(
        started_at=started_at,
        wall_s=time.perf_counter() - began,
        seed=seed,
        experiments=experiments,
        world=world,
        cells=cells,
        again=again,
        repeats=(looks, family),
        planted=planted,
    )


def criteria(proof: Proof) -> list[tuple[str, bool]]:
    """What must hold, and whether it does; a share is held against its own interval, so that chance alone fails none."""
    covered = all(covers(cell) for cell in proof.again)
    repeated_cells = f"{len(proof.again)} of {len(proof.cells)} run again, {AGAIN} times as large"
    alike = [cell for cell in proof.cells if cell.ratio == 1]
    false = [cell.verdicts[Verdict.SPLIT].count + cell.verdicts[Verdict.COLOCATE].count for cell in alike]
    wrong = all(cell.wrong.interval[0] <= MOST_FALSE for cell in proof.cells)
    caught = all(one.caught.value >= LEAST_CAUGHT for one in proof.planted)
    alarms = all(one.false_alarms.interval[0] <= MOST_FALSE for one in proof.planted)
    repeated = all(repeat.corrected.interval[0] <= MOST_FALSE for repeat in proof.repeats)
    return [
        (f"in every cell the 99 % interval of the coverage contains {CONFIDENCE:.0%} ({repeated_cells})", covered),
        (
            f"identical arms are called split or colocate in at most {MOST_FALSE:.0%}",
            all(count <= MOST_FALSE * cell.wrong.of for count, cell in zip(false, alike, strict=True)),
        ),
        (f"no truth is denied in more than {MOST_FALSE:.0%} (lower bound)", wrong),
        (f"several looks and several workloads together deny the truth in at most {MOST_FALSE:.0%} (lower bound)", repeated),
        (f"every planted fault is caught and named in at least {LEAST_CAUGHT:.0%}", caught),
        (f"no detector cries in more than {MOST_FALSE:.0%} of clean experiments (lower bound)", alarms),
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Share):
        return value.as_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return value
