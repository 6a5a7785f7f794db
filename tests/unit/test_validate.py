"""Limits of every public field, from both ends, and what a request becomes."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.gateway.fields import Fields
from coordinator.gateway.validate import (
    INT64_MAX,
    INT64_MIN,
    PUBLIC_HEADERS,
    REQUEST_ID_HEADER,
    Limits,
    Sampling,
    check_metadata,
    check_sampling,
    choice_seed,
    fit_context,
)
from protos.errors import Code, SplitpointError

LIMITS = Limits(max_model_len=100, vocab_size=300, max_choices=8, max_logprobs=20, max_stop_strings=4, max_stop_chars=10)


def sampled(**fields: Any) -> Sampling:
    return check_sampling(Fields(fields), LIMITS, constraint=None, logprobs=None)


def refused(call: Any, *args: Any, **kwargs: Any) -> SplitpointError:
    with pytest.raises(SplitpointError) as caught:
        call(*args, **kwargs)
    return caught.value


BOUNDS: list[tuple[str, Any, Any, Any, Any, list[str]]] = [
    # field, least accepted, most accepted, just below, just above, what the message says
    ("temperature", 0, 2, -0.01, 2.01, ["[0, 2]"]),
    ("top_p", 1e-9, 1, 0, 1.01, ["(0, 1]"]),
    ("top_k", -1, 2**31 - 1, -2, 2**31, ["-1", "2147483647"]),
    ("min_p", 0, 1, -0.01, 1.01, ["[0, 1]"]),
    ("frequency_penalty", -2, 2, -2.1, 2.1, ["[-2, 2]"]),
    ("presence_penalty", -2, 2, -2.1, 2.1, ["[-2, 2]"]),
    ("repetition_penalty", 1e-9, 100, 0, 100.1, ["(0, 100]"]),
    ("max_tokens", 1, 100, 0, 101, ["[1, 100]"]),
    ("min_tokens", 0, 100, -1, 101, ["[0, 100]"]),
    ("n", 1, 8, 0, 9, ["[1, 8]"]),
    ("prompt_logprobs", 0, 20, -1, 21, ["[0, 20]"]),
    ("seed", INT64_MIN, INT64_MAX, INT64_MIN - 1, INT64_MAX + 1, [str(INT64_MIN), str(INT64_MAX)]),
]


@pytest.mark.parametrize(("field", "low", "high", "below", "above", "says"), BOUNDS, ids=[b[0] for b in BOUNDS])
def test_both_ends_of_every_numeric_field(field: str, low: Any, high: Any, below: Any, above: Any, says: list[str]) -> None:
    for accepted in (low, high):
        sampled(**{field: accepted})
    for value in (below, above):
        error = refused(sampled, **{field: value})
        assert error.code is Code.INVALID_VALUE
        assert error.param == field
        assert field in error.message
        for part in says:
            assert part in error.message


@pytest.mark.parametrize("field", [b[0] for b in BOUNDS])
@pytest.mark.parametrize("value", ["1", True, [1], {}, math.nan, math.inf, -math.inf])
def test_wrong_types_and_non_finite_numbers(field: str, value: Any) -> None:
    error = refused(sampled, **{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize("field", [b[0] for b in BOUNDS])
def test_null_is_the_default(field: str) -> None:
    assert sampled(**{field: None}) == sampled()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("stop", ["a", "b", "c", "d", "e"], "at most 4"),
        ("stop", [""], "1 to 10"),
        ("stop", "x" * 11, "1 to 10"),
        ("stop", [1], "string"),
        ("stop", 5, "string"),
        ("stop", "\ud800", "Unicode"),
        ("bad_words", [""], "1 to 10"),
        ("bad_words", {}, "list"),
        ("stop_token_ids", [300], "[0, 299]"),
        ("stop_token_ids", [-1], "[0, 299]"),
        ("stop_token_ids", [True], "[0, 299]"),
        ("stop_token_ids", "7", "list"),
        ("allowed_token_ids", [], "at least 1"),
        ("allowed_token_ids", [0, 300], "position 1"),
        ("logit_bias", {"300": 1}, "[0, 299]"),
        ("logit_bias", {"-1": 1}, "[0, 299]"),
        ("logit_bias", {"x": 1}, "[0, 299]"),
        ("logit_bias", {"1": 100.5}, "[-100, 100]"),
        ("logit_bias", {"1": -100.5}, "[-100, 100]"),
        ("logit_bias", {"1": math.nan}, "[-100, 100]"),
        ("logit_bias", {"1": "2"}, "[-100, 100]"),
        ("logit_bias", [1], "object"),
        ("ignore_eos", 1, "true or false"),
        ("skip_special_tokens", "yes", "true or false"),
        ("include_stop_str_in_output", 0, "true or false"),
    ],
)
def test_lists_maps_and_switches(field: str, value: Any, says: str) -> None:
    error = refused(sampled, **{field: value})
    assert (error.code, error.param) == (Code.INVALID_VALUE, field)
    assert field in error.message
    assert says in error.message


def test_contradictions() -> None:
    error = refused(sampled, min_tokens=6, max_tokens=5)
    assert (error.param, "max_tokens=5" in error.message, "6" in error.message) == ("min_tokens", True, True)
    error = refused(sampled, n=2, temperature=0)
    assert error.param == "n"
    assert "greedy" in error.message
    assert sampled(n=2, temperature=0.5).n == 2


def test_everything_reaches_the_parameters() -> None:
    checked = sampled(
        temperature=1, top_p=0.5, top_k=7, min_p=0.1, frequency_penalty=-1, presence_penalty=1, repetition_penalty=1.5,
        max_tokens=9, min_tokens=2, stop="END", stop_token_ids=[5, 5], ignore_eos=True, seed=3, logit_bias={"4": -1},
        allowed_token_ids=[1, 2], bad_words=["no"], skip_special_tokens=False, include_stop_str_in_output=True, n=2,
    )  # fmt: skip
    params = checked.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 0.5, 7, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (-1, 1, 1.5)
    assert (params.max_tokens, params.min_tokens, params.seed, params.ignore_eos) == (9, 2, 3, True)
    assert (params.stop_token_ids, params.allowed_token_ids, params.bad_words) == ((5,), (1, 2), ("no",))
    assert (params.logit_bias, params.skip_special_tokens) == ({4: -1.0}, False)
    assert (checked.stop, checked.include_stop_str_in_output, checked.n) == (("END",), True, 2)


def fit(prompt_tokens: int, *, default: int | None = None, **fields: Any) -> int:
    return fit_context(prompt_tokens, sampled(**fields), LIMITS, default_max_tokens=default, prompt_field="prompt")


def test_the_context_is_filled_exactly() -> None:
    assert fit(90, max_tokens=10) == 10
    assert fit(90) == 10
    assert fit(90, default=16) == 10
    assert fit(10, default=16) == 16
    assert fit(99) == 1


@pytest.mark.parametrize(
    ("prompt_tokens", "fields", "numbers"),
    [(91, {"max_tokens": 10}, ("91", "10", "101", "100")), (100, {}, ("100", "1", "101")), (500, {}, ("500", "1", "501", "100"))],
)
def test_a_prompt_that_does_not_fit_names_all_numbers(prompt_tokens: int, fields: Any, numbers: tuple[str, ...]) -> None:
    error = refused(fit, prompt_tokens, **fields)
    assert (error.code, error.param) == (Code.PROMPT_TOO_LONG, "prompt")
    for number in (*numbers, "max_tokens", "max_model_len"):
        assert number in error.message


def test_an_empty_prompt_and_min_tokens_beyond_the_room() -> None:
    assert refused(fit, 0).param == "prompt"
    assert refused(fit, 95, min_tokens=6).param == "min_tokens"


@given(st.integers(INT64_MIN, INT64_MAX), st.integers(0, 100))
def test_choice_seeds_stay_in_64_bits_and_differ(seed: int, index: int) -> None:
    other = choice_seed(seed, index)
    assert other is not None
    assert INT64_MIN <= other <= INT64_MAX
    assert (other == seed) == (index == 0)
    assert choice_seed(None, index) is None


def test_metadata() -> None:
    checked = check_metadata(
        [
            ("x-request-id", "abc"),
            ("x-splitpoint-path", b"split"),
            ("x-splitpoint-transport", "grpc"),
            ("x-splitpoint-pools", "a, b"),
            ("x-splitpoint-session", b"talk 7"),
            ("x-splitpoint-deadline-s", "2.5"),
            ("x-splitpoint-slo-ttft-ms", "800"),
            ("x-splitpoint-slo-tpot-ms", b"40.5"),
            ("authorization", "Bearer x"),
        ],
        max_deadline_s=10,
    )
    assert (checked.client_request_id, checked.path, checked.transport, checked.deadline_s) == ("abc", "split", "grpc", 2.5)
    assert (checked.pools, checked.session) == ({"a", "b"}, "talk 7")
    assert (checked.slo_ttft_s, checked.slo_tpot_s) == (0.8, 0.0405)


def test_path_auto_may_be_asked_for_where_it_is_configured() -> None:
    header = [("x-splitpoint-path", "auto")]
    assert 'one of split, colocated, got "auto"' in refused(check_metadata, header, max_deadline_s=10).message
    assert check_metadata(header, max_deadline_s=10, paths=("split", "colocated", "auto")).path == "auto"


def test_a_transport_may_be_named_where_it_is_configured() -> None:
    header = [("x-splitpoint-transport", "nixl")]
    assert "ucx, grpc" in refused(check_metadata, header, max_deadline_s=10).message
    assert check_metadata(header, max_deadline_s=10, transports=("nixl", "grpc")).transport == "nixl"
    assert (
        "nixl"
        not in refused(check_metadata, [("x-splitpoint-transport", "ucx")], max_deadline_s=10, transports=("grpc",)).message
    )


@pytest.mark.parametrize(
    ("name", "value", "code", "says"),
    [
        ("x-splitpoint-path", "both", Code.INVALID_VALUE, "split, colocated"),
        ("x-splitpoint-transport", "rdma", Code.INVALID_VALUE, "ucx, grpc"),
        ("x-splitpoint-pools", "a,,b", Code.INVALID_VALUE, "1 to 64 names"),
        ("x-splitpoint-pools", "", Code.INVALID_VALUE, "1 to 64 names"),
        ("x-splitpoint-deadline-s", "0", Code.INVALID_VALUE, "(0, 10]"),
        ("x-splitpoint-deadline-s", "11", Code.INVALID_VALUE, "(0, 10]"),
        ("x-splitpoint-deadline-s", "soon", Code.INVALID_VALUE, "(0, 10]"),
        ("x-splitpoint-deadline-s", "nan", Code.INVALID_VALUE, "(0, 10]"),
        ("x-splitpoint-session", "x" * 257, Code.INVALID_VALUE, "256"),
        ("x-request-id", "x" * 257, Code.INVALID_VALUE, "256"),
        ("x-request-id", "a\tb", Code.INVALID_VALUE, "printable"),
        ("x-splitpoint-control-token", "t", Code.FORBIDDEN_FIELD, "may not be set"),
        ("x-splitpoint-transfer-id", "t", Code.FORBIDDEN_FIELD, "may not be set"),
    ],
)
def test_bad_metadata(name: str, value: str, code: Code, says: str) -> None:
    error = refused(check_metadata, [(name, value)], max_deadline_s=10)
    assert (error.code, error.param) == (code, name)
    assert name in error.message
    assert says in error.message


def test_every_public_name_may_be_given_once() -> None:
    for name in (*PUBLIC_HEADERS, REQUEST_ID_HEADER):
        error = refused(check_metadata, [(name, "a"), ("other", "x"), (name, b"b")], max_deadline_s=10)
        assert (error.code, error.param) == (Code.INVALID_VALUE, name)
        assert error.message == f'{name} may be given once, got "a" and "b"'


NAMES = [*(b[0] for b in BOUNDS), "stop", "logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "ignore_eos"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(max_size=3), LEAVES, max_size=3)


def outcome(fields: dict[str, Any]) -> SplitpointError | Sampling:
    try:
        return check_sampling(Fields(fields), LIMITS, constraint=None, logprobs=None)
    except SplitpointError as error:
        return error


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_every_value_is_taken_or_refused_by_name(fields: dict[str, Any]) -> None:
    result = outcome(fields)
    if isinstance(result, SplitpointError):
        assert result.code is Code.INVALID_VALUE
        assert result.param in fields
        assert result.param in result.message
    else:
        json.dumps({str(k): v for k, v in result.params.logit_bias.items()}, allow_nan=False)
        result.params.to_proto()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (b"Bearer a key", "one"),
        ("Bearer a key", "one"),
        (b"bearer   a key ", "one"),
        ("Bearer \u00e9t\u00e9", "two"),
        ("Bearer été".encode(), "two"),
        (b"Bearer a  key", ""),
        (b"Bearer", ""),
        (b"Bearer ", ""),
        (b"Basic a key", ""),
        (b"", ""),
        (b"\xff\xfe", ""),
    ],
)
def test_a_bearer_key_is_looked_up_by_its_hash(value: str | bytes, name: str) -> None:
    known = {hashlib.sha256(key.encode()).hexdigest(): label for key, label in (("a key", "one"), ("été", "two"))}
    pairs = [("authorization", value)]
    assert check_metadata(pairs, max_deadline_s=10, key_names=known).key_name == name
    assert check_metadata(pairs, max_deadline_s=10).key_name == ""


def test_two_keys_are_refused_without_a_word_of_either_and_only_where_keys_count() -> None:
    pairs = [("authorization", b"Bearer first"), ("authorization", b"Bearer second")]
    error = refused(check_metadata, pairs, max_deadline_s=10, key_names={"00": "one"})
    assert (error.param, error.message) == ("authorization", "authorization may be given once")
    assert check_metadata(pairs, max_deadline_s=10).key_name == ""
