"""Gather and scatter on a GPU: one kernel each way over all blocks and layers. Importing this needs torch and Triton.

A table on the device tells the kernel where each contiguous segment of the cache begins; it reads block ids from, and writes
checksums to, page-locked memory, so the engine's thread never waits for the GPU. Everything runs on the current stream, in the
order in which the engine launches: what comes later on it sees the blocks as they are after the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtransfer import cuda_checksum, pieces
from kvtransfer.cuda_launch import code_for

TILE_WORDS = 1024
"""64-bit words that one program copies."""
WORD_BYTES = 8
COLUMNS = 4
"""Of the segment table: address, bytes from block to block, words of a block, words before it in a slot's row."""


@triton.jit(do_not_specialize=["row_words", "tiles"])
def _move(
    table,
    block_ids,
    rows,
    row_words,
    tiles,
    SCATTER: tl.constexpr,  # noqa: N803 - Triton's convention
    ALIGN: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    index = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    entry = table + tl.program_id(1) * 4
    base = tl.load(entry)
    stride_bytes = tl.load(entry + 1)
    words = tl.multiple_of(tl.load(entry + 2), ALIGN // 8)
    before = tl.load(entry + 3)
    block = tl.load(block_ids + index)
    engine = tl.multiple_of((base + block * stride_bytes).to(tl.pointer_type(tl.int64)), ALIGN)
    staged = tl.multiple_of(rows + index.to(tl.int64) * row_words + before, ALIGN)
    word = tile * TILE + tl.arange(0, TILE)
    inside = word < words
    if SCATTER:
        tl.store(engine + word, tl.load(staged + word, mask=inside), mask=inside)
    else:
        tl.store(staged + word, tl.load(engine + word, mask=inside), mask=inside)


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A copy that the GPU will do in its turn. Calling it tells whether it is done; `wait` blocks until it is.

    `crcs`: the CRC32C of each piece of the staged bytes (kvtransfer/pieces.py), valid when the copy is done; None where pieces
    do not end with blocks.
    """

    event: torch.cuda.Event
    crcs: torch.Tensor | None = None
    nearly: torch.cuda.Event | None = None
    """What is left when this has passed takes somewhat longer than waking a thread, and no more than some milliseconds."""
    keep: Any = None
    """What must live until then."""

    def __call__(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """Blocks this thread, without the interpreter lock."""
        self.event.synchronize()

    def wait_nearly(self) -> bool:
        """The same until the copy is nearly done; False where nobody can tell."""
        if self.nearly is not None:
            self.nearly.synchronize()
        return self.nearly is not None


def segment_table(segments: Sequence[tuple[int, torch.Tensor]]) -> np.ndarray:
    """`[segments, COLUMNS]` int64 for the kernel, from each segment's place in a row (bytes) and its view `[blocks, bytes]`.

    Raises:
        ValueError: a segment is not made of whole, aligned 64-bit words.
    """
    rows = []
    for before_bytes, segment in segments:
        address, stride_bytes, num_bytes = segment.data_ptr(), segment.stride(0), segment.shape[1]
        if any(value % WORD_BYTES for value in (address, stride_bytes, num_bytes, before_bytes)):
            raise ValueError(
                f"a cache segment of {num_bytes} bytes at {address:#x}, {stride_bytes} bytes from block to block, is not made of "
                "whole 64-bit words"
            )
        rows.append((address, stride_bytes, num_bytes // WORD_BYTES, before_bytes // WORD_BYTES))
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


def alignment(table: np.ndarray, block_bytes: int) -> int:
    """Bytes that every place the kernel begins at is a multiple of: 16, for the widest access, or 8."""
    values = [*table[:, 0], *table[:, 1], *(table[:, 3] * WORD_BYTES), block_bytes]
    return 16 if all(int(value) % 16 == 0 for value in values) else WORD_BYTES


class CudaBlocks:
    """The segments of one rank's cache and the kernels over them. Belongs to the engine's thread.

    `segments` as in `segment_table`; `block_bytes` is a slot's row. Compiles the kernels.
    """

    def __init__(self, segments: Sequence[tuple[int, torch.Tensor]], block_bytes: int, device: torch.device) -> None:
        host = segment_table(segments)
        self._device = device
        self._block_bytes = block_bytes
        self._align = alignment(host, block_bytes)
        self._tiles = int(-(-host[:, 2].max() // TILE_WORDS))
        self._segments = len(host)
        self._table = torch.from_numpy(host).to(device)
        self._sums = block_bytes % pieces.PIECE_BYTES == 0
        self._keep = [segment for _, segment in segments]
        self._code: dict[tuple[bool, bool], Any] = {}
        """Machine code by (scatter, aligned rows)."""
        self._running: list[DeviceCopy] = []
        """What the GPU may still read or write lives here, whoever else has let go of it."""
        scratch = torch.empty((1, block_bytes), dtype=torch.uint8, device=device)
        # The first block goes out and back to where it was.
        self.gather([0], scratch).wait()
        self.scatter(scratch, [0]).wait()
        cuda_checksum.prepare(device)

    def gather(self, block_ids: Sequence[int], rows: torch.Tensor, nearly: torch.cuda.Event | None = None) -> DeviceCopy:
        """Start copying engine blocks into `rows` `[len(block_ids), block_bytes]`, uint8 on this device or page-locked on the
        host. The blocks may be written again by anything that comes later on the current stream. `nearly`: a `mark` before the
        last of what the copy waits for; without it, it is made here."""
        on_device = rows.device.type != "cpu"
        if not on_device:
            nearly = None
        elif nearly is None:
            nearly = self.mark()
        packed = rows if on_device else torch.empty(rows.shape, dtype=torch.uint8, device=self._device)
        ids = self._launch(packed, block_ids, scatter=False)
        crcs = cuda_checksum.start_on_host(packed.view(-1)) if self._sums and on_device else None
        if not on_device:
            rows.copy_(packed, non_blocking=True)
        return self._begun(DeviceCopy(self.mark(), crcs, nearly, keep=ids))

    def scatter(self, rows: torch.Tensor, block_ids: Sequence[int]) -> DeviceCopy:
        """Start copying `rows` into engine blocks. `rows` may be written again when the copy is done; the blocks are complete for
        whatever comes later on the current stream."""
        packed = rows if rows.device.type != "cpu" else rows.to(self._device, non_blocking=True)
        ids = self._launch(packed, block_ids, scatter=True)
        return self._begun(DeviceCopy(self.mark(), keep=(rows, ids)))

    def _launch(self, rows: torch.Tensor, block_ids: Sequence[int], *, scatter: bool) -> torch.Tensor:
        """The block ids: to be kept until the kernel is done."""
        # The kernel reads them where they are: a copy would be one launch more.
        ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=True)
        words = rows.view(-1).view(torch.int64)
        grid = (len(block_ids) * self._tiles, self._segments, 1)
        arguments = (self._table, ids, words, self._block_bytes // WORD_BYTES, self._tiles)
        constants = {"SCATTER": scatter, "ALIGN": self._align, "TILE": TILE_WORDS}
        # All that Triton tells kinds of arguments apart by: the rest is always the same, or aligned by its allocator.
        kind = scatter, words.data_ptr() % 16 == 0
        code = self._code.get(kind)
        if code is None:
            code = self._code[kind] = code_for(_move, grid, arguments, constants)
        code[grid](*arguments, *constants.values(), stream=torch.cuda.current_stream(self._device).cuda_stream)
        return ids

    def _begun(self, copy: DeviceCopy) -> DeviceCopy:
        self._running = [other for other in self._running if not other()]
        self._running.append(copy)
        return copy

    def mark(self) -> torch.cuda.Event:
        """An event behind everything that is on the current stream now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
