"""CRC32C of a message as the CRC32C of its pieces' CRC32Cs, so that a GPU can compute thousands of pieces at once.

The message is cut into pieces of `PIECE_BYTES` from its begin; the last may be shorter. Each piece has its ordinary CRC32C;
the message's checksum is the CRC32C of those values as little-endian 32-bit words. Any change inside one piece is as surely
seen as with one CRC32C over that piece.

A CRC is linear: without its initial value and final complement ("raw"), the CRC of words w[0..n) is the exclusive-or of
A^(n-i) w[i], where A is what 32 zero bits do to the register: multiplication by x^32 modulo CRC32C's polynomial P. So `LANES`
lanes can each take every `LANES`-th word, and a last map of each lane puts them together.

Within a lane nearly no bit has to be moved. P(x)^(2^k) = P(x^(2^k)) over GF(2), so P is zero at y = x^(32 * LANES) as well, where
`LANES` is a power of two: a lane divides its words, as the coefficients of a polynomial in y, by P(y). That takes an
exclusive-or of whole words for each of P's terms, and leaves 32 words; only those are folded with the map A^LANES.

Here are those maps, as the 32 images of the single bits, and the definition on host memory. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np

PIECE_BYTES = 8192
ALGORITHM = "crc32c-8k"
"""How a `Checksum` names it."""

WORD_BYTES = 4
LANES = 4
"""A power of two; a lane's words of a piece are a multiple of `STATE_WORDS`."""
STATE_WORDS = 32
TERMS = (0, 6, 8, 9, 10, 11, 13, 14, 18, 19, 20, 22, 23, 25, 26, 27, 28)
"""Exponents of P's terms below x^32."""
_POLYNOMIAL = np.uint32(0x82F63B78)
"""Castagnoli's, reflected: bit 0 is the highest power."""


def piece_count(num_bytes: int) -> int:
    """Pieces of a message."""
    return -(-num_bytes // PIECE_BYTES)


def piece_crcs(message: np.ndarray) -> np.ndarray:
    """CRC32C of each piece of host memory (one-dimensional uint8), as uint32."""
    starts = range(0, len(message), PIECE_BYTES)
    return np.fromiter((google_crc32c.value(message[start : start + PIECE_BYTES]) for start in starts), np.uint32, len(starts))


def combine(crcs: np.ndarray) -> int:
    """The message's checksum from all its pieces' CRC32Cs (32-bit integers, signed or not), in order."""
    return int(google_crc32c.value(np.ascontiguousarray(crcs).view(np.uint32).astype("<u4", copy=False).view(np.uint8)))


def covering(
    parts: Sequence[tuple[int, int, Any]], first_block: int, end_block: int, block_bytes: int, piece_bytes: int = PIECE_BYTES
) -> np.ndarray | None:
    """The pieces' CRC32Cs of blocks `first_block <= b < end_block` out of `parts` (first block, end block, values), which are in
    order and do not overlap. None: some are not there, are of other pieces, or pieces do not end with blocks."""
    if block_bytes % piece_bytes:
        return None
    per_block = block_bytes // piece_bytes
    found = []
    place = first_block
    for first, end, crcs in parts:
        if first <= place < end and place < end_block and len(crcs) == (end - first) * per_block:
            until = min(end, end_block)
            found.append(np.asarray(crcs)[(place - first) * per_block : (until - first) * per_block])
            place = until
    return np.concatenate(found) if found and place == end_block else None


def zeros_crc(num_bytes: int) -> int:
    """CRC32C of zero bytes: what distinguishes a CRC32C from the raw CRC of any message of that length."""
    return int(google_crc32c.value(bytes(num_bytes)))


def advance_columns(num_words: int) -> np.ndarray:
    """A^num_words as 32 columns: `columns[b]` is the image of bit b. uint32."""
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    square = _advance_word(columns)
    # Square and multiply: the map's powers commute.
    while num_words:
        if num_words & 1:
            columns = apply_columns(square, columns)
        square = apply_columns(square, square)
        num_words >>= 1
    return columns


@functools.cache
def lane_columns() -> np.ndarray:
    """`[32, LANES]`: column b of A^(LANES - lane), which puts a lane's last word at its place before the piece's end."""
    return np.stack([advance_columns(LANES - lane) for lane in range(LANES)], axis=1)


def apply_columns(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The map given by `columns` `[32, ...]` on each of `values` (uint32)."""
    result = np.zeros_like(values)
    for bit in range(32):
        result ^= ((values >> np.uint32(bit)) & np.uint32(1)) * columns[bit]
    return result


def raw_piece_crcs(message: np.ndarray) -> np.ndarray:
    """The lane-wise computation that the GPU kernel does, in NumPy: raw CRCs, uint32. For whole words only.

    Raises:
        ValueError: the message is not made of whole 32-bit words.
    """
    if len(message) % WORD_BYTES:
        raise ValueError(f"{len(message)} bytes are not whole 32-bit words")
    count = piece_count(len(message))
    padded = np.zeros((count, PIECE_BYTES), np.uint8)
    flat = padded.reshape(-1)
    whole = (count - 1) * PIECE_BYTES
    flat[:whole] = message[:whole]
    # Leading zeros do not change a raw CRC, so a short last piece is set to the right.
    flat[len(flat) - (len(message) - whole) :] = message[whole:]
    words = padded.view("<u4").astype(np.uint32).reshape(count, -1, LANES)
    state = np.zeros((STATE_WORDS, count, LANES), np.uint32)
    for row in range(words.shape[1]):
        carry = state[-1].copy()
        state[1:] = state[:-1].copy()
        state[0] = words[:, row]
        for term in TERMS:
            state[term] ^= carry
    step = advance_columns(LANES)
    folded = np.zeros((count, LANES), np.uint32)
    for word in state[::-1]:
        folded = apply_columns(step, folded) ^ word
    placed: np.ndarray = np.bitwise_xor.reduce(apply_columns(lane_columns(), folded), axis=1)
    return placed


def _advance_word(values: np.ndarray) -> np.ndarray:
    for _ in range(32):
        values = (values >> np.uint32(1)) ^ ((values & np.uint32(1)) * _POLYNOMIAL)
    return values


def checksum(memory: Any) -> int:
    """`ALGORITHM` over host memory."""
    return combine(piece_crcs(memory))
