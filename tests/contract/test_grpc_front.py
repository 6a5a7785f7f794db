"""The public gRPC front end over a scripted core, through a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.gateway.api import Finished, Tokens
from coordinator.gateway.grpc_front import server_options
from coordinator.gateway.health import GENERATION_SERVICE
from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import generation_pb2, generation_pb2_grpc
from tests.support.gateway import FakeCore, Recorder, eos_id, frontend, grpc_server, ids_of, logprobs_of, playing, saying

pytestmark = pytest.mark.timeout(30)
Served = tuple[FakeCore, Any]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    core = FakeCore()
    async with grpc_server(core, frontend()) as channel:
        yield core, generation_pb2_grpc.GenerationServiceStub(channel)
    assert all(g.exhausted or g.closed for g in core.generations)


def request(*, stream: bool = False, text: str = "hi", **sampling: Any) -> generation_pb2.GenerateRequest:
    message = generation_pb2.GenerateRequest(text=text, stream=stream)
    for name, value in sampling.items():
        if isinstance(value, list):
            getattr(message.sampling_params, name).extend(value)
        else:
            setattr(message.sampling_params, name, value)
    return message


async def collect(call: Any) -> list[generation_pb2.GenerateResponse]:
    return [message async for message in call]


async def test_a_stream_of_chunks_and_one_complete(served: Served) -> None:
    core, stub = served
    core.script = saying("hello wörld 🙂", cached=2)
    *chunks, last = await collect(stub.Generate(request(stream=True)))
    ids = [*ids_of("hello wörld 🙂"), eos_id()]
    assert [list(m.chunk.token_ids) for m in chunks] == [[i] for i in ids]
    assert "".join(m.chunk.text for m in chunks) == "hello wörld 🙂" == last.complete.text
    assert [m.chunk.completion_tokens for m in chunks] == list(range(1, len(ids) + 1))
    assert {(m.chunk.prompt_tokens, m.chunk.cached_tokens) for m in chunks} == {(len(ids_of("hi")), 2)}
    complete = last.complete
    assert (list(complete.output_ids), complete.finish_reason, complete.matched_token_id) == (ids, "stop", eos_id())
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (len(ids_of("hi")), len(ids), 2)
    assert (complete.metrics.path, complete.metrics.e2e_s) == ("split", 0.05)
    assert {m.request_id for m in [*chunks, last]} == {last.request_id}
    assert last.request_id.startswith("req-")


async def test_without_stream_there_is_only_the_complete(served: Served) -> None:
    core, stub = served
    core.script = saying("hello", finish="length")
    count = len(ids_of("hello"))
    [message] = await collect(stub.Generate(request(max_tokens=count, logprobs=2)))
    assert (message.complete.text, message.complete.finish_reason) == ("hello", "length")
    assert message.complete.WhichOneof("matched_stop") is None
    assert list(message.complete.logprobs) == [logprobs_of(i) for i in ids_of("hello")]
    assert core.submissions[0].sampling.logprobs == 2


async def test_inputs(served: Served) -> None:
    core, stub = served
    make = generation_pb2.GenerateRequest
    await collect(stub.Generate(make(tokenized=generation_pb2.TokenizedInput(input_ids=[5, 6]))))
    chat = generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    await collect(stub.Generate(make(chat=chat, model="tiny", request_id="mine")))
    ids, rendered = (s.prompt_token_ids for s in core.submissions)
    assert ids == [5, 6]
    assert rendered == ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert [s.sampling.max_tokens for s in core.submissions] == [256 - len(ids), 256 - len(rendered)]
    assert core.submissions[1].client_request_id == "mine" != core.submissions[1].request_id


async def test_sampling_fields_arrive_as_over_http(served: Served) -> None:
    core, stub = served
    await collect(stub.Generate(request(temperature=0.7, top_p=0.1, top_k=-1, seed=-3, min_tokens=1, stop_token_ids=[4], n=2)))
    first, second = (s.sampling for s in core.submissions)
    assert (first.temperature, first.top_p, first.top_k, first.seed, first.min_tokens) == (0.7, 0.1, -1, -3, 1)
    assert first.stop_token_ids == (4,)
    assert second.seed == -2
    assert first.presence_penalty is None


async def test_n_choices(served: Served) -> None:
    core, stub = served
    core.script = saying("hello")
    messages = await collect(stub.Generate(request(stream=True, n=3)))
    for index in range(3):
        assert "".join(m.chunk.text for m in messages if m.HasField("chunk") and m.chunk.index == index) == "hello"
    assert sorted(m.complete.index for m in messages if m.HasField("complete")) == [0, 1, 2]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_ends_the_generation(served: Served, streamed: bool) -> None:
    core, stub = served
    core.script = playing(*(Tokens(token_ids=[i]) for i in ids_of("one STOP two")), asyncio.Event())
    messages = await collect(stub.Generate(request(stream=streamed, stop=["STOP"])))
    complete = messages[-1].complete
    assert (complete.text, complete.finish_reason, complete.matched_stop_str) == ("one ", "stop", "STOP")
    assert complete.metrics.e2e_s == 0.05
    assert set(core.generations[0].closed) == {"stop"}


async def test_metadata(served: Served) -> None:
    core, stub = served
    metadata = [("x-splitpoint-path", "colocated"), ("x-splitpoint-transport", "ucx"), ("x-request-id", "abc")]
    await collect(stub.Generate(request(), metadata=metadata, timeout=9))
    [submission] = core.submissions
    assert (submission.path, submission.transport, submission.client_request_id) == ("colocated", "ucx", "abc")
    assert 7 < submission.deadline_s < 9.5  # the wire rounds a timeout up


async def test_without_a_deadline_the_default_applies(served: Served) -> None:
    core, stub = served
    await collect(stub.Generate(request()))
    assert 599 < core.submissions[0].deadline_s <= 600


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


def details(exc: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Standard error details by type name."""
    trailing = dict(exc.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest):
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    return found


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.NO_WORKER, grpc.StatusCode.UNAVAILABLE),
        (Code.QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Code.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (Code.INVALID_VALUE, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_errors_carry_standard_details(served: Served, code: Code, status: grpc.StatusCode) -> None:
    core, stub = served
    core.script = playing(SplitpointError(code, "because", param="thing", retry_after_s=1.5))
    exc = await failure(stub.Generate(request(stream=True)))
    assert (exc.code(), exc.details()) == (status, "because")
    found = details(exc)
    assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == (code.value.upper(), "splitpoint")
    assert found["RetryInfo"].retry_delay.ToMilliseconds() == 1500
    assert found["BadRequest"].field_violations[0].field == "thing"
    assert dict(exc.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1500"
    ours = from_rpc_error(exc)
    assert (ours.code, ours.param, ours.tokens_sent) == (code, "thing", 0)


async def test_open_requests_are_bounded() -> None:
    let_go = asyncio.Event()
    core = FakeCore(playing(let_go, Finished(finish_reason="length")))
    made = frontend(max_open_requests=1)
    async with grpc_server(core, made) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        held = asyncio.create_task(collect(stub.Generate(request())))
        await core.arrived.wait()
        exc = await failure(stub.Generate(request()))
        assert exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_open_requests is 1" in (exc.details() or "")
        assert dict(exc.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"
        let_go.set()
        assert len(await held) == 1
    assert made.door.open_requests == 0


async def test_an_error_after_tokens_says_how_many(served: Served) -> None:
    core, stub = served
    core.script = playing(*(Tokens(token_ids=[i]) for i in ids_of("hello")), SplitpointError(Code.STREAM_BROKEN, "worker died"))
    exc = await failure(stub.Generate(request(stream=True)))
    assert exc.code() is grpc.StatusCode.ABORTED
    assert from_rpc_error(exc).tokens_sent == len(ids_of("hello"))
    assert details(exc)["ErrorInfo"].metadata["tokens_sent"] == str(len(ids_of("hello")))
    assert from_rpc_error(await failure(stub.Generate(request()))).tokens_sent == 0


async def test_a_fault_of_ours_shows_an_id_and_nothing_else(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    core, stub = served
    core.script = playing(RuntimeError("secret detail"))
    exc = await failure(stub.Generate(request()))
    error = from_rpc_error(exc)
    assert exc.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (exc.details() or "")
    assert error.error_id
    assert error.error_id in caplog.text


async def test_no_initial_metadata_before_the_first_token(served: Served) -> None:
    core, stub = served
    gate = asyncio.Event()
    core.script = playing(gate, Tokens(token_ids=[5]), Finished(finish_reason="length"))
    call = stub.Generate(request(stream=True))
    headers = asyncio.ensure_future(call.initial_metadata())
    await asyncio.wait_for(core.arrived.wait(), 5)
    await core.generations[0].entered.wait()
    await stub.ListModels(generation_pb2.ListModelsRequest())
    assert not headers.done()
    gate.set()
    await asyncio.wait_for(headers, 5)
    await collect(call)


async def test_retries_by_service_config_reach_the_core_again() -> None:
    config = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s", "maxBackoff": "0.1s",'
        ' "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}'
    )
    core = FakeCore()
    scripts = iter([playing(SplitpointError(Code.NO_WORKER, "none yet")), saying("hello")])
    core.script = lambda submission: next(scripts)(submission)
    async with grpc_server(core, frontend(), [("grpc.service_config", config)]) as channel:
        [message] = await collect(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request()))
    assert message.complete.text == "hello"
    assert len(core.generations) == 2


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_cancels_closes_every_choice(served: Served, n: int) -> None:
    core, stub = served
    core.script = playing(Tokens(token_ids=[5]), asyncio.Event())
    call = stub.Generate(request(stream=True, n=n))
    await anext(aiter(call))
    call.cancel()
    await asyncio.wait_for(asyncio.gather(*(g.ended.wait() for g in core.generations)), 5)
    assert [g.closed for g in core.generations] == [["client_left"]] * n


async def test_a_client_deadline_closes_the_choice(served: Served) -> None:
    core, stub = served
    core.script = playing(asyncio.Event())
    exc = await failure(stub.Generate(request(stream=True), timeout=0.3))
    assert exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(core.generations[0].ended.wait(), 5)
    assert core.generations[0].closed == ["client_left"]


async def test_every_call_is_counted_once_with_its_code() -> None:
    recorded, core = Recorder(), FakeCore()
    async with grpc_server(core, recorded.frontend()) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await collect(stub.Generate(request()))
        await failure(stub.Generate(request(n=0)))
        core.script = playing(asyncio.Event())
        await failure(stub.Generate(request(), timeout=0.2))
        await asyncio.wait_for(core.generations[-1].ended.wait(), 5)
    assert recorded.ended == [
        ("grpc", "generate", "ok"),
        ("grpc", "generate", "invalid_value"),
        ("grpc", "generate", "cancelled"),
    ]


async def test_list_models(served: Served) -> None:
    _, stub = served
    [model] = (await stub.ListModels(generation_pb2.ListModelsRequest())).models
    assert (model.id, model.max_model_len, model.created) == ("tiny", 256, 1_700_000_000)


async def test_health_checks_and_watches() -> None:
    front, core = frontend(readiness_poll_s=0.02), FakeCore(is_ready=False)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with grpc_server(core, front) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert await check("") == serving
        assert await check(GENERATION_SERVICE) == not_serving
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check("nonsense")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        first = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION_SERVICE))
        second = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION_SERVICE))
        assert [(await anext(aiter(w))).status for w in (first, second)] == [not_serving] * 2
        second.cancel()
        core.is_ready = True
        assert (await anext(aiter(first))).status == serving
        assert await check(GENERATION_SERVICE) == serving
        front.draining.set()
        assert [m.status async for m in first] == [not_serving]
        assert await check("") == serving


@pytest.mark.parametrize("on", [True, False])
async def test_reflection(on: bool) -> None:
    async with grpc_server(FakeCore(), frontend(grpc_reflection=on)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if on:
            [answer] = [m async for m in call]
            names = {s.name for s in answer.list_services_response.service}
            assert {GENERATION_SERVICE, "grpc.health.v1.Health"} <= names
        else:
            assert (await failure(call)).code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_public_port_bounds_messages_and_allows_pings() -> None:
    options = dict(server_options(frontend().settings))
    assert options["grpc.max_receive_message_length"] == 64 * 1024 * 1024
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert options["grpc.keepalive_permit_without_calls"] == 1
