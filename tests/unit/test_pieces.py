"""CRC32C by pieces: the definition, the lane-wise arithmetic that the GPU kernel does, and what a gather computed ahead."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest

from kvtransfer import pieces
from kvtransfer.checksum import algorithm_for, checksum

P = pieces.PIECE_BYTES


def message(num_bytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def test_the_crc_of_every_piece_is_the_published_crc32c() -> None:
    check = np.frombuffer(b"123456789", np.uint8)
    assert pieces.piece_crcs(check).tolist() == [0xE3069283]
    assert pieces.checksum(check) == google_crc32c.value((0xE3069283).to_bytes(4, "little"))


@pytest.mark.parametrize("num_bytes", [4, 64, P - 4, P, P + 4, 3 * P, 5 * P + 1236])
def test_lanes_give_the_same_as_crc32c(num_bytes: int) -> None:
    data = message(num_bytes)
    zeros = np.full(pieces.piece_count(num_bytes), pieces.zeros_crc(P), np.uint32)
    zeros[-1] = pieces.zeros_crc(num_bytes - (len(zeros) - 1) * P)
    assert np.array_equal(pieces.raw_piece_crcs(data) ^ zeros, pieces.piece_crcs(data))


def test_lanes_need_whole_words() -> None:
    with pytest.raises(ValueError, match="whole 32-bit words"):
        pieces.raw_piece_crcs(message(6))


def test_advancing_adds_up() -> None:
    values = np.array([1, 0x80000000, 0xDEADBEEF], np.uint32)
    one = pieces.advance_columns(1)
    three_times = values
    for _ in range(3):
        three_times = pieces.apply_columns(one, three_times)
    assert np.array_equal(pieces.apply_columns(pieces.advance_columns(3), values), three_times)
    assert np.array_equal(pieces.apply_columns(pieces.advance_columns(0), values), values)


@pytest.mark.parametrize("bit", [0, 7, 8 * (P - 1), 8 * (2 * P + 99) + 3])
def test_one_flipped_bit_changes_the_checksum(bit: int) -> None:
    data = message(3 * P)
    before = pieces.checksum(data)
    data[bit // 8] ^= 1 << (bit % 8)
    assert pieces.checksum(data) != before


def test_swapped_pieces_change_the_checksum() -> None:
    data = message(2 * P)
    assert pieces.checksum(data) != pieces.checksum(np.concatenate([data[P:], data[:P]]))


def test_values_computed_by_gathers_make_any_chunk() -> None:
    blocks = 6
    data = message(blocks * 2 * P)
    parts = [(first, end, pieces.piece_crcs(data[first * 2 * P : end * 2 * P])) for first, end in ((0, 1), (1, 4), (4, 6))]
    for first in range(blocks):
        for end in range(first + 1, blocks + 1):
            found = pieces.covering(parts, first, end, 2 * P)
            assert found is not None
            assert pieces.combine(found.view(np.int32)) == pieces.checksum(data[first * 2 * P : end * 2 * P])


def test_values_that_are_missing_are_not_made_up() -> None:
    crcs = pieces.piece_crcs(message(2 * P))
    assert pieces.covering([(0, 1, crcs)], 0, 2, 2 * P) is None, "the second block was not computed"
    assert pieces.covering([(1, 2, crcs)], 0, 2, 2 * P) is None, "the first block was not computed"
    assert pieces.covering([(0, 2, crcs)], 0, 2, 2 * P) is None, "these are of larger pieces"
    whole = pieces.covering([(0, 2, crcs)], 0, 2, 3 * P + 1, piece_bytes=3 * P + 1)
    assert whole is not None
    assert whole.tolist() == crcs.tolist(), "one for each block"
    assert pieces.covering([(0, 1, crcs[:1]), (1, 2, crcs[1:])], 0, 2, P // 2) is None, "pieces do not end with blocks"


def test_the_host_checks_either_kind() -> None:
    data = message(2 * P)
    assert checksum("crc32c", data).value == google_crc32c.value(data.tobytes())
    assert checksum(pieces.ALGORITHM, data).value == pieces.checksum(data)
    assert checksum("off", data).value == 0
    assert algorithm_for("crc32c", data) == "crc32c"
    assert algorithm_for("off", data) == "off"
    with pytest.raises(ValueError, match="md5"):
        checksum("md5", data)
