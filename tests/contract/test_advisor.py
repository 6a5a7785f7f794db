"""Workers that the advisor moves, and moves back, under load: simulated workers and a gateway in one process, no Ray.

What the load is said to be is planted, and time is given: what is decided depends on no machine. What becomes of it is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import load
from coordinator.gateway.latencies import bucket_of
from coordinator.gateway.pool_loads import PoolLoad
from coordinator.pools.autoscale_sampler import Heard
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.scaling import Scaling
from coordinator.pools.store import Store
from tests.contract.test_pools import SPLIT, Rig
from tests.support.cores import core_over
from tests.support.small_cluster import SmallCluster, followed, report_of

pytestmark = pytest.mark.timeout(120)


class Planted:
    """Looks of the advisor, a second of given time apart, of ten prompts and answers each."""

    def __init__(self, scaling: Scaling, rig: Rig) -> None:
        self._scaling = scaling
        self._core = rig.under_test.core
        self._now_s = time.monotonic()
        self._ttft: Counter[int] = Counter()
        self._tpot: Counter[int] = Counter()

    def look(self, *, ttft_s: float, tpot_s: float) -> bool:
        """True when the pools have changed."""
        self._now_s += 1.0
        self._ttft[bucket_of(ttft_s)] += 5
        self._ttft[bucket_of(0.1)] += 5
        self._tpot[bucket_of(tpot_s)] += 10
        came = self._ttft.total()
        loads = {
            "prefill": PoolLoad(legs=came, ttft=dict(self._ttft), prompt_tokens=1000 * came, queued_tokens=50_000),
            "decode": PoolLoad(legs=came, tpot=dict(self._tpot), output_tokens=100 * came),
        }
        report = replace(report_of(self._core), loads=loads)
        heard = Heard(reports={"gateway/0": report}, heard_s={"gateway/0": self._now_s}, expected=("gateway/0",))
        return self._scaling.look_advisor(heard, self._now_s, self._now_s)

    def until_changed(self, **load: float) -> None:
        for _ in range(12):
            if self.look(**load):
                return
        raise AssertionError(self._scaling.advisor.status(self._now_s))


async def test_a_worker_moves_between_the_phases_and_back_and_no_request_notices(tmp_path: Path) -> None:
    settings = load(
        sets=[
            "engine.kind=simulated",
            f"engine.model_path={tmp_path}",
            "engine.max_model_len=512",
            "engine.simulated.step_base_s=0.002",
            "engine.simulated.num_kv_blocks=512",
            "coordinator.heartbeat_interval_s=0.1",
            "coordinator.missed_heartbeats=1000",
            "kvtransfer.transports=['grpc']",
            "kvtransfer.default_transport=grpc",
            "kvtransfer.send_staging_bytes=4MiB",
            "kvtransfer.receive_staging_bytes=4MiB",
            "advisor.enabled=true",
            "advisor.apply=true",
            "advisor.interval_s=1.0",
            "advisor.window_s=4.0",
            "advisor.hold_s=0.5",
        ],
        environment={},
    ).with_pools(SPLIT)
    async with (
        SmallCluster(settings, tmp_path) as cluster,
        core_over([], transports=("grpc",)) as under_test,
        followed(cluster, under_test.core),
    ):
        await cluster.settled(under_test.core)
        rig = Rig(cluster, under_test)
        await rig.alone()
        planted = Planted(Scaling(settings, cluster.store, cluster.pools, cluster.fleet), rig)
        before = rig.incarnations()
        found = []
        async with rig.load() as answered:
            for tpot_s in (0.02, 0.9):
                # The worker that decode has lost is missed then: its answers are late.
                planted.until_changed(ttft_s=3.0, tpot_s=tpot_s)
                await cluster.settled(under_test.core)
                targets = {target.name: target.replicas for target in cluster.pools.targets}
                found.append((targets, {reader.ledger.prefill_worker for reader in await rig.next_answers(answered)}))
        assert [targets for targets, _ in found] == [{"prefill": 2, "decode": 1}, {"prefill": 1, "decode": 2}]
        assert [len(workers) for _, workers in found] == [2, 1], "those who compute prompts"
        assert rig.incarnations() == before, "no engine was started"
        assert not any(reader.ledger.recomputed for reader in answered)
        assert await rig.held() == [(0, 0, 0)] * 3


async def test_both_look_by_themselves_and_what_they_decide_is_scraped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sets = ["engine.kind=simulated", f"engine.model_path={tmp_path}", "coordinator.metrics_port=0"]
    sets += ["advisor.enabled=true", "advisor.interval_s=0.05", "advisor.window_s=0.2"]
    settings, fleet = load(sets=sets, environment={}), Fleet()
    with contextlib.closing(Store(tmp_path / "state.sqlite3")) as store:
        store.begin_run("run", settings.pools)
        scaling = Scaling(settings, store, DesiredPools(settings, store, fleet, rules_of(settings).whole_roles), fleet)
        port = scaling.serve_metrics()
        heard = Heard(reports={}, heard_s={}, expected=("gateway/0",))
        looking = asyncio.create_task(scaling.run(lambda: heard, lambda: [], lambda: False, lambda: None))
        try:
            async with asyncio.timeout(30):
                text = ""
                while 'splitpoint_advisor_decisions_total{action="stay"' not in text or "splitpoint_advisor_pending{" not in text:
                    text = await asyncio.to_thread(_scrape, port)
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
        taken = settings.model_copy(update={"coordinator": settings.coordinator.model_copy(update={"metrics_port": port})})
        again = Scaling(taken, store, DesiredPools(settings, store, fleet, rules_of(settings).whole_roles), fleet)
        with caplog.at_level(logging.ERROR):
            assert again.serve_metrics() is None
        assert "coordinator.metrics_port: no metrics of pools" in caplog.text
        scaling.metrics.close()


def _scrape(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return str(reply.read().decode())
