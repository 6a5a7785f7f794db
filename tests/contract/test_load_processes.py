"""One schedule sent by several client processes, against the real gRPC door."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator

import pytest

from coordinator.compare.clients import ClientProcesses
from coordinator.compare.load import ArmTarget, Slo, run_probe
from coordinator.compare.workload import Workload, WorkloadSpec, make
from coordinator.gateway.api import Finished, Submission, Tokens
from coordinator.gateway.grpc_front import build_grpc_server
from tests.support.gateway import MODEL, FakeCore, frontend

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

REQUESTS = 7


def forced(submission: Submission) -> list[Tokens | Finished]:
    tokens = [Tokens(token_ids=[40 + i]) for i in range(submission.sampling.max_tokens)]
    return [*tokens, Finished(finish_reason="length")]


@pytest.fixture
async def served() -> AsyncIterator[tuple[FakeCore, str]]:
    core, front = FakeCore(script=forced), frontend()
    server = build_grpc_server(core, front)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield core, f"127.0.0.1:{port}"
    front.draining.set()
    await server.stop(2)
    assert children() == []


def children() -> list[multiprocessing.process.BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name == "load-client"]


async def until_submitted(core: FakeCore, count: int) -> None:
    while len(core.submissions) < count:
        core.arrived.clear()
        await core.arrived.wait()


def workload(seed: int = 3) -> Workload:
    spec = WorkloadSpec(seed=seed, requests=REQUESTS, prompt_tokens=(8, 16), output_tokens=(2, 6), first_token=3, end_token=250)
    return make(spec)


async def test_two_processes_send_one_schedule_and_the_next_until_one_is_cancelled(served: tuple[FakeCore, str]) -> None:
    core, target = served
    done = 0

    def on_done() -> None:
        nonlocal done
        done += 1

    async with ClientProcesses(target, processes=2) as clients:
        assert await clients.model(10) == MODEL
        clients.know("arm", ArmTarget("colocated", pools=("a",)))
        first = await run_probe(clients, workload(), path="arm", rate_per_s=50.0, deadline_s=60, on_done=on_done)
        own = {child.pid for child in children()}
        second = await run_probe(clients, workload(4), path="split", rate_per_s=50.0, deadline_s=60)
        assert len(own) == 2
        assert {child.pid for child in children()} == own
        core.script = lambda submission: [asyncio.Event()]
        cancelled = asyncio.create_task(run_probe(clients, workload(5), path="split", rate_per_s=50.0, deadline_s=60))
        await asyncio.wait_for(until_submitted(core, 2 * REQUESTS + 1), 90)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert children() == []
    assert done == REQUESTS
    for probe, sent in ((first, workload()), (second, workload(4))):
        assert [outcome.index for outcome in probe.outcomes] == list(range(REQUESTS))
        assert [outcome.due_s for outcome in probe.outcomes] == pytest.approx(list(sent.due_s(50.0)))
        for outcome, planned in zip(probe.outcomes, sent.requests, strict=True):
            assert (outcome.failure, outcome.tokens) == ("", planned.output_tokens)
            assert outcome.prompt_tokens == len(planned.prompt_token_ids)
            assert outcome.ledger is not None
            # Sent after it was due by the clock of whoever sent it: the processes read the same one.
            assert 0 <= outcome.lag_s < 60
    asked = {tuple(s.prompt_token_ids): s for s in core.submissions}
    assert {asked[r.prompt_token_ids].path for r in workload().requests} == {"colocated"}
    assert {asked[r.prompt_token_ids].pools for r in workload().requests} == {frozenset({"a"})}
    assert {asked[r.prompt_token_ids].path for r in workload(4).requests} == {"split"}


async def test_a_process_that_ends_under_way_is_named_and_none_is_left(served: tuple[FakeCore, str]) -> None:
    core, target = served
    core.script = lambda submission: [Tokens(token_ids=[40]), asyncio.Event()]
    async with ClientProcesses(target, model=MODEL, processes=2) as clients:
        probing = asyncio.create_task(run_probe(clients, workload(), path="split", rate_per_s=50.0, deadline_s=100))
        await asyncio.wait_for(core.arrived.wait(), 90)
        children()[0].kill()
        with pytest.raises(ChildProcessError, match="client process"):
            await asyncio.wait_for(probing, 30)
        assert children() == []


async def test_a_schedule_that_was_late_is_followed_by_more_processes(served: tuple[FakeCore, str]) -> None:
    """An objective that no client can meet voids every probe: the next has twice the processes, up to the most."""
    _, target = served
    async with ClientProcesses(target, model=MODEL, most=3) as clients:
        assert clients.processes == 1
        probe = await run_probe(clients, workload(), path="split", rate_per_s=200.0, deadline_s=60, slo=Slo(1e-9, 1.0))
        assert "fell behind" in probe.void
        assert [outcome.failure for outcome in probe.outcomes] == [""] * REQUESTS
        assert clients.processes == 2
        clients.fell_behind()
        assert clients.processes == 3
        assert children() == [], "none is started before it is needed"
