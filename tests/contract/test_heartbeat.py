"""What a worker says of itself."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from engine.sampling import SamplingParams
from engine.worker.config import WorkerSettings
from engine.worker.heartbeat import heartbeat
from prefill.config import PrefillSettings
from tests.support.pair import pair_of
from tests.support.workers import colocated_leg, new_grant, prefill_leg, running, start_worker

pytestmark = pytest.mark.timeout(60)

SAMPLING = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
PROMPT = list(range(10, 60))


async def test_a_heartbeat_counts_what_runs_waits_and_is_leased() -> None:
    async with pair_of(wire=True) as pair:
        idle = await heartbeat(pair.p.server, 5)
        assert idle.serving
        assert (idle.running, idle.waiting, idle.leases, idle.kv_usage) == (0, 0, 0, 0.0)
        assert (idle.send_staging_used, idle.receive_staging_used, idle.dead, idle.detail) == (0.0, 0.0, "", "")

        grant = new_grant()
        await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, SAMPLING, grant)))
        inside = pair.p.clock.hold()
        for _ in range(9):  # one more than the engine's batch
            await pair.to_p.send(colocated=colocated_leg(PROMPT, SAMPLING))
        await inside.wait()
        await pair.to_p.settled()
        busy = await heartbeat(pair.p.server, 5)
        assert busy.running + busy.waiting == 9
        assert busy.running >= 1
        assert busy.leases == 1
        assert busy.kv_usage > 0
        assert 0 < busy.send_staging_used < 1
        assert busy.receive_staging_used == 0

        pair.p.clock.let_go()
        await pair.to_p.release(grant.transfer_id)
        await pair.empty()
        pair.p.server.begin_drain()
        drained = await heartbeat(pair.p.server, 5)
        assert (drained.serving, drained.draining, drained.leases) == (False, True, 0)


async def test_every_request_is_counted_from_its_arrival_to_its_end_wherever_it_waits() -> None:
    """In the engine's batch, in its queue, or outside it for staging: fifty that wait are fifty."""
    async with pair_of(wire=True, staging_blocks=64, prefill_settings=PrefillSettings(staging_wait_s=30.0)) as pair:
        inside = pair.p.clock.hold()
        grants = [new_grant() for _ in range(25)]
        legs = [{"prefill": prefill_leg(PROMPT, SAMPLING, grant)} for grant in grants]
        legs += [{"colocated": colocated_leg(PROMPT, SAMPLING)} for _ in range(25)]
        attempts = []
        for sent, leg in enumerate(legs, 1):
            attempts.append(await pair.to_p.send(**leg))
            await pair.to_p.settled()
            beat = await heartbeat(pair.p.server, 5)
            assert beat.running + beat.waiting == sent
        await inside.wait()
        assert (await heartbeat(pair.p.server, 5)).running < 25, "most of them wait"
        for attempt in attempts:
            await pair.to_p.abort(attempt)
        pair.p.clock.let_go()
        for attempt in attempts:
            await pair.to_p.last(attempt)
        for grant in grants:
            await pair.to_p.release(grant.transfer_id)
        await pair.empty()
        idle = await heartbeat(pair.p.server, 5)
        assert (idle.running, idle.waiting) == (0, 0)


async def test_a_heartbeat_names_a_dead_engine_and_a_silent_rank() -> None:
    async with pair_of() as pair:
        assert pair.fabric is not None
        attempt = await pair.to_p.send(colocated=colocated_leg(PROMPT, SAMPLING))
        pair.p.clock.hold()
        pair.p.engine.crash("killed by a test")
        async with asyncio.timeout(10):
            await pair.to_p.last(attempt)
        pair.fabric.hold("status")
        beat = await heartbeat(pair.p.server, 0.05)
        pair.fabric.let_go("status")
        assert "killed by a test" in beat.dead
        assert not beat.serving
        assert "rank does not answer" in beat.detail
        assert beat.counters["engine_died"] == 1


async def test_what_a_silent_rank_holds_counts_as_held() -> None:
    """A drain ends when no lease is left (rule 10); a rank that does not answer has not said so."""
    async with pair_of() as pair:
        assert pair.fabric is not None
        pair.fabric.hold("status")
        silent = await heartbeat(pair.p.server, 0.05)
        pair.fabric.let_go("status")
        assert silent.leases > 0
        assert (await heartbeat(pair.p.server, 5)).leases == 0


async def test_staging_too_small_for_the_longest_prompt_is_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    worker = await start_worker(None, wire=True, staging_blocks=4)
    async with running(worker):
        facts, info = worker.server.facts, worker.server.info
        assert facts is not None
        assert info is not None
        assert facts.max_transfer_tokens < info.max_model_len
        (record,) = [r for r in caplog.records if "max_transfer_tokens" in r.getMessage()]
        assert record.levelname == "WARNING"
        assert f"max_transfer_tokens={facts.max_transfer_tokens}" in record.getMessage()
        assert worker.server.metrics.events["staging_below_max_model_len"] == 1


async def test_a_worker_can_be_scraped() -> None:
    worker = await start_worker(None, worker_settings=WorkerSettings(metrics_port=0))
    async with running(worker):
        gateway = await worker.gateway()
        await gateway.last(await gateway.send(colocated=colocated_leg(PROMPT, SAMPLING)))
        address = (await heartbeat(worker.server, 5)).metrics_address
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{address}/metrics")).text
        assert 'splitpoint_worker_legs_total{leg="colocated",outcome="ok"} 1.0' in text
        assert "splitpoint_worker_kv_usage 0.0" in text
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://{address}/metrics")
