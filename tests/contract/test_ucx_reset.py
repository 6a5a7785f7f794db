"""Ending what was given up on a connection leaves what is healthy on it alone; and what a chunk may be between hosts."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
from kvtransfer.transports import ucx_core
from kvtransfer.transports.ucx import ACROSS_CHUNK_BYTES, UcxTransport
from kvtransfer.transports.ucx_core import CHUNK_BITS, Peer, UcxCore
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(60)]

SIZE = 1 << 20


async def test_a_given_up_send_is_ended_and_a_healthy_one_on_the_same_connection_arrives() -> None:
    sender, receiver = UcxCore("lo"), UcxCore("lo")
    await sender.start()
    await receiver.start()
    try:
        there = Peer("receiver", receiver.address, error_handling=True)
        here = Peer("sender", sender.address, error_handling=True)
        receiver.expect(here)
        channel = receiver.open_channel()
        payloads = [np.full(SIZE, value, np.uint8) for value in (1, 2, 3)]
        tags = [channel << CHUNK_BITS | number for number in (1, 2, 3)]
        given_up, healthy = (sender.send(there, payloads[i], tags[i], 5.0) for i in (0, 1))
        await healthy.begun
        sender.give_up(given_up)
        for _ in range(3):  # asked again and again by a channel that drains
            sender.reset(there)
        later = sender.send(there, payloads[2], tags[2], 5.0)
        landed = np.zeros(SIZE, np.uint8)
        for operation, tag, value in ((healthy, tags[1], 2), (later, tags[2], 3)):
            async with asyncio.timeout(20):
                assert await receiver.receive(here, landed, tag, 5.0).done is None
                assert await operation.done is None
            assert (landed == value).all()
        async with asyncio.timeout(20):
            await given_up.done
        assert sender.counters["endpoints_retired"] == 1
        assert sender.counters["endpoints_closed"] == 1
    finally:
        await sender.stop()
        await receiver.stop()


async def test_a_stop_does_not_wait_for_a_thread_that_ucx_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_core, "STOP_TIMEOUT_S", 0.2)
    core, release = UcxCore("lo"), threading.Event()
    await core.start()
    core.run(lambda: release.wait(40) and None)
    try:
        async with asyncio.timeout(20):
            await core.stop()
        assert core.counters["stop_timeouts"] == 1
    finally:
        release.set()


@pytest.mark.parametrize(("host", "asked", "most"), [("there", 0, ACROSS_CHUNK_BYTES), ("there", 4096, 4096), ("here", 0, 0)])
async def test_between_hosts_a_chunk_is_small_enough_to_show_progress(host: str, asked: int, most: int) -> None:
    transport = UcxTransport(host_id="here", net_devices="lo")
    await transport.start()
    try:
        endpoint = pb.RankEndpoint(host_id=host, incarnation="i", ucx_worker_address=transport.worker_address())
        request = pb.FetchRequest(max_chunk_bytes=asked)
        transport.open_receive(endpoint, request)
        assert request.max_chunk_bytes == most
    finally:
        await transport.stop()
