"""Gather and scatter on a GPU: one kernel each way over all blocks and layers. Importing this needs torch and Triton.

A table on the device tells the kernel where each contiguous segment of the cache begins; block ids travel from page-locked memory
on the same stream, so the engine's thread never waits for the GPU. Everything runs on the current stream, in the order in which
the engine launches: what comes later on it sees the blocks as they are after the copy.
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
    begun: torch.cuda.Event | None = None
    """What comes before it on its stream is done: what is left takes about as long as waking a thread. None: it takes longer."""
    keep: Any = None
    """What must live until then."""

    def __call__(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """Blocks this thread, without the interpreter lock."""
        self.event.synchronize()

    def wait_begun(self) -> bool:
        """The same until the copy is about to begin; False where it takes long after that."""
        if self.begun is not None:
            self.begun.synchronize()
        return self.begun is not None


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
        scratch = torch.empty((1, block_bytes), dtype=torch.uint8, device=device)
        # The first block goes out and back to where it was.
        self.gather([0], scratch).wait()
        self.scatter(scratch, [0]).wait()
        cuda_checksum.prepare(device)

    def gather(self, block_ids: Sequence[int], rows: torch.Tensor) -> DeviceCopy:
        """Start copying engine blocks into `rows` `[len(block_ids), block_bytes]`, uint8 on this device or page-locked on the
        host. The blocks may be written again by anything that comes later on the current stream."""
        on_device = rows.device.type != "cpu"
        begun = self._record() if on_device else None
        packed = rows if on_device else torch.empty(rows.shape, dtype=torch.uint8, device=self._device)
        self._launch(packed, block_ids, scatter=False)
        crcs = cuda_checksum.start_on_host(packed.view(-1)) if self._sums and on_device else None
        if not on_device:
            rows.copy_(packed, non_blocking=True)
        return DeviceCopy(self._record(), crcs, begun)

    def scatter(self, rows: torch.Tensor, block_ids: Sequence[int]) -> DeviceCopy:
        """Start copying `rows` into engine blocks. `rows` may be written again when the copy is done; the blocks are complete for
        whatever comes later on the current stream."""
        packed = rows if rows.device.type != "cpu" else rows.to(self._device, non_blocking=True)
        self._launch(packed, block_ids, scatter=True)
        return DeviceCopy(self._record(), keep=rows)

    def _launch(self, rows: torch.Tensor, block_ids: Sequence[int], *, scatter: bool) -> None:
        # The allocator keeps page-locked memory back until the copy that reads it is over.
        ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)
        _move[(len(block_ids) * self._tiles, self._segments)](
            self._table,
            ids,
            rows.view(-1).view(torch.int64),
            self._block_bytes // WORD_BYTES,
            self._tiles,
            SCATTER=scatter,
            ALIGN=self._align,
            TILE=TILE_WORDS,
        )

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
