"""Bad requests over both front ends: the table's status, the field and the limit by name, and nothing reaches the core."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from protos.errors import TABLE, Code
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.support.gateway import FakeCore, frontend, grpc_server, http_server, tiny_tokenizer

pytestmark = pytest.mark.timeout(30)

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
VOCAB = tiny_tokenizer().vocab_size
LAST_ID = str(VOCAB - 1)
INVALID = Code.INVALID_VALUE
GIVEN_TWICE = {
    "x-splitpoint-path": ("split", "colocated"),
    "x-splitpoint-pools": ("one", "other"),
    "x-splitpoint-transport": ("ucx", "grpc"),
    "x-splitpoint-deadline-s": ("5", "6"),
    "x-splitpoint-session": ("here", "there"),
    "x-request-id": ("this", "that"),
}
"""Each value is right by itself."""


class Http(NamedTuple):
    """One bad HTTP request. `says` are parts of the message beside the field's name."""

    kind: str
    url: str
    body: Any
    param: str
    says: tuple[str, ...] = ()
    code: Code = INVALID
    headers: dict[str, str] = {}  # noqa: RUF012


def chat(kind: str, param: str, *says: str, code: Code = INVALID, **fields: Any) -> Http:
    return Http(kind, CHAT, {"messages": MESSAGES, **fields}, param, says, code)


def completion(kind: str, param: str, *says: str, code: Code = INVALID, **fields: Any) -> Http:
    return Http(kind, COMPLETION, {"prompt": "x", **fields}, param, says, code)


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


NUMERIC: list[tuple[str, Any, Any, str]] = [
    ("temperature", -0.1, 2.1, "[0, 2]"),
    ("top_p", 0, 1.1, "(0, 1]"),
    ("top_k", -2, 2**31, "[-1, 2147483647]"),
    ("min_p", -0.1, 1.1, "[0, 1]"),
    ("frequency_penalty", -2.1, 2.1, "[-2, 2]"),
    ("presence_penalty", -2.1, 2.1, "[-2, 2]"),
    ("repetition_penalty", 0, 101, "(0, 100]"),
    ("max_tokens", 0, 257, "[1, 256]"),
    ("min_tokens", -1, 257, "[0, 256]"),
    ("n", 0, 65, "[1, 64]"),
    ("prompt_logprobs", -1, 21, "[0, 20]"),
    ("seed", -(2**63) - 1, 2**63, "[-9223372036854775808, 9223372036854775807]"),
]

