"""The simulated engine's model: blocks, cache, scheduling, preemption, tokens and KV bytes. No clock, no loop."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.config import SimulatedSettings
from engine.sampling import SamplingParams
from engine.sim_blocks import BlockPool
from engine.sim_model import Sequence, SequenceState, SimScheduler, StepPlan, Work, step_time_s
from engine.sim_tokens import History, Sampler, kv_block, prompt_block_digests, prompt_logprobs

BLOCK = 4


def sequence(name: str, tokens: list[int], *, use_cache: bool = True) -> Sequence:
    return Sequence(
        request_id=name,
        tokens=list(tokens),
        history=History(tokens, BLOCK),
        prompt_tokens=len(tokens),
        arrived_s=0.0,
        use_cache=use_cache,
    )


class Model:
    """A scheduler with a pool, stepped by hand; the n-th token of a sequence is n."""

    def __init__(self, blocks: int = 32, *, budget: int = 16, slots: int = 4, caching: bool = True) -> None:
        self.pool = BlockPool(blocks, caching=caching)
        self.scheduler = SimScheduler(self.pool, block_tokens=BLOCK, max_num_batched_tokens=budget, max_num_seqs=slots)
        self.external: dict[str, int] = {}

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(1.0, lambda s: self.external.get(s.request_id, 0))
        for work in self.scheduler.complete(plan):
            if work.samples:
                self.scheduler.append(work.sequence, len(work.sequence.tokens))
        return plan

    def add(self, name: str, length: int, first: int = 0, *, use_cache: bool = True) -> Sequence:
        new = sequence(name, [first, *range(1, length)], use_cache=use_cache)
        self.scheduler.add(new)
        return new


def shares(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {w.sequence.request_id: (w.context, w.tokens) for w in plan.work}


# -- blocks ---------------------------------------------------------------------------------------------------------------


def test_blocks_are_conserved_and_a_block_is_freed_once() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.allocate(2) is None
    assert (pool.held, pool.available) == (3, 1)
    pool.free(blocks)
    assert (pool.held, pool.available) == (0, 4)
    with pytest.raises(ValueError, match="not held"):
        pool.free(blocks)


def test_cached_blocks_are_matched_shared_and_evicted_oldest_first() -> None:
    pool = BlockPool(3, caching=True)
    blocks = pool.allocate(3)
    assert blocks is not None
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]))
    pool.free(blocks)
    assert pool.available == 3
    assert pool.match([bytes([0]), bytes([1]), b"other", bytes([2])]) == blocks[:2]
    pool.hold(blocks[:1])
    pool.hold(blocks[:1])
    pool.free(blocks[:1])
    assert pool.held == 1  # somebody else still holds it
    # The tail of the sequence goes first, its head last: a shorter prefix stays useful.
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match([bytes([0]), bytes([1])]) == blocks[:2]


def test_without_caching_nothing_is_ever_matched() -> None:
    pool = BlockPool(2, caching=False)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], b"h")
    assert pool.match([b"h"]) == []


def test_the_cache_is_reset_only_when_nothing_is_held() -> None:
    pool = BlockPool(2, caching=True)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], b"h")
    assert not pool.reset_cache()
    pool.free(blocks)
    assert pool.reset_cache()
    assert pool.match([b"h"]) == []
    assert pool.available == 2


# -- scheduling -----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_others_share_the_step() -> None:
    model = Model(budget=10)
    model.add("long", 25)
    model.add("short", 3, first=9)
    assert shares(model.step()) == {"long": (0, 10)}
    assert shares(model.step()) == {"long": (10, 10)}
    assert shares(model.step()) == {"long": (20, 5), "short": (0, 3)}
    assert shares(model.step()) == {"long": (25, 1), "short": (3, 1)}


def test_run_slots_are_bounded() -> None:
    model = Model(slots=2)
    for index in range(3):
        model.add(f"s{index}", 2, first=10 + index)
    model.step()
    assert (model.scheduler.running, model.scheduler.waiting) == (2, 1)


def test_a_cached_prefix_is_not_computed_again_but_the_last_token_always_is() -> None:
    model = Model()
    first = model.add("a", 8)
    model.step()
    model.scheduler.leave(first)
    second = model.add("b", 8)
    assert shares(model.step()) == {"b": (4, 4)}  # not all eight: there must be something to sample from
    assert second.cached_tokens == 4
    third = model.add("c", 11)
    assert shares(model.step())["c"] == (8, 3)
    private = model.add("d", 11, use_cache=False)
    assert shares(model.step())["d"] == (0, 11)
    for leaving in (second, third, private):
        model.scheduler.leave(leaving)
    assert model.pool.held == 0


def test_staged_tokens_count_as_computed_once() -> None:
    model = Model()
    model.external = {"a": 9}
    loaded = model.add("a", 10)
    plan = model.step()
    assert shares(plan) == {"a": (9, 1)}
    assert [(load.sequence, load.tokens) for load in plan.loads] == [(loaded, 9)]
    # A prompt without a forwarded token: its last token is computed here.
    model.external = {"b": 10}
    model.add("b", 10, first=77)
    plan = model.step()
    assert shares(plan)["b"] == (9, 1)
    assert plan.loads[0].tokens == 9


def test_a_longer_local_prefix_makes_the_load_unnecessary() -> None:
    model = Model()
    first = model.add("a", 13)
    model.step()
    model.scheduler.leave(first)
    model.external = {"b": 9}
    model.add("b", 13)
    plan = model.step()
    assert shares(plan) == {"b": (12, 1)}
    assert plan.loads == ()


def test_the_youngest_is_preempted_and_computed_again_without_its_staged_kv() -> None:
    model = Model(blocks=5, budget=64)
    model.external = {"young": 8}
    old, young = model.add("old", 8), model.add("young", 9, first=50)
    model.step()
    assert model.pool.available == 0
    preempted: list[Sequence] = []
    while not preempted:
        preempted = list(model.step().preempted)
    assert preempted == [young]
    assert young.state is SequenceState.WAITING
    assert old.state is SequenceState.RUNNING
    model.scheduler.leave(old)
    plan = model.step()
    assert plan.loads == ()
    assert shares(plan)["young"][0] % BLOCK == 0
    assert young.preemptions == 1


def test_leaving_during_a_step_drops_its_part() -> None:
    model = Model()
    gone, stays = model.add("gone", 5), model.add("stays", 5, first=9)
    plan = model.scheduler.plan(1.0, lambda s: 0)
    model.scheduler.leave(gone)
    assert [w.sequence for w in model.scheduler.complete(plan)] == [stays]
    model.scheduler.leave(gone)
    model.scheduler.leave(stays)
    assert (model.pool.held, model.scheduler.running, model.scheduler.waiting) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_any_traffic_ends_with_every_block_free(seed: int) -> None:
    rng = random.Random(seed)
    model = Model(blocks=rng.choice([10, 14, 40]), budget=rng.choice([1, 7, 64]), slots=rng.choice([1, 3, 8]))
    live: list[tuple[Sequence, int]] = []
    for number in range(40):
        length = rng.randint(1, 20)
        live.append((model.add(f"r{number}", length, first=rng.choice([0, number])), length + rng.randint(1, 16)))
        model.external[f"r{number}"] = rng.choice([0, length])
    steps = 0
    while live:
        plan = model.step()
        steps += 1
        assert steps < 5000, "somebody starves"
        assert sum(w.tokens for w in plan.work) <= 64
        assert model.scheduler.running <= 8
        for item in list(live):
            if len(item[0].tokens) >= item[1] or rng.random() < 0.01:
                model.scheduler.leave(item[0])
                live.remove(item)
    assert model.pool.held == 0
    assert model.pool.available == model.pool.num_blocks


def test_step_time_is_the_formula() -> None:
    settings = SimulatedSettings(step_base_s=1, prefill_token_s=0.1, decode_sequence_s=0.01, context_token_s=0.001)
    some = sequence("a", [1])
    work = (Work(some, 10, 0), Work(some, 1, 99), Work(some, 1, 199))
    assert step_time_s(settings, ()) == 1
    assert step_time_s(settings, work) == pytest.approx(1 + 1.0 + 0.02 + 0.31)


# -- tokens and bytes -----------------------------------------------------------------------------------------------------


def sampler(**params: object) -> Sampler:
    values = {"max_tokens": 10, "temperature": 0, **params}
    return Sampler(SamplingParams(**values), vocab_size=97, eos_token_id=2, model_seed=0, nonce="n")  # type: ignore[arg-type]


def test_a_history_is_the_same_however_it_grew() -> None:
    whole = History(list(range(11)), BLOCK)
    grown = History(list(range(3)), BLOCK)
    grown.extend(list(range(3, 9)))
    grown.extend([9])
    grown.extend([10])
    assert (whole.digest(), whole.block_hashes, len(whole)) == (grown.digest(), grown.block_hashes, len(grown))
    assert len(whole.block_hashes) == 2
    assert History([1, 0], BLOCK).digest() != History([0, 1], BLOCK).digest()


def test_the_token_depends_on_history_and_seed_alone() -> None:
    history = History([5, 6, 7], BLOCK)
    assert sampler().sample(history, 0) == sampler(seed=3).sample(history, 5)  # greedy has no seed
    hot = {sampler(temperature=1.0, seed=s).sample(history, 0)[0] for s in range(20)}
    assert len(hot) > 10
    assert sampler(temperature=1.0, seed=4).sample(history, 0) == sampler(temperature=1.0, seed=4).sample(history, 7)


def test_sampling_limits_hold() -> None:
    history = History([5, 6, 7], BLOCK)
    token = sampler().sample(history, 0)[0]
    assert sampler(stop_token_ids=(token,)).stops(token)
    assert sampler(stop_token_ids=(token,), min_tokens=1).sample(history, 0)[0] != token
    assert sampler(stop_token_ids=(token,), min_tokens=1).sample(history, 1)[0] == token
    assert sampler(logit_bias={token: -100.0}).sample(history, 0)[0] != token
    assert sampler(logit_bias={50: 100.0}).sample(history, 0)[0] == 50
    assert sampler(allowed_token_ids=(8, 9)).sample(history, 0)[0] in (8, 9)
    assert sampler().stops(2)
    assert not sampler(ignore_eos=True).stops(2)
    with pytest.raises(ValueError, match="no token"):
        sampler(allowed_token_ids=(8,), logit_bias={8: -100.0}).sample(history, 0)


def test_logprobs_name_the_token_first_and_alternatives_once() -> None:
    history = History([5, 6, 7], BLOCK)
    for wanted in (0, 1, 4):
        token, row = sampler(logprobs=wanted).sample(history, 0)
        assert row[0].token_id == token
        assert [e.rank for e in row] == list(range(1, max(1, wanted) + 1))
        assert len({e.token_id for e in row}) == len(row)
    rows = prompt_logprobs([5, 6, 7], 2, 97)
    assert [len(r) for r in rows] == [0, 3, 3]


def test_kv_bytes_name_prefix_rank_and_place() -> None:
    digests = prompt_block_digests(History(list(range(10)), BLOCK), 10, BLOCK)
    assert len(digests) == 3  # the last one is partial
    blocks = [kv_block(d, rank, 64) for d in digests for rank in (0, 1)]
    assert len({b.tobytes() for b in blocks}) == 6
    again = prompt_block_digests(History(list(range(10)), BLOCK), 10, BLOCK)
    assert np.array_equal(kv_block(again[2], 1, 64), blocks[5])
    other = prompt_block_digests(History([9, *range(1, 10)], BLOCK), 10, BLOCK)
    assert not set(other) & set(digests)
