"""CRC32C pieces (kvtransfer/pieces.py) of device memory, computed where the bytes lie. Importing this needs torch and Triton.

A thread is a lane of a piece: it divides its words by P(y) in registers, folds the 32 that are left with the map A^LANES and puts
the result in place with the map of its lane; an exclusive-or over the lanes is the piece's raw CRC. Bytes are read once.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtransfer import pieces
from kvtransfer.cuda_launch import Launch

ROWS = 32
"""Pieces of one program."""
WARPS = 4
_STEP = tl.constexpr([int(column) for column in pieces.advance_columns(pieces.LANES).view(np.int32)])
"""In the kernel's code: loaded, they would take more instructions than the words."""


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def _divide(w, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
            s16, s17, s18, s19, s20, s21, s22, s23, s24, s25, s26, s27, s28, s29, s30, s31):  # fmt: skip
    """The next word: times y, and the carry `s31` comes back in at every term of P (`pieces.TERMS`)."""
    return (w ^ s31, s0, s1, s2, s3, s4, s5 ^ s31, s6, s7 ^ s31, s8 ^ s31, s9 ^ s31, s10 ^ s31, s11, s12 ^ s31, s13 ^ s31, s14,
            s15, s16, s17 ^ s31, s18 ^ s31, s19 ^ s31, s20, s21 ^ s31, s22 ^ s31, s23, s24 ^ s31, s25 ^ s31, s26 ^ s31, s27 ^ s31,
            s28, s29, s30)  # fmt: skip


@triton.jit
def _advance(state):
    """The map A^LANES."""
    moved = tl.zeros_like(state)
    for bit in tl.static_range(32):
        moved ^= (0 - ((state >> bit) & 1)) & _STEP[bit]
    return moved


@triton.jit(do_not_specialize=["num_words", "num_pieces", "last_zeros"])
def _piece_crcs(
    source,
    result,
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
    zero = tl.zeros((ROWS, LANES), tl.int32)
    # The state's words, the lowest power of y first.
    s = (zero,) * 32
    for rows in range(PIECE_WORDS // LANES // 32):
        for row in tl.static_range(32):
            word = (rows * 32 + row) * LANES + lane[None, :] - shift[:, None]
            wanted = (word >= 0) & (piece < num_pieces)[:, None]
            s = _divide(tl.load(source + start[:, None] + word, mask=wanted, other=0), *s)
    folded = zero
    # Rolled: unrolled it takes minutes to compile.
    for _power in range(32):
        folded = _advance(folded) ^ s[31]
        s = (zero,) + s[:31]  # noqa: RUF005 - Triton knows no unpacking here
    placed = zero
    for bit in tl.static_range(32):
        placed ^= (0 - ((folded >> bit) & 1)) & tl.load(lane_columns + bit * LANES + lane)[None, :]
    raw = tl.reduce(placed, 1, _xor)
    zeros = tl.where(piece == num_pieces - 1, last_zeros, full_zeros)
    tl.store(result + piece, raw ^ zeros, mask=piece < num_pieces)


@functools.cache
def _lane_columns(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(pieces.lane_columns()).view(np.int32)).to(device)


@functools.cache
def _zeros(num_bytes: int) -> int:
    return int(np.array(pieces.zeros_crc(num_bytes), np.uint32).view(np.int32))


def _bind(memory: torch.Tensor, result: torch.Tensor) -> Launch:
    num_bytes = memory.numel()
    if num_bytes == 0 or num_bytes % pieces.WORD_BYTES:
        raise ValueError(f"{num_bytes} bytes are not whole 32-bit words")
    count = pieces.piece_count(num_bytes)
    arguments = (
        memory.view(torch.int32),
        result,
        _lane_columns(memory.device),
        num_bytes // pieces.WORD_BYTES,
        count,
        _zeros(pieces.PIECE_BYTES),
        _zeros(num_bytes - (count - 1) * pieces.PIECE_BYTES),
    )
    constants = {"PIECE_WORDS": pieces.PIECE_BYTES // pieces.WORD_BYTES, "LANES": pieces.LANES, "ROWS": ROWS}
    return Launch(_piece_crcs, (-(-count // ROWS), 1, 1), arguments, constants, WARPS)


def launch(memory: torch.Tensor, result: torch.Tensor | None = None) -> torch.Tensor:
    """Start the computation over `memory` (one-dimensional uint8 on a device) on the current stream; int32 per piece, there: in
    `result`, where that is given.

    Raises:
        ValueError: not whole 32-bit words.
    """
    if result is None:
        result = torch.empty(pieces.piece_count(memory.numel()), dtype=torch.int32, device=memory.device)
    _bind(memory, result)(_current_stream(memory.device))
    return result


def prepare(device: torch.device) -> None:
    """Compile the kernel and load its table, so that no transfer pays for it."""
    rehearse(device)
    torch.cuda.synchronize(device)


def start_on_host(memory: torch.Tensor) -> torch.Tensor:
    """`launch` into page-locked host memory: valid after an event of the stream, and until then to be kept."""
    return launch(memory, _host_values(memory))


def _host_values(memory: torch.Tensor) -> torch.Tensor:
    # The kernel writes there itself: a copy would be one launch more.
    return torch.empty(pieces.piece_count(memory.numel()), dtype=torch.int32, pin_memory=True)


class Pending:
    """A checksum that the device computes. Calling it tells whether it is done."""

    def __init__(self, done: torch.cuda.Event, crcs: torch.Tensor) -> None:
        self._done = done
        self._crcs = crcs
        # Whoever wanted it may leave before; the kernel still writes.
        for other in list(_computing):
            other()
        _computing.add(self)

    def __call__(self) -> bool:
        done = bool(self._done.query())
        if done:
            _computing.discard(self)
        return done

    def wait(self) -> None:
        """Blocks this thread, without the interpreter lock."""
        self._done.synchronize()
        _computing.discard(self)

    def value(self) -> int:
        """The checksum, when it is done."""
        return pieces.combine(self._crcs.numpy())


_computing: set[Pending] = set()
"""What a kernel may still write to."""


class Prepared:
    """Everything that `start` needs beside the bytes themselves, made while these are still on their way."""

    def __init__(self, memory: Any) -> None:
        self._stream = _own_stream(memory.device)
        self._crcs = _host_values(memory)
        self._launch = _bind(memory, self._crcs)
        self._done = torch.cuda.Event()
        self._done.record(self._stream)  # which makes it

    def start(self) -> Pending:
        """Begin, on a stream of this thread's own: it does not wait for what the engine computes. The bytes are final."""
        self._launch(self._stream.cuda_stream)
        self._done.record(self._stream)
        return Pending(self._done, self._crcs)


def rehearse(device: torch.device) -> None:
    """Compute one piece's, as `Prepared` does."""
    pending = Prepared(_nothing(device)).start()
    pending()


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


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


_streams = threading.local()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream | None = getattr(_streams, "stream", None)
    if stream is None or stream.device != device:
        stream = _streams.stream = torch.cuda.Stream(device, priority=-1)
    return stream
