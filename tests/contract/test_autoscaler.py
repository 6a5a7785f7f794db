"""Pools that follow their load: simulated workers, a gateway and the autoscaler in one process, no Ray. No request notices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import load
from coordinator.pools.autoscale_sampler import Heard
from coordinator.pools.autoscaler import Autoscaler
from protos.splitpoint.v1 import admin_pb2
from tests.contract.test_pools import PROMPTS, Rig
from tests.support.cores import core_over
from tests.support.small_cluster import SmallCluster, followed, pool_settings, report_of

pytestmark = pytest.mark.timeout(120)

PASS_S = 0.05
QUICK = {"metrics_interval_s": 0.1, "look_back_period_s": 0.2, "upscale_delay_s": 0.1, "downscale_delay_s": 0.3}


class Scaled(Rig):
    """A rig with an autoscaler that looks at it every `PASS_S`."""

    scaler: Autoscaler
    away = False

    def begin(self) -> None:
        self.scaler = Autoscaler(self.cluster.store, self.cluster.pools, self.cluster.fleet, 5.0)

    def set(self, pool: str, **policy: Any) -> None:
        self.scaler.set(admin_pb2.SetAutoscalerRequest(pool=pool, policy={**QUICK, **policy}), time.monotonic())

    async def restart_coordinator(self) -> None:
        self.away = True
        await self.cluster.restart_coordinator()
        self.begin()
        self.away = False

    async def looking(self) -> None:
        while True:
            if self.away:
                await asyncio.sleep(PASS_S)
                continue
            now_s = time.monotonic()
            name, report = "gateway/0", report_of(self.under_test.core)
            self.scaler.run(Heard(reports={name: report}, heard_s={name: now_s}, expected=(name,)), now_s)
            await asyncio.sleep(PASS_S)

    def ready(self, pool: str) -> int:
        return sum(label[0] == pool for label in self.members().values())

    async def until(self, what: Callable[[], bool], timeout_s: float = 30.0) -> None:
        until_s = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < until_s, self.scaler.status(time.monotonic())
            await asyncio.sleep(PASS_S)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Scaled]:
    settings = load(
        sets=[
            "engine.kind=simulated",
            f"engine.model_path={tmp_path}",
            "engine.max_model_len=512",
            "engine.simulated.step_base_s=0.01",
            "engine.simulated.num_kv_blocks=512",
            "coordinator.heartbeat_interval_s=0.1",
            "coordinator.missed_heartbeats=100",
            "kvtransfer.transports=['grpc']",
            "kvtransfer.default_transport=grpc",
            "kvtransfer.send_staging_bytes=4MiB",
            "kvtransfer.receive_staging_bytes=4MiB",
        ],
        environment={},
    ).with_pools(pool_settings(prefill={"role": "prefill"}, decode={"role": "decode"}))
    async with (
        SmallCluster(settings, tmp_path) as cluster,
        core_over([], transports=("grpc",)) as under_test,
        followed(cluster, under_test.core),
    ):
        await cluster.settled(under_test.core)
        made = Scaled(cluster, under_test)
        made.begin()
        await made.alone()
        looking = asyncio.create_task(made.looking())
        try:
            yield made
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking


async def test_decode_grows_under_load_and_shrinks_after_it_and_no_request_fails(rig: Scaled) -> None:
    rig.set("decode", min_replicas=1, max_replicas=3, target_decode_batch=2)
    async with rig.load() as answered:
        await rig.until(lambda: rig.ready("decode") == 3)
        await rig.cluster.settled(rig.under_test.core)
        workers = {reader.ledger.decode_worker for reader in await rig.next_answers(answered)}
        assert len(workers) > 1, "the new ones take traffic"
        assert rig.ready("prefill") == 1, "a phase scales by itself"
    await rig.until(lambda: rig.ready("decode") == 1)
    await rig.cluster.settled(rig.under_test.core)
    assert await rig.held() == [(0, 0, 0)] * 2


async def test_prefill_goes_to_0_when_nobody_asks_and_comes_back_for_the_first_that_wants_it(rig: Scaled) -> None:
    rig.set("prefill", min_replicas=0, max_replicas=2)
    await rig.until(lambda: rig.ready("prefill") == 0)
    await rig.cluster.settled(rig.under_test.core)
    assert (await rig.answer(PROMPTS[1])).ledger.path == "colocated", "decode serves it meanwhile, which is noted"
    await rig.until(lambda: rig.ready("prefill") > 0)
    await rig.cluster.settled(rig.under_test.core)
    rig.set("prefill", min_replicas=1, max_replicas=2)
    assert (await rig.answer(PROMPTS[1])).ledger.path == "split"


async def test_a_coordinator_that_was_lost_goes_on_scaling(rig: Scaled) -> None:
    rig.set("decode", min_replicas=2, max_replicas=2)
    await rig.until(lambda: rig.ready("decode") == 2)
    rig.set("decode", min_replicas=1, max_replicas=2, downscale_delay_s=0)
    await rig.restart_coordinator()
    await rig.until(lambda: rig.ready("decode") == 1)
    await rig.cluster.settled(rig.under_test.core)
