"""A peer that is killed in the middle of a write to UCX's queue in shared memory: noticed, said, and survived by the rest."""

from __future__ import annotations

import asyncio
import os
import struct

import numpy as np
import pytest

pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
from kvtransfer.transports.ucx_core import CHUNK_BITS, Peer, UcxCore

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(120)]

SIZE = 1 << 20


def take_a_slot(core: UcxCore) -> None:
    """What a writer does first; a killed one never does the rest."""
    descriptor = os.open("/proc/self/mem", os.O_RDWR)
    try:
        for address in core._thread.queue._queues:
            (taken,) = struct.unpack("<Q", os.pread(descriptor, 8, address))
            os.pwrite(descriptor, struct.pack("<Q", taken + 1), address)
    finally:
        os.close(descriptor)


async def test_a_writer_that_is_gone_is_noticed_and_said_and_everything_ends() -> None:
    sender, receiver = UcxCore("lo"), UcxCore("lo")
    await sender.start()
    await receiver.start()
    try:
        there = Peer("receiver", receiver.address, error_handling=True)
        here = Peer("sender", sender.address, error_handling=True)
        assert sender.queue_watched
        assert receiver.queue_watched
        receiver.expect(here)
        channel = receiver.open_channel()
        payload, landed = np.full(SIZE, 7, np.uint8), np.zeros(SIZE, np.uint8)
        sent = sender.send(there, payload, channel << CHUNK_BITS | 1, 5.0)
        async with asyncio.timeout(30):
            assert await receiver.receive(here, landed, channel << CHUNK_BITS | 1, 5.0).done is None
            assert await sent.done is None
        assert "in order" in receiver.condition(here)

        take_a_slot(receiver)
        sent = sender.send(there, payload, channel << CHUNK_BITS | 2, 5.0)
        received = receiver.receive(here, landed, channel << CHUNK_BITS | 2, 5.0)
        async with asyncio.timeout(60):
            while not receiver.counters["queue_stuck"]:  # noqa: ASYNC110 (a counter of another thread)
                await asyncio.sleep(0.05)
        assert "half written" in receiver.condition(here)
        assert not received.done.done(), "what is behind that slot does not come"
        assert sender.counters["queue_stuck"] == 0
        sender.peer_died("receiver")
        receiver.peer_died("sender")
        async with asyncio.timeout(30):
            assert await sent.done is not None
            assert await received.done is not None
        assert receiver.counters["queue_stuck"] == 1, "said once"
    finally:
        async with asyncio.timeout(30):
            await sender.stop()
            await receiver.stop()
    assert "ended" in receiver.condition(here)
