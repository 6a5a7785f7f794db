"""Gather and scatter in host memory: neighbouring blocks in one copy a segment, on the caller's thread.

One thread only: the engine's own cores compute meanwhile, and one core's copies already fill a good part of the memory's rate.

A gather can compute the CRC32C of each block as it copies. Bytes that were just copied are in the processor's cache, where that
costs a fraction of what another thread pays later to fetch them from memory again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from awscrt.checksums import crc32c

CACHED_BYTES = 256 * 1024
"""What was copied stays in a core's own cache up to this: half a megabyte with what it was copied from."""


def runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive block ids: place of the first, its id, how many."""
    begin = 0
    for place in range(1, len(block_ids) + 1):
        if place == len(block_ids) or block_ids[place] != block_ids[place - 1] + 1:
            yield begin, block_ids[begin], place - begin
            begin = place


Segments = list[tuple[int, int, np.ndarray]]


def _groups(segments: Segments) -> list[tuple[int, int, Segments]]:
    """Neighbours, in the row's order, as many as stay in the cache between being copied and being summed."""
    made: list[tuple[int, int, Segments]] = []
    for start, end, blocks in sorted(segments, key=lambda segment: segment[0]):
        if made and end - made[-1][0] <= CACHED_BYTES:
            made[-1] = made[-1][0], end, [*made[-1][2], (start, end, blocks)]
        else:
            made.append((start, end, [(start, end, blocks)]))
    return made


class HostBlocks:
    """`segments`: (first byte in a slot's row, the cache's bytes `[num_blocks, bytes]`). Together they are the whole row."""

    def __init__(self, segments: Sequence[tuple[int, np.ndarray]]) -> None:
        self._segments = [(start, start + blocks.shape[1], blocks) for start, blocks in segments]
        self._num_blocks = min(len(blocks) for _, blocks in segments)
        self._groups = _groups(self._segments)

    def gather(self, block_ids: Sequence[int], rows: np.ndarray, *, check: bool = False) -> np.ndarray | None:
        """Copy blocks into `rows` `[len(block_ids), row bytes]`. `check`: returns the CRC32C of each row as it lies there.

        Raises:
            ValueError: another shape, or an unknown block.
        """
        self._check(block_ids, rows)
        if check:
            return self._gather_checked(block_ids, rows)
        for place, block, count in runs(block_ids):
            for start, end, blocks in self._segments:
                rows[place : place + count, start:end] = blocks[block : block + count]
        return None

    def _gather_checked(self, block_ids: Sequence[int], rows: np.ndarray) -> np.ndarray:
        crcs = np.zeros(len(block_ids), np.uint32)
        at_once = max(1, CACHED_BYTES // rows.shape[1]) if len(rows) else 1
        for begin, first, length in runs(block_ids):
            for place in range(begin, begin + length, at_once):
                count = min(at_once, begin + length - place)
                block = first + place - begin
                for start, end, segments in self._groups:
                    for left, right, blocks in segments:
                        rows[place : place + count, left:right] = blocks[block : block + count]
                    for row in range(place, place + count):
                        crcs[row] = crc32c(rows[row, start:end], int(crcs[row]))
        return crcs

    def scatter(self, rows: np.ndarray, block_ids: Sequence[int]) -> None:
        """Copy `rows` into blocks. Raises like `gather`."""
        self._check(block_ids, rows)
        for place, block, count in runs(block_ids):
            for start, end, blocks in self._segments:
                blocks[block : block + count] = rows[place : place + count, start:end]

    def _check(self, block_ids: Sequence[int], rows: np.ndarray) -> None:
        if len(rows) != len(block_ids):
            raise ValueError(f"{len(rows)} rows for {len(block_ids)} blocks")
        # A slice beyond the end would be cut short without a word.
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise ValueError(f"blocks {min(block_ids)} to {max(block_ids)} of {self._num_blocks}")
