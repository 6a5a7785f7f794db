"""Gather and scatter in host memory against one block at a time."""

from __future__ import annotations

import itertools
from unittest import mock

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.connector import host_blocks
from kvtransfer.connector.host_blocks import HostBlocks, runs

NUM_BLOCKS = 9
WIDTHS = (5, 1, 8)


def cache(seed: int) -> list[tuple[int, np.ndarray]]:
    """Segments of several widths; the second's blocks do not touch each other in memory."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *WIDTHS])
    made = [rng.integers(0, 256, (NUM_BLOCKS, 2 * width), dtype=np.uint8)[:, :width] for width in WIDTHS]
    return [(int(start), blocks) for start, blocks in zip(starts, made, strict=False)]


def row_of(segments: list[tuple[int, np.ndarray]], block: int) -> np.ndarray:
    return np.concatenate([blocks[block] for _, blocks in segments])


block_ids = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS)


@given(block_ids)
def test_runs_are_the_ids_in_order(ids: list[int]) -> None:
    found = list(runs(ids))
    assert [first + i for _, first, count in found for i in range(count)] == ids
    assert [place for place, _, _ in found] == [sum(count for _, _, count in found[:i]) for i in range(len(found))]
    assert all(count > 0 for _, _, count in found)
    for (_, first, count), (_, following, _) in itertools.pairwise(found):
        assert following != first + count, "two runs that are one"


@given(block_ids)
def test_gather_takes_each_block_whole(ids: list[int]) -> None:
    segments = cache(1)
    rows = np.full((len(ids), sum(WIDTHS)), 77, np.uint8)
    HostBlocks(segments).gather(ids, rows)
    for row, block in zip(rows, ids, strict=True):
        assert np.array_equal(row, row_of(segments, block))


@given(block_ids, st.sampled_from([1, 40, 1 << 20]))
def test_a_checked_gather_copies_the_same_and_sums_each_row(ids: list[int], cached_bytes: int) -> None:
    segments = cache(1)
    rows = np.full((len(ids), sum(WIDTHS)), 77, np.uint8)
    with mock.patch.object(host_blocks, "CACHED_BYTES", cached_bytes):
        crcs = HostBlocks(segments[::-1]).gather(ids, rows, check=True)
    expected = [row_of(segments, block) for block in ids]
    assert crcs is not None
    assert crcs.tolist() == [google_crc32c.value(row.tobytes()) for row in expected]
    assert [row.tolist() for row in rows] == [row.tolist() for row in expected]


@given(block_ids)
def test_scatter_writes_these_blocks_and_no_other(ids: list[int]) -> None:
    segments, before = cache(2), cache(2)
    rows = np.random.default_rng(3).integers(0, 256, (len(ids), sum(WIDTHS)), dtype=np.uint8)
    HostBlocks(segments).scatter(rows, ids)
    for block in range(NUM_BLOCKS):
        expected = rows[ids.index(block)] if block in ids else row_of(before, block)
        assert np.array_equal(row_of(segments, block), expected)


@pytest.mark.parametrize("ids", [[NUM_BLOCKS], [NUM_BLOCKS - 1, NUM_BLOCKS], [-1]])
def test_an_unknown_block_is_refused(ids: list[int]) -> None:
    blocks = HostBlocks(cache(1))
    rows = np.zeros((len(ids), sum(WIDTHS)), np.uint8)
    with pytest.raises(ValueError, match="of 9"):
        blocks.gather(ids, rows)
    with pytest.raises(ValueError, match="of 9"):
        blocks.scatter(rows, ids)
    with pytest.raises(ValueError, match="rows for"):
        blocks.gather([0, 1, 2], rows)
