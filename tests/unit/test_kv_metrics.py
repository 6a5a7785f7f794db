"""Recording a metric never disturbs a transfer, and what is recorded can be read both ways."""

from __future__ import annotations

import pytest

from kvtransfer.metrics import KvMetrics


def test_events_are_counted_and_exposed() -> None:
    metrics = KvMetrics()
    metrics.started()
    metrics.delivered("grpc", 4096, 0.003)
    metrics.started()
    metrics.failed("timeout")
    metrics.event("refused.capability")
    metrics.expired("send")
    metrics.late("complete")
    metrics.staging("send", 10, 20)
    assert metrics.counters() == {
        "pulls_started": 2,
        "pulls_delivered": 1,
        "pulls_failed": 1,
        "pulls_failed.timeout": 1,
        "refused.capability": 1,
        "expired.send": 1,
        "late.complete": 1,
    }
    text = metrics.exposition().decode()
    for line in (
        'splitpoint_kv_transfer_bytes_total{transport="grpc"} 4096.0',
        'splitpoint_kv_transfer_seconds_bucket{le="0.005",transport="grpc"} 1.0',
        'splitpoint_kv_transfer_failures_total{reason="timeout"} 1.0',
        'splitpoint_kv_events_total{event="refused.capability"} 1.0',
        'splitpoint_kv_transfer_expired_total{side="send"} 1.0',
        'splitpoint_kv_transfer_late_total{kind="complete"} 1.0',
        'splitpoint_kv_staging_bytes{pool="send",state="quarantined"} 20.0',
        "splitpoint_kv_transfer_inflight 0.0",
    ):
        assert line in text


def test_two_nodes_of_one_process_do_not_share_numbers() -> None:
    first, second = KvMetrics(), KvMetrics()
    first.event("x")
    assert second.counters() == {}


def test_a_metric_that_fails_is_counted_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = KvMetrics()

    def broken(*_: object) -> None:
        raise RuntimeError("no registry")

    monkeypatch.setattr(metrics._failures, "labels", broken)
    metrics.failed("timeout")
    assert metrics.counters()["metrics_lost"] == 1
    assert metrics.counters()["pulls_failed"] == 1
