"""Recording a metric never disturbs a transfer, and what is recorded can be read both ways."""

from __future__ import annotations

import pytest

from kvtransfer.metrics import KEPT_OBSERVATIONS, KvMetrics, Observation
from protos.splitpoint.v1 import kv_transfer_pb2 as pb


def test_events_are_counted_and_exposed() -> None:
    metrics = KvMetrics()
    metrics.started("grpc")
    metrics.delivered("grpc", 4096, 0.003, waited_s=0.04, chunks=2)
    metrics.started("ucx")
    metrics.failed("ucx", "timeout")
    metrics.event("refused.capability")
    metrics.expired("send")
    metrics.late("complete")
    metrics.staging_waited("send", "granted", 0.3)
    assert metrics.counters() == {
        "pulls_started": 2,
        "pulls_delivered": 1,
        "pulls_failed": 1,
        "pulls_failed.timeout": 1,
        "refused.capability": 1,
        "expired.send": 1,
        "late.complete": 1,
        "staging_wait.send.granted": 1,
    }
    text = metrics.exposition().decode()
    for line in (
        'splitpoint_kv_transfer_bytes_total{transport="grpc"} 4096.0',
        'splitpoint_kv_transfer_seconds_bucket{le="0.005",transport="grpc"} 1.0',
        'splitpoint_kv_transfer_failures_total{reason="timeout",transport="ucx"} 1.0',
        'splitpoint_kv_events_total{event="refused.capability"} 1.0',
        'splitpoint_kv_transfer_expired_total{side="send"} 1.0',
        'splitpoint_kv_transfer_late_total{kind="complete"} 1.0',
        'splitpoint_kv_transfer_wait_seconds_sum{transport="grpc"} 0.04',
        'splitpoint_kv_staging_wait_seconds_count{outcome="granted",pool="send"} 1.0',
        'splitpoint_kv_transfer_inflight{transport="grpc"} 0.0',
        'splitpoint_kv_transfer_inflight{transport="ucx"} 0.0',
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
    metrics.failed("ucx", "timeout")
    assert metrics.counters()["metrics_lost"] == 1
    assert metrics.counters()["pulls_failed"] == 1


def test_ends_are_handed_to_the_engine_once_and_kept_for_no_engine() -> None:
    metrics = KvMetrics()
    metrics.delivered("ucx", 100, 0.5, waited_s=0.2, chunks=3)
    metrics.failed("ucx", "peer_lost")
    metrics.expired("send")
    metrics.late("complete")
    metrics.event("complete_failed")
    metrics.event("refused.capability")
    taken = metrics.take_observations()
    assert taken[0] == Observation("delivered", 100, 0.5, 0.2, 3)
    assert [seen.kind for seen in taken] == ["delivered", "failed", "expired", "late", "unheard"]
    assert metrics.take_observations() == []
    for _ in range(KEPT_OBSERVATIONS + 10):
        metrics.late("complete")
    assert len(metrics.take_observations()) == KEPT_OBSERVATIONS


def test_what_a_node_holds_is_read_at_the_scrape() -> None:
    status = pb.GetNodeStatusResponse(lease_states={"sealed": 2}, session_states={"verified": 1})
    metrics = KvMetrics()
    metrics.watch(lambda: status)
    status.send.capacity_bytes, status.send.used_bytes, status.receive.quarantined_bytes = 100, 30, 7
    text = metrics.exposition().decode()
    for line in (
        'splitpoint_kv_staging_bytes{pool="send",state="capacity"} 100.0',
        'splitpoint_kv_staging_bytes{pool="send",state="used"} 30.0',
        'splitpoint_kv_staging_bytes{pool="receive",state="quarantined"} 7.0',
        'splitpoint_kv_leases{state="sealed"} 2.0',
        'splitpoint_kv_sessions{state="verified"} 1.0',
        "splitpoint_kv_pinned_engine_blocks 0.0",
    ):
        assert line in text


def test_a_status_that_fails_costs_its_own_lines_alone() -> None:
    def broken() -> pb.GetNodeStatusResponse:
        raise RuntimeError("no status")

    metrics = KvMetrics()
    metrics.watch(broken)
    metrics.event("x")
    assert 'splitpoint_kv_events_total{event="x"} 1.0' in metrics.exposition().decode()
    assert metrics.counters()["metrics_lost"] == 1
