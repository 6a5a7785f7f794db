"""Staging against a model that knows nothing of ranges: every byte has at most one owner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvtransfer.staging import Slot, SlotHold, Staging, StagingError

PAGE = 16


class Allocations(RuleBasedStateMachine):
    slots = Bundle("slots")

    @initialize(pages=st.integers(1, 24))
    def start(self, pages: int) -> None:
        self.staging = Staging(pages * PAGE, PAGE)
        self.owner: list[int | None] = [None] * pages
        self.quarantined: set[int] = set()
        self.last_generation = 0

    @rule(target=slots, num_bytes=st.integers(1, 10 * PAGE))
    def allocate(self, num_bytes: int) -> Slot | None:
        pages = -(-num_bytes // PAGE)
        slot = self.staging.allocate(num_bytes)
        fits = any(all(p is None for p in self.owner[i : i + pages]) for i in range(len(self.owner) - pages + 1))
        assert (slot is not None) == fits, "a slot is refused exactly when no free range is long enough"
        if slot is None:
            return None
        assert slot.generation > self.last_generation, "generations rise at every allocation"
        self.last_generation = slot.generation
        assert slot.num_bytes == num_bytes
        first = slot.offset // PAGE
        assert self.owner[first : first + pages] == [None] * pages, "somebody else's bytes"
        self.owner[first : first + pages] = [slot.generation] * pages
        return slot

    @rule(slot=consumes(slots))
    def free(self, slot: Slot | None) -> None:
        if slot is None:
            return
        self.staging.free(slot)
        self.owner = [None if owner == slot.generation else owner for owner in self.owner]
        self.quarantined.discard(slot.generation)
        with pytest.raises(StagingError):
            self.staging.free(slot)

    @rule(slot=slots)
    def quarantine(self, slot: Slot | None) -> None:
        if slot is not None and slot.generation in self.owner:
            self.staging.quarantine(slot)
            self.quarantined.add(slot.generation)

    @precondition(lambda self: hasattr(self, "staging"))
    @invariant()
    def sums_agree(self) -> None:
        self.staging.check()
        assert self.staging.quarantined_bytes == PAGE * sum(owner in self.quarantined for owner in self.owner)
        held = PAGE * sum(owner is not None for owner in self.owner)
        assert self.staging.used_bytes + self.staging.quarantined_bytes == held
        assert self.staging.free_bytes == len(self.owner) * PAGE - held
        assert self.staging.idle == (held == 0)


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.sampled_from(["pin a", "pin b", "unpin a", "unpin b", "end"]), max_size=30))
def test_a_hold_is_freed_exactly_when_it_ended_and_nothing_pins_it(steps: list[str]) -> None:
    staging = Staging(4 * PAGE, PAGE)
    slot = staging.allocate(PAGE)
    assert slot is not None
    hold = SlotHold(staging, slot)
    pins = {"a": 0, "b": 0}
    ended = freed = False
    for step in steps:
        verb, _, reason = step.partition(" ")
        illegal = (verb == "pin" and freed) or (verb == "unpin" and pins[reason] == 0)
        if illegal:
            with pytest.raises(StagingError):
                getattr(hold, verb)(reason)
            continue
        if verb == "end":
            hold.end()
            ended = True
        else:
            getattr(hold, verb)(reason)
            pins[reason] += 1 if verb == "pin" else -1
        freed = freed or (ended and not any(pins.values()))
        assert hold.freed == freed
        assert staging.idle == freed
        assert (staging.quarantined_bytes > 0) == (ended and not freed)
        staging.check()


def test_a_stale_slot_cannot_free_its_successor() -> None:
    staging = Staging(PAGE, PAGE)
    first = staging.allocate(1)
    assert first is not None
    staging.free(first)
    second = staging.allocate(1)
    assert second is not None
    assert second.offset == first.offset
    for touch in (staging.free, staging.quarantine):
        with pytest.raises(StagingError):
            touch(first)
    staging.free(second)
    assert staging.idle


def test_sizes_that_can_never_fit() -> None:
    staging = Staging(10 * PAGE + 3, PAGE)
    assert staging.capacity_bytes == 10 * PAGE
    assert staging.fits(10 * PAGE)
    assert not staging.fits(10 * PAGE + 1)
    assert not staging.fits(0)
    with pytest.raises(ValueError, match="0 bytes"):
        staging.allocate(0)
    with pytest.raises(ValueError, match="no page"):
        Staging(PAGE - 1, PAGE)
