"""What the gateway's core tells routing of its prompts, over real streams to scripted workers."""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.routing.config import RoutingSettings
from coordinator.routing.views import Role
from protos.errors import Code
from protos.splitpoint.v1 import worker_pb2
from tests.support.cores import PROMPT, CoreUnderTest, Reader, scripted
from tests.support.scripted_worker import ScriptedWorker

PREFIX_AWARE = RoutingSettings(policy="prefix_aware", prefix_block_tokens=1)


def colocated(count: int) -> list[ScriptedWorker]:
    return [ScriptedWorker(f"c{i}", Role.COLOCATED) for i in range(count)]


async def begun(
    under_test: CoreUnderTest, workers: list[ScriptedWorker], **sampling: Any
) -> tuple[Reader, ScriptedWorker, worker_pb2.ColocatedLeg]:
    """One more request, and who got it."""
    waits = {asyncio.create_task(w.leg("colocated", len(w.of("colocated")) + 1)): w for w in workers}
    reader = under_test.run(path="colocated", max_tokens=2, **sampling)
    done, pending = await asyncio.wait(waits, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    (task,) = done
    return reader, waits[task], task.result()


async def answered(
    under_test: CoreUnderTest, workers: list[ScriptedWorker], *, cached_tokens: int, **sampling: Any
) -> tuple[str, int]:
    """One request to its end: who served it, and what it weighed while it ran."""
    reader, worker, leg = await begun(under_test, workers, **sampling)
    weight = under_test.core.router.load.in_flight_tokens(worker.view.incarnation)
    worker.tokens(leg, 1, cached_tokens=cached_tokens)
    worker.finished(leg, 2)
    await reader.end()
    assert reader.error is None
    return worker.view.worker_id, weight


async def test_the_same_prompt_goes_to_the_same_worker_and_weighs_what_it_computes() -> None:
    workers = colocated(3)
    async with scripted(*workers, routing=PREFIX_AWARE) as under_test:
        home, weight = await answered(under_test, workers, cached_tokens=0)
        assert weight == len(PROMPT) + 2
        for _ in range(4):
            assert await answered(under_test, workers, cached_tokens=len(PROMPT) - 1) == (home, 1 + 2)
        assert under_test.core.router.load.total_in_flight_tokens() == 0


async def test_a_prompt_whose_log_probabilities_are_asked_for_is_not_expected_to_be_cached() -> None:
    workers = colocated(1)
    async with scripted(*workers, routing=PREFIX_AWARE) as under_test:
        await answered(under_test, workers, cached_tokens=0)
        _, weight = await answered(under_test, workers, cached_tokens=0, prompt_logprobs=0)
        assert weight == len(PROMPT) + 2
        _, weight = await answered(under_test, workers, cached_tokens=len(PROMPT) - 1)
        assert weight == 1 + 2, "the worker's cache is believed to hold what it held"


async def test_a_prompt_that_was_not_computed_is_not_expected_again() -> None:
    workers = colocated(1)
    async with scripted(*workers, routing=PREFIX_AWARE) as under_test:
        reader, _, _ = await begun(under_test, workers)
        await reader.leave()
        _, weight = await answered(under_test, workers, cached_tokens=0)
        assert weight == len(PROMPT) + 2


async def test_without_a_budget_for_retries_the_first_failure_is_the_answer_and_is_counted() -> None:
    workers = colocated(2)
    async with scripted(*workers, retry_reserve=0) as under_test:
        reader, worker, leg = await begun(under_test, workers)
        worker.failed(leg, Code.QUEUE_FULL)
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.QUEUE_FULL
        assert "budget" in reader.error.message
        assert under_test.metric("events_total", event="retry_budget_spent") == 1
        assert sum(len(w.of("colocated")) for w in workers) == 1


async def test_a_client_error_costs_no_retry() -> None:
    workers = colocated(2)
    async with scripted(*workers) as under_test:
        before = under_test.core.retries.left
        reader, worker, leg = await begun(under_test, workers)
        worker.failed(leg, Code.INVALID_VALUE)
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.INVALID_VALUE
        assert under_test.core.retries.left == before
        assert sum(len(w.of("colocated")) for w in workers) == 1
