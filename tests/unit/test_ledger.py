"""The stage ledger: exclusive stages that add up, the same ones on both paths."""

from __future__ import annotations

import pytest

from coordinator.gateway.ledger import STAGES, LedgerRecorder, Window
from protos.splitpoint.v1 import common_pb2, worker_pb2


def times(**durations: float) -> worker_pb2.LegTimes:
    return worker_pb2.LegTimes(**durations)  # type: ignore[arg-type]


def total(ledger: common_pb2.StageLedger) -> float:
    return sum(getattr(ledger, f"{stage}_s") for stage in STAGES) + ledger.residual_s


def split(recorder: LedgerRecorder) -> LedgerRecorder:
    """Received at 10, prefill 10.1 to 11.0, decode 11.1 to 13.0, finished 13.2."""
    recorder.leg_sent(Window.PREFILL, "p", 10.1)
    recorder.tokens_arrived(11.0)
    recorder.leg_ended(11.0, times(queued_s=0.2, computing_s=0.6, returning_s=0.01, elapsed_s=0.82))
    recorder.leg_sent(Window.DECODE, "d", 11.1)
    recorder.emitted(11.1)
    recorder.staged(11.4, worker_pb2.StagedEvent(bytes=1000, seconds=0.5, transport="ucx"))
    recorder.tokens_arrived(12.0)
    recorder.emitted(12.0)
    recorder.leg_ended(
        13.0,
        times(queued_s=0.1, computing_s=0.2, decoding_s=1.1, transfer_wait_s=0.3, returning_s=0.02, elapsed_s=1.75),
    )
    return recorder


def test_split_stages_add_up_and_the_residual_is_what_nobody_explains() -> None:
    recorder = split(LedgerRecorder(received_s=10.0, path="split", transport="ucx"))
    recorder.emitted(13.0)
    recorder.finished(13.2)
    ledger = recorder.build(99.0)
    hops_s = (0.9 - 0.82) + (1.9 - 1.75)
    assert ledger.gateway_s == pytest.approx(0.1 + 0.1 + 0.2 + hops_s)
    assert (ledger.prefill_queue_s, ledger.prefill_s) == (0.2, 0.6)
    assert (ledger.transfer_wait_s, ledger.decode_queue_s) == (0.3, 0.1)
    assert ledger.decode_s == pytest.approx(1.3)
    assert ledger.worker_s == pytest.approx(0.03)
    assert ledger.e2e_s == pytest.approx(3.2)
    assert ledger.residual_s == pytest.approx(0.82 - 0.81 + 1.75 - 1.72), "what the workers took beyond their stages"
    assert total(ledger) == pytest.approx(ledger.e2e_s)
    assert ledger.ttft_s == pytest.approx(1.1)
    assert ledger.second_token_gap_s == pytest.approx(0.9), "waited for between prefill's token and decode's first"
    assert (ledger.transfer_s, ledger.transfer_bytes) == (0.5, 1000)
    assert (ledger.prefill_worker, ledger.decode_worker) == ("p", "d")
    assert not ledger.partial


def test_colocated_has_the_same_stages() -> None:
    recorder = LedgerRecorder(received_s=0.0, path="colocated")
    recorder.leg_sent(Window.SOLO, "c", 0.5)
    recorder.tokens_arrived(2.0)
    recorder.emitted(2.0)
    recorder.leg_ended(5.0, times(queued_s=0.25, computing_s=1.0, decoding_s=3.0))
    recorder.finished(5.0)
    ledger = recorder.build(5.0)
    assert {stage: getattr(ledger, f"{stage}_s") for stage in STAGES} == {
        "gateway": 0.5,
        "prefill_queue": 0.25,
        "prefill": 1.0,
        "transfer_wait": 0.0,
        "decode_queue": 0.0,
        "decode": 3.0,
        "worker": 0.0,
        "retry": 0.0,
    }
    assert ledger.residual_s == pytest.approx(0.25)
    assert ledger.transport == ""


def test_a_failed_route_is_retry_and_its_stages_are_forgotten() -> None:
    recorder = LedgerRecorder(received_s=10.0, path="split")
    recorder.leg_sent(Window.PREFILL, "p", 10.5)
    recorder.leg_ended(12.0, times(computing_s=1.0))
    recorder.leg_sent(Window.DECODE, "d", 12.0)
    recorder.route_failed(14.5)
    recorder.leg_sent(Window.SOLO, "c", 14.75)
    recorder.emitted(16.0)
    recorder.leg_ended(16.0, times(computing_s=1.25))
    recorder.finished(16.0)
    ledger = recorder.build(16.0)
    assert ledger.retry_s == 4.0
    assert ledger.prefill_s == 1.25
    assert ledger.gateway_s == pytest.approx(0.75)
    assert ledger.residual_s == pytest.approx(0.0)
    assert total(ledger) == pytest.approx(ledger.e2e_s)
    assert not ledger.partial


