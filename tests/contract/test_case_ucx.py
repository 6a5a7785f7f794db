"""Receives that are posted when their sender goes: each ends, in time, and leaves nothing pending (docs/failure-cases.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvtransfer.transports.base import TransportError

pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
from kvtransfer.transports.ucx_core import CHUNK_BITS
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.contract.test_ucx import MIB, Rig

pytestmark = [pytest.mark.ucx, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(60)]

PATIENCE_S = 20.0
RECEIVES = 8


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig("same")
    await made.transport.start()
    yield made
    for remote in made.remotes:
        await remote.kill()
        made.transport.peer_died(remote.incarnation)
    await asyncio.wait_for(made.transport.stop(), 20)


@pytest.mark.parametrize("how", ["closes", "is killed"])
async def test_posted_receives_end_when_their_sender(rig: Rig, how: str) -> None:
    remote = await rig.remote()
    channel = await rig.open_from(remote, 1)
    # One whole transfer first: the two are connected.
    (response,) = (await remote.ask("send", number=1, num_bytes=MIB, seed=1))["responses"]
    target = np.zeros(MIB, np.uint8)
    await channel.accept(pb.FetchResponse.FromString(bytes.fromhex(response)), lambda _: target, PATIENCE_S)
    memory = np.zeros((RECEIVES, MIB), np.uint8)

    async def accept(number: int) -> str:
        header = pb.ChunkHeader(index=number, bytes=MIB, tag=channel._channel << CHUNK_BITS | (100 + number))
        with pytest.raises(TransportError) as raised:
            await channel.accept(pb.FetchResponse(header=header), lambda _: memory[number], 1.5)
        return raised.value.reason

    accepting = [asyncio.create_task(accept(number)) for number in range(RECEIVES)]
    await asyncio.sleep(0)
    if how == "closes":
        await remote.ask("stop")
    else:
        await remote.kill()
    async with asyncio.timeout(PATIENCE_S):
        reasons = {await task for task in accepting}
    assert reasons <= {"peer_lost", "timeout", "closed"}
    await channel.close()
    assert await channel.drained(PATIENCE_S), "nothing can write into the memory any more"
    assert not memory.any()
    rig.transport.peer_died(remote.incarnation)
    # The transport serves others as before.
    other = await rig.remote()
    again = await rig.open_from(other, 2)
    (response,) = (await other.ask("send", number=2, num_bytes=MIB, seed=2))["responses"]
    await again.accept(pb.FetchResponse.FromString(bytes.fromhex(response)), lambda _: target, PATIENCE_S)
    assert await again.drained(PATIENCE_S)
