"""The proof through the simulated engines as one record that grows cell by cell, and whether it holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from coordinator.compare.proof.cells import AGAIN, Share
from coordinator.compare.proof.engine_cells import CELLS, TRUTHS, Result, result, row
from coordinator.compare.proof.engine_truth import RATES, SEEDS, TUNED, Truth, arrays, long_run, truth
from coordinator.compare.proof.engine_world import BASELINE, REQUESTS, SLO, candidate_name
from coordinator.compare.record import write_text
from coordinator.compare.stats import CONFIDENCE
from coordinator.compare.verdict import MARGIN, Verdict

SCHEMA_VERSION = 3
MOST_FALSE = 0.05
LEAST_CAUGHT = 0.95
BATCH = 4
"""Experiments of each process between two writings of the record."""

FIRST_SEED, AGAIN_FIRST_SEED = 1, 1_000_001
"""Of experiments."""

Told = Callable[[str, float], None]


class EngineProofError(Exception):
    """The record cannot be gone on with; the text says why."""


@dataclass(slots=True, kw_only=True)
class EngineProof:
    """`rows` are the experiments by cell, `truths` what long runs found, by cell and the second arm's candidate. `wall_s` adds up
    over all runs of the command.

    `again` are those of cells whose coverage missed: fresh seeds, `AGAIN` times as many, and what they say stands.
    """

    seed: int
    experiments: int
    wall_s: float = 0.0
    truths: dict[str, dict[str, Truth]] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    again: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def results(self) -> list[Result]:
        """Of the cells that are whole; where one was run again, of that."""
        second = {each.cell.name: each for each in self.second_results()}
        return [second.get(each.cell.name, each) for each in self.first_results()]

    def first_results(self) -> list[Result]:
        """Of the cells that are whole, as they came out first."""
        return self._counted(self.rows, self.experiments)

    def second_results(self) -> list[Result]:
        """Of the cells that were run again."""
        return self._counted(self.again, AGAIN * self.experiments)

    @property
    def doubtful(self) -> list[str]:
        """Cells that have to be run again: one interval of several may miss by chance; what is wrong misses
        the more surely with more."""
        return [each.cell.name for each in self.first_results() if each.truths and not _covers(each)]

    @property
    def missing(self) -> list[str]:
        """Cells that are not whole."""
        first = [name for name in CELLS if len(self.rows.get(name, [])) < self.experiments]
        return first + [f"{name}, again" for name in self.doubtful if len(self.again.get(name, [])) < AGAIN * self.experiments]

    def _counted(self, rows: dict[str, list[dict[str, Any]]], experiments: int) -> list[Result]:
        whole = [cell for cell in CELLS.values() if len(rows.get(cell.name, [])) >= experiments]
        return [result(cell, rows[cell.name], self.truths.get(cell.name, {})) for cell in whole]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "engine-proof",
            "seed": self.seed,
            "experiments": self.experiments,
            "wall_s": self.wall_s,
            "margin": MARGIN,
            "slo": dataclasses.asdict(SLO),
            "requests": REQUESTS,
            "long_runs": {"seeds": SEEDS, "rates_per_s": list(RATES)},
            "criteria": dict(criteria(self)) if self.rows else {},
            "missing": self.missing,
            "truths": _plain(self.truths),
            "cells": [_plain(each) for each in self.results()],
            "first": [_plain(each) for each in self.first_results() if each.cell.name in self.again],
            "rows": self.rows,
            "again": self.again,
        }


def prove(
    experiments: int, seed: int, *, names: Sequence[str] = (), path: Path | None = None, processes: int = 1, told: Told
) -> EngineProof:
    """Run the cells of these names, all without any, that `path` does not hold already, and again those that are doubtful; it is
    written after every few experiments.

    The same `seed` gives the same rows, whatever the number of processes.

    Raises:
        EngineProofError: `path` is the record of another proof.
        OSError: `path` cannot be read or written.
    """
    proof = _begun(path, experiments, seed)
    wanted = list(names) or list(CELLS)
    began, before_s = time.perf_counter(), proof.wall_s
    with _mapping(processes) as mapped:
        if not proof.truths:
            told("long runs", 0.0)
            runs = {
                (kind, chunk): arrays(list(mapped(long_run, [kind] * SEEDS, [chunk] * SEEDS, range(SEEDS))))
                for kind, chunks in TUNED.items()
                for chunk in chunks
            }
            base = runs[BASELINE, TUNED[BASELINE][0]]
            for cell in TRUTHS:
                own = {chunk: truth(base, runs[cell.kind, chunk], cell.speed) for chunk in TUNED[cell.kind]}
                proof.truths[cell.name] = {candidate_name(chunk): found for chunk, found in own.items()}
            _keep(proof, path, before_s + time.perf_counter() - began)

        def fill(rows: list[dict[str, Any]], name: str, seeds: Sequence[int]) -> None:
            while left := seeds[len(rows) :][: BATCH * processes]:
                rows += mapped(row, [name] * len(left), left)
                _keep(proof, path, before_s + time.perf_counter() - began)

        places = {name: place for place, name in enumerate(CELLS)}
        # No two experiments of a proof share a workload.
        for number, name in enumerate(wanted):
            told(name, number / len(wanted))
            first = FIRST_SEED + seed * 10_000 + places[name] * 200
            fill(proof.rows.setdefault(name, []), name, range(first, first + experiments))
        for name in proof.doubtful:
            if name in wanted:
                told(f"{name}, again", 1.0)
                first = AGAIN_FIRST_SEED + seed * AGAIN * 10_000 + places[name] * AGAIN * 200
                fill(proof.again.setdefault(name, []), name, range(first, first + AGAIN * experiments))
    return proof


def criteria(proof: EngineProof) -> list[tuple[str, bool]]:
    """What must hold, and whether it does, of the cells that were run."""
    found = proof.results()
    truths = [each for each in found if each.truths]
    faulty = [each for each in found if each.caught is not None]
    alike = [each for each in truths if each.cell.nominal == 1]
    false = [each.verdicts[Verdict.SPLIT].count + each.verdicts[Verdict.COLOCATE].count for each in alike]
    return [
        (
            f"in every cell the 99 % interval of the coverage contains {CONFIDENCE:.0%} "
            f"({len(proof.doubtful)} of {len(truths)} run again, {AGAIN} times as large)",
            all(_covers(each) for each in truths),
        ),
        (
            f"identical arms are called split or colocate in at most {MOST_FALSE:.0%}",
            all(count <= MOST_FALSE * each.experiments for count, each in zip(false, alike, strict=True)),
        ),
        (f"no truth is denied in more than {MOST_FALSE:.0%} (lower bound)", all(_at_most(each.wrong) for each in truths)),
        (
            f"every planted fault is caught and named in at least {LEAST_CAUGHT:.0%}",
            all(each.caught is not None and each.caught.value >= LEAST_CAUGHT for each in faulty),
        ),
        (
            f"no fault is named that is not there in more than {MOST_FALSE:.0%} (lower bound)",
            all(each.alarms is not None and _at_most(each.alarms) for each in truths),
        ),
    ]


@contextlib.contextmanager
def _mapping(processes: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map`, in this process or over several."""
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield pool.map


