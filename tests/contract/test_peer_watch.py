"""A stopped peer process is noticed within its heartbeats, by either side; what it does later changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from protos.errors import Code
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import NodePair, error_of, small_settings, until
from tests.support.netns import Host, hosts
from tests.support.netns_node import Crossing, agent, settings

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(120)]

HEARTBEAT_S, MISSES = 0.4, 3
WATCHED = {"peer_heartbeat_s": HEARTBEAT_S, "peer_missed_heartbeats": MISSES, "progress_timeout_s": 60.0}
LONG_S = 60.0


class Two:
    """Sender and receiver, each a process, over one transport."""

    def __init__(self, sender: Host, receiver: Host, endpoint: bytes, transport: str) -> None:
        self.sender, self.receiver, self.endpoint, self.transport = sender, receiver, endpoint, transport

    def crossing(self) -> Crossing:
        return Crossing(self.sender, self.receiver, self.endpoint, self.transport, 32)

    async def works(self) -> None:
        crossing = self.crossing()
        await crossing.reserve(LONG_S)
        pull = asyncio.create_task(crossing.pull(LONG_S))
        assert await crossing.gather()
        await pull
        assert await crossing.exact()

    async def status(self, host: Host) -> pb.GetNodeStatusResponse:
        return pb.GetNodeStatusResponse.FromString(await host.call("status"))

    async def until_idle(self) -> None:
        async with asyncio.timeout(30):
            for host in (self.sender, self.receiver):
                while True:
                    status = await self.status(host)
                    held = status.send.used_bytes + status.send.quarantined_bytes
                    held += status.receive.used_bytes + status.receive.quarantined_bytes
                    if held + status.leases + status.sessions == 0:
                        break
                    await asyncio.sleep(0.05)


@pytest.fixture(params=["grpc", "ucx"])
async def two(request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    if request.param == "ucx":
        pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
    async with hosts(agent, "sender", "receiver", apart=False) as (sender, receiver):
        fields = settings("127.0.0.1", transports=(request.param,), default_transport=request.param, **WATCHED)
        endpoint = await sender.call("start", fields)
        await receiver.call("start", fields)
        yield Two(sender, receiver, endpoint, request.param)


async def test_a_stopped_sender_ends_the_pull_and_what_it_sends_later_lands_nowhere(two: Two) -> None:
    await two.works()
    crossing = two.crossing()
    await crossing.reserve(LONG_S)
    pull = asyncio.create_task(crossing.pull(LONG_S))
    await crossing.gather(0, 16)
    await asyncio.sleep(HEARTBEAT_S)  # some of it is on its way
    os.kill(two.sender.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        error = await error_of(pull)
        noticed_s = time.monotonic() - began
    finally:
        os.kill(two.sender.pid, signal.SIGCONT)
    assert error.code is Code.TRANSFER_FAILED
    assert "silent" in error.message
    assert noticed_s < LONG_S / 2, "by its heartbeats, not by a deadline"
    assert (await two.status(two.receiver)).counters["sender_silent"] == 1
    await crossing.gather(16, 32)  # it has woken up and goes on where it was
    assert not await crossing.exact()
    await crossing.sender.call("release", crossing.id)
    await two.until_idle()
    await two.works()


async def test_a_stopped_receiver_ends_the_lease(two: Two) -> None:
    await two.works()
    crossing = two.crossing()
    await crossing.reserve(LONG_S)
    pull = asyncio.create_task(crossing.pull(LONG_S))
    await crossing.gather(0, 16)
    await asyncio.sleep(HEARTBEAT_S)
    os.kill(two.receiver.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(LONG_S / 2):
            status = await two.status(two.sender)
            # The lease ends; its slot may still be held for what the receiver was given.
            while status.counters["receiver_silent"] == 0 or status.lease_states:
                status = await two.status(two.sender)
    finally:
        os.kill(two.receiver.pid, signal.SIGCONT)
    error = await error_of(pull)
    assert error.code in (Code.TRANSFER_REFUSED, Code.TRANSFER_FAILED, Code.WORKER_LOST)
    await two.until_idle()
    await two.works()


async def test_a_sender_that_only_computes_for_long_is_not_silent() -> None:
    """No byte for many heartbeats, and heartbeats all the while."""
    async with NodePair(settings=small_settings(**{**WATCHED, "peer_heartbeat_s": 0.05})) as pair:
        transfer = pair.transfer(64)
        await transfer.reserve(remaining_s=30.0)
        pull = asyncio.create_task(transfer.pull(remaining_s=30.0))
        await until(lambda: len(pair.senders[0]._rt.fetches) == 1)
        watch, heard = pair.receivers[0]._rt.watch, []
        detector = watch._senders
        original = detector.heard
        detector.heard = lambda key, now_s: (heard.append(now_s), original(key, now_s))[1]  # type: ignore[method-assign]
        await until(lambda: len(heard) > 2 * MISSES, 20)
        assert not pull.done()
        transfer.gather()
        await pull
        transfer.scatter()
        await pair.settled()
        assert not watch._pings, "nobody is asked when nothing is under way"
        assert len(watch._senders) == len(pair.senders[0]._rt.watch._receivers) == 0
