"""The simulated engine's shell: slow consumers, crashes, preemption, held steps. Its contract: tests/contract/test_engines.py."""

from __future__ import annotations

import asyncio

import pytest

from engine.config import EngineSettings, SimulatedSettings
from engine.protocol import EngineDeadError, EngineOutput, EngineRequest, KvSend
from engine.sampling import Constraint, SamplingParams
from engine.simulated import SimulatedEngine
from protos.ids import new_transfer_id
from tests.support.workers import StepClock, engine_settings

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def request(name: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


async def tokens(engine: SimulatedEngine, name: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    return [t async for o in engine.generate(request(name, prompt, sampling)) for t in o.token_ids]


async def test_a_slow_consumer_gets_everything_in_fewer_outputs() -> None:
    engine = SimulatedEngine(engine_settings(), clock=StepClock())
    await engine.start()
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=1)
    outputs: list[EngineOutput] = []
    async for output in engine.generate(request("slow", [5, 6], sampling)):
        outputs.append(output)
        await tokens(engine, f"other{len(outputs)}", [7])  # meanwhile the engine goes on
    assert len(outputs) < 20
    assert [t for o in outputs for t in o.token_ids] == await tokens(engine, "again", [5, 6])
    assert all(len(o.logprobs or []) == len(o.token_ids) for o in outputs)
    assert [o.finish_reason for o in outputs][-2:] == [None, "length"]
    assert outputs[0].computing_s > 0
    assert outputs[-1].decoding_s > 0
    await engine.stop()


async def test_a_crash_raises_in_every_iterator_and_ever_after() -> None:
    clock = StepClock()
    engine = SimulatedEngine(engine_settings(), clock=clock)
    await engine.start()
    inside = clock.hold()
    running = [asyncio.create_task(tokens(engine, f"r{i}", [5 + i])) for i in range(10)]
    await inside.wait()
    engine.crash("boom")
    for ended in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(ended, EngineDeadError)
        assert "boom" in str(ended)
    with pytest.raises(EngineDeadError, match="boom"):
        await tokens(engine, "late", [5])
    with pytest.raises(EngineDeadError, match="boom"):
        await engine.check_health()
    assert engine.load().running == engine.load().waiting == 0
    await engine.stop()


async def test_an_abort_frees_everything_while_the_step_is_still_held() -> None:
    clock = StepClock()
    engine = SimulatedEngine(engine_settings(), clock=clock)
    await engine.start()
    inside = clock.hold()
    running = asyncio.create_task(tokens(engine, "r", [5] * 100))
    await inside.wait()
    assert engine.load().kv_usage > 0
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (engine.load().running, engine.load().kv_usage) == (0, 0.0)
    clock.let_go()
    assert len(await tokens(engine, "next", [5])) == 20
    await engine.stop()


async def test_preemption_changes_no_token() -> None:
    tight = engine_settings(max_model_len=64, enable_prefix_caching=False, simulated={"num_kv_blocks": 8})
    engine = SimulatedEngine(tight, clock=StepClock())
    await engine.start()
    prompts = [[5 + i] * 20 for i in range(5)]
    together = await asyncio.gather(*(tokens(engine, f"t{i}", p) for i, p in enumerate(prompts)))
    assert engine.counters()["preemptions"] > 0
    assert together == [await tokens(engine, f"a{i}", p) for i, p in enumerate(prompts)]
    assert engine.load().kv_usage == 0
    await engine.stop()


async def test_what_it_cannot_do_is_refused_by_name() -> None:
    engine = SimulatedEngine(engine_settings(), clock=StepClock())
    await engine.start()
    with pytest.raises(ValueError, match="constraint"):
        await tokens(engine, "a", [5], SamplingParams(max_tokens=2, constraint=Constraint(json_object=True)))
    kv = EngineRequest(request_id="b", prompt_token_ids=[5], sampling=GREEDY, kv=KvSend(new_transfer_id()))
    with pytest.raises(ValueError, match="kv"):
        _ = [o async for o in engine.generate(kv)]
    await engine.stop()


def test_blocks_must_hold_one_request_of_the_longest_kind() -> None:
    with pytest.raises(ValueError, match="num_kv_blocks"):
        SimulatedEngine(EngineSettings(kind="simulated", max_model_len=1024, simulated=SimulatedSettings(num_kv_blocks=63)))


async def test_a_reset_is_refused_while_blocks_are_held() -> None:
    clock = StepClock()
    engine = SimulatedEngine(engine_settings(), clock=clock)
    await engine.start()
    inside = clock.hold()
    running = asyncio.create_task(tokens(engine, "r", [5] * 20))
    await inside.wait()
    assert not await engine.reset_prefix_cache()
    clock.let_go()
    await running
    assert await engine.reset_prefix_cache()
    await engine.stop()
