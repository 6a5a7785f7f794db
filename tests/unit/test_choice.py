"""Tokens of the core become deltas: however they are grouped, the client reads the same text and the same end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.gateway.api import Finished, Submission, Tokens
from coordinator.gateway.choice import Choice, Delta, TextOptions
from engine.sampling import SamplingParams
from protos.ids import RequestId
from tests.support.gateway import eos_id, ids_of, tiny_tokenizer


def choice(*, max_tokens: int = 100, stop: tuple[str, ...] = (), include: bool = False, **sampling: object) -> Choice:
    submission = Submission(
        request_id=RequestId("r"),
        client_request_id="c",
        prompt_token_ids=ids_of("prompt"),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        received_s=0,
        deadline_s=1,
    )
    return Choice(0, submission, TextOptions(stop=stop, include_stop_str_in_output=include), tiny_tokenizer())


def fed(made: Choice, groups: list[list[int]], end: Finished) -> list[Delta]:
    deltas: list[Delta] = []
    for group in groups:
        deltas += made.tokens(Tokens(token_ids=group))
        if made.finished:
            return deltas
    return [*deltas, made.end(end)]


def test_the_last_allowed_token_waits_for_the_end() -> None:
    made = choice(max_tokens=2)
    first, second = ids_of("he") + ids_of("llo")
    assert [d.text for d in made.tokens(Tokens(token_ids=[first]))] == ["he"]
    assert made.tokens(Tokens(token_ids=[second])) == []
    last = made.end(Finished(finish_reason="length"))
    assert (last.token_id, last.text, last.finish_reason) == (second, "llo", "length")


def test_a_stop_token_that_did_not_stop_is_text_after_all() -> None:
    [x] = ids_of("x")
    made = choice(stop_token_ids=(x,))
    assert made.tokens(Tokens(token_ids=[x])) == []
    assert "".join(d.text for d in made.tokens(Tokens(token_ids=[*ids_of("y"), x]))) == "xy"
    last = made.end(Finished(finish_reason="stop", matched_token_id=x))
    assert (last.text, last.stop_reason, made.completion_tokens) == ("", x, 3)


def test_before_min_tokens_a_stop_token_does_not_wait() -> None:
    [x] = ids_of("x")
    made = choice(stop_token_ids=(x,), min_tokens=2)
    assert [d.text for d in made.tokens(Tokens(token_ids=[x]))] == ["x"]
    assert made.tokens(Tokens(token_ids=[x])) == []


def test_eos_is_no_stop_reason_and_a_stop_token_is() -> None:
    made = choice()
    made.tokens(Tokens(token_ids=[eos_id()]))
    last = made.end(Finished(finish_reason="stop", matched_token_id=eos_id()))
    assert (last.finish_reason, last.stop_reason, last.matched_token_id) == ("stop", None, eos_id())


def test_the_end_flushes_an_unfinished_character_and_held_back_text() -> None:
    made = choice(stop=("STOP",))
    ids = [*ids_of("a ST"), ids_of("🙂")[0]]
    text = "".join(d.text for d in fed(made, [ids], Finished(finish_reason="length")))
    assert text == "a ST\ufffd"


def test_a_stop_string_in_the_flushed_end_counts() -> None:
    made = choice(stop=("\ufffd",))
    deltas = fed(made, [ids_of("a🙂")[:-1]], Finished(finish_reason="length"))
    assert ("".join(d.text for d in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == ("a", "stop", "\ufffd")


def test_tokens_after_a_stop_string_in_the_same_event_do_not_count() -> None:
    made = choice(stop=(" STOP",))
    ids = ids_of("go STOP and more")
    deltas = fed(made, [ids], Finished(finish_reason="length"))
    assert "".join(d.text for d in deltas) == "go"
    assert made.completion_tokens == len(deltas) == len(ids_of("go STOP"))


def test_cached_tokens_and_prompt_logprobs_come_with_the_first_event() -> None:
    made = choice()
    made.tokens(Tokens(token_ids=[5], cached_tokens=3, prompt_logprobs=[]))
    made.tokens(Tokens(token_ids=[5], cached_tokens=9))
    assert (made.cached_tokens, made.prompt_logprobs) == (3, [])


WORDS = st.sampled_from(["a", "b", "ab", "the", " ", "é", "🙂", "hello", "\n"])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(WORDS, min_size=1, max_size=12).map("".join),
    st.lists(st.sampled_from(["ab", "b", "🙂", " the", "lo\n", "éa"]), max_size=2, unique=True),
    st.booleans(),
    st.data(),
)
def test_grouping_changes_neither_text_nor_end(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    ids = ids_of(text)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(ids) - 1)), max_size=4)))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True) if ids[a:b]]
    deltas = fed(choice(stop=tuple(stops), include=include), groups, Finished(finish_reason="length"))
    matches = [(text.find(s) + len(s), order, s) for order, s in enumerate(stops) if s in text]
    shown = "".join(d.text for d in deltas)
    if matches:
        end, _, stop = min(matches)
        assert shown == text[: end if include else end - len(stop)]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    else:
        assert (shown, deltas[-1].finish_reason, deltas[-1].stop_reason) == (text, "length", None)
    assert all(d.finish_reason is None for d in deltas[:-1])


@pytest.mark.parametrize("grouped", [True, False])
def test_a_token_is_one_delta(grouped: bool) -> None:
    ids = ids_of("hello world")
    groups = [ids] if grouped else [[i] for i in ids]
    deltas = fed(choice(max_tokens=len(ids)), groups, Finished(finish_reason="length"))
    assert [d.token_id for d in deltas] == ids
