"""Preemption: decode computes prompt and output again, prefill goes on staging where it was. Tokens stay the same."""

from __future__ import annotations

import pytest

from engine import handover
from engine.protocol import KvReceive, KvSend
from engine.sampling import SamplingParams
from protos.ids import TransferId
from tests.engine.test_parity import prompt_of
from tests.support.stepped_engine import BLOCK_TOKENS, SteppedEngine

pytestmark = pytest.mark.vllm

K = BLOCK_TOKENS


def preempted(engine: SteppedEngine) -> int:
    return sum(request.num_preemptions for request in engine.scheduler.requests.values())


def counting(engine: SteppedEngine, length: int, seed: int) -> list[int]:
    """A prompt of which every next token is certain: what is computed again, in other shapes, differs in its last bits, and how
    much so is the processor's affair. Two candidates that nearly tie would answer differently on some."""
    start = 1000 + 300 * seed
    tokens = engine.tokenize("Count: " + ", ".join(str(number) for number in range(start, start + length)))
    return tokens[:length]


def test_a_preempted_decode_is_exact_and_loads_once(engine: SteppedEngine) -> None:
    """Two prompts of 7 blocks and 5 tokens in 16 blocks; each output crosses into another block, and a third request squeezes."""
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [counting(engine, 6 * K + 110, seed=n) for n in range(2)]
    expected = []
    for prompt in prompts:
        expected.append(engine.run(prompt, sampling).token_ids)
        engine.forget_prefixes()
    staged = [engine.stage(prompt, sampling) for prompt in prompts]
    engine.forget_prefixes()
    squeezing = engine.submit(prompt_of(K + 100, seed=7), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    engine.step()
    decodes = [
        engine.submit(
            [*prompt, *run.token_ids],
            handover.decode_params(sampling, forwarded_tokens=1),
            KvReceive(TransferId(grant.transfer_id), len(prompt)),
        )
        for prompt, (run, grant) in zip(prompts, staged, strict=True)
    ]
    most = 0
    while any(engine.runs[request].finish_reason is None for request in decodes):
        engine.step()
        most = max(most, preempted(engine))
    engine.finish(squeezing)
    assert most > 0, "the test must preempt something"
    for run, (prefill, _), tokens in zip((engine.runs[d] for d in decodes), staged, expected, strict=True):
        assert run.finish_reason == "length"
        assert prefill.token_ids + run.token_ids == tokens
    assert sum(p.event == "scatter" for p in engine.probed) == 2


def test_a_preempted_prefill_stages_the_rest_once(engine: SteppedEngine) -> None:
    """vLLM preempts the youngest running request: a prefill between two chunks, while older requests decode into new blocks."""
    prompt = counting(engine, 8 * K - 3, seed=3)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    expected = engine.run(prompt, sampling).token_ids
    engine.forget_prefixes()
    older = engine.submit(prompt_of(2 * K - 6, seed=5), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    engine.step()
    grant = engine.grant()
    engine.reserve(grant, prompt)
    pull = engine.pull(grant, prompt)
    prefill = engine.submit(prompt, handover.prefill_params(sampling), KvSend(TransferId(grant.transfer_id)))
    engine.step()
    engine.step()
    assert engine.runs[prefill].finish_reason is None
    # What a full cache does, without having to fill it: the scheduler's own preemption of its youngest request.
    victim = engine.scheduler.running.pop()
    assert victim.request_id.startswith(prefill)
    engine.scheduler._preempt_request(victim, 0.0)
    engine.finish(older)
    run = engine.finish(prefill)[0]
    answer = pull.result(10.0)[0]
    assert answer.seal.prompt_tokens == len(prompt)
    places = [place for p in engine.probed for place in range(p.first_block, p.first_block + len(p.digests))]
    assert places == list(range(8)), "every block staged once, in order"
    engine.forget_prefixes()
    decode = engine.run(
        [*prompt, *run.token_ids],
        handover.decode_params(sampling, forwarded_tokens=1),
        KvReceive(TransferId(grant.transfer_id), len(prompt)),
    )
    assert run.token_ids + decode.token_ids == expected
