"""What every engine must do, run on the simulated one and on vLLM: a fake that nobody checks proves nothing.

Each `check_*` takes a started engine and leaves it idle. Requests run one at a time where tokens are compared: under batching a
real engine may flip a near-tie.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from engine.config import EngineSettings, SimulatedSettings
from engine.protocol import Engine, EngineInfo, EngineOutput, EngineRequest
from engine.sampling import SamplingParams
from engine.simulated import SimulatedEngine

MAX_MODEL_LEN = 512
PROMPT = [504, 3575, 282, 4649, 314, 260]
_numbers = itertools.count()

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


class Subject:
    """An engine and its facts."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.engine, self.info = engine, info

    async def outputs(self, prompt: list[int], sampling: SamplingParams) -> list[EngineOutput]:
        request = EngineRequest(request_id=f"r{next(_numbers)}", prompt_token_ids=prompt, sampling=sampling)
        return [output async for output in self.engine.generate(request)]

    async def tokens(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        return [t for o in await self.outputs(prompt, sampling) for t in o.token_ids]

    async def idle(self) -> None:
        """An engine may learn of the last end with its next step: give it one, then nothing may be held."""
        await self.tokens(PROMPT, greedy(1))
        load = self.engine.load()
        assert (load.running, load.waiting) == (0, 0)
        assert load.kv_usage == 0


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **more)  # type: ignore[arg-type]


async def check_info(subject: Subject) -> None:
    info = subject.info
    assert info.max_model_len == MAX_MODEL_LEN
    assert info.num_kv_blocks * info.block_tokens >= info.max_model_len
    assert info.world_size == 1
    assert info.start_arguments
    await subject.engine.check_health()


async def check_length_is_exact_and_reason_comes_once(subject: Subject) -> None:
    for length in (1, 2, 17):
        outputs = await subject.outputs(PROMPT, greedy(length))
        assert sum(len(o.token_ids) for o in outputs) == length
        assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert outputs[-1].matched_token_id is None
        assert all(0 <= t < subject.info.vocab_size for o in outputs for t in o.token_ids)


async def check_times(subject: Subject) -> None:
    began_s = time.monotonic()
    outputs = await subject.outputs(PROMPT, greedy(5))
    lasted_s = time.monotonic() - began_s
    assert outputs[0].queued_s >= 0
    assert outputs[0].computing_s > 0
    assert outputs[-1].decoding_s > 0
    assert outputs[-1].returning_s > 0
    parts = sum(o.queued_s + o.computing_s + o.decoding_s + o.returning_s for o in outputs)
    assert parts <= lasted_s, "exclusive, so no longer than the request was seen to take"


async def check_greedy_repeats(subject: Subject) -> None:
    assert await subject.tokens(PROMPT, greedy(12)) == await subject.tokens(PROMPT, greedy(12))


async def check_a_history_may_be_cut_anywhere(subject: Subject) -> None:
    whole = await subject.tokens(PROMPT, greedy(12))
    for cut in (1, 2, 7):
        assert await subject.tokens([*PROMPT, *whole[:cut]], greedy(12 - cut)) == whole[cut:]


async def check_seed_repeats(subject: Subject) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    first = await subject.tokens(PROMPT, sampling)
    assert first == await subject.tokens(PROMPT, sampling)
    other = SamplingParams(max_tokens=12, temperature=1.0, seed=8, ignore_eos=True)
    assert first != await subject.tokens(PROMPT, other)


async def check_stop_token_ends_and_is_named(subject: Subject) -> None:
    whole = await subject.tokens(PROMPT, greedy(12))
    stop = whole[4]
    end = whole.index(stop)
    outputs = await subject.outputs(PROMPT, greedy(12, stop_token_ids=(stop,)))
    assert [t for o in outputs for t in o.token_ids] == whole[: end + 1]
    assert (outputs[-1].finish_reason, outputs[-1].matched_token_id) == ("stop", stop)


async def check_min_tokens_keeps_stop_tokens_away(subject: Subject) -> None:
    first = (await subject.tokens(PROMPT, greedy(1)))[0]
    tokens = await subject.tokens(PROMPT, greedy(8, stop_token_ids=(first,), min_tokens=3))
    assert first not in tokens[:3]
    assert len(tokens) >= 3


async def check_allowed_tokens_and_bias(subject: Subject) -> None:
    allowed = await subject.tokens(PROMPT, greedy(6, allowed_token_ids=(11, 12, 13)))
    assert set(allowed) <= {11, 12, 13}
    assert await subject.tokens(PROMPT, greedy(3, logit_bias={77: 100.0})) == [77, 77, 77]


