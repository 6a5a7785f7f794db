"""Metrics of a gateway: names, what is counted when, and that recording never raises."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from coordinator.gateway.frontend import FrontEndMetrics
from coordinator.gateway.ledger import STAGES
from coordinator.gateway.metrics import GatewayMetrics
from protos.splitpoint.v1 import common_pb2


def ledger(**fields) -> common_pb2.StageLedger:
    base = {"path": "split", "transport": "ucx", "e2e_s": 2.0, "ttft_s": 0.5, "transfer_bytes": 100, "transfer_s": 0.1}
    return common_pb2.StageLedger(**{**base, **fields})


def sample(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"splitpoint_{name}", {"model_name": "m", **labels})


def test_a_choice_that_ended_well_is_in_every_histogram() -> None:
    metrics = GatewayMetrics("m")
    metrics.choice_ended(ledger(decode_s=1.0), status="ok", error_type="", prompt_tokens=10, output_tokens=4)
    assert sample(metrics, "choices_total", path="split", status="ok", error_type="") == 1
    assert sample(metrics, "ttft_seconds_sum", path="split") == 0.5
    assert sample(metrics, "time_per_output_token_seconds_sum", path="split") == 0.5
    assert sample(metrics, "request_duration_seconds_sum", path="split") == 2.0
    assert sample(metrics, "kv_transfer_bytes_sum", transport="ucx") == 100
    assert sample(metrics, "prompt_tokens_total") == 10
    for stage in STAGES:
        assert sample(metrics, "phase_duration_seconds_count", path="split", phase=stage) == 1


def test_failures_do_not_colour_the_stages() -> None:
    metrics = GatewayMetrics("m")
    metrics.choice_ended(ledger(), status="error", error_type="worker_lost", prompt_tokens=1, output_tokens=0)
    assert sample(metrics, "choices_total", path="split", status="error", error_type="worker_lost") == 1
    assert sample(metrics, "ttft_seconds_count", path="split") is None
    assert sample(metrics, "phase_duration_seconds_count", path="split", phase="decode") is None


@pytest.mark.parametrize(
    ("code", "status", "error_type"),
    [("ok", "ok", ""), ("cancelled", "cancelled", "cancelled"), ("queue_full", "error", "queue_full")],
)
def test_public_requests_by_front_end_and_outcome(code: str, status: str, error_type: str) -> None:
    metrics: FrontEndMetrics = GatewayMetrics("m")
    metrics.request_ended(front="http", endpoint="chat", code=code)
    assert isinstance(metrics, GatewayMetrics)
    labels = {"front": "http", "endpoint": "chat", "status": status, "error_type": error_type}
    assert sample(metrics, "requests_total", **labels) == 1


def test_recording_never_raises_and_a_fault_is_counted() -> None:
    metrics = GatewayMetrics("m")
    metrics.token_gap(None, "no number")  # type: ignore[arg-type]
    metrics.event(object())  # type: ignore[arg-type]
    assert metrics.recording_faults >= 1

    def broken() -> None:
        raise RuntimeError

    metrics.before_exposition = broken
    body, content_type = metrics.exposition()
    assert b"splitpoint_inflight" in body
    assert content_type.startswith("text/plain")


def test_two_gateways_in_one_process_do_not_share_series() -> None:
    one, two = GatewayMetrics("m"), GatewayMetrics("m")
    one.in_flight(3)
    assert sample(one, "inflight") == 3
    assert not sample(two, "inflight")
    assert isinstance(one.registry, CollectorRegistry)
    assert one.registry is not two.registry
