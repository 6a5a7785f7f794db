"""Connections that the network has forgotten: both ends hold them open, and what is written goes nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import time
from collections.abc import AsyncIterator

import pytest

from coordinator.gateway.client_config import WorkerClientSettings
from coordinator.gateway.worker_client import WorkerClient
from engine.sampling import SamplingParams
from protos.ids import AttemptId, WorkerId
from protos.splitpoint.v1 import worker_pb2
from tests.support.workers import SimWorker, colocated_leg, running, start_worker

pytestmark = pytest.mark.timeout(60)


class ForgetfulNetwork:
    """A relay to one address, as a stateful firewall is: `forget` drops all further bytes of the connections there are."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._generation = 0
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget(self) -> None:
        self._generation += 1

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        to_reader, to_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, to_writer), (to_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink, self._generation))
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, generation: int) -> None:
        try:
            while data := await source.read(65536):
                if generation == self._generation:
                    sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()


@contextlib.asynccontextmanager
async def connected(address: str, worker: SimWorker) -> AsyncIterator[tuple[WorkerClient, asyncio.Queue[bool]]]:
    """A client whose stream is up, and what it hears of the stream from then on."""
    changes: asyncio.Queue[bool] = asyncio.Queue()
    client = WorkerClient(
        worker_id=WorkerId("w"),
        incarnation=worker.server.identity.incarnation,
        address=address,
        settings=WorkerClientSettings(keepalive_time_s=1.0, keepalive_timeout_s=1.0, backoff_initial_s=0.01),
        clock=time.monotonic,
        on_reachable=lambda _, up: changes.put_nowait(up),
    )
    client.start()
    try:
        async with asyncio.timeout(30):
            assert await changes.get()
        yield client, changes
    finally:
        await client.close()


async def served(client: WorkerClient) -> None:
    """One request to its end, within 5 s."""
    events: asyncio.Queue[worker_pb2.LegEvent] = asyncio.Queue()
    leg = colocated_leg([5] * 20, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    request = worker_pb2.StreamRequest(colocated=leg)
    client.open(AttemptId(leg.header.attempt_id), request, lambda event, _: events.put_nowait(event))
    async with asyncio.timeout(5):
        while (kind := (await events.get()).WhichOneof("event")) == "tokens":
            pass
    assert kind == "finished"


async def test_a_stream_that_the_network_forgot_while_idle_is_replaced_before_the_next_request() -> None:
    worker = await start_worker(None)
    async with running(worker):
        network = ForgetfulNetwork(worker.address)
        async with network.listening() as address, connected(address, worker) as (client, changes):
            network.forget()
            async with asyncio.timeout(30):
                assert not await changes.get(), "nobody has asked for anything, and the loss is known"
                assert await changes.get(), "another connection is up"
            assert network.connections == 2
            await served(client)


async def test_an_event_loop_that_stands_still_for_longer_than_a_ping_may_take_loses_no_stream() -> None:
    """gRPC answers pings by itself: a busy process is no lost one."""
    worker = await start_worker(None)
    async with running(worker), connected(worker.address, worker) as (client, changes):
        ctypes.PyDLL(None).sleep(4)  # with the interpreter's lock held: no thread of Python runs, on either side
        await served(client)
        assert changes.empty()