async def check_logprobs(subject: Subject) -> None:
    for wanted in (0, 1, 5):
        outputs = await subject.outputs(PROMPT, greedy(3, logprobs=wanted))
        tokens = [t for o in outputs for t in o.token_ids]
        rows = [row for o in outputs for row in o.logprobs or []]
        assert len(rows) == len(tokens)
        for token, row in zip(tokens, rows, strict=True):
            assert row[0].token_id == token
            assert row[0].rank == 1  # greedy
            assert len(row) == max(1, wanted)
            assert len({e.token_id for e in row}) == len(row)
            assert [e.logprob for e in row] == sorted((e.logprob for e in row), reverse=True)
            assert all(e.logprob <= 0 for e in row)
    assert all(o.logprobs is None for o in await subject.outputs(PROMPT, greedy(2)))


async def check_prompt_logprobs(subject: Subject) -> None:
    outputs = await subject.outputs(PROMPT, greedy(2, prompt_logprobs=1))
    (rows,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(rows) == len(PROMPT)
    assert rows[0] == []
    for token, row in zip(PROMPT[1:], rows[1:], strict=True):
        assert row[0].token_id == token


async def check_prefix_cache_and_its_reset(subject: Subject) -> None:
    block = subject.info.block_tokens
    prompt = [100 + i % 300 for i in range(2 * block + 3)]
    assert await subject.engine.reset_prefix_cache()
    cold = await subject.outputs(prompt, greedy(3))
    warm = await subject.outputs(prompt, greedy(3))
    assert (cold[0].cached_tokens, warm[0].cached_tokens) == (0, 2 * block)
    # However many tokens an output brings: a busy machine gets several at once.
    assert [token for o in cold for token in o.token_ids] == [token for o in warm for token in o.token_ids]
    assert await subject.engine.reset_prefix_cache()
    assert (await subject.outputs(prompt, greedy(1)))[0].cached_tokens == 0


async def check_refusals_name_the_field_and_start_nothing(subject: Subject) -> None:
    cases = [
        ([], greedy(1), "prompt"),
        ([5] * MAX_MODEL_LEN, greedy(1), "prompt"),
        ([subject.info.vocab_size], greedy(1), "prompt"),
        (PROMPT, greedy(0), "max_tokens"),
        (PROMPT, greedy(2, min_tokens=3), "min_tokens"),
    ]
    for prompt, sampling, name in cases:
        with pytest.raises(ValueError, match=name):
            await subject.tokens(prompt, sampling)
    await subject.idle()


async def check_closing_the_iterator_aborts(subject: Subject) -> None:
    request = EngineRequest(request_id=f"r{next(_numbers)}", prompt_token_ids=PROMPT, sampling=greedy(400))
    async with contextlib.aclosing(subject.engine.generate(request)) as stream:  # type: ignore[type-var]
        async for _ in stream:
            break
    await subject.idle()


async def check_cancelling_the_consumer_aborts(subject: Subject) -> None:
    first = asyncio.Event()

    async def consume() -> None:
        request = EngineRequest(request_id=f"r{next(_numbers)}", prompt_token_ids=PROMPT, sampling=greedy(400))
        async for _ in subject.engine.generate(request):
            first.set()

    task = asyncio.create_task(consume())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await subject.idle()


async def check_many_at_once_all_end(subject: Subject) -> None:
    lengths = [1 + 3 * i for i in range(10)]
    runs = await asyncio.gather(*(subject.tokens([*PROMPT, 20 + i], greedy(n)) for i, n in enumerate(lengths)))
    assert [len(tokens) for tokens in runs] == lengths
    await subject.idle()


CHECKS: list[Callable[[Subject], Awaitable[None]]] = [
    value for name, value in sorted(globals().items()) if name.startswith("check_")
]


def simulated_settings() -> EngineSettings:
    return EngineSettings(
        kind="simulated",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_tokens=32,
        simulated=SimulatedSettings(num_kv_blocks=64, vocab_size=49152, time_scale=0.01),
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def simulated() -> AsyncIterator[Subject]:
    engine = SimulatedEngine(simulated_settings())
    yield Subject(engine, await engine.start())
    await engine.stop()
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def vllm(checkpoint: Path) -> AsyncIterator[Subject]:
    from engine.vllm import VllmEngine

    engine = VllmEngine(
        EngineSettings(
            model_path=checkpoint,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            block_tokens=32,
            kv_cache_bytes=256 * 1024 * 1024,
        ),
        None,
    )
    try:
        yield Subject(engine, await engine.start())
    finally:
        await engine.stop()
        await engine.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_simulated(check: Callable[[Subject], Awaitable[None]], simulated: Subject) -> None:
    await check(simulated)
    await simulated.idle()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_vllm(check: Callable[[Subject], Awaitable[None]], vllm: Subject) -> None:
    await check(vllm)
    await vllm.idle()