HTTP_CASES: list[Http] = [
    # missing
    Http("missing", CHAT, {"model": "tiny"}, "messages", ("missing",)),
    Http("missing", COMPLETION, {"model": "tiny"}, "prompt", ("missing",)),
    Http("missing", CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", ("string",)),
    Http("missing", CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", ("user",)),
    chat("missing", "response_format.json_schema", "missing", response_format={"type": "json_schema"}),
    # empty
    Http("empty", CHAT, {"messages": []}, "messages", ("at least 1",)),
    Http("empty", COMPLETION, {"prompt": ""}, "prompt", ("at least 1",)),
    Http("empty", COMPLETION, {"prompt": []}, "prompt", ("non-empty",)),
    Http("empty", COMPLETION, {"prompt": ["a", ""]}, "prompt[1]", ("at least 1",)),
    Http("empty", COMPLETION, {"prompt": [[1], []]}, "prompt[1]", ("at least 1",)),
    Http("empty", CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content", ("at least 1",)),
    completion("empty", "stop", "1 to 256", stop=["a", ""]),
    completion("empty", "allowed_token_ids", "at least 1", allowed_token_ids=[]),
    # wrong type
    Http("type", CHAT, {"messages": "hi"}, "messages", ("list",)),
    Http("type", CHAT, {"messages": ["hi"]}, "messages[0]", ("object",)),
    Http("type", CHAT, {"messages": MESSAGES, "model": 7}, "model", ("string",)),
    Http("type", COMPLETION, {"prompt": 7}, "prompt", ("text",)),
    Http("type", COMPLETION, {"prompt": {"a": 1}}, "prompt", ("text",)),
    Http("type", COMPLETION, {"prompt": ["a", [1]]}, "prompt", ("not both",)),
    Http("type", COMPLETION, {"prompt": [1, "a"]}, "prompt", (f"[0, {LAST_ID}]",)),
    Http("type", COMPLETION, {"prompt": [1.5]}, "prompt", (f"[0, {LAST_ID}]",)),
    chat("type", "temperature", "[0, 2]", temperature="hot"),
    chat("type", "max_tokens", "[1, 256]", max_tokens="10"),
    chat("type", "max_completion_tokens", "[1, 256]", max_completion_tokens=True),
    chat("type", "n", "[1, 64]", n=1.5),
    chat("type", "stream", "true or false", stream="yes"),
    chat("type", "logprobs", "true or false", logprobs=3),
    completion("type", "logprobs", "[0, 20]", logprobs=True),
    chat("type", "logit_bias", "object", logit_bias=[1]),
    chat("type", "stop", "string", stop=5),
    chat("type", "stream_options", "object", stream=True, stream_options="usage"),
    chat("type", "stream_options.include_usage", "true or false", stream=True, stream_options={"include_usage": 1}),
    # out of range, both ends of each numeric field
    *(completion("range", name, limits, **{name: value}) for name, low, high, limits in NUMERIC for value in (low, high)),
    *(completion("range", "logprobs", "[0, 20]", logprobs=value) for value in (-1, 21)),
    *(chat("range", "top_logprobs", "[0, 20]", logprobs=True, top_logprobs=value) for value in (-1, 21)),
    *(chat("range", "max_completion_tokens", "[1, 256]", max_completion_tokens=value) for value in (0, 257)),
    *(completion("range", "logit_bias", "[-100, 100]", logit_bias={"5": value}) for value in (-101, 101)),
    *(completion("range", "logit_bias", f"[0, {LAST_ID}]", logit_bias={key: 1}) for key in ("-1", str(VOCAB))),
    *(completion("range", "stop_token_ids", f"[0, {LAST_ID}]", stop_token_ids=[value]) for value in (-1, VOCAB)),
    *(completion("range", "allowed_token_ids", f"[0, {LAST_ID}]", allowed_token_ids=[value]) for value in (-1, VOCAB)),
    *(Http("range", COMPLETION, {"prompt": [value]}, "prompt", (f"[0, {LAST_ID}]",)) for value in (-1, VOCAB)),
    completion("range", "stop", "at most 16", stop=[str(i) for i in range(17)]),
    completion("range", "stop", "256", stop="x" * 257),
    Http("range", COMPLETION, {"prompt": ["x"] * 65}, "prompt", ("at most 64", "65")),
    Http("range", COMPLETION, {"prompt": ["x"] * 33, "n": 2, "temperature": 1}, "n", ("at most 64",)),
    # over-long prompt
    Http("long", COMPLETION, {"prompt": [5] * 250, "max_tokens": 10}, "prompt", ("250", "10", "256"), Code.PROMPT_TOO_LONG),
    Http("long", COMPLETION, {"prompt": [5] * 256}, "prompt", ("256", "1", "257"), Code.PROMPT_TOO_LONG),
    Http("long", COMPLETION, {"prompt": "ab " * 9000}, "prompt", ("256", "max_tokens"), Code.PROMPT_TOO_LONG),
    Http("long", COMPLETION, {"prompt": [[5], [5] * 300]}, "prompt[1]", ("300", "256"), Code.PROMPT_TOO_LONG),
    Http(
        "long",
        CHAT,
        {"messages": [{"role": "user", "content": "zq" * 120}], "max_completion_tokens": 100},
        "messages",
        ("max_completion_tokens is 100", "256"),
        Code.PROMPT_TOO_LONG,
    ),
    # unknown model
    chat("model", "model", "tiny", code=Code.UNKNOWN_MODEL, model="gpt-4"),
    completion("model", "model", "tiny", code=Code.UNKNOWN_MODEL, model="TINY"),
    chat("model", "model", "tiny", code=Code.UNKNOWN_MODEL, model="../etc/passwd"),
    # invalid UTF-8, Unicode and JSON
    Http("utf8", CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', "body", ("UTF-8", "byte")),
    Http("utf8", COMPLETION, b'{"prompt": "\xc3\x28"}', "body", ("UTF-8",)),
    Http("utf8", COMPLETION, '{"prompt": "x"}'.encode("utf-16"), "body", ("UTF-8",)),
    Http("utf8", COMPLETION, b'{"prompt": "\\ud800"}', "prompt", ("surrogate",)),
    Http("utf8", CHAT, b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "messages[0].content", ("surrogate",)),
    Http("json", CHAT, b"", "body", ("JSON",)),
    Http("json", CHAT, b'{"messages": ', "body", ("JSON",)),
    Http("json", CHAT, b"{'messages': []}", "body", ("JSON",)),
    Http("json", CHAT, b"[]", "body", ("object",)),
    Http("json", COMPLETION, b"[" * 200_000, "body", ("JSON",)),
    Http("json", COMPLETION, b'{"prompt": "x", "temperature": NaN}', "temperature", ("[0, 2]",)),
    Http("json", COMPLETION, b'{"prompt": "x", "temperature": 1e999}', "temperature", ("[0, 2]",)),
    # impossible combinations
    completion("combination", "min_tokens", "max_tokens=5", min_tokens=6, max_tokens=5),
    completion("combination", "n", "greedy", n=2, temperature=0),
    chat("combination", "stream_options", "stream", stream_options={"include_usage": True}),
    chat("combination", "top_logprobs", "logprobs", top_logprobs=2),
    completion("combination", "prompt_logprobs", "stream", prompt_logprobs=1, stream=True),
    chat("combination", "continue_final_message", "both", continue_final_message=True, add_generation_prompt=True),
    chat("combination", "response_format", "together", response_format={"type": "json_object"}, guided_regex="a"),
    # broken schema
    chat("schema", "response_format.json_schema.schema", "JSON schema", response_format=schema({"type": "objekt"})),
    chat("schema", "response_format.json_schema.schema", "properties", response_format=schema({"properties": 1})),
    chat("schema", "response_format.json_schema.schema", "object", response_format=schema([1])),
    chat("schema", "response_format.type", "json_schema", response_format={"type": "yaml"}),
    chat("schema", "guided_regex", "regular expression", guided_regex="(a"),
    chat("schema", "structured_outputs.json", "JSON", structured_outputs={"json": "{"}),
    # known but not supported
    chat("unsupported", "tools", "not supported", code=Code.UNSUPPORTED_FIELD, tools=[{"type": "function"}]),
    chat("unsupported", "tool_choice", "not supported", code=Code.UNSUPPORTED_FIELD, tool_choice="required"),
    chat("unsupported", "modalities", "text", code=Code.UNSUPPORTED_FIELD, modalities=["text", "audio"]),
    chat("unsupported", "audio", "absent", code=Code.UNSUPPORTED_FIELD, audio={"voice": "x"}),
    completion("unsupported", "best_of", "1", code=Code.UNSUPPORTED_FIELD, best_of=2),
    completion("unsupported", "suffix", "absent", code=Code.UNSUPPORTED_FIELD, suffix="end"),
    completion("unsupported", "echo", "false", code=Code.UNSUPPORTED_FIELD, echo=True),
    completion("unsupported", "use_beam_search", "false", code=Code.UNSUPPORTED_FIELD, use_beam_search=True),
    completion("unsupported", "prompt_embeds", "absent", code=Code.UNSUPPORTED_FIELD, prompt_embeds="AAAA"),
    completion("unsupported", "lora_request", "absent", code=Code.UNSUPPORTED_FIELD, lora_request={"lora_name": "x"}),
    completion("unsupported", "priority", "0", code=Code.UNSUPPORTED_FIELD, priority=5),
    Http(
        "unsupported",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].type",
        ("text only",),
        Code.UNSUPPORTED_FIELD,
    ),
    Http("unsupported", CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", (), Code.UNSUPPORTED_FIELD),
    # transfer fields
    chat("transfer", "kv_transfer_params", code=Code.FORBIDDEN_FIELD, kv_transfer_params={"remote_host": "10.0.0.1"}),
    completion("transfer", "do_remote_decode", code=Code.FORBIDDEN_FIELD, do_remote_decode=True),
    completion("transfer", "bootstrap_host", code=Code.FORBIDDEN_FIELD, bootstrap_host="10.0.0.1"),
    completion("transfer", "remote_block_ids", code=Code.FORBIDDEN_FIELD, remote_block_ids=[1, 2]),
    completion("transfer", "vllm_xargs", code=Code.UNSUPPORTED_FIELD, vllm_xargs={"kv_transfer_params": "x"}),
    *(
        Http("transfer", COMPLETION, {"prompt": "x"}, name, (), Code.FORBIDDEN_FIELD, {name: "x"})
        for name in ("x-splitpoint-control-token", "x-splitpoint-transfer-id", "x-splitpoint-capability")
    ),
    # headers
    Http(
        "header", COMPLETION, {"prompt": "x"}, "x-splitpoint-path", ("split, colocated",), INVALID, {"x-splitpoint-path": "any"}
    ),
    *(
        Http("header", COMPLETION, {"prompt": "x"}, name, ("(0, 3600000]", says), INVALID, {name: value})
        for name in ("x-splitpoint-slo-ttft-ms", "x-splitpoint-slo-tpot-ms")
        for value, says in (
            ("0", '"0"'),
            ("-1", '"-1"'),
            ("3600001", '"3600001"'),
            ("soon", '"soon"'),
            ("nan", '"nan"'),
            ("", '""'),
        )
    ),
    Http(
        "header",
        COMPLETION,
        {"prompt": "x"},
        "x-splitpoint-path",
        ('one of split, colocated, got "auto"',),  # this gateway has no prediction model
        INVALID,
        {"x-splitpoint-path": "auto"},
    ),
    Http(
        "header",
        COMPLETION,
        {"prompt": "x"},
        "x-splitpoint-transport",
        ("ucx, grpc",),
        INVALID,
        {"x-splitpoint-transport": "tcp"},
    ),
    Http("header", COMPLETION, {"prompt": "x"}, "x-request-id", ("256",), INVALID, {"x-request-id": "x" * 257}),
    *(
        Http(
            "header",
            COMPLETION,
            {"prompt": "x"},
            "x-splitpoint-deadline-s",
            ("(0, 3600]",),
            INVALID,
            {"x-splitpoint-deadline-s": v},
        )
        for v in ("0", "3601", "soon")
    ),
]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    core = FakeCore()
    async with http_server(core, frontend()) as client:
        yield client
    assert core.generations == [], "a refused request reached the core"


@pytest.mark.parametrize("kind", sorted({case.kind for case in HTTP_CASES}))
def test_every_class_has_at_least_three_http_cases(kind: str) -> None:
    assert sum(case.kind == kind for case in HTTP_CASES) >= 3


async def test_http(http: httpx.AsyncClient) -> None:
    wrong = []
    for case in HTTP_CASES:
        content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
        response = await http.post(case.url, content=content, headers={"content-type": "application/json", **case.headers})
        error = response.json().get("error", {})
        expected = (TABLE[case.code].http, case.code.value, case.param, TABLE[case.code].http)
        found = (response.status_code, error.get("reason"), error.get("param"), error.get("code"))
        missing = [part for part in (case.param, *case.says) if part not in error.get("message", "")]
        if found != expected or missing or error["type"] != "invalid_request_error":
            wrong.append((case.kind, case.param, expected, found, missing, error.get("message")))
    assert wrong == []


async def test_a_header_that_is_given_twice_is_refused_by_its_name(http: httpx.AsyncClient) -> None:
    for name, values in GIVEN_TWICE.items():
        response = await http.post(COMPLETION, json={"prompt": "x"}, headers=[(name, value) for value in values])
        error = response.json()["error"]
        assert (response.status_code, error["reason"], error["param"]) == (400, INVALID.value, name)
        assert all(part in error["message"] for part in (name, "once", *values))


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_and_thrown_away(declared: bool) -> None:
    core, total = FakeCore(), 10_000_000

    async def body() -> AsyncIterator[bytes]:
        for _ in range(total // 10_000):
            yield b"x" * 10_000

    headers = {"content-length": str(total)} if declared else {}
    async with http_server(core, frontend(max_body_bytes=100_000)) as client:
        response = await client.post(COMPLETION, content=body(), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["reason"]) == (413, "body", "body_too_large")
    assert response.headers["connection"] == "close"
    assert "100000" in error["message"]
    assert core.generations == []


async def test_a_client_that_waits_for_the_answer_gets_it_before_its_body() -> None:
    async with http_server(FakeCore(), frontend(max_body_bytes=100_000)) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100001\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


async def test_a_body_just_over_the_limit_is_refused_and_one_at_it_is_not(http: httpx.AsyncClient) -> None:
    core = FakeCore()
    async with http_server(core, frontend(max_body_bytes=1000)) as client:
        for size, status in ((1001, 413), (1000, 200)):
            body = json.dumps({"prompt": "x", "user": ""})
            padded = body[:-2] + "u" * (size - len(body)) + body[-2:]
            assert len(padded) == size
            response = await client.post(COMPLETION, content=padded.encode())
            assert response.status_code == status
    assert len(core.generations) == 1


async def test_harmless_and_unknown_fields_are_accepted() -> None:
    core = FakeCore()
    body = {
        "prompt": "x", "user": "u", "metadata": {"a": "b"}, "brand_new": [1], "best_of": 1, "echo": False, "suffix": None,
        "tools": None, "stop": None, "logprobs": None, "kv_transfer_params": None, "response_format": {"type": "text"},
        "stream_options": None, "priority": 0, "use_beam_search": False, "temperature": None, "store": False,
    }  # fmt: skip
    async with http_server(core, frontend()) as client:
        response = await client.post(COMPLETION, json=body)
    assert response.status_code == 200
    assert len(core.generations) == 1


class Grpc(NamedTuple):
    """One bad gRPC request: a message, or raw bytes."""

    kind: str
    request: generation_pb2.GenerateRequest | bytes
    param: str
    says: tuple[str, ...] = ()
    code: Code = INVALID
    metadata: tuple[tuple[str, str], ...] = ()


def generate(kind: str, param: str, *says: str, code: Code = INVALID, **sampling: Any) -> Grpc:
    request = generation_pb2.GenerateRequest(text="x", sampling_params=common_pb2.SamplingParams(**sampling))
    return Grpc(kind, request, f"sampling_params.{param}", says, code)


def asking(kind: str, param: str, *says: str, code: Code = INVALID, **fields: Any) -> Grpc:
    return Grpc(kind, generation_pb2.GenerateRequest(**fields), param, says, code)


def told(*messages: tuple[str, str]) -> generation_pb2.ChatInput:
    return generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role=r, content=c) for r, c in messages])


def ids(*values: int) -> generation_pb2.TokenizedInput:
    return generation_pb2.TokenizedInput(input_ids=values)


def broken_string(tag: int) -> bytes:
    """A request whose string field `tag` is not UTF-8."""
    return bytes([tag << 3 | 2, 2, 0xC3, 0x28])


# The wire type itself bounds a seed.
GRPC_NUMERIC = [row for row in NUMERIC if row[0] != "seed"]

UNSUPPORTED = Code.UNSUPPORTED_FIELD
PLAIN = generation_pb2.GenerateRequest(text="x")

GRPC_CASES: list[Grpc] = [
    asking("missing", "input", "tokenized, text, chat"),
    asking("missing", "input", "tokenized, text, chat", model="tiny", stream=True),
    asking("missing", "chat.messages[0].role", "user", chat=told(("", "x"))),
    asking("empty", "text", "at least 1", text=""),
    asking("empty", "tokenized.input_ids", "at least 1", tokenized=ids()),
    asking("empty", "chat.messages", "at least 1", chat=told()),
    generate("empty", "stop", "1 to 256", stop=[""]),
    # A wrong type on the wire: field 4 (text) as a number, field 6 (sampling_params) as a string, a truncated message.
    Grpc("type", bytes([4 << 3 | 2, 200]), "body", ("wire format",)),
    Grpc("type", bytes([6 << 3 | 2, 3, 1, 2, 3]), "body", ("wire format",)),
    Grpc("type", b"\xff\xff\xff", "body", ("wire format",)),
    *(
        generate("range", name, limits, **{name: value})
        for name, low, high, limits in GRPC_NUMERIC
        for value in (low, high)
        if not (isinstance(value, int) and value >= 2**31)
    ),
    *(generate("range", "logprobs", "[0, 20]", logprobs=value) for value in (-1, 21)),
    generate("range", "temperature", "[0, 2]", temperature=float("nan")),
    generate("range", "top_p", "(0, 1]", top_p=float("inf")),
    generate("range", "stop_token_ids", f"[0, {LAST_ID}]", stop_token_ids=[VOCAB]),
    generate("range", "allowed_token_ids", f"[0, {LAST_ID}]", allowed_token_ids=[VOCAB]),
    generate("range", "logit_bias", f"[0, {LAST_ID}]", logit_bias={VOCAB: 1.0}),
    *(generate("range", "logit_bias", "[-100, 100]", logit_bias={5: value}) for value in (-101.0, 101.0)),
    generate("range", "stop", "at most 16", stop=[str(i) for i in range(17)]),
    asking("range", "tokenized.input_ids", f"[0, {LAST_ID}]", tokenized=ids(5, VOCAB)),
    asking("range", "request_id", "256", text="x", request_id="x" * 257),
    asking("long", "tokenized.input_ids", "256", "1", "257", code=Code.PROMPT_TOO_LONG, tokenized=ids(*[5] * 256)),
    asking("long", "text", "max_model_len 256", code=Code.PROMPT_TOO_LONG, text="ab " * 9000),
    asking("long", "chat.messages", "max_model_len 256", code=Code.PROMPT_TOO_LONG, chat=told(("user", "zq" * 500))),
    Grpc(
        "long",
        generation_pb2.GenerateRequest(tokenized=ids(*[5] * 250), sampling_params=common_pb2.SamplingParams(max_tokens=10)),
        "tokenized.input_ids",
        ("250", "sampling_params.max_tokens is 10", "260", "256"),
        Code.PROMPT_TOO_LONG,
    ),
    asking("model", "model", "tiny", code=Code.UNKNOWN_MODEL, text="x", model="gpt-4"),
    asking("model", "model", "tiny", code=Code.UNKNOWN_MODEL, text="x", model="TINY"),
    asking("model", "model", "tiny", code=Code.UNKNOWN_MODEL, chat=told(("user", "x")), model="tiny "),
    Grpc("utf8", broken_string(1), "body", ("UTF-8",)),
    Grpc("utf8", broken_string(2), "body", ("UTF-8",)),
    Grpc("utf8", broken_string(4), "body", ("UTF-8",)),
    generate("combination", "min_tokens", "max_tokens=5", min_tokens=6, max_tokens=5),
    generate("combination", "n", "greedy", n=2, temperature=0.0),
    Grpc(
        "combination",
        generation_pb2.GenerateRequest(tokenized=ids(*[5] * 250), sampling_params=common_pb2.SamplingParams(min_tokens=9)),
        "min_tokens",
        ("at most 6",),
    ),
    generate("schema", "json_schema", "JSON schema", json_schema='{"type": "objekt"}'),
    generate("schema", "json_schema", "JSON", json_schema="{"),
    generate("schema", "regex", "regular expression", regex="(a"),
    generate("schema", "choice", "at least 1", choice=common_pb2.ChoiceConstraint()),
    generate("schema", "structural_tag", "JSON", structural_tag="x"),
    asking("unsupported", "chat.messages[0].role", "not supported", code=UNSUPPORTED, chat=told(("tool", "x"))),
    asking(
        "unsupported", "chat.messages[1].role", "not supported", code=UNSUPPORTED, chat=told(("user", "x"), ("function", "x"))
    ),
    asking("unsupported", "chat.messages[0].role", "one of", chat=told(("narrator", "x"))),
    *(
        Grpc("transfer", PLAIN, name, ("clients",), Code.FORBIDDEN_FIELD, ((name, "x"),))
        for name in ("x-splitpoint-control-token", "x-splitpoint-transfer-id", "x-splitpoint-capability")
    ),
    Grpc("header", PLAIN, "x-splitpoint-path", ("split",), INVALID, (("x-splitpoint-path", "any"),)),
    Grpc("header", PLAIN, "x-splitpoint-slo-tpot-ms", ("(0, 3600000]",), INVALID, (("x-splitpoint-slo-tpot-ms", "inf"),)),
    Grpc("header", PLAIN, "x-splitpoint-transport", ("ucx",), INVALID, (("x-splitpoint-transport", "x"),)),
    Grpc("header", PLAIN, "x-request-id", ("256",), INVALID, (("x-request-id", "x" * 257),)),
]


@pytest.mark.parametrize("kind", sorted({case.kind for case in GRPC_CASES}))
def test_every_class_has_at_least_three_grpc_cases(kind: str) -> None:
    assert sum(case.kind == kind for case in GRPC_CASES) >= 3


async def grpc_failure(call: Any) -> grpc.aio.AioRpcError | None:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as exc:
        return exc
    return None


async def test_grpc() -> None:
    core, wrong = FakeCore(), list[tuple[str, ...]]()
    async with grpc_server(core, frontend()) as channel:
        method = channel.unary_stream("/splitpoint.v1.GenerationService/Generate")  # bytes in, bytes out
        for case in GRPC_CASES:
            raw = case.request if isinstance(case.request, bytes) else case.request.SerializeToString()
            exc = await grpc_failure(method(raw, metadata=case.metadata))
            if exc is None:
                wrong.append((case.kind, case.param, "accepted"))
                continue
            error = from_rpc_error(exc)
            expected = (TABLE[case.code].grpc, case.code, case.param)
            missing = [part for part in (case.param, *case.says) if part not in error.message]
            if (exc.code(), error.code, error.param) != expected or missing:
                wrong.append((case.kind, case.param, str(expected), f"{exc.code()} {error!r} {error.param}"))
    assert wrong == []
    assert core.generations == []


async def test_metadata_that_is_given_twice_is_refused_by_its_name() -> None:
    core = FakeCore()
    async with grpc_server(core, frontend()) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for name, values in GIVEN_TWICE.items():
            exc = await grpc_failure(stub.Generate(PLAIN, metadata=tuple((name, value) for value in values)))
            assert exc is not None
            error = from_rpc_error(exc)
            assert (exc.code(), error.code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, INVALID, name)
            assert all(part in error.message for part in (name, "once", *values))
    assert core.generations == []


async def test_a_message_over_the_transports_limit() -> None:
    core = FakeCore()
    async with grpc_server(core, frontend(grpc_max_receive_bytes=1000)) as channel:
        method = channel.unary_stream("/splitpoint.v1.GenerationService/Generate")
        raw = generation_pb2.GenerateRequest(text="x" * 2000).SerializeToString()
        exc = await grpc_failure(method(raw))
    assert exc is not None
    assert exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert core.generations == []
