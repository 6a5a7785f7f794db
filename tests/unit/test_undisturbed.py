"""The load client's priority and garbage collection while it measures."""

from __future__ import annotations

import gc
import os

import pytest

from coordinator.compare import undisturbed
from coordinator.compare.undisturbed import CLIENT_NICE, Priority, prompt_client

policies: list[int] = []
"""That threads were given."""


@pytest.fixture
def niceness(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was asked of the system, which refuses nothing and is not changed."""
    asked = [0]
    monkeypatch.setattr(undisturbed, "threads", lambda: [0])
    monkeypatch.setattr(os, "getpriority", lambda which, who: asked[-1])
    monkeypatch.setattr(os, "setpriority", lambda which, who, value: asked.append(value))
    monkeypatch.setattr(os, "sched_setscheduler", lambda thread, policy, param: policies.append(policy))
    policies.clear()
    return asked


def test_the_client_runs_first_and_everything_is_as_before_at_its_end(niceness: list[int]) -> None:
    with prompt_client() as priority:
        assert priority == Priority(CLIENT_NICE, realtime=True)
        assert not gc.isenabled()
        assert policies == [os.SCHED_FIFO]
    assert gc.isenabled()
    assert niceness == [0, CLIENT_NICE, 0]
    assert policies == [os.SCHED_FIFO, os.SCHED_OTHER]


def test_a_client_that_runs_first_already_is_not_slowed(niceness: list[int]) -> None:
    niceness[:] = [-15]
    with prompt_client() as priority:
        assert priority.nice == -15


def test_without_the_right_it_stays_as_it_is(niceness: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, value: int) -> None:
        if value < niceness[-1]:
            raise PermissionError(value)
        niceness.append(value)

    def refuse_policy(thread: int, policy: int, param: object) -> None:
        raise PermissionError(policy)

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(os, "sched_setscheduler", refuse_policy)
    with prompt_client() as priority:
        assert priority == Priority(0, realtime=False)
        assert not gc.isenabled()
    assert gc.isenabled()


def test_all_threads_get_it_and_one_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    nices = {11: 0, 12: 0}

    def set_priority(which: int, who: int, value: int) -> None:
        if who not in nices:
            raise ProcessLookupError(who)
        nices[who] = value

    monkeypatch.setattr(undisturbed, "threads", lambda: [11, 13, 12])
    monkeypatch.setattr(os, "getpriority", lambda which, who: nices[11])
    monkeypatch.setattr(os, "setpriority", set_priority)
    monkeypatch.setattr(os, "sched_setscheduler", lambda thread, policy, param: set_priority(0, thread, nices.get(thread, 0)))
    with prompt_client():
        assert nices == {11: CLIENT_NICE, 12: CLIENT_NICE}
    assert nices == {11: 0, 12: 0}
    assert set(undisturbed.threads())
