"""Between Splitpoint's values and vLLM's, with stand-ins for vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import EngineOutput, EngineRequest, KvReceive, KvSend, Logprob
from engine.sampling import Constraint, SamplingParams
from engine.vllm_convert import check_prompt, engine_output, plain_arguments, sampling_arguments
from protos.ids import TransferId

T = TransferId(bytes(range(16)))


def request(kv: KvSend | KvReceive | None = None, **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 5, **sampling})
    return EngineRequest(request_id="r", prompt_token_ids=[1, 2], sampling=params, kv=kv)


def test_what_is_not_given_is_left_to_vllm() -> None:
    assert sampling_arguments(request()) == {
        "n": 1,
        "max_tokens": 5,
        "min_tokens": 0,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "detokenize": False,
    }


def test_zero_is_a_value() -> None:
    arguments = sampling_arguments(request(temperature=0.0, logprobs=0, seed=0, top_k=0))
    assert {name: arguments[name] for name in ("temperature", "logprobs", "seed", "top_k")} == {
        "temperature": 0.0,
        "logprobs": 0,
        "seed": 0,
        "top_k": 0,
    }


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint(json_schema="{}"), {"json": "{}"}),
        (Constraint(json_object=True), {"json_object": True}),
        (Constraint(regex="a+"), {"regex": "a+"}),
        (Constraint(grammar="root ::= a"), {"grammar": "root ::= a"}),
        (Constraint(structural_tag="{}"), {"structural_tag": "{}"}),
        (Constraint(choice=("a", "b")), {"choice": ["a", "b"]}),
    ],
)
def test_constraints(constraint: Constraint, expected: dict[str, Any]) -> None:
    assert sampling_arguments(request(constraint=constraint))["structured_outputs"] == expected


def test_an_empty_constraint_is_refused() -> None:
    with pytest.raises(ValueError, match="constraint"):
        sampling_arguments(request(constraint=Constraint()))


def test_transfers_travel_in_extra_args() -> None:
    send = sampling_arguments(request(KvSend(T)))["extra_args"]["kv_transfer_params"]
    assert send == {"splitpoint": {"send": T.hex()}}
    receive = sampling_arguments(request(KvReceive(T, 7)))["extra_args"]["kv_transfer_params"]
    assert receive == {"splitpoint": {"receive": T.hex(), "tokens": 7}}


def test_prompt_logprobs_cannot_come_from_loaded_kv() -> None:
    with pytest.raises(ValueError, match="prompt_logprobs"):
        sampling_arguments(request(KvReceive(T, 7), prompt_logprobs=1))
    assert sampling_arguments(request(KvSend(T), prompt_logprobs=1))["prompt_logprobs"] == 1


@pytest.mark.parametrize(("tokens", "refused"), [(0, True), (1, False), (9, False), (10, True), (11, True)])
def test_prompts_that_leave_no_room(tokens: int, refused: bool) -> None:
    asked = EngineRequest(request_id="r", prompt_token_ids=[1] * tokens, sampling=SamplingParams(max_tokens=1))
    if refused:
        with pytest.raises(ValueError, match="prompt_token_ids"):
            check_prompt(asked, max_model_len=10, vocab_size=2)
    else:
        check_prompt(asked, max_model_len=10, vocab_size=2)


@pytest.mark.parametrize("token", [-1, 2, 1 << 40])
def test_tokens_that_no_vocabulary_has(token: int) -> None:
    asked = EngineRequest(request_id="r", prompt_token_ids=[0, token, 1], sampling=SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match=f"prompt_token_ids holds {token}"):
        check_prompt(asked, max_model_len=10, vocab_size=2)


def completion(**values: Any) -> Any:
    defaults = {"token_ids": [5], "logprobs": None, "finish_reason": None, "stop_reason": None}
    times = SimpleNamespace(queued_ts=10.0, scheduled_ts=10.5, first_token_ts=12.0, last_token_ts=15.0)
    return SimpleNamespace(
        outputs=[SimpleNamespace(**{**defaults, **values})], prompt_logprobs=None, num_cached_tokens=3, metrics=times
    )


def convert(output: Any, *, first: bool, called_s: float = 9.0, read_s: float = 15.25) -> EngineOutput:
    return engine_output(output, first=first, called_s=called_s, read_s=read_s)


def times_of(output: EngineOutput) -> tuple[float, float, float, float]:
    return output.queued_s, output.computing_s, output.decoding_s, output.returning_s


def test_times_come_with_the_first_and_the_last_output_and_add_up() -> None:
    assert times_of(convert(completion(), first=True)) == (1.5, 1.5, 0.0, 0.0)
    assert times_of(convert(completion(), first=False)) == (0.0, 0.0, 0.0, 0.0)
    assert times_of(convert(completion(finish_reason="length"), first=False)) == (0.0, 0.0, 3.0, 0.25)
    only = convert(completion(finish_reason="length"), first=True)
    assert sum(times_of(only)) == 15.25 - 9.0


def test_without_stamps_there_are_no_times() -> None:
    only = completion(finish_reason="length")
    only.metrics = None
    assert times_of(convert(only, first=True)) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("called_s", "read_s"), [(10.25, 15.25), (9.0, 14.0)])
def test_a_clock_that_is_not_shared_leaves_the_cores_own_durations(called_s: float, read_s: float) -> None:
    output = convert(completion(finish_reason="length"), first=True, called_s=called_s, read_s=read_s)
    assert times_of(output) == (0.5, 1.5, 3.0, 0.0)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected_reason", "matched"),
    [("stop", 7, "stop", 7), ("stop", None, "stop", 5), ("length", None, "length", None), ("repetition", None, "stop", None)],
)
def test_what_ended_it(reason: str, stop_reason: int | None, expected_reason: str, matched: int | None) -> None:
    output = convert(completion(finish_reason=reason, stop_reason=stop_reason), first=False)
    assert (output.finish_reason, output.matched_token_id) == (expected_reason, matched)


def test_logprobs_keep_the_chosen_token_first() -> None:
    entry = SimpleNamespace
    chosen = {9: entry(logprob=-2.0, rank=4), 5: entry(logprob=-0.1, rank=1), 6: entry(logprob=-0.5, rank=None)}
    given = completion(logprobs=[chosen])
    given.prompt_logprobs = [None, {1: entry(logprob=-1.0, rank=2)}]
    output = convert(given, first=True)
    assert output.logprobs == [[Logprob(9, -2.0, 4), Logprob(5, -0.1, 1), Logprob(6, -0.5, 0)]]
    assert output.prompt_logprobs == [[], [Logprob(1, -1.0, 2)]]


def test_the_manifest_gets_plain_values_and_no_secret() -> None:
    found = plain_arguments({"a": 1, "hf_token": "secret", "b": {"c": (1, object)}, "d": None})
    assert found == {"a": 1, "hf_token": "***", "b": {"c": [1, "<class 'object'>"]}, "d": None}
