"""The connector's decisions, step by step, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.connector.parameters import ReceiveParameters, SendParameters, parse
from kvtransfer.connector.scheduler import Gather, Scatter, SchedulerHalf, StepPlan
from protos.ids import TransferId

BLOCK = 16
A, B = TransferId(b"a" * 16), TransferId(b"b" * 16)


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    num_preemptions: int = 0
    num_output_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass
class New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    scheduled_new_reqs: list[New]
    scheduled_cached_reqs: Cached
    num_scheduled_tokens: dict[str, int]


def new(request: str, blocks: list[int], computed: int, scheduled: int) -> Output:
    return Output([New(request, (blocks,), computed)], Cached(), {request: scheduled})


def again(request: str, blocks: list[int] | None, computed: int, scheduled: int, *, resumed: bool = False) -> Output:
    cached = Cached([request], {request} if resumed else set(), [None if blocks is None else (blocks,)], [computed])
    return Output([], cached, {request: scheduled})


EMPTY = Output([], Cached(), {})


def sender(tokens: int, transfer: TransferId = A, name: str = "p") -> Request:
    return Request(name, tokens, SendParameters(transfer).to_extra_args()["kv_transfer_params"])


def receiver(tokens: int, staged: int, transfer: TransferId = A, name: str = "d") -> Request:
    return Request(name, tokens, ReceiveParameters(transfer, staged).to_extra_args()["kv_transfer_params"])


@pytest.fixture
def half() -> SchedulerHalf:
    return SchedulerHalf(BLOCK)


def test_only_whole_blocks_leave_before_the_prompt_ends(half: SchedulerHalf) -> None:
    half.started(sender(40))
    assert half.plan_step(new("p", [7, 8], 0, 20)).gathers == (Gather(A, 0, (7,), False),)
    assert half.plan_step(again("p", [9], 20, 10)).gathers == ()
    assert half.plan_step(again("p", None, 30, 10)).gathers == (Gather(A, 1, (8, 9), True),)
    assert half.plan_step(again("p", [10], 40, 1)).gathers == (), "the output's blocks are not the prompt's"


def test_a_cached_prefix_is_gathered_from_block_0(half: SchedulerHalf) -> None:
    half.started(sender(50))
    assert half.plan_step(new("p", [1, 2, 3, 4], 32, 18)).gathers == (Gather(A, 0, (1, 2, 3, 4), True),)


def test_a_resumed_send_goes_on_with_its_new_blocks(half: SchedulerHalf) -> None:
    half.started(sender(64))
    half.plan_step(new("p", [1, 2], 0, 32))
    assert half.plan_step(again("p", [5, 6, 7], 0, 40, resumed=True)).gathers == ()
    assert half.plan_step(again("p", [8], 40, 24)).gathers == (Gather(A, 2, (7, 8), True),)


def test_a_resumed_send_of_the_v2_runner_comes_as_a_new_request(half: SchedulerHalf) -> None:
    half.started(sender(64))
    half.plan_step(new("p", [1, 2], 0, 32))
    assert half.plan_step(new("p", [5, 6, 7, 8], 0, 64)).gathers == (Gather(A, 2, (7, 8), True),)


@given(tokens=st.integers(1, 200), data=st.data())
def test_every_block_of_a_send_is_gathered_once_in_order(tokens: int, data: st.DataObject) -> None:
    """Whatever the chunks, cached prefixes and preemptions, and always by the engine block that then holds it."""
    half = SchedulerHalf(BLOCK)
    half.started(sender(tokens))
    places: list[int] = []
    lasts = 0
    base = 0
    computed = -1
    while computed < tokens:
        fresh = computed < 0 or data.draw(st.booleans(), label="preempted")
        first_time = computed < 0
        if fresh:
            base += 1000
            computed = data.draw(st.integers(0, max(0, (tokens - 1) // BLOCK)), label="cached blocks") * BLOCK
            known = 0
        chunk = data.draw(st.integers(1, tokens - computed), label="chunk")
        needed = -(-(computed + chunk) // BLOCK)
        blocks = [base + place for place in range(known, needed)]
        known = needed
        output = new("p", blocks, computed, chunk) if first_time else again("p", blocks, computed, chunk, resumed=fresh)
        computed += chunk
        for gather in half.plan_step(output).gathers:
            got = range(gather.first_block, gather.first_block + len(gather.block_ids))
            assert list(gather.block_ids) == [base + place for place in got]
            assert gather.last or got.stop * BLOCK <= computed
            places += got
            lasts += gather.last
    assert places == list(range(-(-tokens // BLOCK)))
    assert lasts == 1


def test_a_receive_answers_what_is_staged_beyond_the_local_cache_and_leaves_one_token(half: SchedulerHalf) -> None:
    forwarded, whole = receiver(41, 40), receiver(40, 40, B, "e")
    half.started(forwarded)
    half.started(whole)
    for _ in range(3):
        assert half.matched_tokens(forwarded, 0) == 40
    assert half.matched_tokens(forwarded, 32) == 8
    assert half.matched_tokens(whole, 0) == 39
    assert half.matched_tokens(whole, 48) == 0
    assert half.matched_tokens(Request("x", 10, None), 0) == 0
    assert half.plan_step(EMPTY) == StepPlan(), "asking changes nothing"


def test_a_receive_is_scattered_in_the_step_that_admits_it(half: SchedulerHalf) -> None:
    request = receiver(41, 40)
    half.started(request)
    half.allocated(request, [3, 4, 5], 24)
    assert half.plan_step(EMPTY).scatters == (Scatter(A, "d", 1, (4, 5)),)
    assert half.plan_step(EMPTY) == StepPlan()
    half.finished(request)
    assert half.plan_step(EMPTY) == StepPlan(), "the scatter gives the slot back"
    assert half.live_transfers == 0


def test_after_preemption_nothing_is_loaded_again(half: SchedulerHalf) -> None:
    request = receiver(41, 40)
    half.started(request)
    half.allocated(request, [3, 4, 5], 40)
    half.plan_step(EMPTY)
    request.num_preemptions, request.num_output_tokens = 1, 7
    assert half.matched_tokens(request, 0) == 0
    half.allocated(request, [9, 10, 11], 0)
    assert half.plan_step(EMPTY) == StepPlan()
    assert half.counters["recomputed_after_preemption"] == 1


def test_a_full_local_hit_gives_the_slot_back_unread(half: SchedulerHalf) -> None:
    request = receiver(33, 32)
    half.started(request)
    assert half.matched_tokens(request, 32) == 0
    half.allocated(request, [3, 4, 5], 0)
    assert half.plan_step(EMPTY) == StepPlan(releases=(A,))
    half.finished(request)
    assert half.plan_step(EMPTY) == StepPlan()


def test_a_receive_that_ends_unadmitted_gives_the_slot_back_once(half: SchedulerHalf) -> None:
    request = receiver(33, 32)
    half.started(request)
    half.finished(request)
    half.finished(request)
    assert half.plan_step(EMPTY) == StepPlan(releases=(A,))
    assert half.counters["unread_receives"] == 1


def test_a_send_that_ends_leaves_its_slot_to_the_actor(half: SchedulerHalf) -> None:
    request = sender(64)
    half.started(request)
    half.plan_step(new("p", [1, 2], 0, 32))
    half.finished(request)
    assert half.plan_step(again("p", [3, 4], 32, 32)) == StepPlan()
    assert half.live_transfers == 0


def test_a_transfer_belongs_to_the_first_request_that_names_it(half: SchedulerHalf) -> None:
    first, second = receiver(41, 40), receiver(41, 40, A, "e")
    half.started(first)
    half.started(second)
    assert (half.matched_tokens(first, 0), half.matched_tokens(second, 0)) == (40, 0)
    assert half.counters["duplicate_transfers"] == 1
    half.finished(second)
    assert half.matched_tokens(first, 0) == 40, "the other's end takes nothing away"


@pytest.mark.parametrize(
    "entry", [{}, {"send": 1}, {"send": "zz"}, {"receive": "00"}, {"receive": "00", "tokens": 0}, {"send": "00", "more": 1}, "x"]
)
def test_what_the_engine_adapter_does_not_write_is_refused_and_counted(half: SchedulerHalf, entry: Any) -> None:
    with pytest.raises(ValueError, match=r"splitpoint|hex"):
        parse({"splitpoint": entry})
    request = Request("r", 10, {"splitpoint": entry})
    half.started(request)
    assert half.matched_tokens(request, 0) == 0
    assert half.counters["malformed"] == 1


def test_parameters_survive_the_trip_and_others_are_left_alone() -> None:
    for parameters in (SendParameters(A), ReceiveParameters(B, 17)):
        assert parse(parameters.to_extra_args()["kv_transfer_params"]) == parameters
    assert parse(None) is None
    assert parse({"do_remote_prefill": True}) is None
