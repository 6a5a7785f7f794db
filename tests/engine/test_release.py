"""Whatever ends a request, and at whatever stage, blocks, leases and staging come back. The fixture asserts it."""

from __future__ import annotations

import random

import pytest

from engine import handover
from engine.protocol import KvReceive, KvSend
from engine.sampling import SamplingParams
from protos.ids import TransferId, new_transfer_id
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.engine.test_parity import GREEDY, PROMPTS, colocated, prompt_of
from tests.support.stepped_engine import BLOCK_TOKENS, SteppedEngine

pytestmark = pytest.mark.vllm

LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def submit_prefill(engine: SteppedEngine, prompt: list[int]) -> tuple[str, pb.TransferGrant]:
    grant = engine.grant()
    engine.reserve(grant, prompt)
    return engine.submit(prompt, handover.prefill_params(LONG), KvSend(TransferId(grant.transfer_id))), grant


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("pulling", [False, True])
def test_prefill_aborted_before_and_between_chunks(engine: SteppedEngine, steps: int, pulling: bool) -> None:
    prompt = prompt_of(1400)
    request, grant = submit_prefill(engine, prompt)
    pull = engine.pull(grant, prompt) if pulling else None
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    engine.release(grant, "client_left")
    if pull is not None:
        assert pull.exception(10.0) is not None


def test_prefill_released_while_it_computes_runs_on_without_a_slot(engine: SteppedEngine) -> None:
    prompt = prompt_of(1000)
    request, grant = submit_prefill(engine, prompt)
    engine.step()
    engine.release(grant, "deadline")
    run = engine.finish(request)[0]
    assert run.finish_reason == "length"
    assert [p.first_block for p in engine.probed] == [0], "no block is gathered into a slot that was given back"


def test_prefill_finished_and_no_decode_follows(engine: SteppedEngine) -> None:
    prompt = prompt_of(300)
    request, grant = submit_prefill(engine, prompt)
    engine.finish(request)
    assert engine.leftovers().keys() == {"leases", "send used"}
    engine.release(grant, "no decode to follow")


def test_prefill_without_a_reservation_is_an_ordinary_request(engine: SteppedEngine) -> None:
    prompt = prompt_of(300)
    expected = colocated(engine, prompt, LONG)[:1]
    run = engine.run(prompt, handover.prefill_params(LONG), KvSend(new_transfer_id()))
    assert run.token_ids == expected


@pytest.mark.parametrize("occupied", [False, True])
def test_decode_aborted_before_it_was_admitted(engine: SteppedEngine, occupied: bool) -> None:
    prompt = prompt_of(400)
    prefill, grant = engine.stage(prompt, LONG)
    others = [engine.submit(prompt_of(20, seed=n), LONG) for n in range(4)] if occupied else []
    if others:
        engine.step()
    decode = engine.submit([*prompt, *prefill.token_ids], LONG, KvReceive(TransferId(grant.transfer_id), len(prompt)))
    if others:
        engine.step()
        assert engine.runs[decode].token_ids == [], "all run slots are taken"
    engine.abort(decode)
    # No release by the actor: the connector gives an unread slot back by itself.
    for other in others:
        engine.abort(other)


def test_decode_aborted_while_decoding(engine: SteppedEngine) -> None:
    prompt = prompt_of(400)
    prefill, grant = engine.stage(prompt, LONG)
    decode = engine.submit([*prompt, *prefill.token_ids], LONG, KvReceive(TransferId(grant.transfer_id), len(prompt)))
    for _ in range(5):
        engine.step()
    assert 0 < len(engine.runs[decode].token_ids) < 60
    engine.abort(decode)


def test_a_slot_that_is_gone_fails_its_request_and_poisons_nobody(engine: SteppedEngine) -> None:
    """It must not happen; if it does, the blocks are already hashed, and no later request may hit them."""
    prompt = prompt_of(500)
    expected = colocated(engine, prompt, GREEDY)
    lost = engine.run([*prompt, 42], GREEDY, KvReceive(new_transfer_id(), len(prompt)))
    assert (lost.finish_reason, lost.token_ids) == ("error", [])
    engine.settle()
    after = engine.run(prompt, GREEDY)
    assert after.cached_tokens == 0
    assert after.token_ids == expected


def test_a_request_that_shares_a_lost_slots_blocks_fails_too(engine: SteppedEngine) -> None:
    prompt = prompt_of(500)
    lost = engine.submit([*prompt, 42], GREEDY, KvReceive(new_transfer_id(), len(prompt)))
    sharing = engine.submit([*prompt, 43], GREEDY)
    runs = engine.finish(lost, sharing)
    assert [run.finish_reason for run in runs] == ["error", "error"]
    assert runs[1].token_ids == []


def test_one_transfer_serves_one_request(engine: SteppedEngine) -> None:
    # A text, because two requests in one batch may fall apart at a near-tie of random tokens.
    prompt = engine.tokenize(PROMPTS[0])
    expected = colocated(engine, prompt, GREEDY)
    prefill, grant = engine.stage(prompt, GREEDY)
    engine.forget_prefixes()
    sampling = handover.decode_params(GREEDY, forwarded_tokens=1)
    receive = KvReceive(TransferId(grant.transfer_id), len(prompt))
    requests = [engine.submit([*prompt, *prefill.token_ids], sampling, receive) for _ in range(2)]
    first, second = engine.finish(*requests)
    assert prefill.token_ids + first.token_ids == expected
    assert prefill.token_ids + second.token_ids == expected, "it computed the prompt, or shared the first one's blocks"
    assert sum(p.event == "scatter" for p in engine.probed) == 1
    assert engine.scheduler_half.counters["duplicate_transfers"] >= 1


def test_fifty_requests_aborted_anywhere(engine: SteppedEngine) -> None:
    """Overlapping split requests, each ended at a random point of its life or left to finish."""
    choose = random.Random(20)
    finished = 0
    for number in range(50):
        prompt = prompt_of(choose.choice([1, 60, BLOCK_TOKENS, 300, 600]), seed=choose.randrange(4))
        sampling = SamplingParams(max_tokens=choose.choice([2, 6]), temperature=0.0, ignore_eos=True)
        grant = engine.grant()
        engine.reserve(grant, prompt)
        pull = engine.pull(grant, prompt)
        prefill = engine.submit(prompt, handover.prefill_params(sampling), KvSend(TransferId(grant.transfer_id)))
        stage = choose.choice(["queued", "computing", "staged", "submitted", "decoding", "done"])
        for _ in range({"queued": 0, "computing": 1}.get(stage, 100)):
            if engine.runs[prefill].finish_reason is None:
                engine.step()
        if engine.runs[prefill].finish_reason is None:
            engine.abort(prefill)
        else:
            pull.result(10.0)
        if stage in ("submitted", "decoding", "done"):
            tokens = engine.runs[prefill].token_ids
            receive = KvReceive(TransferId(grant.transfer_id), len(prompt))
            params = handover.decode_params(sampling, forwarded_tokens=1)
            decode = engine.submit([*prompt, *tokens], params, receive)
            if stage == "decoding":
                engine.step()
            if stage == "done":
                assert engine.finish(decode)[0].finish_reason == "length"
                finished += 1
            else:
                engine.abort(decode)
        engine.release(grant, f"{stage} {number}")
        if not pull.done():
            assert pull.exception(10.0) is not None
    assert finished > 3
