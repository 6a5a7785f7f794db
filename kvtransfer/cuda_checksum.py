"""CRC32C pieces (kvtransfer/pieces.py) of device memory, computed where the bytes lie. Importing this needs torch and Triton.

One program folds `ROWS` pieces: every lane takes each `LANES`-th word with the map A^LANES, in registers; then each lane's own
map puts its value in place and an exclusive-or over the lanes is the piece's raw CRC. Bytes are read once.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtransfer import pieces

ROWS = 4


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit(do_not_specialize=["num_words", "num_pieces", "last_zeros"])
def _piece_crcs(
    source,
    result,
    step_columns,
    lane_columns,
    num_words,
    num_pieces,
    full_zeros,
    last_zeros,
    PIECE_WORDS: tl.constexpr,  # noqa: N803 - Triton's convention
    LANES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    start = piece.to(tl.int64) * PIECE_WORDS
    # A short last piece is set to the right: zeros before it do not change a raw CRC.
    length = tl.minimum(num_words.to(tl.int64) - start, PIECE_WORDS).to(tl.int32)
    shift = PIECE_WORDS - length
    state = tl.zeros((ROWS, LANES), tl.int32)
    for row in range(PIECE_WORDS // LANES):
        word = row * LANES + lane[None, :] - shift[:, None]
        wanted = (word >= 0) & (piece < num_pieces)[:, None]
        folded = tl.load(source + start[:, None] + word, mask=wanted, other=0)
        for bit in tl.static_range(32):
            column = tl.load(step_columns + bit)
            folded ^= (0 - ((state >> bit) & 1)) & column
        state = folded
    placed = tl.zeros((ROWS, LANES), tl.int32)
    for bit in tl.static_range(32):
        column = tl.load(lane_columns + bit * LANES + lane)
        placed ^= (0 - ((state >> bit) & 1)) & column[None, :]
    raw = tl.reduce(placed, 1, _xor)
    zeros = tl.where(piece == num_pieces - 1, last_zeros, full_zeros)
    tl.store(result + piece, raw ^ zeros, mask=piece < num_pieces)


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    step = torch.from_numpy(pieces.advance_columns(pieces.LANES).view(np.int32)).to(device)
    lanes = torch.from_numpy(np.ascontiguousarray(pieces.lane_columns()).view(np.int32)).to(device)
    return step, lanes


@functools.cache
def _zeros(num_bytes: int) -> int:
    return int(np.array(pieces.zeros_crc(num_bytes), np.uint32).view(np.int32))


def launch(memory: torch.Tensor, result: torch.Tensor | None = None) -> torch.Tensor:
    """Start the computation over `memory` (one-dimensional uint8 on a device) on the current stream; int32 per piece, there: in
    `result`, where that is given.

    Raises:
        ValueError: not whole 32-bit words.
    """
    num_bytes = memory.numel()
    if num_bytes == 0 or num_bytes % pieces.WORD_BYTES:
        raise ValueError(f"{num_bytes} bytes are not whole 32-bit words")
    count = pieces.piece_count(num_bytes)
    if result is None:
        result = torch.empty(count, dtype=torch.int32, device=memory.device)
    step, lanes = _tables(memory.device)
    _piece_crcs[(-(-count // ROWS),)](
        memory.view(torch.int32),
        result,
        step,
        lanes,
        num_bytes // pieces.WORD_BYTES,
        count,
        _zeros(pieces.PIECE_BYTES),
        _zeros(num_bytes - (count - 1) * pieces.PIECE_BYTES),
        PIECE_WORDS=pieces.PIECE_BYTES // pieces.WORD_BYTES,
        LANES=pieces.LANES,
        ROWS=ROWS,
    )
    return result


def prepare(device: torch.device) -> None:
    """Compile the kernel and load its tables, so that no transfer pays for it."""
    launch(torch.zeros(pieces.PIECE_BYTES, dtype=torch.uint8, device=device)).cpu()


def start_on_host(memory: torch.Tensor) -> torch.Tensor:
    """`launch`, and the values on their way to page-locked host memory on the same stream: valid after an event of it."""
    crcs = launch(memory)
    host = torch.empty(crcs.shape, dtype=crcs.dtype, pin_memory=True)
    host.copy_(crcs, non_blocking=True)
    return host


@dataclass(frozen=True, slots=True)
class Pending:
    """A checksum that the device computes. Calling it tells whether it is done."""

    done: torch.cuda.Event
    crcs: torch.Tensor

    def __call__(self) -> bool:
        return bool(self.done.query())

    def wait(self) -> None:
        """Blocks this thread, without the interpreter lock."""
        self.done.synchronize()

    def value(self) -> int:
        """The checksum, when it is done."""
        return pieces.combine(self.crcs.numpy())


class Prepared:
    """Everything that `start` needs beside the bytes themselves, made while these are still on their way."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._stream = _own_stream(memory.device)
        count = pieces.piece_count(memory.numel())
        with torch.cuda.stream(self._stream):
            self._crcs = torch.empty(count, dtype=torch.int32, device=memory.device)
        self._host = torch.empty(count, dtype=torch.int32, pin_memory=True)
        self._done = torch.cuda.Event()

    def start(self) -> Pending:
        """Begin, on a stream of this thread's own: it does not wait for what the engine computes. The bytes are final."""
        with torch.cuda.stream(self._stream):
            launch(self._memory, self._crcs)
            self._host.copy_(self._crcs, non_blocking=True)
            self._done.record()
        return Pending(self._done, self._host)


def rehearse(device: torch.device) -> None:
    """Launch everything once over one piece."""
    Prepared(_nothing(device)).start()


@functools.cache
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.zeros(pieces.PIECE_BYTES, dtype=torch.uint8, device=device)


def start(memory: Any) -> Pending:
    """Begin `pieces.ALGORITHM` over device memory whose bytes are final."""
    return Prepared(memory).start()


def checksum(memory: Any) -> int:
    """`pieces.ALGORITHM` over device memory whose bytes are final. Blocks this thread."""
    pending = start(memory)
    pending.wait()
    return pending.value()


_streams = threading.local()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream | None = getattr(_streams, "stream", None)
    if stream is None or stream.device != device:
        stream = _streams.stream = torch.cuda.Stream(device, priority=-1)
    return stream
