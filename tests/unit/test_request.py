"""The life of a request, transition by transition."""

from __future__ import annotations

import pytest

from coordinator.request import TABLE, InvalidTransition
from coordinator.request_actions import (
    AbortLeg,
    Blame,
    Closed,
    DeadlinePassed,
    Emit,
    Fail,
    Fault,
    Finish,
    NoRoute,
    ReleaseTransfer,
    Routed,
    SendColocated,
    SendDecode,
    SendPrefill,
    SendPrepare,
    Start,
)
from coordinator.request_states import REPORTS, State
from coordinator.routing.goals import LocalGoal, PairGoal, PairRoute, SoloGoal, SoloRoute
from coordinator.routing.views import Role
from engine.sampling import Constraint
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import common_pb2, worker_pb2
from tests.support.request_driver import Driver
from tests.support.views import worker_view

P1, P2 = worker_view("p1"), worker_view("p2")
D1, D2 = worker_view("d1", Role.DECODE), worker_view("d2", Role.DECODE)
C1 = worker_view("c1", Role.COLOCATED)
PAIR = PairRoute(prefill=P1, decode=D1, transport="ucx")


def begun(**options) -> Driver:
    driver = Driver(**options)
    driver.feed(Start())
    driver.feed(Routed(PAIR if options.get("path", "split") == "split" else SoloRoute(worker=C1)))
    return driver


def decoding(first: int = 1, **options) -> Driver:
    driver = begun(**options)
    driver.sealed([first])
    return driver


# The good case --------------------------------------------------------------------------------------------------------


def test_split_sends_both_legs_at_once_then_forwards_the_first_token() -> None:
    driver = begun()
    assert [type(a) for a in driver.last] == [SendPrefill, SendPrepare]
    prefill, prepare = driver.sent(SendPrefill), driver.sent(SendPrepare)
    assert prefill.sampling.max_tokens == 1
    assert prefill.grant == prepare.grant
    assert (prefill.worker, prepare.worker, prepare.prefill, prepare.transport) == (P1, D1, P1, "ucx")

    driver.sealed([11])
    kinds = [type(a) for a in driver.last]
    assert kinds.index(SendDecode) < kinds.index(Emit)
    decode = driver.sent(SendDecode)
    assert decode.output_token_ids == (11,)
    assert decode.sampling.max_tokens == 3
    assert decode.allow_recompute

    driver.staged()
    driver.tokens(decode, 12)
    driver.finished(decode, 13, 14)
    assert driver.emitted == [11, 12, 13, 14]
    assert driver.terminals == [Finish("length", None)]
    assert not driver.open_attempts()
    assert not driver.released(), "a verified and scattered transfer is over on both sides by itself"


def test_cached_tokens_and_prompt_logprobs_are_prefills_own() -> None:
    rows = [common_pb2.PositionLogprobs(entries=[common_pb2.TokenLogprob(token_id=5)])]
    driver = begun(prompt_logprobs=1)
    driver.sealed(tokens=worker_pb2.TokensEvent(token_ids=[1], cached_tokens=3, prompt_logprobs=rows))
    decode = driver.sent(SendDecode)
    assert decode.sampling.prompt_logprobs is None
    driver.tokens(decode, 2, cached_tokens=4)
    first, second = driver.of(Emit)
    assert (first.cached_tokens, list(first.prompt_logprobs)) == (3, rows)
    assert (second.cached_tokens, list(second.prompt_logprobs)) == (0, [])


@pytest.mark.parametrize(
    "sampling",
    [
        {"seed": 3, "temperature": 1.0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"bad_words": ("no",)},
        {"constraint": Constraint(regex="a+")},
    ],
)
def test_where_forwarding_is_refused_decode_emits_every_token(sampling: dict) -> None:
    rows = [common_pb2.PositionLogprobs(entries=[common_pb2.TokenLogprob(token_id=5)])]
    driver = begun(**sampling)
    driver.sealed(tokens=worker_pb2.TokensEvent(token_ids=[1], cached_tokens=3, prompt_logprobs=rows))
    assert driver.emitted == []
    decode = driver.sent(SendDecode)
    assert decode.output_token_ids == ()
    assert decode.sampling.max_tokens == 4
    driver.tokens(decode, 1, cached_tokens=4)
    (first,) = driver.of(Emit)
    assert (first.cached_tokens, list(first.prompt_logprobs)) == (3, rows), "not decode's view of loaded KV"
    assert not driver.request.first_token_forwarded


