"""One gateway's end as its actor runs it: unready, then closed, then finished. Simulated workers in this process, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.config import Settings, load
from coordinator.pools.gateway_process import GatewayProcess
from coordinator.pools.ray_gateway import CoordinatorBackend
from tests.support.gateway import tiny_tokenizer
from tests.support.small_cluster import SmallCluster, pool_settings

pytestmark = pytest.mark.timeout(90)

NOTICE_S = 1.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    tiny_tokenizer()._hf.save_pretrained(tmp_path)
    return load(
        sets=[
            "engine.kind=simulated",
            f"engine.model_path={tmp_path}",
            "engine.max_model_len=2048",
            "engine.simulated.step_base_s=0.01",
            "coordinator.heartbeat_interval_s=0.1",
            "coordinator.missed_heartbeats=100",
            "kvtransfer.transports=['grpc']",
            "kvtransfer.default_transport=grpc",
            f"gateway.drain_notice_s={NOTICE_S}",
            *(f"gateway.{name}_port=0" for name in ("http", "grpc", "admin")),
        ],
        environment={},
    ).with_pools(pool_settings(both={"role": "colocated"}))


@pytest.fixture
async def gateway(settings: Settings, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    """It serves."""
    async with SmallCluster(settings, tmp_path) as cluster:
        process = GatewayProcess("gateway/0", 0, settings, cluster.poll, CoordinatorBackend())
        await process.start()
        assert process.core is not None
        cluster.cores.append(process.core)
        await cluster.settled(process.core)
        yield process
        await process.stop()


async def complete(client: httpx.AsyncClient, model: str, max_tokens: int) -> dict[str, Any]:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == httpx.codes.OK, reply.text
    return dict(reply.json())


async def test_a_gateway_that_drains_is_unready_then_closed_and_answers_what_it_has(
    gateway: GatewayProcess, settings: Settings
) -> None:
    url, model = f"http://{gateway.report().http_address}", settings.engine.served_model_name
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        assert (await client.get("/health")).status_code == httpx.codes.OK
        long = asyncio.create_task(complete(client, model, 400))
        async with asyncio.timeout(10):
            while gateway.report().in_flight == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        draining = asyncio.create_task(gateway.drain(30.0))
        await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == httpx.codes.SERVICE_UNAVAILABLE
        late = await complete(client, model, 1)
        assert late["usage"]["completion_tokens"] == 1, "a client that had not looked yet"
        async with asyncio.timeout(10):
            while not await refused(url):
                assert not draining.done()
        assert not long.done(), "closed while one request ran"
        assert (await long)["usage"]["completion_tokens"] == 400
        assert await draining


async def test_a_drain_whose_time_is_over_says_so(gateway: GatewayProcess, settings: Settings) -> None:
    url, model = f"http://{gateway.report().http_address}", settings.engine.served_model_name
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        long = asyncio.create_task(complete(client, model, 2000))
        async with asyncio.timeout(10):
            while gateway.report().in_flight == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not await gateway.drain(0.2)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


async def refused(url: str) -> bool:
    """Whether a new connection is refused; one that the kernel had taken as the door closed is reset, and asks again."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as client:
            await client.get("/health")
    except httpx.ConnectError:
        return True
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return False
    return False
