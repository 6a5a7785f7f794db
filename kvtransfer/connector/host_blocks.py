"""Gather and scatter in host memory: neighbouring blocks in one copy a segment, on the caller's thread.

One thread only: the engine's own cores compute meanwhile, and one core's copies already fill a good part of the memory's rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive block ids: place of the first, its id, how many."""
    begin = 0
    for place in range(1, len(block_ids) + 1):
        if place == len(block_ids) or block_ids[place] != block_ids[place - 1] + 1:
            yield begin, block_ids[begin], place - begin
            begin = place


class HostBlocks:
    """`segments`: (first byte in a slot's row, the cache's bytes `[num_blocks, bytes]`). Together they are the whole row."""

    def __init__(self, segments: Sequence[tuple[int, np.ndarray]]) -> None:
        self._segments = [(start, start + blocks.shape[1], blocks) for start, blocks in segments]
        self._num_blocks = min(len(blocks) for _, blocks in segments)

    def gather(self, block_ids: Sequence[int], rows: np.ndarray) -> None:
        """Copy blocks into `rows` `[len(block_ids), row bytes]`. Raises `ValueError` for another shape or an unknown block."""
        self._check(block_ids, rows)
        for place, block, count in runs(block_ids):
            for start, end, blocks in self._segments:
                rows[place : place + count, start:end] = blocks[block : block + count]

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
