"""The prefix index and the work of the last minute, against plain models."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.routing.prefix_index import PrefixIndex
from coordinator.routing.recent import SLICES, RecentWork
from protos.ids import Incarnation

WORKERS = [Incarnation(f"w{i}") for i in range(4)]
MOST = 24
PROMPTS = st.lists(st.integers(0, 2), max_size=8)
"""Few tokens and short prompts, so that beginnings are shared; a block's hash stands for the whole beginning."""


def blocks_of(tokens: list[int]) -> tuple[int, ...]:
    return tuple(hash(tuple(tokens[: end + 1])) for end in range(len(tokens)))


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(block_tokens=1, max_blocks=MOST)
        self.sent: dict[Incarnation, set[int]] = {}
        self.computed: dict[Incarnation, set[int]] = {}
        self.join(set(WORKERS[:2]), 10)

    @rule(who=st.sets(st.sampled_from(WORKERS)), capacity=st.integers(1, 12))
    def join(self, who: set[Incarnation], capacity: int) -> None:
        self.index.members((w, capacity) for w in sorted(who))
        self.sent = {w: self.sent.get(w, set()) for w in who}
        self.computed = {w: self.computed.get(w, set()) for w in who}

    @rule(worker=st.sampled_from(WORKERS), tokens=PROMPTS)
    def send(self, worker: Incarnation, tokens: list[int]) -> None:
        blocks = blocks_of(tokens)
        self.index.sent(worker, blocks)
        if worker in self.sent:
            self.sent[worker] |= set(blocks)
            levels = self.index.levels(blocks, 1 << self.index.seat(worker))
            assert bool(levels) == bool(blocks), "what came last is there, its beginning at least"

    @rule(worker=st.sampled_from(WORKERS), tokens=PROMPTS)
    def lose(self, worker: Incarnation, tokens: list[int]) -> None:
        blocks = blocks_of(tokens)
        before = self.index.held(worker, blocks)
        self.index.not_computed(worker, blocks)
        assert self.index.held(worker, blocks) == before, "what another prompt has computed stays"
        if worker in self.sent:
            self.sent[worker] -= set(blocks) - self.computed[worker]

    @rule(worker=st.sampled_from(WORKERS), tokens=PROMPTS, expected=st.integers(0, 20), cached=st.integers(0, 20))
    def compute(self, worker: Incarnation, tokens: list[int], expected: int, cached: int) -> None:
        blocks = blocks_of(tokens)
        self.index.computed(worker, blocks, expected_tokens=expected, cached_tokens=cached)
        if worker in self.computed:
            self.computed[worker] |= set(blocks) & self.sent[worker]

    @rule(worker=st.sampled_from(WORKERS))
    def reset(self, worker: Incarnation) -> None:
        self.index.forget_all(worker)
        if worker in self.sent:
            self.sent[worker].clear()
            self.computed[worker].clear()

    @rule(tokens=PROMPTS)
    def look(self, tokens: list[int]) -> None:
        blocks = blocks_of(tokens)
        everybody = sum(1 << self.index.seat(w) for w in self.sent)
        levels = self.index.levels(blocks, everybody)
        assert [level.blocks for level in levels] == sorted({level.blocks for level in levels})
        for worker, sent in self.sent.items():
            held = self.index.held(worker, blocks)
            assert set(blocks[:held]) <= self.computed[worker], "no hit is claimed above what was sent and computed"
            bit = 1 << self.index.seat(worker)
            coming = sum(level.blocks for level in levels if level.seats & bit)
            assert coming >= held
            assert set(blocks[:coming]) <= sent

    @invariant()
    def bounded(self) -> None:
        assert len(self.index) <= max(MOST, len(self.sent))
        seats = [self.index.seat(w) for w in self.sent]
        assert len(set(seats)) == len(seats)
        assert all(seat < len(WORKERS) for seat in seats), "seats of those that left are used again"


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(prompts=st.lists(PROMPTS, max_size=40), capacity=st.integers(1, 10))
def test_eviction_is_the_least_recently_used_tail_first(prompts: list[list[int]], capacity: int) -> None:
    index = PrefixIndex(block_tokens=1, max_blocks=1000)
    index.members([(WORKERS[0], capacity)])
    model: OrderedDict[int, None] = OrderedDict()
    for tokens in prompts:
        blocks = blocks_of(tokens)
        kept = 0
        while kept < len(blocks) and blocks[kept] in model:
            kept += 1
        assert index.held(WORKERS[0], blocks) == kept
        index.sent(WORKERS[0], blocks)
        index.computed(WORKERS[0], blocks, expected_tokens=0, cached_tokens=0)
        for block in reversed(blocks[:capacity]):
            model[block] = None
            model.move_to_end(block)
        while len(model) > capacity:
            model.popitem(last=False)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0, 40), st.integers(0, 30), st.integers(0, 1000)), max_size=40),
    begin=st.floats(0, 1e6),
)
def test_recent_work_is_the_sum_of_what_is_still_in_the_window(steps: list[tuple[float, int, int]], begin: float) -> None:
    recent = RecentWork(60.0)
    given_at: list[tuple[int, int, int]] = []
    now_s = begin
    for wait_s, seat, tokens in steps:
        now_s += wait_s
        recent.add(seat, tokens, now_s)
        given_at.append((int(now_s), seat, tokens))
        sums, weighed = recent.of(np.arange(31), now_s)
        for each in range(31):
            left = [(t, max(0, SLICES - (int(now_s) - at))) for at, s, t in given_at if s == each]
            assert sums[each] == sum(t for t, slices in left if slices)
            assert weighed[each] == sum(t * slices for t, slices in left) / SLICES
    recent.clear(0)
    assert [of_it[0] for of_it in recent.of(np.array([0]), now_s)] == [0, 0]
