"""The split path's tokens are the colocated path's tokens, one request at a time, on a real model.

With the first token forwarded both paths run the same shapes on the same bytes, so equality is exact. Without, the decode
engine computes the last prompt token alone instead of within its chunk: the last bits differ, and a first divergence is
allowed where the colocated run's two candidates were no further apart than one step of bfloat16 logits.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.sampling import Constraint, SamplingParams
from tests.support.stepped_engine import BLOCK_TOKENS, Run, SteppedEngine

pytestmark = pytest.mark.vllm

K = BLOCK_TOKENS
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    choose = random.Random(f"{length}/{seed}")
    return [choose.randrange(1000, 40000) for _ in range(length)]


NEAR_TIE = 0.26


def assert_same_or_near_tie(split: Run, whole: Run) -> None:
    """`whole` was run with enough log-probabilities to hold the candidates of a tie."""
    for position, (ours, theirs) in enumerate(zip(split.token_ids, whole.token_ids, strict=True)):
        if ours != theirs:
            candidates = {entry.token_id: entry.logprob for entry in whole.logprobs[position]}
            assert candidates[theirs] - candidates[ours] <= NEAR_TIE, f"position {position}"
            return


def colocated(engine: SteppedEngine, prompt: list[int], sampling: SamplingParams) -> list[int]:
    engine.forget_prefixes()
    tokens = engine.run(prompt, sampling).token_ids
    engine.forget_prefixes()
    return tokens


@pytest.mark.parametrize("length", [1, 2, K - 1, K, K + 1, 2 * K, 3 * K - 1, 3 * K + 1, 700, 1500])
def test_prompt_lengths(engine: SteppedEngine, length: int) -> None:
    prompt = prompt_of(length)
    expected = colocated(engine, prompt, GREEDY)
    split = engine.split(prompt, GREEDY, before_decode=engine.forget_prefixes)
    assert split.result.token_ids == expected
    assert split.decode is not None
    # All of the prompt came from staging: the decode engine computed the forwarded token alone.
    assert split.decode.cached_tokens == length


@pytest.mark.parametrize("length", [2, K, K + 1, 2 * K, 300])
def test_without_forwarding_decode_computes_the_last_prompt_token(engine: SteppedEngine, length: int) -> None:
    prompt = prompt_of(length)
    sampling = replace(GREEDY, logprobs=8)
    whole = engine.run(prompt, sampling)
    engine.forget_prefixes()
    split = engine.split(prompt, sampling, before_decode=engine.forget_prefixes, forward=False)
    assert_same_or_near_tie(split.result, whole)
    assert split.decode is not None
    assert split.decode.cached_tokens == length - 1


def test_a_prompt_of_one_token_without_forwarding_loads_nothing(engine: SteppedEngine) -> None:
    prompt = prompt_of(1)
    expected = colocated(engine, prompt, GREEDY)
    split = engine.split(prompt, GREEDY, before_decode=engine.forget_prefixes, forward=False)
    assert split.result.token_ids == expected
    assert [probed.event for probed in engine.probed] == ["gather"]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_shortest_outputs(engine: SteppedEngine, max_tokens: int) -> None:
    prompt = prompt_of(200)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    expected = colocated(engine, prompt, sampling)
    split = engine.split(prompt, sampling, before_decode=engine.forget_prefixes)
    assert split.result.token_ids == expected
    assert split.result.finish_reason == "length"
    assert (split.decode is None) == (max_tokens == 1)


@pytest.mark.parametrize("cached_on_decode", [0, 2 * K, 5 * K])
@pytest.mark.parametrize("cached_on_prefill", [0, 2 * K, 5 * K])
def test_prefixes_cached_on_either_side(engine: SteppedEngine, cached_on_prefill: int, cached_on_decode: int) -> None:
    """0, part, or all whole blocks of the prompt are already in the prefix cache."""
    prompt = prompt_of(5 * K + 10)
    expected = colocated(engine, prompt, GREEDY)
    one = SamplingParams(max_tokens=1, temperature=0.0)

    def warm(tokens: int) -> None:
        engine.forget_prefixes()
        if tokens:
            engine.run(prompt[: tokens + 1], one)

    warm(cached_on_prefill)
    split = engine.split(prompt, GREEDY, before_decode=lambda: warm(cached_on_decode))
    assert split.result.token_ids == expected
    assert split.prefill.cached_tokens == cached_on_prefill
    assert split.decode is not None
    assert split.decode.cached_tokens == len(prompt)
    gathered = [p for p in engine.probed if p.event == "gather" and p.transfer_id == split.transfer_id]
    assert sum(len(p.digests) for p in gathered) == 6, "cached blocks are gathered too"
    scattered = [p for p in engine.probed if p.event == "scatter" and p.transfer_id == split.transfer_id]
    assert [(p.first_block, len(p.digests)) for p in scattered] == [(cached_on_decode // K, 6 - cached_on_decode // K)]


def test_a_full_local_hit_loads_nothing_and_gives_the_slot_back(engine: SteppedEngine) -> None:
    prompt = prompt_of(3 * K)
    expected = colocated(engine, prompt, GREEDY)
    # Not forgetting: prefill on the same engine has left every whole block in the cache.
    split = engine.split(prompt, GREEDY)
    assert split.result.token_ids == expected
    assert [p for p in engine.probed if p.event == "scatter"] == []
    assert engine.scheduler_half.counters["full_local_hits"] >= 1


JSON = '{"type":"object","properties":{"city":{"enum":["Paris","London"]},"n":{"type":"integer"}},"required":["city","n"]}'
PROMPTS = ("The capital of France is Paris.\nThe capital of England is", "Once upon a time there was a small", "Count: 1, 2, 3,")


@pytest.mark.parametrize(
    ("name", "extra", "forwards"),
    [
        ("repetition_penalty", {"repetition_penalty": 1.3}, True),
        ("presence_penalty", {"presence_penalty": 1.5}, False),
        ("frequency_penalty", {"frequency_penalty": 1.2}, False),
        ("seeded", {"temperature": 0.9, "seed": 7}, False),
        ("seeded top_p", {"temperature": 1.1, "seed": 11, "top_p": 0.8, "top_k": 40, "min_p": 0.02}, False),
        ("greedy with a seed", {"seed": 5}, True),
        ("min_tokens", {"min_tokens": 5, "ignore_eos": False}, True),
        ("logit_bias", {"logit_bias": {1000: 5.0, 2000: -20.0}}, True),
        ("allowed_token_ids", {"allowed_token_ids": tuple(range(500, 900))}, True),
        ("bad_words", {"bad_words": ("city", " the capital")}, False),
        ("json schema", {"constraint": Constraint(json_schema=JSON), "max_tokens": 24, "ignore_eos": False}, False),
        ("choice", {"constraint": Constraint(choice=("Paris is large", "London is grey")), "ignore_eos": False}, False),
        ("regex", {"constraint": Constraint(regex="[a-z]{3} [0-9]{4}"), "ignore_eos": False}, False),
    ],
)
def test_sampling_parameters(engine: SteppedEngine, name: str, extra: dict, forwards: bool) -> None:
    values = {"max_tokens": 14, "temperature": 0.0, "ignore_eos": True, **extra}
    sampling = SamplingParams(**values)
    # Short texts: a chunk this small is computed as its single tokens are, so equality is exact with or without forwarding.
    for text in PROMPTS:
        prompt = engine.tokenize(text)
        engine.forget_prefixes()
        whole = engine.run(prompt, sampling)
        engine.forget_prefixes()
        split = engine.split(prompt, sampling, before_decode=engine.forget_prefixes)
        assert split.result.token_ids == whole.token_ids, name
        assert split.result.finish_reason == whole.finish_reason
        if split.decode is not None:
            assert split.forwarded == forwards


@pytest.mark.parametrize("position", [0, 1, 5])
def test_a_stop_token_at_any_position(engine: SteppedEngine, position: int) -> None:
    prompt = prompt_of(150, seed=3)
    free = colocated(engine, prompt, GREEDY)
    stop = free[position]
    first = free.index(stop)
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    split = engine.split(prompt, sampling, before_decode=engine.forget_prefixes)
    assert split.result.token_ids == free[: first + 1]
    assert (split.result.finish_reason, split.result.matched_token_id) == ("stop", stop)
    assert (split.decode is None) == (first == 0)


@pytest.mark.parametrize("position", [0, 1, 3])
def test_the_models_end_of_sequence_at_any_position(engine: SteppedEngine, position: int) -> None:
    """A bias makes EOS certain as soon as `min_tokens` allows it."""
    eos = engine.llm.model_config.hf_config.eos_token_id
    sampling = SamplingParams(max_tokens=8, temperature=0.0, min_tokens=position, logit_bias={eos: 100.0})
    prompt = prompt_of(140, seed=4)
    engine.forget_prefixes()
    whole = engine.run(prompt, sampling)
    engine.forget_prefixes()
    split = engine.split(prompt, sampling, before_decode=engine.forget_prefixes)
    assert split.result.token_ids == whole.token_ids
    assert len(whole.token_ids) == position + 1
    assert (split.result.finish_reason, split.result.matched_token_id) == ("stop", eos)


def test_logprobs_join_at_the_seam(engine: SteppedEngine) -> None:
    prompt = prompt_of(K + 20)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    engine.forget_prefixes()
    whole = engine.run(prompt, sampling)
    engine.forget_prefixes()
    split = engine.split(prompt, sampling, before_decode=engine.forget_prefixes)
    assert split.result.token_ids == whole.token_ids
    assert split.result.logprobs == whole.logprobs
    assert [len(position) >= 3 for position in whole.logprobs] == [True] * 6
    assert [position[0].token_id for position in whole.logprobs] == whole.token_ids
    assert split.prefill.prompt_logprobs == whole.prompt_logprobs
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(prompt)
