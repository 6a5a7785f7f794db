"""The two clients of the load generator: one suite over the real gRPC and HTTP doors; then OpenAI servers that are not ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from coordinator.compare import cli
from coordinator.compare.http_client import HttpClient
from coordinator.compare.load import ArmTarget, GrpcClient, Outcome, RequestFailedError, run_one_at_a_time, run_probe
from coordinator.compare.target import connect
from coordinator.compare.workload import PlannedRequest, WorkloadSpec, make
from coordinator.gateway.api import Finished, Submission, Tokens
from coordinator.gateway.grpc_front import build_grpc_server
from protos.errors import Code, SplitpointError
from tests.support.gateway import MODEL, FakeCore, frontend, http_server, playing

pytestmark = pytest.mark.timeout(60)

SPEC = WorkloadSpec(seed=3, requests=6, prompt_tokens=(8, 16), output_tokens=(2, 6), first_token=3, end_token=250)
Door = tuple[FakeCore, GrpcClient | HttpClient]


def forced(submission: Submission) -> list[Tokens | Finished]:
    """As many tokens as were forced; the prompt's first five were cached."""
    count = submission.sampling.max_tokens
    tokens = [Tokens(token_ids=[40 + i], cached_tokens=0 if i else 5) for i in range(count)]
    return [*tokens, Finished(finish_reason="length")]


@pytest.fixture(params=["grpc", "http"])
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    """A core that answers as it is told to, and a client of one of its doors."""
    core = FakeCore(script=forced)
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "http":
            url = str((await stack.enter_async_context(http_server(core, frontend()))).base_url)
            client: GrpcClient | HttpClient = connect(url)
            assert isinstance(client, HttpClient)
        else:
            front = frontend()
            server = build_grpc_server(core, front)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 2)
            stack.callback(front.draining.set)
            client = connect(f"127.0.0.1:{port}")
            assert isinstance(client, GrpcClient)
        await stack.enter_async_context(client)
        assert await client.model(10) == MODEL
        yield core, client


async def one(client: GrpcClient | HttpClient, *, deadline_s: float = 20.0) -> Outcome:
    (outcome,) = await run_one_at_a_time(client, [PlannedRequest(0.0, (5, 6, 7), 4)], path="split", deadline_s=deadline_s)
    return outcome


async def test_a_probe_forces_lengths_names_its_path_and_brings_ledgers(door: Door) -> None:
    core, client = door
    workload = make(SPEC)
    probe = await run_probe(client, workload, path="colocated", rate_per_s=500.0, deadline_s=20)
    assert [outcome.failure for outcome in probe.outcomes] == [""] * SPEC.requests
    asked = {tuple(s.prompt_token_ids): s for s in core.submissions}
    for planned, outcome in zip(workload.requests, probe.outcomes, strict=True):
        submission = asked[planned.prompt_token_ids]
        assert submission.sampling.max_tokens == outcome.tokens == planned.output_tokens
        assert submission.sampling.ignore_eos
        assert submission.path == "colocated"
        assert 15 < submission.deadline_s < 21
        assert outcome.cached_tokens == 5
        assert len(outcome.gaps_s) == outcome.tokens - 1
        assert outcome.ttft_s is not None
        assert outcome.e2e_s is not None
        assert 0 < outcome.ttft_s <= outcome.e2e_s
        assert outcome.ledger is not None
        assert (outcome.ledger["path"], outcome.ledger["attempts"], outcome.ledger["recomputed"]) == ("split", 3, False)
        assert outcome.ledger["e2e_s"] == pytest.approx(0.05)


async def test_an_arm_names_its_path_pools_and_transport(door: Door) -> None:
    core, client = door
    client.know("two", ArmTarget("colocated", pools=("a", "b"), transport="grpc"))
    (outcome,) = await run_one_at_a_time(client, [PlannedRequest(0.0, (5, 6, 7), 2)], path="two", deadline_s=20)
    assert outcome.failure == ""
    (submission,) = core.submissions
    assert (submission.path, submission.pools, submission.transport) == ("colocated", {"a", "b"}, "grpc")


async def test_both_doors_say_a_failure_in_its_own_words(door: Door) -> None:
    core, client = door
    core.script = playing(SplitpointError(Code.NO_WORKER, "no live worker in phase decode"))
    assert "no live worker in phase decode" in (await one(client)).failure
    core.script = playing(Tokens(token_ids=[40]), SplitpointError(Code.STREAM_BROKEN, "worker decode-1 is lost"))
    broken = await one(client)
    assert "worker decode-1 is lost" in broken.failure
    assert broken.tokens == 1