def _begun(path: Path | None, experiments: int, seed: int) -> EngineProof:
    if path is None or not path.exists():
        return EngineProof(seed=seed, experiments=experiments)
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        same = said["kind"] == "engine-proof" and (said["seed"], said["experiments"]) == (seed, experiments)
        found = EngineProof(
            seed=seed,
            experiments=experiments,
            wall_s=said["wall_s"],
            truths={cell: {name: Truth(**one) for name, one in own.items()} for cell, own in said["truths"].items()},
            rows=said["rows"],
            again=said["again"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise EngineProofError(f"{path}: not a record of this proof") from error
    if not same:
        raise EngineProofError(f"{path}: a proof of {said['experiments']} experiments a cell, seed {said['seed']}")
    return found


def _keep(proof: EngineProof, path: Path | None, wall_s: float) -> None:
    proof.wall_s = wall_s
    if path is not None:
        write_text(json.dumps(proof.as_dict(), indent=1) + "\n", path)


def _covers(found: Result) -> bool:
    """Whether the coverage may be what the intervals claim."""
    if found.covered is None:
        return False
    low, high = found.covered.interval
    return low <= CONFIDENCE <= high


def _at_most(share: Share) -> bool:
    return share.interval[0] <= MOST_FALSE


def _plain(value: Any) -> Any:
    if isinstance(value, Share):
        return value.as_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return value
