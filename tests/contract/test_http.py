"""The OpenAI HTTP front end over a scripted core, through a real server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from coordinator.gateway import constraint
from coordinator.gateway.api import Finished, Tokens
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import common_pb2
from tests.support.gateway import (
    EOS,
    FakeCore,
    Recorder,
    eos_id,
    frontend,
    http_server,
    ids_of,
    logprobs_of,
    playing,
    saying,
    tiny_tokenizer,
)

pytestmark = pytest.mark.timeout(30)
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CHAT_URL = "/v1/chat/completions"
URL = "/v1/completions"


def parse_events(text: str) -> list[tuple[str, Any]]:
    """(event name, data) of a whole stream; data is JSON but for [DONE]."""
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            data = lines["data"]
            events.append((lines.get("event", "message"), data if data == "[DONE]" else json.loads(data)))
    return events


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    response = await client.post(url, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.text)


@pytest.fixture
def recorded() -> Recorder:
    return Recorder()


def all_ended(core: FakeCore) -> bool:
    return all(g.exhausted or g.closed for g in core.generations)


@pytest.fixture
async def served() -> AsyncIterator[tuple[FakeCore, httpx.AsyncClient]]:
    core = FakeCore()
    async with http_server(core, frontend()) as client:
        yield core, client
    assert all_ended(core)


Served = tuple[FakeCore, httpx.AsyncClient]


async def test_a_chat_answer(served: Served) -> None:
    core, client = served
    core.script = saying("hello wörld 🙂", cached=3)
    response = await client.post(CHAT_URL, json=CHAT, headers={"x-request-id": "abc-1"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "abc-1"
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello wörld 🙂"}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    prompt = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    said = len(ids_of("hello wörld 🙂")) + 1
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": said,
        "total_tokens": len(prompt) + said,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    [submission] = core.submissions
    assert submission.prompt_token_ids == prompt
    assert submission.client_request_id == "abc-1"
    assert submission.request_id != "abc-1"
    assert submission.sampling.max_tokens == 256 - len(prompt)
    assert (submission.path, submission.transport) == (None, None)
    assert 599 < submission.deadline_s <= 600


async def test_metrics_hold_the_ledger_and_vllms_names(served: Served) -> None:
    _, client = served
    metrics = (await client.post(CHAT_URL, json=CHAT)).json()["metrics"]
    assert (metrics["path"], metrics["transport"], metrics["attempts"]) == ("split", "ucx", 3)
    assert (metrics["ttft_ms"], metrics["time_to_first_token_ms"], metrics["e2e_ms"]) == (10.0, 10.0, 50.0)
    assert {"queue_time_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second", "prefill_ms", "residual_ms"} <= set(
        metrics
    )


async def test_a_stream_has_one_token_per_chunk_and_the_end_on_the_last(served: Served) -> None:
    core, client = served
    core.script = saying("hello wörld 🙂")
    events = await stream(client, CHAT_URL, {**CHAT, "stream_options": {"include_usage": True}})
    assert events[-1] == ("message", "[DONE]")
    usage_chunk = events[-2][1]
    chunks = [data for _, data in events[:-2]]
    assert len(chunks) == len(ids_of("hello wörld 🙂")) + 1
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "hello wörld 🙂"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c["id"] for c in chunks}) == 1
    assert all(c["object"] == "chat.completion.chunk" and "usage" not in c for c in chunks)
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"]["completion_tokens"] == len(chunks)
    assert usage_chunk["metrics"]["e2e_ms"] == 50.0


async def test_without_include_usage_there_is_no_usage_chunk(served: Served) -> None:
    _, client = served
    events = await stream(client, CHAT_URL, CHAT)
    assert all(data == "[DONE]" or data["choices"] for _, data in events)


async def test_continuous_usage_counts_up(served: Served) -> None:
    core, client = served
    core.script = saying("hello world")
    events = await stream(client, URL, {"prompt": "x", "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [d["usage"]["completion_tokens"] for _, d in events[:-1]]
    assert counts == [*range(1, len(counts)), len(counts) - 1]


async def test_max_tokens_one_and_length(served: Served) -> None:
    core, client = served
    events = await stream(client, URL, {"prompt": "x", "max_tokens": 1})
    [(_, chunk), done] = events
    assert done == ("message", "[DONE]")
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert chunk["choices"][0]["text"] == tiny_tokenizer().decode(ids_of("hello world")[:1])
    assert core.submissions[0].sampling.max_tokens == 1


async def test_completion_defaults_to_sixteen_tokens(served: Served) -> None:
    core, client = served
    await client.post(URL, json={"prompt": "x"})
    assert core.submissions[0].sampling.max_tokens == 16


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_ends_the_generation(served: Served, streamed: bool, include: bool) -> None:
    core, client = served
    core.script = playing(*(Tokens(token_ids=[i]) for i in ids_of("one two STOP three")), asyncio.Event())
    body = {"prompt": "x", "max_tokens": 100, "stop": ["zzz", " STOP"], "include_stop_str_in_output": include}
    if streamed:
        choices = [d["choices"][0] for _, d in (await stream(client, URL, body))[:-1]]
        text, last = "".join(c["text"] for c in choices), choices[-1]
    else:
        last = (await client.post(URL, json=body)).json()["choices"][0]
        text = last["text"]
    assert text == ("one two STOP" if include else "one two")
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", " STOP")
    assert core.generations[0].closed == ["stop"]


async def test_a_stop_string_does_not_count_before_min_tokens(served: Served) -> None:
    core, client = served
    core.script = saying("a STOP b STOP c")
    least = len(ids_of("a STOP b"))
    body = {"prompt": "x", "max_tokens": 100, "stop": " STOP", "min_tokens": least}
    assert (await client.post(URL, json=body)).json()["choices"][0]["text"] == "a STOP b"


async def test_a_stop_string_on_the_last_allowed_token(served: Served) -> None:
    core, client = served
    core.script = saying("a STOP", finish="length")
    choice = (await client.post(URL, json={"prompt": "x", "max_tokens": len(ids_of("a STOP")), "stop": "STOP"})).json()[
        "choices"
    ][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a ", "stop", "STOP")


async def test_held_back_text_is_given_out_at_the_end(served: Served) -> None:
    core, client = served
    core.script = saying("the end ST")
    events = await stream(client, URL, {"prompt": "x", "max_tokens": 100, "stop": "STOP"})
    assert "".join(d["choices"][0]["text"] for _, d in events[:-1]) == "the end ST"


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({}, "hello", None),
        ({"skip_special_tokens": False}, "hello", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, f"hello{EOS}", None),
    ],
)
async def test_eos_shows_no_text_unless_asked_for(served: Served, fields: Any, text: str, reason: Any) -> None:
    core, client = served
    core.script = saying("hello")
    choice = (await client.post(URL, json={"prompt": "x", **fields})).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)


async def test_a_stop_token_is_named_and_hidden(served: Served) -> None:
    core, client = served
    [*head, last] = ids_of("hello world")
    core.script = playing(*(Tokens(token_ids=[i]) for i in [*head, last]), Finished(finish_reason="stop", matched_token_id=last))
    body = {"prompt": "x", "stop_token_ids": [last], "return_token_ids": True}
    choice = (await client.post(URL, json=body)).json()["choices"][0]
    assert choice["text"] == tiny_tokenizer().decode(head)
    assert (choice["stop_reason"], choice["token_ids"]) == (last, [*head, last])
    assert choice["prompt_token_ids"] == ids_of("x")


async def test_ignore_eos_goes_on(served: Served) -> None:
    core, client = served
    ids = [*ids_of("a"), eos_id(), *ids_of("b")]
    core.script = playing(*(Tokens(token_ids=[i]) for i in ids), Finished(finish_reason="length"))
    body = {"prompt": "x", "ignore_eos": True, "max_tokens": 3}
    choice = (await client.post(URL, json=body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")


async def test_several_tokens_in_one_event_are_several_chunks(served: Served) -> None:
    core, client = served
    ids = ids_of("hello world")
    core.script = playing(Tokens(token_ids=ids[:3]), Tokens(token_ids=ids[3:]), Finished(finish_reason="length"))
    events = await stream(client, URL, {"prompt": "x", "max_tokens": len(ids)})
    assert len(events) == len(ids) + 1
    assert "".join(d["choices"][0]["text"] for _, d in events[:-1]) == "hello world"


@pytest.mark.parametrize("streamed", [False, True])
async def test_n_choices_over_several_prompts(served: Served, streamed: bool) -> None:
    core, client = served
    core.script = saying("hello", cached=1)
    body = {"prompt": ["a", "bb"], "n": 2, "seed": 7, "temperature": 0.5, "max_tokens": 9}
    if streamed:
        options = {"stream_options": {"include_usage": True}}
        events = await stream(client, URL, {**body, **options})
        texts = ["".join(d["choices"][0]["text"] for _, d in events[:-2] if d["choices"][0]["index"] == i) for i in range(4)]
        usage = events[-2][1]["usage"]
        assert len(events[-2][1]["metrics"]["choices"]) == 4
    else:
        reply = (await client.post(URL, json=body)).json()
        texts = [c["text"] for c in reply["choices"]]
        assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
        usage = reply["usage"]
    assert texts == ["hello"] * 4
    prompts = len(ids_of("a")) + len(ids_of("bb"))
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (prompts, 2)
    assert usage["completion_tokens"] == 4 * (len(ids_of("hello")) + 1)
    assert [(s.prompt_token_ids, s.sampling.seed) for s in core.submissions] == [
        (ids_of(p), seed) for p in ("a", "bb") for seed in (7, 8)
    ]
    assert len({s.request_id for s in core.submissions}) == 4


async def test_token_id_prompts(served: Served) -> None:
    core, client = served
    await client.post(URL, json={"prompt": [5, 6, 7]})
    await client.post(URL, json={"prompt": [[5], [6, 7]]})
    assert [s.prompt_token_ids for s in core.submissions] == [[5, 6, 7], [5], [6, 7]]


async def test_chat_logprobs(served: Served) -> None:
    core, client = served
    core.script = saying("é", finish="length")
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    content = (await client.post(CHAT_URL, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for item in content for b in item["bytes"]) == "é".encode()
    assert [item["logprob"] for item in content] == [-0.5, -0.5]
    assert [[t["logprob"] for t in item["top_logprobs"]] for item in content] == [[-0.5, -1.5]] * 2
    events = await stream(client, CHAT_URL, body)
    streamed = [item for _, d in events[:-1] for item in d["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    assert core.submissions[0].sampling.logprobs == 2


async def test_completion_logprobs(served: Served) -> None:
    core, client = served
    core.script = saying("hé you", finish="length")
    count = len(ids_of("hé you"))
    body = {"prompt": "x", "logprobs": 3, "max_tokens": count}
    record = (await client.post(URL, json=body)).json()["choices"][0]["logprobs"]
    assert len(record["tokens"]) == len(record["token_logprobs"]) == len(record["top_logprobs"]) == count
    assert record["text_offset"][0] == 0
    assert record["text_offset"][-1] == len("hé you") - len(record["tokens"][-1])
    assert record["tokens"][1] == "bytes:\\xc3"
    assert -9999.0 in record["top_logprobs"][0].values()
    events = await stream(client, URL, body)
    assert [o for _, d in events[:-1] for o in d["choices"][0]["logprobs"]["text_offset"]] == record["text_offset"]
    as_ids = (await client.post(URL, json={**body, "return_tokens_as_token_ids": True})).json()["choices"][0]["logprobs"]
    assert as_ids["tokens"] == [f"token_id:{i}" for i in ids_of("hé you")]


@pytest.mark.parametrize("chat", [True, False])
async def test_facts_about_the_prompt_stand_where_vllm_puts_them(served: Served, chat: bool) -> None:
    core, client = served
    core.script = playing(
        Tokens(token_ids=[5], prompt_logprobs=[common_pb2.PositionLogprobs(), logprobs_of(7)]), Finished(finish_reason="length")
    )
    body = {"return_token_ids": True, "max_tokens": 1}
    url, asked = (CHAT_URL, {**CHAT, **body}) if chat else (URL, {"prompt": "x", **body})
    reply = (await client.post(url, json={**asked, "prompt_logprobs": 1})).json()
    assert core.submissions[0].sampling.prompt_logprobs == 1
    prompt = core.submissions[0].prompt_token_ids
    holder = reply if chat else reply["choices"][0]
    assert holder["prompt_token_ids"] == prompt
    assert holder["prompt_logprobs"][0] is None
    assert holder["prompt_logprobs"][1]["7"] == {"logprob": -0.5, "rank": 1, "decoded_token": tiny_tokenizer().token_text(7)}
    assert reply["choices"][0]["token_ids"] == [5]
    first = (await stream(client, url, asked))[0][1]
    assert (first if chat else first["choices"][0])["prompt_token_ids"] == prompt
    assert first["choices"][0]["token_ids"] == [5]


async def test_every_request_is_counted_once_with_its_code(recorded: Recorder) -> None:
    core = FakeCore()
    async with http_server(core, recorded.frontend()) as client:
        await client.post(CHAT_URL, json=CHAT)
        await client.post(URL, json={"prompt": ""})
        core.script = playing(Tokens(token_ids=[5]), SplitpointError(Code.STREAM_BROKEN, "worker died"))
        await client.post(URL, json={"prompt": "x", "stream": True})
        assert (await client.get("/metrics")).text == "recorded 3"
    assert recorded.ended == [
        ("http", "chat_completions", "ok"),
        ("http", "completions", "invalid_value"),
        ("http", "completions", "stream_broken"),
    ]


async def test_path_transport_and_deadline_headers(served: Served) -> None:
    core, client = served
    headers = {"x-splitpoint-path": "split", "X-Splitpoint-Transport": "grpc", "x-splitpoint-deadline-s": "7"}
    await client.post(CHAT_URL, json=CHAT, headers=headers)
    [submission] = core.submissions
    assert (submission.path, submission.transport) == ("split", "grpc")
    assert 6 < submission.deadline_s <= 7


@pytest.mark.parametrize(
    ("code", "status"),
    [(Code.NO_WORKER, 503), (Code.QUEUE_FULL, 429), (Code.DEADLINE_EXCEEDED, 504), (Code.INVALID_VALUE, 400)],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_token_has_its_own_status(
    served: Served, code: Code, status: int, streamed: bool
) -> None:
    core, client = served
    core.script = playing(SplitpointError(code, "because", param="thing", retry_after_s=2.5))
    response = await client.post(CHAT_URL, json={**CHAT, "stream": streamed})
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["message"], error["param"], error["code"], error["reason"]) == ("because", "thing", status, code.value)
    assert isinstance(error["type"], str)
    assert response.headers.get("retry-after") == ("3" if status in (429, 503) else None)


async def test_an_error_after_tokens_is_an_error_event(served: Served) -> None:
    core, client = served
    ids = ids_of("hello world")
    core.script = playing(*(Tokens(token_ids=[i]) for i in ids[:3]), SplitpointError(Code.STREAM_BROKEN, "worker died"))
    response = await client.post(CHAT_URL, json={**CHAT, "stream": True})
    events = parse_events(response.text)
    assert [name for name, _ in events] == ["message"] * 3 + ["error", "message"]
    error = events[3][1]["error"]
    assert (error["reason"], error["code"], error["tokens_sent"]) == ("stream_broken", 503, 3)
    assert events[4][1] == "[DONE]"
    assert core.generations[0].closed == ["failed"]
    whole = await client.post(CHAT_URL, json=CHAT)
    assert whole.status_code == 503
    assert "tokens_sent" not in whole.json()["error"]


async def test_a_fault_of_ours_shows_an_id_and_nothing_else(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    core, client = served
    core.script = playing(RuntimeError("secret detail"))
    response = await client.post(CHAT_URL, json=CHAT)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert "secret" not in response.text
    assert error["error_id"] in error["message"]
    assert error["error_id"] in caplog.text


async def test_one_failed_choice_ends_the_others(served: Served) -> None:
    core, client = served
    scripts = iter([saying("hello"), playing(SplitpointError(Code.NO_WORKER, "gone")), playing(asyncio.Event())])
    core.script = lambda submission: next(scripts)(submission)
    response = await client.post(URL, json={"prompt": "x", "n": 3})
    assert response.status_code == 503
    assert all_ended(core)
    assert core.generations[2].closed == ["failed"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_closes_every_choice(served: Served, streamed: bool, n: int) -> None:
    core, client = served
    core.script = playing(Tokens(token_ids=ids_of("hello")[:1]), asyncio.Event())
    request = client.build_request("POST", URL, json={"prompt": "x", "n": n, "stream": streamed})
    sending = asyncio.create_task(client.send(request, stream=True))
    await core.arrived.wait()
    if streamed:
        response = await sending
        await anext(response.aiter_raw())
        await response.aclose()
    else:
        for generation in core.generations:
            await generation.entered.wait()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    await asyncio.wait_for(asyncio.gather(*(g.ended.wait() for g in core.generations)), 5)
    assert [g.closed for g in core.generations] == [["client_left"]] * n


async def test_silence_is_broken_by_comments_and_a_late_error_is_an_event() -> None:
    gate = asyncio.Event()
    core = FakeCore(playing(gate, SplitpointError(Code.NO_WORKER, "gone")))
    async with (
        http_server(core, frontend(sse_keepalive_s=0.02)) as client,
        client.stream("POST", CHAT_URL, json={**CHAT, "stream": True}) as response,
    ):
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(3)] == [": keep-alive", "", ": keep-alive"]
        gate.set()
        rest = "\n".join([line async for line in lines])
    assert [name for name, _ in parse_events(rest)] == ["error", "message"]


async def test_a_body_that_never_ends_is_given_up_at_the_deadline() -> None:
    core = FakeCore(saying("hello"))
    made = frontend(default_deadline_s=0.2)
    async with http_server(core, made) as client:
        host, port = client.base_url.host, client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(10):
            status = await reader.readline()
            rest = await reader.read()
        writer.close()
        assert b" 504 " in status
        assert b'"reason": "deadline_exceeded"' in rest
        assert b"body" in rest
    assert core.submissions == []


async def test_open_requests_are_bounded_before_their_body_is_read() -> None:
    let_go = asyncio.Event()
    core = FakeCore(playing(let_go, Finished(finish_reason="length")))
    made = frontend(max_open_requests=1, max_body_bytes=1000)
    async with http_server(core, made) as client:
        held = asyncio.create_task(client.post(URL, json={"prompt": "hi"}))
        await core.arrived.wait()
        for body in (b'{"prompt": "hi"}', b"x" * 2000):
            refused = await client.post(URL, content=body)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["reason"] == "queue_full"
            assert "max_open_requests is 1" in refused.json()["error"]["message"]
        let_go.set()
        assert (await held).status_code == 200
    assert made.door.open_requests == 0


async def test_a_long_body_is_read_beside_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    core, client = served
    core.script = saying("hello")
    threads: list[bool] = []
    check = constraint.check_schema

    def checking(path: str, text: str) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        check(path, text)

    monkeypatch.setattr(constraint, "check_schema", checking)
    for properties in (1, 1000):
        schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
        response = await client.post(URL, json={"prompt": "hi", "structured_outputs": {"json": schema}})
        assert response.status_code == 200, response.text
    assert threads == [True, False]


async def test_no_status_is_sent_before_the_first_token() -> None:
    gate = asyncio.Event()
    core = FakeCore(playing(gate, Tokens(token_ids=[5]), Finished(finish_reason="length")))
    async with http_server(core, frontend()) as client:
        request = client.build_request("POST", URL, json={"prompt": "x", "stream": True, "max_tokens": 1})
        sending = asyncio.create_task(client.send(request))
        await core.arrived.wait()
        await core.generations[0].entered.wait()
        # The server has had its turn many times over; nothing may have come.
        for _ in range(50):
            await client.get("/version")
        assert not sending.done()
        gate.set()
        assert (await sending).status_code == 200


async def test_service_endpoints(served: Served) -> None:
    core, client = served
    assert (await client.get("/health")).status_code == 200
    core.is_ready = False
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/version")).json()["versions"] == {"vllm": "0.32.0"}
    assert (await client.get("/metrics")).status_code == 200
    [model] = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)
    assert (await client.get("/v1/models/tiny")).json() == model
    for method, path, status in (("GET", "/v1/models/other", 404), ("GET", "/nope", 404), ("GET", URL, 405)):
        response = await client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["code"] == status


async def test_draining_is_unhealthy_but_serves() -> None:
    front = frontend()
    async with http_server(FakeCore(), front) as client:
        front.draining.set()
        assert (await client.get("/health")).status_code == 503
        assert (await client.post(CHAT_URL, json=CHAT)).status_code == 200


async def test_the_openai_client_works_unchanged(served: Served) -> None:
    core, http = served
    core.script = saying("hello wörld")
    client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    try:
        assert [m.id async for m in client.models.list()] == ["tiny"]
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=1)
        assert whole.choices[0].message.content == "hello wörld"
        pieces = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in pieces]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello wörld"
        assert chunks[-1].usage is not None
        completion = await client.completions.create(model="tiny", prompt="x")
        assert completion.choices[0].text == "hello wörld"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="x")
        core.script = playing(Tokens(token_ids=[5]), SplitpointError(Code.STREAM_BROKEN, "worker died"))
        broken = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="worker died"):
            _ = [chunk async for chunk in broken]
    finally:
        await client.close()
