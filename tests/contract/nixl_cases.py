"""NIXL between two processes: bytes, grants, wreckage, restarts; and between two nodes. Run by test_nixl.py, in a process of its
own: the UCX inside NIXL does not live beside that of ucxx."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import psutil
import pytest

from kvtransfer.transports import TransportContext, create_transport
from kvtransfer.transports.base import TransportError
from protos.errors import Code
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import BLOCK_BYTES, NodePair, assert_scattered, complete, error_of, make_node, small_settings, until

# Only the library's absence is a reason to skip: a fault in our own modules is not.
if not any(importlib.util.find_spec(wheel) for wheel in ("nixl_cu12", "nixl_cu13")):
    pytest.skip("NIXL is not installed", allow_module_level=True)
from kvtransfer.transports.nixl_messages import AgentAddress, Notice, NoticeKind
from tests.contract.nixl_peer import Peer, pattern

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PEER = Path(__file__).with_name("nixl_peer.py")
MIB = 1 << 20
HERE = "incarnation-here"
FD_BUDGET_PER_RESTART = 2
RESTARTS = 5


class Remote:
    """The other process, seen from here."""

    def __init__(self, process: asyncio.subprocess.Process, incarnation: str) -> None:
        self.process = process
        self.incarnation = incarnation
        self.address = ""

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps({"do": do, **arguments}) + "\n").encode())
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert line, "the other process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Rig:
    """A peer in this process and as many others as a test starts."""

    def __init__(self) -> None:
        self.here = Peer(HERE)
        self.remotes: list[Remote] = []

    async def remote(self) -> Remote:
        incarnation = f"incarnation-{len(self.remotes)}"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, str(PEER), incarnation, stdin=pipe, stdout=pipe)
        remote = Remote(process, incarnation)
        self.remotes.append(remote)
        remote.address = (await remote.answer())["address"]
        return remote

    async def open_to(self, remote: Remote, number: int) -> Any:
        """A channel that sends from here to there."""
        address = self.here.transport.worker_address().hex()
        answer = await remote.ask("open_receive", number=number, sender=HERE, address=address)
        await self.here.open_send(number, answer["request"])
        return self.here.channels[number]

    async def open_from(self, remote: Remote, number: int) -> Any:
        """A channel that receives here what is sent there."""
        answer = await self.here.open_receive(number, remote.incarnation, remote.address)
        await remote.ask("open_send", number=number, request=answer["request"])
        return self.here.channels[number]

    async def begin(self, number: int, num_bytes: int, seed: int) -> str:
        """Offer one chunk from here; the one message that goes on the stream."""
        (response,) = (await self.here.send(number, num_bytes, seed))["responses"]
        text: str = response
        return text


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.here.start()
    yield made
    for remote in made.remotes:
        await remote.kill()
        made.here.transport.peer_died(remote.incarnation)
    await asyncio.wait_for(made.here.transport.stop(), 30)


def crc(num_bytes: int, seed: int) -> int:
    value: int = google_crc32c.value(pattern(num_bytes, seed).tobytes())
    return value


async def test_bytes_arrive_both_ways(rig: Rig) -> None:
    remote = await rig.remote()
    for number, num_bytes in enumerate((1, 1000, MIB, 20 * MIB)):
        channel = await rig.open_to(remote, number)
        response = await rig.begin(number, num_bytes, number)
        answer = await remote.ask("accept", number=number, response=response, timeout_s=20)
        assert answer.get("crc") == crc(num_bytes, number), answer
        assert await channel.drained(10)
        back = await rig.open_from(remote, 100 + number)
        (response,) = (await remote.ask("send", number=100 + number, num_bytes=num_bytes, seed=9))["responses"]
        assert (await rig.here.accept(100 + number, response, 20))["crc"] == crc(num_bytes, 9)
        assert await back.drained(10)
        assert (await remote.ask("drained", number=100 + number, timeout_s=10))["drained"]


async def test_nothing_is_written_before_it_is_granted_or_after_it_was_given_up(rig: Rig) -> None:
    remote = await rig.remote()
    channel = await rig.open_to(remote, 1)
    response = await rig.begin(1, MIB, 1)
    assert not await channel.drained(0.3), "the sender's slot is held as long as the chunk may be granted"
    await channel.close()
    assert await channel.drained(10)
    answer = await remote.ask("accept", number=1, response=response, timeout_s=20)
    assert answer["failed"] == "closed"
    assert (await remote.ask("drained", number=1, timeout_s=10))["drained"]


@pytest.mark.fault
async def test_a_stopped_sender_holds_the_slot_until_it_answers_and_its_late_bytes_are_told(rig: Rig) -> None:
    remote = await rig.remote()
    channel = await rig.open_from(remote, 1)
    (response,) = (await remote.ask("send", number=1, num_bytes=8 * MIB, seed=1))["responses"]
    os.kill(remote.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TransportError) as raised:
            await rig.here.accept(1, response, 0.5)
        assert raised.value.reason == "timeout"
        await channel.close()
        assert not await channel.drained(0.5), "a stopped process may still write: time alone frees nothing"
    finally:
        os.kill(remote.process.pid, signal.SIGCONT)
    assert await channel.drained(20)
    slot = rig.here.receiving[: 8 * MIB]
    slot[:] = 0  # used again
    await remote.ask("counters")
    assert not slot.any(), "a byte landed in a slot that was called free"


@pytest.mark.fault
async def test_a_killed_sender_frees_the_slot_once_it_is_known_dead(rig: Rig) -> None:
    remote = await rig.remote()
    channel = await rig.open_from(remote, 1)
    (response,) = (await remote.ask("send", number=1, num_bytes=MIB, seed=1))["responses"]
    await remote.kill()
    with pytest.raises(TransportError) as raised:
        await rig.here.accept(1, response, 1.0)
    assert raised.value.reason in {"timeout", "peer_lost"}
    await channel.close()
    rig.here.transport.peer_died(remote.incarnation)
    assert await channel.drained(10)
    late = await rig.here.open_receive(2, remote.incarnation, remote.address)
    assert late["request"]
    with pytest.raises(TransportError) as raised:
        await rig.here.accept(2, response, 5)
    assert raised.value.reason == "peer_lost"


@pytest.mark.fault
@pytest.mark.timeout(240)
async def test_restarts_of_the_peer(rig: Rig) -> None:
    """Half die with a chunk of ours offered. Descriptors grow by no more than the budget per restart."""
    before = 0
    restarts = RESTARTS
    for number in range(restarts):
        remote = await rig.remote()
        channel = await rig.open_to(remote, number)
        response = await rig.begin(number, MIB, number)
        if number % 2:
            answer = await remote.ask("accept", number=number, response=response, timeout_s=20)
            assert answer.get("crc") == crc(MIB, number), answer
        await remote.kill()
        rig.here.transport.peer_died(remote.incarnation)
        assert await channel.drained(10)
        if number == 1:
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) - before <= (restarts - 2) * FD_BUDGET_PER_RESTART


async def test_two_nodes(caplog: pytest.LogCaptureFixture) -> None:
    settings = small_settings(transports=("nixl", "grpc"), default_transport="nixl", chunk_bytes=4 * BLOCK_BYTES)
    async with NodePair(settings=settings) as pair:
        assert pair.senders[0].transports == ("nixl", "grpc")
        for num_tokens in (1, 100, 1000):
            await complete(pair.transfer(num_tokens, "nixl"))
        await pair.settled()
        # What a gateway passes on of a rank has no NIXL address: that comes from the rank itself, in the handshake.
        known = [node.endpoint for node in pair.senders]
        for endpoint in known:
            endpoint.transport_addresses.clear()
        by_handshake = pair.transfer(64, "nixl")
        await by_handshake.reserve()
        by_handshake.gather()
        await by_handshake.pull(senders=known)
        assert_scattered(by_handshake)
        late = pair.transfer(64, "nixl")
        pull = asyncio.create_task(late.pull())
        await late.reserve()
        late.gather(0, 2)
        await until(lambda: (late.id, 0) in pair.senders[0]._rt.fetches, 20.0)
        await pair.receive_control.release(late.id, "client_left")
        assert (await error_of(pull)).code is Code.CANCELLED
        await pair.settled(15.0)


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in [name for name in sys.modules if name.startswith("kvtransfer.transports.nixl")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"nixl.*splitpoint\[nixl\]"):
        create_transport("nixl", TransportContext(small_settings(), 0, "i", "h"))
    node = make_node(small_settings(transports=("nixl", "grpc")))
    await asyncio.to_thread(node.start)
    try:
        assert node.transports == ("grpc",)
        assert node.counters()["transport_unavailable.nixl"] == 1
        assert "splitpoint[nixl]" in caplog.text
    finally:
        await asyncio.to_thread(node.stop)


async def test_on_loopback_it_listens_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    process = psutil.Process()
    before = {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    area = np.zeros(4096, np.uint8)
    transport = create_transport("nixl", TransportContext(small_settings(), 0, HERE, "h", area, area))
    await transport.start()
    try:
        opened = {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN} - before
        assert opened
        assert {address.ip for address in opened} == {"127.0.0.1"}
        assert "UCX_NET_DEVICES" not in os.environ
    finally:
        await transport.stop()


async def test_memory_outside_of_staging_is_refused(rig: Rig) -> None:
    await rig.here.open_receive(1, HERE, rig.here.transport.worker_address().hex())
    header = pb.ChunkHeader(bytes=16)
    with pytest.raises(TransportError, match="outside") as raised:
        await rig.here.channels[1].accept(pb.FetchResponse(header=header), lambda _: np.zeros(16, np.uint8), 5)
    assert raised.value.reason == "refused"


def test_addresses_are_checked_before_nixl_sees_them() -> None:
    address = AgentAddress("incarnation.0", b"metadata", (1, 5))
    framed = address.encode()
    assert AgentAddress.decode(framed, version=(1, 5)) == address
    for damaged in (b"", framed[:10], framed[:-1], b"X" + framed[1:], framed[:20] + b"?" + framed[21:]):
        with pytest.raises(ValueError, match="NIXL address"):
            AgentAddress.decode(damaged, version=(1, 5))
    with pytest.raises(ValueError, match=r"1\.5, this side 2\.0"):
        AgentAddress.decode(framed, version=(2, 0))


def test_notices_survive_the_wire_and_nothing_else_does() -> None:
    notice = Notice(NoticeKind.GRANT, 2**64 - 1, 3, 2**63, 4096)
    assert Notice.decode(notice.encode()) == notice
    for strange in (b"", notice.encode()[:-1], b"X" * len(notice.encode()), notice.encode()[:4] + b"\x63" + notice.encode()[5:]):
        assert Notice.decode(strange) is None