def test_prefill_that_ends_the_request_starts_no_decode_and_releases_both_sides() -> None:
    driver = begun()
    driver.finished(driver.sent(SendPrefill), 2, reason="stop", matched_token_id=2)
    assert driver.emitted == [2]
    assert driver.terminals == [Finish("stop", 2)]
    assert not driver.of(SendDecode)
    transfer = driver.sent(SendPrepare).grant.transfer_id
    assert driver.released() == {(transfer, "p1"), (transfer, "d1")}
    assert [a.attempt_id for a in driver.of(AbortLeg)] == [driver.sent(SendPrepare).attempt_id]


def test_max_tokens_1_stages_nothing_and_asks_no_decode_worker() -> None:
    driver = begun(max_tokens=1)
    assert driver.sent(SendPrefill).grant is None
    assert not driver.of(SendPrepare)
    driver.finished(driver.sent(SendPrefill), 9)
    assert driver.emitted == [9]
    assert driver.terminals == [Finish("length", None)]
    assert not driver.released()


def test_colocated_path_sends_the_parameters_whole() -> None:
    driver = begun(path="colocated", prompt_logprobs=1, min_tokens=2)
    leg = driver.sent(SendColocated)
    assert leg.sampling == driver.spec.sampling
    driver.tokens(leg, 1, 2)
    driver.finished(leg, 3, reason="stop", matched_token_id=3)
    assert driver.emitted == [1, 2, 3]
    assert driver.terminals == [Finish("stop", 3)]


def test_recompute_on_decode_is_counted_and_both_slots_are_released() -> None:
    driver = decoding()
    driver.failed(driver.sent(SendPrepare), Code.TRANSFER_FAILED)
    assert driver.request.state is State.DECODING
    assert driver.of(Blame)[0].workers == (P1, D1)
    driver.finished(driver.sent(SendDecode), 2, 3, 4, recomputed=True)
    assert driver.request.recomputed
    assert ("recovery", "recompute") in driver.notes()
    assert {w for _, w in driver.released()} == {"p1", "d1"}
    assert driver.terminals == [Finish("length", None)]


def test_another_transport_than_asked_is_an_event() -> None:
    driver = begun()
    driver.staged(transport="grpc")
    assert ("transport_fallback", "ucx became grpc") in driver.notes()


def test_a_transfer_nobody_called_verified_is_released() -> None:
    driver = decoding()
    driver.finished(driver.sent(SendDecode), 2, 3, 4)
    assert {w for _, w in driver.released()} == {"p1", "d1"}
    assert driver.terminals == [Finish("length", None)]


def test_one_failed_transfer_is_one_fault_of_the_pair() -> None:
    driver = decoding(strict=True)
    driver.failed(driver.sent(SendPrepare), Code.TRANSFER_FAILED)
    driver.failed(driver.sent(SendDecode), Code.TRANSFER_FAILED)
    assert len(driver.of(Blame)) == 1


# Failures before the first token --------------------------------------------------------------------------------------


def test_prefill_lost_tries_another_pair_then_the_same_decode_then_one_worker() -> None:
    driver = begun()
    driver.failed(driver.sent(SendPrefill), Code.WORKER_LOST)
    pair, local, solo, *again = driver.goals()
    assert pair == PairGoal(prompt_tokens=4, exclude=frozenset({P1.incarnation}))
    assert local == LocalGoal(incarnation=D1.incarnation)
    assert solo == SoloGoal(exclude=frozenset({P1.incarnation}))
    assert again == [PairGoal(prompt_tokens=4), SoloGoal()], "its stream may come back, when there is nobody else"
    transfer = driver.sent(SendPrepare).grant.transfer_id
    assert driver.released() == {(transfer, "p1"), (transfer, "d1")}
    assert not driver.open_attempts()

    old = driver.sent(SendPrefill)
    driver.feed(Routed(PairRoute(prefill=P2, decode=D1, transport="ucx")))
    new = driver.sent(SendPrefill)
    assert new.attempt_id != old.attempt_id
    assert new.grant.transfer_id != old.grant.transfer_id, "a retry is a new transfer"
    assert ("recovery", "prefill_retry") in driver.notes()


