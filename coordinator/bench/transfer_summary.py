"""What a transfer benchmark's samples say. Pure: values in, values out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Key = tuple[str, str, float, bool, bool]
"""Path, layout, size in MiB, staged, checked."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run."""

    path: str
    layout: str
    size_mib: float
    staged: bool
    check: bool
    repeat: int
    num_bytes: int
    seconds: float

    @property
    def key(self) -> Key:
        return self.path, self.layout, self.size_mib, self.staged, self.check

    @property
    def gigabytes_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Rate:
    """GB/s over the repeats of one case: median, and the quartiles as its spread."""

    median: float
    low: float
    high: float
    count: int


def rates(samples: Iterable[Sample]) -> dict[Key, Rate]:
    """Each case's rate, in the order in which the cases came."""
    grouped: dict[Key, list[float]] = {}
    for sample in samples:
        grouped.setdefault(sample.key, []).append(sample.gigabytes_per_s)
    return {key: rate(values) for key, values in grouped.items()}


def rate(values: Sequence[float]) -> Rate:
    """Raises `statistics.StatisticsError` without values."""
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = high = values[0]
    return Rate(statistics.median(values), low, high, len(values))


def paired_ratio(samples: Iterable[Sample], path: str, other: str, *, staged: bool = False, layout: str) -> Rate | None:
    """`path` over `other`, each pair of the same size and repeat, so that what slows the whole machine slows both. `staged`: of
    `path`; a raw stream has no cache blocks. None without a pair."""
    found: dict[str, dict[tuple[float, int], float]] = {path: {}, other: {}}
    for sample in samples:
        if sample.path in found and sample.check and sample.layout == layout and sample.staged == staged:
            found[sample.path][sample.size_mib, sample.repeat] = sample.gigabytes_per_s
    ratios = [value / found[other][key] for key, value in found[path].items() if key in found[other]]
    return rate(ratios) if ratios else None


def bound(parts: Mapping[str, float], cores: int, *, reads: bool = False) -> float:
    """GB/s that a perfect pipeline from cache blocks to cache blocks reaches with the speeds of one core that this run measured:
    gather with its checksum at `memcpy_crc32c`, the receiver's checksum of what it maps at `crc32c`, scatter at `memcpy`.
    `reads`: of a receiver that does not map but reads, at `readv_crc32c`. No stage is faster than one core makes it, and all of
    them share the cores. What the cores share among themselves it leaves out: memory, and the kernel's idea of where threads run.
    """
    stages = [1 / parts["memcpy_crc32c"], 1 / parts["readv_crc32c" if reads else "crc32c"], 1 / parts["memcpy"]]
    return 1 / max(max(stages), sum(stages) / max(1, cores))
