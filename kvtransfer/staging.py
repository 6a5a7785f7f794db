"""Contiguous slots in one staging area: first fit, page granular, coalescing. Arithmetic only; the bytes live elsewhere.

A slot's bytes are `used` by a live transfer, or `quarantined` (the transfer is over, but an engine copy or a transport
request may still touch them: rule 13), or free. Every allocation has a generation of its own, rising, so that a message about
an earlier owner of the same bytes is told apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PAGE_BYTES = 4096

State = Literal["used", "quarantined"]


class StagingError(RuntimeError):
    """A slot was freed twice, or was never this staging's: a fault of ours."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One allocation. `num_bytes` is what was asked for; `span_bytes` what it takes, in whole pages."""

    offset: int
    num_bytes: int
    span_bytes: int
    generation: int


class Staging:
    """Who owns which bytes of `capacity_bytes`. Not thread-safe: the owner brings a lock."""

    def __init__(self, capacity_bytes: int, page_bytes: int = PAGE_BYTES, mark: Callable[[int, int], None] | None = None) -> None:
        """`mark(page, generation)` says for others to see which slot begins at a page, 0: none. It is called before a slot is
        given out, and before its bytes can be anybody else's."""
        if capacity_bytes < page_bytes:
            raise ValueError(f"staging of {capacity_bytes} bytes holds no page of {page_bytes}")
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes // page_bytes * page_bytes
        self.frees = 0
        """Rises whenever bytes become free: who waits for room tries again when it has changed."""
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._slots: dict[int, tuple[Slot, State]] = {}
        self._mark = mark
        self._generation = 0
        self._bytes: dict[State, int] = {"used": 0, "quarantined": 0}

    @property
    def used_bytes(self) -> int:
        return self._bytes["used"]

    @property
    def quarantined_bytes(self) -> int:
        return self._bytes["quarantined"]

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.quarantined_bytes

    @property
    def idle(self) -> bool:
        """Nothing is used or quarantined."""
        return not self._slots

    def fits(self, num_bytes: int) -> bool:
        """Whether an empty staging could hold it."""
        return 0 < num_bytes <= self.capacity_bytes

    def allocate(self, num_bytes: int) -> Slot | None:
        """A slot of at least `num_bytes`, or None when no free range is long enough now."""
        if num_bytes <= 0:
            raise ValueError(f"a slot of {num_bytes} bytes")
        span = -(-num_bytes // self.page_bytes) * self.page_bytes
        for index, (offset, length) in enumerate(self._free):
            if length < span:
                continue
            if length == span:
                del self._free[index]
            else:
                self._free[index] = (offset + span, length - span)
            self._generation += 1
            slot = Slot(offset, num_bytes, span, self._generation)
            self._slots[offset] = (slot, "used")
            self._say(slot, slot.generation)
            self._bytes["used"] += span
            return slot
        return None

    def quarantine(self, slot: Slot) -> None:
        """Its transfer is over, its bytes may still be touched. Idempotent."""
        state = self._state(slot)
        self._bytes[state] -= slot.span_bytes
        self._bytes["quarantined"] += slot.span_bytes
        self._slots[slot.offset] = (slot, "quarantined")

    def free(self, slot: Slot) -> None:
        """Nobody can touch its bytes any more."""
        self._bytes[self._state(slot)] -= slot.span_bytes
        del self._slots[slot.offset]
        self._say(slot, 0)
        self.frees += 1
        offset, length = slot.offset, slot.span_bytes
        index = bisect.bisect(self._free, (offset, length))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, length = self._free[index][0], self._free[index][1] + length
            self._free[index] = (offset, length)
        else:
            self._free.insert(index, (offset, length))

    def _say(self, slot: Slot, generation: int) -> None:
        if self._mark is not None:
            self._mark(slot.offset // self.page_bytes, generation)

    def _state(self, slot: Slot) -> State:
        held = self._slots.get(slot.offset)
        if held is None or held[0].generation != slot.generation:
            raise StagingError(f"{slot} is not allocated")
        return held[1]

    def check(self) -> None:
        """Raises `StagingError` unless free, used and quarantined ranges tile the area and the sums agree."""
        ranges = sorted([*self._free, *((slot.offset, slot.span_bytes) for slot, _ in self._slots.values())])
        end = 0
        for offset, length in ranges:
            if offset != end or length <= 0:
                raise StagingError(f"range at {offset} of {length} bytes does not follow {end}")
            end = offset + length
        if end != self.capacity_bytes:
            raise StagingError(f"ranges end at {end} of {self.capacity_bytes}")
        for (offset, length), (following, _) in zip(self._free, self._free[1:], strict=False):
            if offset + length == following:
                raise StagingError(f"free ranges at {offset} and {following} are not merged")


class SlotHold:
    """One slot with the reasons why its bytes may still be touched ("pins"). It is freed when its transfer has ended and no
    pin is left; ended with pins it is quarantined.

    Pins are counted: two gathers in flight are two pins.
    """

    def __init__(self, staging: Staging, slot: Slot) -> None:
        self.slot = slot
        self._staging = staging
        self._pins: dict[str, int] = {}
        self._ended = False
        self._freed = False

    @property
    def freed(self) -> bool:
        return self._freed

    @property
    def ended(self) -> bool:
        return self._ended

    def pinned(self, reason: str) -> bool:
        return self._pins.get(reason, 0) > 0

    def pin(self, reason: str) -> None:
        """Raises `StagingError` when the slot is already freed: nobody may touch it then."""
        if self._freed:
            raise StagingError(f"pin {reason} on a freed slot {self.slot}")
        self._pins[reason] = self._pins.get(reason, 0) + 1

    def unpin(self, reason: str) -> None:
        """One pin less. Raises `StagingError` when there is none of that reason."""
        count = self._pins.get(reason, 0)
        if count == 0:
            raise StagingError(f"no pin {reason} on {self.slot}")
        if count == 1:
            del self._pins[reason]
        else:
            self._pins[reason] = count - 1
        self._settle()

    def end(self) -> None:
        """The transfer is over. Idempotent."""
        self._ended = True
        self._settle()

    def _settle(self) -> None:
        if not self._ended or self._freed:
            return
        if self._pins:
            self._staging.quarantine(self.slot)
        else:
            self._freed = True
            self._staging.free(self.slot)