def test_decode_lost_before_the_seal_keeps_the_prefill_worker() -> None:
    driver = begun()
    driver.failed(driver.sent(SendPrepare), Code.WORKER_LOST)
    pair, solo, *_ = driver.goals()
    assert pair == PairGoal(prompt_tokens=4, exclude=frozenset({D1.incarnation}), prefer_prefill=P1.incarnation)
    assert solo == SoloGoal(exclude=frozenset({D1.incarnation})), "a lost decode worker cannot compute by itself"


def test_a_lost_worker_that_fails_otherwise_is_not_waited_for() -> None:
    driver = Driver(path="colocated")
    driver.feed(Start())
    driver.feed(Routed(SoloRoute(worker=C1)))
    driver.failed(driver.sent(SendColocated), Code.WORKER_LOST)
    assert driver.goals() == (SoloGoal(exclude=frozenset({C1.incarnation})), SoloGoal())
    driver.feed(Routed(SoloRoute(worker=C1)))
    assert ("lost_worker_tried_again", "") in driver.notes()
    driver.failed(driver.sent(SendColocated), Code.QUEUE_FULL)
    assert driver.goals() == (SoloGoal(exclude=frozenset({C1.incarnation})),)


def test_a_transfer_fault_is_blamed_on_the_pair_and_leaves_decode_usable() -> None:
    driver = begun()
    driver.failed(driver.sent(SendPrepare), Code.TRANSFER_FAILED)
    assert driver.of(Blame)[0].workers == (P1, D1)
    pair, local, _ = driver.goals()
    assert pair.exclude == {P1.incarnation}
    assert local.incarnation == D1.incarnation


@pytest.mark.parametrize("code", [Code.QUEUE_FULL, Code.STAGING_FULL, Code.DRAINING, Code.WORKER_LOST])
def test_overload_drain_and_loss_trip_no_breaker(code: Code) -> None:
    driver = begun()
    driver.failed(driver.sent(SendPrefill), code)
    assert not driver.of(Blame)
    assert driver.request.state is State.ROUTING


def test_local_recompute_is_marked() -> None:
    driver = begun()
    driver.failed(driver.sent(SendPrefill), Code.WORKER_LOST)
    driver.feed(Routed(SoloRoute(worker=D1, local=True, notes=("local_recompute",))))
    assert driver.request.recomputed
    assert ("recovery", "recompute") in driver.notes()
    assert ("local_recompute", "") in driver.notes()
    assert driver.sent(SendColocated).sent_token_ids == ()


def test_strict_mode_takes_a_pair_or_nothing() -> None:
    driver = begun(strict=True)
    assert [type(g) for g in driver.goals()] == [PairGoal]
    driver.failed(driver.sent(SendPrefill), Code.WORKER_LOST)
    assert {type(g) for g in driver.goals()} == {PairGoal}
    driver.feed(Routed(PAIR))
    driver.sealed()
    assert not driver.sent(SendDecode).allow_recompute


def test_budget_spent_fails_with_the_last_cause() -> None:
    driver = begun(extra_attempts=1)
    driver.failed(driver.sent(SendPrefill), Code.WORKER_LOST)
    driver.feed(Routed(PAIR))
    driver.failed(driver.sent(SendPrefill), Code.QUEUE_FULL, "full up")
    assert driver.error.code is Code.QUEUE_FULL
    assert "full up" in driver.error.message
    assert not driver.open_attempts()


def test_no_route_after_a_failure_reports_the_failure() -> None:
    driver = begun()
    driver.failed(driver.sent(SendPrefill), Code.QUEUE_FULL)
    driver.feed(NoRoute(SplitpointError(Code.NO_WORKER, "none")))
    assert driver.error.code is Code.QUEUE_FULL


