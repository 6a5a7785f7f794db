"""What only a real scheduler can show of other systems' failures (docs/failure-cases.md): aborts at every chunk and after a
preemption, prompts around the chunk, and that vLLM is never told of anything asynchronous."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import handover
from engine.protocol import KvReceive, KvSend
from engine.sampling import SamplingParams
from protos.ids import TransferId
from tests.engine.test_parity import colocated, prompt_of
from tests.support.stepped_engine import BLOCK_TOKENS, BUDGET_TOKENS, MAX_MODEL_LEN, USABLE_BLOCKS, SteppedEngine

pytestmark = pytest.mark.vllm

FEW = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def begin_prefill(engine: SteppedEngine, prompt: list[int]) -> tuple[str, TransferId]:
    """A reserved prefill in the engine's queue, and its transfer."""
    grant = engine.grant()
    engine.reserve(grant, prompt)
    transfer_id = TransferId(grant.transfer_id)
    return engine.submit(prompt, handover.prefill_params(FEW), KvSend(transfer_id)), transfer_id


def give_up(engine: SteppedEngine, request: str, transfer_id: TransferId) -> None:
    engine.abort(request)
    engine.actor.call(engine.control.release(transfer_id, "client_left"))


def preempt(engine: SteppedEngine) -> None:
    """What a full cache does, without having to fill it."""
    victim = engine.scheduler.running.pop()
    engine.scheduler._preempt_request(victim, 0.0)


def test_a_cancelled_prefill_has_no_effect_on_the_next_requests(engine: SteppedEngine) -> None:
    """The same prompt again, and another one, in the cancelled one's blocks and slot."""
    same, other = prompt_of(600, seed=51), prompt_of(500, seed=52)
    expected = {id(prompt): colocated(engine, prompt, FEW) for prompt in (same, other)}
    for prompt in (same, other):
        engine.forget_prefixes()
        request, transfer_id = begin_prefill(engine, same)
        engine.step()
        engine.step()
        assert engine.runs[request].finish_reason is None
        give_up(engine, request, transfer_id)
        split = engine.split(prompt, FEW, before_decode=engine.forget_prefixes)
        assert split.result.token_ids == expected[id(prompt)]
        engine.check_idle()


def test_an_abort_after_any_chunk_accounts_for_every_block(engine: SteppedEngine) -> None:
    """A prompt of five chunks, aborted after none, one, ... all but one of them, while its KV travels."""
    prompt = prompt_of(5 * BUDGET_TOKENS - 7, seed=53)
    pool = engine.scheduler.kv_cache_manager.block_pool
    for chunks in range(5):
        engine.forget_prefixes()
        request, transfer_id = begin_prefill(engine, prompt)
        for _ in range(chunks):
            engine.step()
        assert USABLE_BLOCKS - pool.get_num_free_blocks() == chunks * BUDGET_TOKENS // BLOCK_TOKENS
        give_up(engine, request, transfer_id)
        engine.settle()
        assert pool.get_num_free_blocks() == USABLE_BLOCKS
        engine.check_idle()


def test_a_preempted_request_that_is_aborted_keeps_nothing(engine: SteppedEngine) -> None:
    """Prefill holds staged blocks while it is preempted, decode has given its slot back by then; cycle after cycle both are
    left with nothing. Neither keeps a host copy of its blocks."""
    prompt = prompt_of(3 * BLOCK_TOKENS - 5, seed=54)
    for _ in range(3):
        engine.forget_prefixes()
        request, transfer_id = begin_prefill(engine, prompt)
        engine.step()
        preempt(engine)
        assert engine.node.staged_blocks(transfer_id) == BUDGET_TOKENS // BLOCK_TOKENS
        give_up(engine, request, transfer_id)
        engine.settle()
        engine.check_idle()

        prefill, grant = engine.stage(prompt, FEW)
        decode = engine.submit([*prompt, *prefill.token_ids], FEW, KvReceive(TransferId(grant.transfer_id), len(prompt)))
        engine.step()
        assert engine.runs[decode].token_ids
        preempt(engine)
        engine.abort(decode)
        engine.settle()
        engine.check_idle()


@pytest.mark.parametrize("length", [BUDGET_TOKENS - 1, BUDGET_TOKENS + 1, 2 * BUDGET_TOKENS + 1, MAX_MODEL_LEN - 4])
def test_prompts_around_the_chunk_and_of_the_longest_kind(engine: SteppedEngine, length: int) -> None:
    prompt = prompt_of(length, seed=55)
    expected = colocated(engine, prompt, FEW)
    split = engine.split(prompt, FEW, before_decode=engine.forget_prefixes)
    assert split.result.token_ids == expected
    assert split.decode is not None
    assert split.decode.cached_tokens == length, "what was moved was used"


def test_vllm_is_told_of_nothing_asynchronous(engine: SteppedEngine) -> None:
    """Its engine core asserts on completions that it does not expect, and frees blocks by them: none is ever reported."""
    facade = engine.scheduler.connector
    base = type(facade).__mro__[1]
    for report in ("get_finished", "get_finished_count", "update_connector_output"):
        assert getattr(type(facade), report) is getattr(base, report), report
    assert not facade.requires_kv_delivery
    answers: dict[str, list[object]] = {
        "request_finished": [],
        "request_finished_all_groups": [],
        "get_num_new_matched_tokens": [],
    }

    def heard(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def method(*args: object) -> object:
            answers[name].append(original(*args))
            return answers[name][-1]

        return method

    for name in answers:
        setattr(facade, name, heard(name, getattr(facade, name)))
    try:
        prompt = prompt_of(300, seed=56)
        split = engine.split(prompt, FEW, before_decode=engine.forget_prefixes)
    finally:
        for name in answers:
            delattr(facade, name)
    assert split.result.finish_reason == "length"
    finished = answers["request_finished"] + answers["request_finished_all_groups"]
    assert finished == [(False, None)] * 2, "blocks are free when the request ends"
    matched = answers["get_num_new_matched_tokens"]
    assert matched == [(0, False), (300, False)], "a load is done in the step that admits it"
