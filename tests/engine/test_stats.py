"""The connector's statistics in vLLM's form: both halves' numbers leave their process, and vLLM's own loggers show them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter as Counts
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.sampling import SamplingParams
from kvtransfer.metrics import Observation
from tests.support.stepped_engine import BLOCK_TOKENS, SteppedEngine

pytestmark = pytest.mark.vllm

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
DELIVERED = Observation("delivered", num_bytes=4096, seconds=0.25, waited_s=0.01, chunks=2)


@pytest.fixture
def logged(engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the scheduler hands to its statistics in each step, as it travels to the process that logs."""
    seen: list[dict[str, Any]] = []
    make_stats = engine.scheduler.make_stats

    def make(spec: Any = None, connector: Any = None, *args: Any, **kwargs: Any) -> Any:
        if connector is not None:
            seen.append(json.loads(json.dumps(connector.to_dict())))
        return make_stats(spec, connector, *args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "make_stats", make)
    return seen


def test_a_transfer_and_the_schedulers_decisions_leave_the_engine_once(
    engine: SteppedEngine, logged: list[dict[str, Any]]
) -> None:
    from kvtransfer.connector.stats import SplitpointStats

    engine.run([1, 2, 3], GREEDY)
    engine.forget_prefixes()
    engine.node.take_observations()
    logged.clear()
    prompt = list(range(2000, 2000 + 2 * BLOCK_TOKENS))
    engine.split(prompt, GREEDY, before_decode=engine.forget_prefixes)
    assert logged
    total = SplitpointStats()
    for data in logged:
        total = total.aggregate(SplitpointStats(data=data))
    assert total.data["bytes_transferred"] == [2 * engine.node._rt.block_bytes]
    assert len(total.data["transfer_duration"]) == len(total.data["post_duration"]) == 1
    assert total.data["num_descriptors"][0] >= 1
    assert total.data["num_failed_transfers"] == []
    assert total.data["scheduler_events"] == {"gathers": 1, "scatters": 1, "scattered_blocks": 2}
    logged.clear()
    engine.run([4, 5, 6], GREEDY)
    assert logged == [], "a step without news carries nothing"
    assert engine.leftovers() == {}


def shown_by_vllm() -> dict[str, float]:
    """Our series in the registry of vLLM's own Prometheus logger, summed over labels."""
    totals: Counts[str] = Counts()
    for family in REGISTRY.collect():
        if family.name.startswith("vllm:splitpoint_"):
            for sample in family.samples:
                event = sample.labels.get("event", "")
                totals[f"{sample.name}{event and '/'}{event}"] += sample.value
    return dict(totals)


def test_vllms_own_prometheus_logger_shows_a_transfer(engine: SteppedEngine) -> None:
    engine.node.take_observations()
    before = shown_by_vllm()
    engine.split(list(range(3000, 3000 + BLOCK_TOKENS)), GREEDY, before_decode=engine.forget_prefixes)
    after = shown_by_vllm()
    added = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert added["vllm:splitpoint_xfer_time_seconds_count"] == 1
    assert added["vllm:splitpoint_bytes_transferred_sum"] == engine.node._rt.block_bytes
    assert added["vllm:splitpoint_scheduler_events_total/gathers"] == 1
    assert added["vllm:splitpoint_scheduler_events_total/scatters"] == 1
    assert added.get("vllm:splitpoint_num_failed_transfers_total", 0.0) == 0


def test_failures_are_shown_and_nothing_is_raised(engine: SteppedEngine) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    from kvtransfer.connector.facade import SplitpointConnector
    from kvtransfer.connector.stats import SplitpointStats

    config = engine.llm.vllm_config
    seen = [DELIVERED, *(Observation(kind) for kind in ("failed", "expired", "late", "unheard"))]
    stats = SplitpointStats.of_rank(seen).aggregate(SplitpointStats.of_scheduler({"gathers": 3}))
    registry = CollectorRegistry()
    types: dict[Any, Any] = {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = SplitpointConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    metrics.observe(stats.to_dict(), 0)
    metrics.observe({"nonsense": 1}, 0)
    assert metrics.lost == 1
    text = generate_latest(registry).decode()
    for line in (
        'vllm:splitpoint_xfer_time_seconds_sum{engine="0"} 0.25',
        'vllm:splitpoint_post_time_seconds_sum{engine="0"} 0.01',
        'vllm:splitpoint_num_descriptors_sum{engine="0"} 2.0',
        'vllm:splitpoint_num_failed_transfers_total{engine="0"} 1.0',
        'vllm:splitpoint_num_failed_notifications_total{engine="0"} 1.0',
        'vllm:splitpoint_num_kv_expired_reqs_total{engine="0"} 1.0',
        'vllm:splitpoint_num_notifications_after_expiry_total{engine="0"} 1.0',
        'vllm:splitpoint_scheduler_events_total{engine="0",event="gathers"} 3.0',
    ):
        assert line in text
    lines: list[str] = []
    log = KVConnectorLogging(config.kv_transfer_config)
    log.observe(stats.to_dict())
    log.observe(SplitpointStats.of_rank([dataclasses.replace(DELIVERED, seconds=0.75)]).to_dict())
    log.log(lambda text, *arguments: lines.append(text % arguments))
    assert "Num successful transfers=2, Avg xfer time (ms)=500.0" in lines[0]
    assert "Num failed transfers=1" in lines[0]
    assert "gathers=3" in lines[0]


def test_the_names_are_those_of_the_nixl_connector() -> None:
    """So that a dashboard needs one word replaced."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics

    from kvtransfer.connector.metrics import SplitpointPromMetrics

    def names(of: type) -> set[str]:
        made: list[str] = []

        class Named:
            def __init__(self, *, name: str, **_: Any) -> None:
                made.append(name)

            def labels(self, *_: Any) -> None:
                return None

        class Config:
            kv_transfer_config = None

        of(Config(), dict.fromkeys((Gauge, Counter, Histogram), Named), ["engine"], {})
        return {name.replace("splitpoint", "nixl") for name in made}

    assert names(NixlPromMetrics) <= names(SplitpointPromMetrics)