def test_no_route_at_the_start_is_no_worker() -> None:
    driver = Driver()
    driver.feed(Start())
    driver.feed(NoRoute(SplitpointError(Code.NO_WORKER, "none")))
    assert driver.error.code is Code.NO_WORKER


@pytest.mark.parametrize("code", [Code.INVALID_VALUE, Code.PROMPT_TOO_LONG, Code.DEADLINE_EXCEEDED])
def test_client_errors_and_deadlines_are_returned_at_once_and_never_retried(code: Code) -> None:
    driver = begun()
    driver.failed(driver.sent(SendPrefill), code)
    assert driver.error.code is code
    assert not driver.of(Blame)
    assert not driver.open_attempts(), "the other leg does not wait for KV that never comes"
    assert {w for _, w in driver.released()} == {"p1", "d1"}


def test_a_cancel_nobody_asked_for_is_a_lost_worker() -> None:
    driver = begun()
    driver.failed(driver.sent(SendPrefill), Code.CANCELLED, "aborted: the worker stops")
    assert driver.request.state is State.ROUTING
    assert ("retry", "worker_lost") in driver.notes()


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": b"x" * 16},
        {"incarnation": "another"},
        {"prompt_tokens": 5},
        {"token_hash": b"x" * 32},
        {"first": []},
        {"first": [1, 2]},
    ],
)
def test_a_wrong_seal_starts_no_decode(changes: dict) -> None:
    driver = begun()
    driver.sealed(**changes)
    assert not driver.of(SendDecode)
    assert driver.emitted == []
    assert driver.request.state is State.ROUTING


# Failures after the first token ---------------------------------------------------------------------------------------


def test_resume_appends_what_was_sent_and_counts_it() -> None:
    driver = decoding(min_tokens=3, max_tokens=5, prompt_logprobs=1)
    driver.tokens(driver.sent(SendDecode), 2)
    driver.failed(driver.sent(SendDecode), Code.WORKER_LOST)
    assert driver.goals() == (SoloGoal(exclude=frozenset({D1.incarnation})), SoloGoal())
    driver.feed(Routed(SoloRoute(worker=C1)))
    leg = driver.sent(SendColocated)
    assert leg.sent_token_ids == (1, 2)
    assert (leg.sampling.max_tokens, leg.sampling.min_tokens, leg.sampling.prompt_logprobs) == (3, 1, None)
    assert ("recovery", "migrate") in driver.notes()
    driver.tokens(leg, 3, 4)
    driver.finished(leg, 5)
    assert driver.emitted == [1, 2, 3, 4, 5]
    assert driver.terminals == [Finish("length", None)]


def test_a_colocated_stream_is_resumed_too() -> None:
    driver = begun(path="colocated")
    driver.tokens(driver.sent(SendColocated), 1)
    driver.failed(driver.sent(SendColocated), Code.WORKER_LOST)
    driver.feed(Routed(SoloRoute(worker=D1)))
    assert driver.sent(SendColocated).sent_token_ids == (1,)
    assert not driver.request.recomputed, "a colocated request has no KV to lose"


@pytest.mark.parametrize("sampling", [{"seed": 1, "temperature": 0.7}, {"presence_penalty": 1.0}, {"bad_words": ("x",)}])
def test_what_cannot_be_resumed_breaks_with_the_tokens_sent(sampling: dict) -> None:
    driver = decoding(**sampling)
    driver.tokens(driver.sent(SendDecode), 1, 2)
    driver.failed(driver.sent(SendDecode), Code.WORKER_LOST)
    assert (driver.error.code, driver.error.tokens_sent) == (Code.STREAM_BROKEN, 2)


def test_strict_mode_does_not_resume_a_split_stream() -> None:
    driver = decoding(strict=True)
    driver.failed(driver.sent(SendDecode), Code.WORKER_LOST)
    assert (driver.error.code, driver.error.tokens_sent) == (Code.STREAM_BROKEN, 1)


def test_losing_only_the_last_word_is_an_end() -> None:
    driver = decoding(max_tokens=2)
    driver.tokens(driver.sent(SendDecode), 2)
    driver.failed(driver.sent(SendDecode), Code.WORKER_LOST)
    assert driver.terminals == [Finish("length", None)]
    assert {w for _, w in driver.released()} == {"p1", "d1"}