async def test_a_short_answer_is_a_failure(door: Door) -> None:
    core, client = door
    core.script = playing(Tokens(token_ids=[40]), Tokens(token_ids=[41]), Finished(finish_reason="length"))
    assert (await one(client)).failure == "2 tokens came where 4 were forced"


async def test_tokens_of_one_message_are_counted_once_each(door: Door) -> None:
    core, client = door
    core.script = playing(Tokens(token_ids=[40, 41, 42]), Tokens(token_ids=[43]), Finished(finish_reason="length"))
    outcome = await one(client)
    assert (outcome.failure, outcome.tokens, len(outcome.gaps_s)) == ("", 4, 3)


async def test_a_late_answer_ends_its_generation(door: Door) -> None:
    core, client = door
    core.script = playing(Tokens(token_ids=[40]), asyncio.Event())
    assert (await one(client, deadline_s=0.5)).failure
    await asyncio.wait_for(core.generations[0].ended.wait(), 10)
    assert core.generations[0].closed


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://127.0.0.1:1"])
async def test_nobody_answers(target: str) -> None:
    async with connect(target) as client:
        with pytest.raises(RequestFailedError):
            await client.model(5.0)
        assert (await one(client, deadline_s=5.0)).failure


# Servers that are not ours ------------------------------------------------------------------------------------------------

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def foreign(answer: Answer) -> AsyncIterator[str]:
    """An OpenAI server of one model that answers completions so. Gives its URL."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "other"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        return await answer(request, await request.json())

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def streamed(request: web.Request, events: list[str]) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await reply.prepare(request)
    for event in events:
        await reply.write(f"{event}\n\n".encode())
    await reply.write_eof()
    return reply


def chunk(total: int) -> str:
    return "data: " + json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": total}})


LAST = 'data: {"choices": [], "usage": {"completion_tokens": 4}}'
DONE = "data: [DONE]"


@pytest.mark.parametrize(
    ("events", "failure", "tokens"),
    [
        ([chunk(1), ": keep-alive", chunk(3), chunk(4), LAST, DONE], "", 4),
        ([chunk(0), chunk(2), chunk(4), DONE], "", 4),
        (['data: {"choices": [{"text": "x"}]}', DONE], "continuous_usage_stats", 0),
        ([chunk(1), chunk(4), LAST], "without [DONE]", 4),
        ([chunk(1), "data: nonsense", DONE], "not a JSON object: nonsense", 1),
        ([chunk(1), 'event: error\ndata: {"error": {"message": "gone", "type": "x"}}', DONE], "x: gone", 1),
        ([chunk(1), "data: " + "y" * 3_000_000, DONE], "Too", 1),
    ],
)
async def test_what_a_stream_may_hold(events: list[str], failure: str, tokens: int) -> None:
    async with foreign(lambda request, _: streamed(request, events)) as url, connect(url, model="other") as client:
        outcome = await one(client)
    assert failure in outcome.failure
    assert bool(outcome.failure) == bool(failure)
    assert outcome.tokens == tokens
    assert outcome.ledger is None


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ('{"error": {"message": "busy", "code": 429}}', "HTTP 503: 429: busy"),
        ("<html>proxy</html>", "HTTP 503: <html>proxy</html>"),
        ('{"error": "plain"}', "HTTP 503: plain"),
    ],
)
async def test_a_refusal_in_any_form(body: str, failure: str) -> None:
    async def refuse(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.Response(status=503, text=body)

    async with foreign(refuse) as url, connect(url, model="other") as client:
        assert (await one(client)).failure == failure


async def test_the_comparison_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--target http://...` asks the OpenAI door, with both paths, and the key."""
    seen: list[tuple[str, str, int]] = []

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append((request.headers["x-splitpoint-path"], request.headers["authorization"], len(body["prompt"])))
        assert body["ignore_eos"]
        return await streamed(request, [*(chunk(i + 1) for i in range(body["max_tokens"])), DONE])

    monkeypatch.setattr("coordinator.compare.run.BUDGET_S", 2.0)
    path = tmp_path / "out.json"
    async with foreign(answer) as url:
        arguments = ["--quick", "--json", str(path), "--target", url, "--admin", "127.0.0.1:1", "--api-key", "k"]
        assert await asyncio.to_thread(cli.main, arguments) == 0
    written = json.loads(path.read_text())
    assert (written["target"], written["model"]) == (url, "other")
    assert {name for name, _, _ in seen} == {"split", "colocated"}
    assert {key for _, key, _ in seen} == {"Bearer k"}
    assert all(not outcome["failure"] for probe in written["probes"] for outcome in probe["outcomes"])
