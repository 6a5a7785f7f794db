"""The queue in shared memory through which processes of a host reach a UCX worker, looked at from outside UCX.

Whoever sends takes the next slot, fills it and marks it. One that is killed in between leaves a slot that nobody will ever mark,
and UCX reads in order: whatever any process of this host sends afterwards lies behind it. UCX reports nothing, and refuses to
sleep. One in a few hundred peers that are killed while they connect leaves that, since the first message attaches a segment
between those two steps. Nothing of UCX's interface mends it: it is noticed here, the process is replaced (docs/decisions/0032).

This only reads, by the layout that UCX 1.21 gives the queue by default. Where it finds no such queue, nothing is watched.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections import Counter
from pathlib import Path

logger = logging.getLogger(__name__)

QUEUE_UCX_VERSION = (1, 21)
SLOTS = 256
LOOK_EVERY_S = 0.5
STUCK_AFTER_S = 5.0
"""A slot unmarked for so long has lost its writer, or one that stands still: the others wait for it either way."""
_FIELDS = struct.Struct("<QIH114xQi")
"""Next slot to take and whether a sleeper is to be woken, length and family of the address that wakes; slots read, owner."""
_WAKE = 1 << 63
_SLOTS_AT, _SLOT_BYTES = 192, 128
QUEUE_BYTES = _SLOTS_AT + SLOTS * _SLOT_BYTES
_MARK = 1
_NAMES = ("/SYSV", "ucx_shm_posix")


def unmarked_slot(queue: bytes) -> int | None:
    """Number of the first slot that is taken and not marked, counted since the queue was made. Pure. The mark's value turns with
    each round; UCX says what was read only now and then, and slots that were read keep their mark."""
    if len(queue) < QUEUE_BYTES:
        return None
    taken, _, _, read, _ = _FIELDS.unpack_from(queue)
    marks = queue[_SLOTS_AT::_SLOT_BYTES]
    for number in range(read, min(taken & ~_WAKE, read + SLOTS)):
        if marks[number % SLOTS] & _MARK != number // SLOTS & _MARK:
            return number
    return None


def is_queue(queue: bytes, pid: int) -> bool:
    """Whether these bytes are a queue that process `pid` reads. Pure."""
    if len(queue) < QUEUE_BYTES:
        return False
    taken, _, family, read, owner = _FIELDS.unpack_from(queue)
    return owner == pid and family == socket.AF_UNIX and 0 <= (taken & ~_WAKE) - read <= SLOTS


def shared_segments(maps: str) -> set[int]:
    """Addresses of the segments in `/proc/PID/maps` that are as large as a queue and of UCX's kinds. Pure."""
    found = set()
    for line in maps.splitlines():
        if any(name in line for name in _NAMES):
            begin, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
            if end - begin >= QUEUE_BYTES:
                found.add(begin)
    return found


class QueueWatch:
    """Of one UCX worker, on its thread. `counters`: queue_stuck, how often its queue was found to be so."""

    def __init__(self, counters: Counter[str], ucx_version: tuple[int, ...]) -> None:
        self._counters = counters
        self._known = ucx_version[:2] == QUEUE_UCX_VERSION
        self._others: set[int] = set()
        self._queues: list[int] = []
        self._memory: int | None = None
        self._slot: tuple[int, int] | None = None
        self._since = 0.0
        self._looked_at = 0.0
        self._said = False
        self.suspect = False
        """A slot has been unmarked for more than a moment: UCX may refuse to sleep over it."""
        self.condition = "not watched"
        """In words, for whoever waits in vain."""

    def before_opening(self) -> None:
        """Whatever is there now belongs to others."""
        self._others = self._segments()

    def opened(self) -> None:
        """Find the queues of the worker that was made since `before_opening`."""
        if not self._known:
            return
        try:
            self._memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            logger.warning("ucx: its queue in shared memory is not watched: %s", exc)
            return
        self._queues = [at for at in sorted(self._segments() - self._others) if is_queue(self._read(at), os.getpid())]
        if self._queues:
            self.condition = "in order"

    @property
    def watched(self) -> bool:
        """There is a queue, and its layout is known."""
        return bool(self._queues)

    def look(self, now: float, *, at_once: bool = False) -> None:
        """Now and then, or when a process has just died."""
        if not self._queues or (now - self._looked_at < LOOK_EVERY_S and not at_once):
            return
        self._looked_at = now
        slots = ((at, unmarked_slot(self._read(at))) for at in self._queues)
        slot = next(((at, number) for at, number in slots if number is not None), None)
        if slot is None or slot != self._slot:
            self._slot, self._since, self.suspect, self.condition = slot, now, False, "in order"
            return
        stood_s = now - self._since
        self.suspect = stood_s >= LOOK_EVERY_S
        self.condition = f"slot {slot[1]} half written for {stood_s:.1f} s"
        if stood_s >= STUCK_AFTER_S and not self._said:
            self._said = True
            self._counters["queue_stuck"] += 1
            logger.error(
                "ucx: a process of this host died while it wrote to the queue here, %s: nothing of this host comes in any more",
                self.condition,
            )

    def close(self) -> None:
        """Idempotent."""
        memory, self._memory, self._queues = self._memory, None, []
        if memory is not None:
            os.close(memory)

    def _segments(self) -> set[int]:
        return shared_segments(Path("/proc/self/maps").read_text()) if self._known else set()

    def _read(self, address: int) -> bytes:
        assert self._memory is not None
        try:
            return os.pread(self._memory, QUEUE_BYTES, address)
        except OSError:  # no longer mapped
            return b""