def test_more_tokens_than_asked_never_reach_the_client() -> None:
    driver = decoding(max_tokens=2)
    driver.tokens(driver.sent(SendDecode), 2, 3)
    assert driver.emitted == [1]
    assert driver.request.state is State.ROUTING


def test_an_engine_that_aborts_by_itself_has_failed() -> None:
    driver = begun(path="colocated")
    driver.finished(driver.sent(SendColocated), reason="abort")
    assert driver.request.state is State.ROUTING
    assert driver.of(Blame)


# Ends from outside ----------------------------------------------------------------------------------------------------


def at_every_stage() -> list[tuple[str, Driver]]:
    retried = begun()
    retried.failed(retried.sent(SendPrefill), Code.WORKER_LOST)
    resumed = decoding()
    resumed.failed(resumed.sent(SendDecode), Code.WORKER_LOST)
    resumed.feed(Routed(SoloRoute(worker=C1)))
    staged = begun()
    staged.staged()
    routing = Driver()
    routing.feed(Start())
    return [
        ("new", Driver()),
        ("routing", routing),
        ("prefilling", begun()),
        ("staged", staged),
        ("decoding", decoding()),
        ("retrying", retried),
        ("computing", begun(path="colocated")),
        ("resumed", resumed),
    ]


@pytest.mark.parametrize("stage", [name for name, _ in at_every_stage()])
@pytest.mark.parametrize("event", [Closed("client_left"), DeadlinePassed(), Fault(SplitpointError(Code.INTERNAL, "bug"))])
def test_an_end_from_outside_leaves_nothing(stage: str, event: Closed | DeadlinePassed | Fault) -> None:
    driver = dict(at_every_stage())[stage]
    driver.feed(event)
    assert len(driver.terminals) == 1
    assert not driver.open_attempts()
    granted = {p.grant.transfer_id for p in driver.of(SendPrepare)}
    assert {t for t, _ in driver.released()} == granted
    sent = driver.request.tokens_sent
    if isinstance(driver.terminals[0], Fail):
        assert driver.error.tokens_sent == sent
    for again in (Closed("client_left"), DeadlinePassed()):
        assert driver.feed(again) == []


def test_abort_and_release_carry_the_reason() -> None:
    driver = begun()
    driver.feed(DeadlinePassed())
    assert {a.reason for a in driver.of(AbortLeg)} == {"deadline"}
    assert {a.reason for a in driver.of(ReleaseTransfer)} == {"deadline"}


# Reports that do not fit ----------------------------------------------------------------------------------------------


def test_late_and_unknown_reports_are_counted_and_change_nothing() -> None:
    driver = begun()
    old = driver.sent(SendPrefill)
    driver.failed(old, Code.WORKER_LOST)
    driver.feed(Routed(PairRoute(prefill=P2, decode=D1, transport="ucx")))
    driver.finished(old, 5)
    assert driver.emitted == []
    assert driver.notes()[-1] == ("late_event", f"finished of {old.attempt_id}")
    driver.feed(worker_pb2.LegEvent(attempt_id="never", tokens=worker_pb2.TokensEvent(token_ids=[1])))
    assert driver.emitted == []
    assert driver.request.state is State.PREFILLING


def test_a_report_no_such_leg_makes_fails_the_attempt() -> None:
    driver = begun(path="colocated")
    event = worker_pb2.LegEvent(attempt_id=driver.sent(SendColocated).attempt_id, staged=worker_pb2.StagedEvent())
    driver.feed(event)
    assert driver.request.state is State.ROUTING
    assert ("retry", "internal") in driver.notes()


def test_an_impossible_event_raises_with_the_story() -> None:
    driver = begun()
    with pytest.raises(InvalidTransition) as caught:
        driver.feed(Routed(PAIR))
    assert caught.value.state is State.PREFILLING
    assert any("start" in line for line in caught.value.story)


def test_the_table_has_a_place_for_every_legal_report() -> None:
    told = {kind for _, kind in TABLE}
    assert {f"{leg}.{what}" for leg, reports in REPORTS.items() for what in reports} <= told
