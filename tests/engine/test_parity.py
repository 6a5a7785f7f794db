"""The split path's tokens are the colocated path's tokens, one request at a time, on a real model."""

from __future__ import annotations

import random

import pytest

from engine.sampling import Constraint, SamplingParams
from tests.support.stepped_engine import BLOCK_TOKENS, SteppedEngine

pytestmark = pytest.mark.vllm

K = BLOCK_TOKENS
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    choose = random.Random(f"{length}/{seed}")
    return [choose.randrange(1000, 40000) for _ in range(length)]


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
    expected = colocated(engine, prompt, GREEDY)
    split = engine.split(prompt, GREEDY, before_decode=engine.forget_prefixes, forward=False)
    assert split.result.token_ids == expected
    assert split.decode is not None
    assert split.decode.cached_tokens == length - 1


def test_a_prompt_of_one_token_without_forwarding_loads_nothing(engine: SteppedEngine) -> None:
    prompt = prompt_of(1)
    expected = colocated(engine, prompt, GREEDY)
    assert engine.split(prompt, GREEDY, before_decode=engine.forget_prefixes, forward=False).result.token_ids == expected


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
TEXT = [504, 4743, 314, 260, 1834, 2022, 288, 28, 216, 33, 34, 30, 198, 504, 3575, 282, 4649, 314]


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
    for prompt in (TEXT, prompt_of(K + 5)):
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