def test_a_resumed_request_keeps_the_stages_of_the_tokens_it_sent() -> None:
    recorder = LedgerRecorder(received_s=10.0, path="split")
    recorder.leg_sent(Window.PREFILL, "p", 10.0)
    recorder.leg_ended(11.0, times(computing_s=1.0))
    recorder.leg_sent(Window.DECODE, "d", 11.0)
    recorder.emitted(11.0)
    recorder.staged(11.5, worker_pb2.StagedEvent(bytes=1, seconds=0.1))
    recorder.tokens_arrived(12.0)
    recorder.route_failed(13.0)
    recorder.leg_sent(Window.SOLO, "c", 13.0)
    recorder.leg_ended(15.0, times(computing_s=0.5, decoding_s=1.5))
    recorder.finished(15.0)
    ledger = recorder.build(15.0)
    assert ledger.retry_s == 0.0
    assert ledger.prefill_s == 1.5
    assert ledger.transfer_wait_s == 0.5
    assert ledger.decode_s == 1.5 + 1.5
    assert ledger.partial
    assert total(ledger) == pytest.approx(5.0)


@pytest.mark.parametrize(("first_s", "prefill_s", "decode_s"), [(None, 3.0, 0.0), (2.0, 1.0, 2.0)])
def test_a_leg_that_is_cut_is_divided_by_the_gateways_stamps(first_s: float | None, prefill_s: float, decode_s: float) -> None:
    recorder = LedgerRecorder(received_s=1.0, path="colocated")
    recorder.leg_sent(Window.SOLO, "c", 1.0)
    if first_s is not None:
        recorder.tokens_arrived(first_s)
        recorder.emitted(first_s)
    recorder.finished(4.0)
    ledger = recorder.build(9.0)
    assert (ledger.prefill_s, ledger.decode_s, ledger.partial) == (prefill_s, decode_s, True)
    assert ledger.residual_s == 0.0


def test_a_decode_leg_cut_before_its_kv_came_was_waiting_for_it() -> None:
    recorder = LedgerRecorder(received_s=0.0, path="split")
    recorder.leg_sent(Window.PREFILL, "p", 0.0)
    recorder.leg_ended(1.0, times(computing_s=1.0))
    recorder.leg_sent(Window.DECODE, "d", 1.0)
    recorder.emitted(1.0)
    recorder.finished(3.0)
    ledger = recorder.build(3.0)
    assert (ledger.transfer_wait_s, ledger.decode_s) == (2.0, 0.0)


def test_building_early_changes_nothing_and_the_first_end_counts() -> None:
    recorder = LedgerRecorder(received_s=0.0, path="colocated")
    recorder.leg_sent(Window.SOLO, "c", 1.0)
    assert recorder.build(4.0).residual_s == 3.0
    recorder.finished(5.0)
    recorder.finished(7.0)
    first, second = recorder.build(8.0), recorder.build(9.0)
    assert first == second
    assert first.e2e_s == 5.0


def test_a_request_that_never_found_a_worker_was_at_the_gateway() -> None:
    recorder = LedgerRecorder(received_s=0.0, path="split")
    recorder.finished(0.5)
    ledger = recorder.build(1.0)
    assert ledger.gateway_s == 0.5
    assert (ledger.attempts, ledger.ttft_s) == (0, 0.0)


def test_a_worker_that_claims_more_than_its_leg_lasted_shows_as_a_negative_residual() -> None:
    recorder = LedgerRecorder(received_s=0.0, path="colocated")
    recorder.leg_sent(Window.SOLO, "c", 0.0)
    recorder.leg_ended(2.0, times(computing_s=2.5, elapsed_s=2.5))
    recorder.finished(2.0)
    ledger = recorder.build(2.0)
    assert ledger.gateway_s == 0.0
    assert ledger.residual_s == -0.5


@pytest.mark.parametrize(("emissions", "gap_s"), [([(2.0, 1)], 0.0), ([(2.0, 1), (2.5, 1), (9.0, 1)], 0.5), ([(2.0, 3)], 0.0)])
def test_the_gap_to_the_second_token(emissions: list[tuple[float, int]], gap_s: float) -> None:
    recorder = LedgerRecorder(received_s=1.0)
    for now_s, tokens in emissions:
        recorder.emitted(now_s, tokens)
    assert recorder.build(10.0).second_token_gap_s == gap_s
