"""Bounds in front of an engine."""

from __future__ import annotations

import pytest

from engine.worker.admission import Admission
from protos.errors import Code, SplitpointError


def refusal(admission: Admission, tokens: int) -> SplitpointError:
    with pytest.raises(SplitpointError) as refused:
        admission.admit(tokens)
    assert refused.value.code is Code.QUEUE_FULL
    return refused.value


def test_requests_are_bounded() -> None:
    admission = Admission(2, 1000)
    first, _ = admission.admit(10), admission.admit(10)
    assert "max_waiting_requests is 2" in refusal(admission, 1).message
    assert admission.left(first)
    admission.admit(1)
    assert admission.refused == 1


def test_tokens_are_bounded_but_one_long_prompt_alone_is_let_in() -> None:
    admission = Admission(10, 100)
    long = admission.admit(5000)
    assert "max_waiting_tokens is 100" in refusal(admission, 1).message
    admission.started(long, 1.0)
    admission.admit(60)
    admission.admit(40)
    refusal(admission, 1)
    assert (admission.waiting_requests, admission.waiting_tokens) == (2, 100)


def test_leaving_twice_counts_once() -> None:
    admission = Admission(10, 100)
    ticket = admission.admit(30)
    admission.admit(30)
    admission.started(ticket, 1.0)
    admission.started(ticket, 2.0)
    assert not admission.left(ticket)
    assert (admission.waiting_requests, admission.waiting_tokens) == (1, 30)


def test_the_guess_follows_the_rate_of_starts() -> None:
    admission = Admission(100, 1000)
    assert admission.retry_after_s() == 1.0  # nothing is known yet
    tickets = [admission.admit(100) for _ in range(10)]
    for second, ticket in enumerate(tickets[:5]):
        admission.started(ticket, float(second))  # 100 tokens a second
    assert admission.retry_after_s() == pytest.approx(0.5 * 500 / 100)


def test_the_guess_is_bounded_and_a_pause_teaches_nothing() -> None:
    admission = Admission(100, 10**9)
    a, b = admission.admit(1), admission.admit(1)
    admission.started(a, 0.0)
    admission.started(b, 1.0)  # one token a second
    admission.admit(10**6)
    assert admission.retry_after_s() == 30.0
    idle = Admission(100, 10**9)
    idle.started(idle.admit(1000), 0.0)
    idle.started(idle.admit(1000), 3600.0)  # the queue was empty for an hour
    assert idle.retry_after_s() == 1.0
