"""What Prometheus finds at a worker's address: its own series, its ranks' with their number, and vLLM's."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from prometheus_client import REGISTRY, Counter

from engine.sampling import SamplingParams
from engine.worker.config import WorkerSettings
from engine.worker.rank_metrics import merged
from tests.support.pair import pair_of
from tests.support.workers import SimWorker, engine_settings, running, start_worker

pytestmark = pytest.mark.timeout(60)

METRICS = WorkerSettings(metrics_port=0)
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


async def scrape(worker: SimWorker) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://{worker.server.metrics_address}/metrics", timeout=20)
    assert answer.status_code == 200
    return answer.text


async def test_every_rank_is_shown_with_its_number() -> None:
    worker = await start_worker(None, wire=True, engine=engine_settings(tensor_parallel_size=2), worker_settings=METRICS)
    async with running(worker):
        text = await scrape(worker)
    for rank in (0, 1):
        assert f'splitpoint_kv_staging_bytes{{pool="send",rank="{rank}",state="capacity"}} 65536.0' in text
        assert f'splitpoint_kv_pinned_engine_blocks{{rank="{rank}"}} 0.0' in text
    assert "splitpoint_worker_legs_running 0.0" in text
    assert len(re.findall(r"^# TYPE splitpoint_kv_staging_bytes ", text, re.MULTILINE)) == 1


async def test_a_transfer_is_seen_at_the_worker_that_pulled() -> None:
    async with pair_of(wire=True, worker_settings=METRICS) as pair:
        await pair.split(list(range(10, 60)), GREEDY)
        text = await scrape(pair.d)
        assert 'splitpoint_kv_transfer_seconds_count{rank="0",transport="grpc"} 1.0' in text
        assert 'splitpoint_kv_transfer_bytes_total{rank="0",transport="grpc"} 7168.0' in text
        assert 'splitpoint_kv_transfer_inflight{rank="0",transport="grpc"} 0.0' in text
        await pair.empty()


async def test_a_rank_that_does_not_answer_costs_its_own_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await start_worker(None, wire=True, worker_settings=METRICS)
    async with running(worker):
        await asyncio.to_thread(worker.engine._kv._nodes[0].stop)  # type: ignore[union-attr]
        text = await scrape(worker)
        assert "splitpoint_kv_" not in text
        assert "splitpoint_worker_legs_running 0.0" in text

        async def nonsense() -> list[bytes | None]:
            return [b"{ this is no exposition"]

        assert worker.server.ranks is not None
        monkeypatch.setattr(worker.server.ranks, "metrics", nonsense)
        worker.server.metrics.ranks(nonsense)
        await scrape(worker)
        assert worker.events()["rank_scrape_failed"] == 1


async def test_the_series_of_vllm_are_shown_and_nothing_else_of_the_process() -> None:
    theirs = Counter("vllm:test_of_the_worker", "As vLLM makes them")
    other = Counter("other_test_of_the_worker", "Of something else in this process")
    theirs.inc(3)
    worker = await start_worker(None, worker_settings=METRICS)
    try:
        async with running(worker):
            text = await scrape(worker)
    finally:
        REGISTRY.unregister(theirs)
        REGISTRY.unregister(other)
    assert "vllm:test_of_the_worker_total 3.0" in text
    assert "other_test" not in text


def test_ranks_are_merged_by_family_and_one_may_be_silent() -> None:
    said = b'# HELP a_total x\n# TYPE a_total counter\na_total{k="v"} 2.0\n'
    (family,) = merged([said, None, said])
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("a_total", {"k": "v", "rank": "0"}, 2.0),
        ("a_total", {"k": "v", "rank": "2"}, 2.0),
    ]
