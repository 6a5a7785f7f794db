"""What workers held during a probe, read over the admin API from a service that answers as scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from coordinator.compare.usage import Usage, UsageSampler
from protos.splitpoint.v1 import admin_pb2, admin_pb2_grpc

pytestmark = pytest.mark.timeout(60)


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Answers with `workers`; every call rings."""

    def __init__(self) -> None:
        self.workers: list[admin_pb2.WorkerStatus] = []
        self.away = False
        self._calls = 0
        self._called = asyncio.Condition()

    async def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:
        async with self._called:
            self._calls += 1
            self._called.notify_all()
        if self.away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator is away")
        return admin_pb2.GetStatusResponse(workers=self.workers)

    async def calls(self, count: int) -> None:
        """Until this many more have come."""
        async with self._called:
            wanted = self._calls + count
            await self._called.wait_for(lambda: self._calls >= wanted)


@contextlib.asynccontextmanager
async def serving(admin: Admin) -> AsyncIterator[str]:
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def worker(name: str, pool: str, **changes: Any) -> admin_pb2.WorkerStatus:
    held = admin_pb2.WorkerResources(memory_bytes=2**30, device_memory_bytes=2**34)
    held.send_staging.used_bytes, held.receive_staging.quarantined_bytes = 100, 20
    values = {"worker_id": name, "pool": pool, "running": 3, "waiting": 2, "kv_usage": 0.25, "resources": held, **changes}
    return admin_pb2.WorkerStatus(**values)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_probe_keeps_each_heartbeat_of_its_pools_once() -> None:
    admin, clock = Admin(), Clock()
    admin.workers = [
        worker("p-0", "prefill"),
        worker("c-0", "colocated"),
        admin_pb2.WorkerStatus(worker_id="p-1", pool="prefill"),
    ]
    async with serving(admin) as address, UsageSampler(address, interval_s=0.01, now=clock) as sampler:
        assert sampler.samples == []
        with sampler.probe("split", 7, pools=["prefill", "decode"]):
            clock.now_s += 1.0
            # The clock stands: later answers speak of the same heartbeat.
            await admin.calls(4)
            first = list(sampler.samples)
            clock.now_s += 1.0
            await admin.calls(3)
        kept = list(sampler.samples)
        # Begun anew, a heartbeat from before the probe is none of its.
        admin.workers = [worker("p-0", "prefill", heartbeat_age_s=5.0)]
        with sampler.probe("split", 8):
            await admin.calls(3)
    assert first == [
        Usage(
            arm="split", probe=7, t_s=1.0, worker="p-0", kv_usage=0.25, running=3, waiting=2, memory_bytes=2**30,
            device_memory_bytes=2**34, staging_bytes=120,
        )
    ]  # fmt: skip
    assert [(each.t_s, each.worker) for each in kept] == [(1.0, "p-0"), (2.0, "p-0")]
    assert sampler.samples == kept
    assert (sampler.missed, sampler.notes()) == (0, [])


async def test_an_admin_that_is_away_costs_samples_and_is_told() -> None:
    admin = Admin()
    admin.away = True
    async with serving(admin) as address, UsageSampler(address, interval_s=0.01) as sampler:
        with sampler.probe("split", 0):
            await admin.calls(3)
            admin.away = False
            admin.workers = [worker("p-0", "prefill")]
            while not sampler.samples:
                await admin.calls(1)
    assert sampler.missed >= 2
    assert f"{sampler.missed} of {sampler.polls} looks" in sampler.notes()[0]


async def test_a_probe_is_looked_at_when_it_begins_and_nothing_is_asked_between() -> None:
    admin = Admin()
    async with serving(admin) as address, UsageSampler(address, interval_s=3600) as sampler:
        for number in range(3):
            with sampler.probe("split", number):
                await admin.calls(1)
    assert sampler.polls == 3
