"""One worker's life as its actor runs it, with the simulated engine and without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from coordinator.config import Settings, load
from coordinator.pools.reports import Beat, ProcessRef, WorkerSpec
from coordinator.pools.worker_process import STAGGER, Host, WorkerProcess
from coordinator.routing.views import Role, WorkerState
from engine.simulated import SimulatedEngine
from protos.ids import WorkerId
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.timeout(60)


class Coordinator:
    """Takes heartbeats; `answer` is what it says to them, an exception is raised."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []
        self.answer: bool | Exception = True
        self._news = asyncio.Event()

    async def push(self, beat: Beat) -> bool:
        self.beats.append(beat)
        self._news.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def until(self, wanted: WorkerState, *, refusing: bool = False) -> Beat:
        """The next beat that says so."""
        async with asyncio.timeout(20):
            while True:
                for beat in self.beats:
                    if beat.view.state is wanted and beat.refusing is refusing:
                        return beat
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(
        sets=[
            "engine.kind=simulated",
            f"engine.model_path={tmp_path}",
            "engine.max_model_len=1024",
            "coordinator.heartbeat_interval_s=0.05",
            "kvtransfer.transports=['grpc']",
            "kvtransfer.default_transport=grpc",
            "kvtransfer.send_staging_bytes=1MiB",
            "kvtransfer.receive_staging_bytes=1MiB",
        ],
        environment={},
    )


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@contextlib.asynccontextmanager
async def living(settings: Settings, coordinator: Coordinator, tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    spec = WorkerSpec(
        worker_id=WorkerId("decode-7"), pool="decode", role=Role.DECODE, slot=2, settings=settings, log_dir=tmp_path
    )
    refs = (ProcessRef(os.getpid(), 0.0),)
    process = WorkerProcess(spec, Host(node_id="n", node_ip="127.0.0.1", push=coordinator.push, processes=lambda: refs))
    life = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        if not life.done():
            await process.stop("the test is over")
        await life


@pytest.fixture
async def worker(settings: Settings, coordinator: Coordinator, tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    async with living(settings, coordinator, tmp_path) as process:
        yield process


async def test_it_says_that_it_starts_and_then_that_it_serves(worker: WorkerProcess, coordinator: Coordinator) -> None:
    first = await coordinator.until(WorkerState.STARTING)
    assert (first.view.worker_id, first.slot, first.view.fingerprint) == ("decode-7", 2, b"")
    ready = (await coordinator.until(WorkerState.READY)).view
    assert ready.incarnation == first.view.incarnation == worker.incarnation
    assert len(ready.ranks) == 1
    assert ready.fingerprint
    assert ready.max_transfer_tokens > 0
    assert ready.kv_capacity_tokens >= 512
    assert ready.transports == ("grpc",)
    async with grpc.aio.insecure_channel(ready.address) as channel:
        reply = await worker_pb2_grpc.WorkerServiceStub(channel).DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=5)
    assert reply.incarnation == worker.incarnation


async def test_a_beat_says_what_requests_make_it_hold(worker: WorkerProcess, coordinator: Coordinator) -> None:
    assert (await coordinator.until(WorkerState.STARTING)).resources is None
    held = (await coordinator.until(WorkerState.READY)).resources
    assert held is not None
    assert (held.kv_blocks_held, held.legs, held.leases, held.sessions) == (0, 0, 0, 0)
    assert (held.lease_states, held.session_states) == ({}, {})
    for staging in (held.send_staging, held.receive_staging):
        assert (staging.capacity_bytes, staging.used_bytes, staging.quarantined_bytes) == (2**20, 0, 0)
    # Its own tasks and its rank's, its own files.
    assert held.tasks >= 3
    assert held.open_files > 3
    assert held.memory_bytes > 2**24
    assert held.device_memory_bytes == 0


async def test_a_coordinator_that_is_away_ends_nothing(worker: WorkerProcess, coordinator: Coordinator) -> None:
    await coordinator.until(WorkerState.READY)
    coordinator.answer = ConnectionError("away")
    for _ in range(5):
        coordinator.beats.clear()
        await coordinator.until(WorkerState.READY)
    coordinator.answer = True
    coordinator.beats.clear()
    assert (await coordinator.until(WorkerState.READY)).view.incarnation == worker.incarnation


async def test_a_worker_that_was_given_up_ends_itself(worker: WorkerProcess, coordinator: Coordinator) -> None:
    await coordinator.until(WorkerState.READY)
    coordinator.answer = False
    assert "gave this worker up" in await asyncio.wait_for(worker.wait_ended(), 20)


async def test_a_worker_whose_engine_dies_ends_itself(worker: WorkerProcess, coordinator: Coordinator) -> None:
    await coordinator.until(WorkerState.READY)
    assert isinstance(worker.server.engine, SimulatedEngine)
    worker.server.engine.crash()
    assert "engine died" in await asyncio.wait_for(worker.wait_ended(), 20)


async def test_a_worker_whose_transfer_node_ends_is_dead_and_says_why(worker: WorkerProcess, coordinator: Coordinator) -> None:
    """It would go on looking ready, and fail every split request."""
    await coordinator.until(WorkerState.READY)
    assert isinstance(worker.server.engine, SimulatedEngine)
    node = worker.server.engine._kv._nodes[0]

    def crash() -> None:
        node._rt.sessions = None  # what the sweep looks at

    node._rt.loop.call_soon_threadsafe(crash)
    reason = await asyncio.wait_for(worker.wait_ended(), 30)
    assert "its ranks are lost, 3 heartbeats in a row" in reason
    assert "rank 0" in reason
    assert node.counters is not None


async def test_a_group_of_ranks_ends_as_a_whole_when_one_of_them_does(
    settings: Settings, coordinator: Coordinator, tmp_path: Path
) -> None:
    """Nothing is repaired rank by rank: the worker ends, and another one is started (`test_pool_scenarios`)."""
    engine = settings.engine.model_copy(update={"tensor_parallel_size": 2})
    async with living(settings.model_copy(update={"engine": engine}), coordinator, tmp_path) as worker:
        ready = await coordinator.until(WorkerState.READY)
        assert len(ready.view.ranks) == 2
        assert ready.ranks == 2
        assert isinstance(worker.server.engine, SimulatedEngine)
        nodes = worker.server.engine._kv._nodes
        await asyncio.to_thread(nodes[1].stop)
        reason = await asyncio.wait_for(worker.wait_ended(), 30)
        assert "its ranks are lost" in reason
        assert "rank 1" in reason


async def test_ranks_find_their_own_address_where_the_actor_is_not_on_loopback(settings: Settings, tmp_path: Path) -> None:
    auto = settings.kvtransfer.model_copy(update={"advertise_host": "auto"})
    spec = WorkerSpec(
        worker_id=WorkerId("d"),
        pool="decode",
        role=Role.DECODE,
        slot=0,
        settings=settings.model_copy(update={"kvtransfer": auto}),
        log_dir=tmp_path,
    )

    async def push(beat: Beat) -> bool:
        return True

    process = WorkerProcess(spec, Host(node_id="n", node_ip="10.1.2.3", push=push, processes=tuple))
    assert process._kv_config("10.1.2.3:7000").settings.advertise_host == "auto", "each rank says its own"
    here = process._kv_config("127.0.0.1:7000").settings
    assert (here.advertise_host, here.bind_host) == ("10.1.2.3", "10.1.2.3")


async def test_a_worker_that_holds_too_much_of_killed_peers_drains_by_itself(
    worker: WorkerProcess, coordinator: Coordinator, settings: Settings
) -> None:
    await coordinator.until(WorkerState.READY)
    assert isinstance(worker.server.engine, SimulatedEngine)
    node = worker.server.engine._kv._nodes[0]
    budget = settings.kvtransfer.leaked_attachments + STAGGER * worker.spec.slot
    leaked = Counter({"leaked_attachments": budget - 1})
    node._rt.transports["ucx"] = type("Leaky", (), {"scheme": "ucx", "counters": lambda self: leaked})()
    coordinator.beats.clear()
    await coordinator.until(WorkerState.READY)
    assert not worker.server.draining
    leaked["leaked_attachments"] = budget
    await coordinator.until(WorkerState.READY, refusing=True)
    assert worker.server.metrics.events["recycled"] == 1
    del node._rt.transports["ucx"]


async def test_a_worker_whose_queue_a_killed_peer_has_spoilt_drains_by_itself(
    worker: WorkerProcess, coordinator: Coordinator
) -> None:
    await coordinator.until(WorkerState.READY)
    assert isinstance(worker.server.engine, SimulatedEngine)
    node = worker.server.engine._kv._nodes[0]
    node._rt.transports["ucx"] = type("Spoilt", (), {"scheme": "ucx", "counters": lambda self: {"queue_stuck": 1}})()
    await coordinator.until(WorkerState.READY, refusing=True)
    assert worker.server.metrics.events["recycled"] == 1
    del node._rt.transports["ucx"]


async def test_a_drain_is_confirmed_by_the_next_heartbeat(worker: WorkerProcess, coordinator: Coordinator) -> None:
    await coordinator.until(WorkerState.READY)
    worker.drain()
    view = (await coordinator.until(WorkerState.READY, refusing=True)).view
    assert view.running + view.waiting + view.leases == 0


async def test_stop_ends_in_order_and_says_why(worker: WorkerProcess, coordinator: Coordinator) -> None:
    address = (await coordinator.until(WorkerState.READY)).view.address
    await worker.stop("scaled down")
    assert await worker.wait_ended() == "scaled down"
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await worker_pb2_grpc.WorkerServiceStub(channel).DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=2)


async def test_facts_for_the_manifest(worker: WorkerProcess, coordinator: Coordinator) -> None:
    await coordinator.until(WorkerState.READY)
    facts = worker.facts()
    assert facts.start_arguments["kind"] == "simulated"
    assert facts.transports["usable"] == ["grpc"]
    assert facts.versions["ray"]


async def test_a_start_that_fails_says_why(settings: Settings, coordinator: Coordinator, tmp_path: Path) -> None:
    small = settings.engine.simulated.model_copy(update={"num_kv_blocks": 1})
    broken = settings.model_copy(update={"engine": settings.engine.model_copy(update={"simulated": small})})
    spec = WorkerSpec(worker_id=WorkerId("decode-8"), pool="decode", role=Role.DECODE, slot=0, settings=broken, log_dir=tmp_path)
    host = Host(node_id="n", node_ip="127.0.0.1", push=coordinator.push, processes=lambda: (ProcessRef(1, 0.0),))
    process = WorkerProcess(spec, host)
    reason = await asyncio.wait_for(process.run(), 20)
    assert "did not start" in reason
    assert "num_kv_blocks" in reason
    assert await process.wait_ended() == reason
