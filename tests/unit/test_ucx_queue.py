"""UCX's queue in shared memory, as bytes."""

from __future__ import annotations

import socket
import struct

import pytest

from kvtransfer.transports.ucx_queue import QUEUE_BYTES, SLOTS, is_queue, shared_segments, unmarked_slot

WAKE = 1 << 63


def queue(taken: int, read: int, *, unmarked: tuple[int, ...] = (), pid: int = 42, family: int = socket.AF_UNIX) -> bytes:
    """One whose slots below `taken` are marked, but for those."""
    made = bytearray(QUEUE_BYTES)
    struct.pack_into("<QIH114xQi", made, 0, taken, 8, family, read, pid)
    for number in range(-SLOTS, taken & ~WAKE):
        if number not in unmarked:
            made[192 + number % SLOTS * 128] = number // SLOTS & 1
    return bytes(made)


@pytest.mark.parametrize("taken", [0, 1, 200, SLOTS, SLOTS + 1, 5 * SLOTS - 1, 5 * SLOTS])
@pytest.mark.parametrize("wake", [0, WAKE])
def test_in_order_whatever_was_read(taken: int, wake: int) -> None:
    for read in {max(0, taken - SLOTS), max(0, taken - 1), taken}:
        assert unmarked_slot(queue(taken | wake, read)) is None


@pytest.mark.parametrize("number", [0, 103, SLOTS - 1, SLOTS, 3 * SLOTS + 17])
@pytest.mark.parametrize("behind", [0, 1, 11])
def test_the_first_slot_that_nobody_marked_is_found(number: int, behind: int) -> None:
    taken = number + 1 + behind
    assert unmarked_slot(queue(taken, max(0, number - 48), unmarked=(number, number + 2))) == number


def test_what_is_no_queue_of_this_process_is_not_watched() -> None:
    assert is_queue(queue(7, 0), 42)
    assert is_queue(queue(7 | WAKE, 7), 42)
    assert not is_queue(queue(7, 0), 43)
    assert not is_queue(queue(7, 0, family=0), 42)
    assert not is_queue(queue(7, 8), 42)
    assert not is_queue(queue(2 * SLOTS, 0), 42)
    assert not is_queue(b"", 42)
    assert unmarked_slot(b"") is None


def test_segments_of_ucxs_kinds_that_are_large_enough() -> None:
    maps = """\
7f0000000000-7f0000009000 rw-s 00000000 00:01 98305                      /SYSV00000000 (deleted)
7f0000010000-7f0000011000 rw-s 00000000 00:01 98306                      /SYSV00000000 (deleted)
7f0000020000-7f0000029000 rw-s 00000000 00:1b 7                          /dev/shm/ucx_shm_posix_1a2b
7f0000030000-7f0000039000 rw-s 00000000 00:1b 8                          /dev/shm/something_else
7f0000040000-7f0000049000 rw-p 00000000 00:00 0
"""
    assert shared_segments(maps) == {0x7F0000000000, 0x7F0000020000}
    assert shared_segments("") == set()
