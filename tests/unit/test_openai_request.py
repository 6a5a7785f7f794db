"""From an OpenAI body to a request: known fields, structured output, prompts, and nothing but refusals for the rest."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.gateway import constraint
from coordinator.gateway.fields import Fields, nests_deeper, shown
from coordinator.gateway.openai_fields import FORBIDDEN, UNSUPPORTED, refuse_known
from coordinator.gateway.openai_request import parse_body, parse_chat, parse_completion, prompts_of
from coordinator.gateway.validate import Limits
from engine.sampling import Constraint
from protos.errors import Code, SplitpointError
from tests.support.gateway import tiny_tokenizer

LIMITS = Limits(max_model_len=100, vocab_size=300, max_choices=8, max_logprobs=20, max_stop_strings=4, max_stop_chars=10)


def refused(call: Any, *args: Any, **kwargs: Any) -> SplitpointError:
    with pytest.raises(SplitpointError) as caught:
        call(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_transfer_fields_are_forbidden(name: str) -> None:
    error = refused(refuse_known, {name: {}})
    assert (error.code, error.param) == (Code.FORBIDDEN_FIELD, name)
    refuse_known({name: None})


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_known_fields_are_refused_unless_harmless(name: str) -> None:
    for harmless in UNSUPPORTED[name]:
        refuse_known({name: harmless})
    error = refused(refuse_known, {name: "something"})
    assert (error.code, error.param) == (Code.UNSUPPORTED_FIELD, name)
    assert name in error.message


def test_true_is_not_one() -> None:
    assert refused(refuse_known, {"best_of": True}).param == "best_of"


def test_unknown_fields_are_ignored() -> None:
    refuse_known({"brand_new_field": {"a": 1}})
    with_it, without = chat(brand_new_field={"a": 1}, max_tokens=3), chat(max_tokens=3)
    assert (with_it.sampling, with_it.prompts) == (without.sampling, without.prompts)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            Constraint(json_schema='{"type": "object"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Constraint(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, Constraint(choice=("a", "b"))),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, Constraint(json_schema='{"type": "null"}')),
        ({"structured_outputs": {"json_object": True}}, Constraint(json_object=True)),
        ({"guided_grammar": 'root ::= "a"'}, Constraint(grammar='root ::= "a"')),
        ({"guided_choice": ["x"]}, Constraint(choice=("x",))),
    ],
)
def test_structured_output(fields: Any, expected: Constraint | None) -> None:
    assert constraint.from_openai(Fields(fields)) == expected


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format.json_schema.schema",
            "JSON schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": 3}}}},
            "response_format.json_schema.schema",
            "properties",
        ),
        ({"guided_json": nested(70)}, "guided_json", "64"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": [1]}, "guided_json", "object"),
        ({"guided_regex": "("}, "guided_regex", "regular expression"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"structured_outputs": {}}, "structured_outputs", "none"),
        ({"structured_outputs": {"yaml": "x"}}, "structured_outputs.yaml", "json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "together"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "together"),
        ({"guided_grammar": "x" * 70000}, "guided_grammar", "65536"),
    ],
)
def test_broken_constraints(fields: Any, param: str, says: str) -> None:
    error = refused(constraint.from_openai, Fields(fields))
    assert (error.code, error.param) == (Code.INVALID_VALUE, param)
    assert says in error.message


@pytest.mark.parametrize(("depth", "deeper"), [(0, False), (3, False), (4, True)])
def test_depth_is_counted_exactly(depth: int, deeper: bool) -> None:
    value: Any = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    assert nests_deeper(value, 3) is deeper


def test_a_deep_body_is_refused_before_anything_walks_it() -> None:
    deep = b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}"
    assert "128" in refused(parse_body, deep).message
    wide = json.dumps({"prompt": [[1]] * 500}).encode()
    assert len(parse_body(wide)["prompt"]) == 500


@pytest.mark.parametrize(
    "value", ["x" * 10_000, list(range(10_000)), {str(i): i for i in range(100)}, [["y" * 500]], 10**300, math.nan]
)
def test_a_shown_value_is_short(value: Any) -> None:
    assert len(shown(value)) < 80


def chat(**body: Any) -> Any:
    return parse_chat({"messages": [{"role": "user", "content": "hi"}], **body}, LIMITS, "tiny", tiny_tokenizer())


def test_a_chat_becomes_one_prompt() -> None:
    request = chat(max_completion_tokens=7, logprobs=True, top_logprobs=3)
    assert prompts_of(request)[0].content == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (request.sampling.max_tokens, request.sampling.max_tokens_field) == (7, "max_completion_tokens")
    assert (request.sampling.params.logprobs, request.top_logprobs) == (3, 3)
    assert chat(logprobs=True).sampling.params.logprobs == 0
    assert chat(logprobs=False).sampling.params.logprobs is None


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "content": parts}], add_generation_prompt=False)
    assert prompts_of(request)[0].content == "<|im_start|>user\na\nb<|im_end|>\n"


@pytest.mark.parametrize(("prompt", "count"), [("one", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1], [2, 3], [4]], 3)])
def test_the_four_forms_of_a_prompt(prompt: Any, count: int) -> None:
    assert len(prompts_of(parse_completion({"prompt": prompt}, LIMITS, "tiny"))) == count


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b'{"a": 1', b"[1]", b'"x"', b"\xff\xfe", b'{"a": "\xc3\x28"}', b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"],
)
def test_a_body_that_is_no_json_object(raw: bytes) -> None:
    error = refused(parse_body, raw)
    assert (error.code, error.param) == (Code.INVALID_VALUE, "body")
    assert len(error.message) < 300


ANY_FIELD = st.sampled_from(
    [
        "temperature", "top_p", "top_k", "max_tokens", "min_tokens", "n", "seed", "prompt_logprobs",
        *sorted(UNSUPPORTED), *sorted(FORBIDDEN), "messages", "prompt", "model", "stop", "logit_bias",
        "logprobs", "top_logprobs", "stream", "stream_options", "response_format", "structured_outputs", "guided_json",
        "guided_regex", "guided_choice", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "request_id",
        "max_completion_tokens", "return_token_ids", "add_special_tokens", "unknown",
    ]
)  # fmt: skip
PIECES = st.none() | st.booleans() | st.integers(-3, 400) | st.floats() | st.text(max_size=4)
PIECES |= st.sampled_from(["user", "text", "json_schema", "json_object", "\ud800", "tiny", 2**70])
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "schema", "json_schema", "include_usage", "json", "regex", "choice", "5"]
)
JSON = st.recursive(PIECES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(ANY_FIELD, JSON, max_size=3), st.booleans())
def test_any_body_is_a_request_or_a_refusal(fields: dict[str, Any], with_chat: bool) -> None:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if with_chat else {"prompt": "x"}
    try:
        if with_chat:
            parse_chat({**base, **fields}, LIMITS, "tiny", tiny_tokenizer())
        else:
            parse_completion({**base, **fields}, LIMITS, "tiny")
    except SplitpointError as error:
        problem = error
    else:
        return
    assert problem.status.client_fault
    assert problem.param
    assert len(problem.message) < 500
