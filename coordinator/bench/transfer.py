"""Runs the paths of a transfer benchmark in turns: every repeat times every path once, so that what slows the machine for a
while slows all of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.bench.transfer_summary import Sample
from kvtransfer.bench.bounds import AT_ONCE
from kvtransfer.bench.halves import Pair, PathError, PathSpec
from kvtransfer.bench.shape import MIB, REAL, SYNTHETIC, Case
from kvtransfer.config import KvTransferSettings

MEMORY = "memory"
BOUNDS = ("memcpy", "crc32c", "memcpy_crc32c", "readv", "readv_crc32c", AT_ONCE)
OURS = ("ucx", "grpc")
UCX_ALONE = "ucx contained"
UCX_ONE_COPY = "ucx one copy"
RAW_GRPC = "gRPC stream"
NIXL = "NIXL READ"
CONNECTOR = "NixlConnector"
RUN_BYTES = 256 * MIB
"""One run moves this much, in as many transfers as it takes, at least two."""

Say = Callable[[str], None]
Advance = Callable[[str, int, int], None]
"""(what, done, of)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in MiB, repeats after one warm-up of each case."""

    sizes: tuple[int, ...]
    repeats: int
    model: Path
    thorough: bool = True
    own_cores: bool = False
    """Half of the cores for each half of a path, as two workers with cores of their own have them."""

    @classmethod
    def make(cls, *, quick: bool, model: Path, own_cores: bool = False) -> Plan:
        """Raises `ValueError` when there are no two cores to share out."""
        if own_cores and cores() < 2:
            raise ValueError("one core cannot be shared out")
        if quick:
            return cls((32, 64, 128), 5, model, thorough=False, own_cores=own_cores)
        return cls((1, 4, 16, 32, 64, 128), 15, model, own_cores=own_cores)

    def shares(self) -> dict[str, list[int]] | None:
        """Which cores each half may use; None: all of them."""
        mine = sorted(os.sched_getaffinity(0))
        middle = len(mine) // 2
        return {"sender": mine[:middle], "receiver": mine[middle:]} if self.own_cores else None


@dataclass(slots=True)
class Outcome:
    """`missing`: peers that could not be measured, and why."""

    samples: list[Sample] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def specs(plan: Plan) -> tuple[list[PathSpec], dict[str, str]]:
    """What to run, and what is missing here with the way to get it."""
    made = [PathSpec(MEMORY, "kvtransfer.bench.bounds")]
    message_bytes = KvTransferSettings().grpc_message_bytes
    missing: dict[str, str] = {}
    if importlib.util.find_spec("ucxx") is None:
        missing["ucx"] = "ucxx is not installed (extra cpu or gpu)"
    else:
        made.append(PathSpec("ucx", "kvtransfer.bench.ours", (("transport", "ucx"),)))
        for name, way in ((UCX_ONE_COPY, "one_copy"), (UCX_ALONE, "contained")):
            if plan.thorough or name == UCX_ONE_COPY:
                made.append(PathSpec(name, "kvtransfer.bench.ours", (("transport", "ucx"), ("ucx_same_host", way))))
    made.append(PathSpec("grpc", "kvtransfer.bench.ours", (("transport", "grpc"),)))
    made.append(PathSpec(RAW_GRPC, "kvtransfer.bench.grpc_stream", (("message_bytes", message_bytes),)))
    wheels = [name for name in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name)]
    if not wheels:
        missing[NIXL] = missing[CONNECTOR] = "NIXL is not installed (extra nixl)"
        return made, missing
    made.append(PathSpec(NIXL, "kvtransfer.bench.nixl_read"))
    lacks = [name for name in ("vllm", "nixl") if importlib.util.find_spec(name) is None]
    if lacks:
        missing[CONNECTOR] = f"not installed: {', '.join(lacks)} (vLLM's connector imports the package nixl)"
    elif not (plan.model / "config.json").is_file():
        missing[CONNECTOR] = f"no checkpoint at {plan.model} (splitpoint models fetch smollm2)"
    else:
        made.append(PathSpec(CONNECTOR, "kvtransfer.connector.nixl_peer", (("model", str(plan.model)),)))
    return made, missing


def cases(plan: Plan, path: str) -> Iterator[Case]:
    """What is timed on one path."""
    for size in plan.sizes:
        transfers = max(2, RUN_BYTES // (size * MIB))
        real = Case(REAL.name, size * MIB, transfers)
        small = Case(SYNTHETIC.name, size * MIB, transfers)
        if path == RAW_GRPC:
            yield Case(REAL.name, size * MIB, transfers, staged=True)
            continue
        if path == MEMORY:
            yield from (replace(real, what=what) for what in BOUNDS)
            continue
        yield real
        if path in OURS:
            yield Case(REAL.name, size * MIB, transfers, staged=True)
        if path in ("ucx", NIXL) and size == max(plan.sizes):
            yield small
        if path in OURS and size == max(plan.sizes):
            yield Case(REAL.name, size * MIB, transfers, check=False)


def measure(plan: Plan, say: Say, advance: Advance) -> Outcome:
    """Run everything. A peer that fails is named in `missing`; one of ours that fails raises `PathError`."""
    wanted, missing = specs(plan)
    outcome = Outcome(missing=missing)
    pairs: dict[str, Pair] = {}
    try:
        pairs.update((spec.name, Pair(spec, plan.shares())) for spec in wanted)
        _start(wanted, pairs, outcome, say, advance)
        for repeat in range(plan.repeats + 1):
            for path in list(pairs):
                try:
                    _one_round(pairs[path], list(cases(plan, path)), repeat, outcome.samples)
                except PathError as error:
                    _drop(pairs, path, error, outcome)
                advance("measuring", repeat, plan.repeats)
    finally:
        for pair in pairs.values():
            pair.close()
    return outcome


def _start(wanted: Sequence[PathSpec], pairs: dict[str, Pair], outcome: Outcome, say: Say, advance: Advance) -> None:
    for number, spec in enumerate(wanted):
        say(f"starting {spec.name}")
        try:
            pairs[spec.name].start()
            pairs[spec.name].pause()
        except PathError as error:
            _drop(pairs, spec.name, error, outcome)
        advance("starting", number + 1, len(wanted))


def _one_round(pair: Pair, wanted: Sequence[Case], repeat: int, samples: list[Sample]) -> None:
    """Time each case once; the first repeat warms up and compares the bytes."""
    pair.resume()
    for case in wanted:
        seconds = pair.run(case)
        if repeat == 0:
            if not case.staged:
                pair.verify(case)
            continue
        sample = Sample(
            path=case.what or pair.name,
            layout=case.layout,
            size_mib=case.size_bytes / MIB,
            staged=case.staged,
            check=case.check,
            repeat=repeat,
            num_bytes=case.total_bytes,
            seconds=seconds,
        )
        samples.append(sample)
    pair.pause()


def _drop(pairs: dict[str, Pair], path: str, error: PathError, outcome: Outcome) -> None:
    pairs.pop(path).close()
    if path in (*OURS, MEMORY):
        raise error
    outcome.missing[path] = str(error)
    outcome.samples = [sample for sample in outcome.samples if sample.path != path]


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
