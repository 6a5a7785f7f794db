"""Transfers that are asked for, answered and confirmed over UCX: the same promises as over gRPC, without its `Fetch`."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import google_crc32c
import numpy as np
import pytest

from kvtransfer.control import RankControl
from kvtransfer.push import KvTransferServicer
from kvtransfer.push_direct import DirectSend
from kvtransfer.transports.base import TransportError
from protos.errors import Code
from protos.ids import new_capability
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import (
    TOKEN,
    NodePair,
    Transfer,
    assert_scattered,
    complete,
    error_of,
    small_settings,
    until,
)

pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
from kvtransfer.transports.ucx import WorkerAddress
from kvtransfer.transports.ucx_asks import ASK_TAG, COMPLETE_TAG, Asking
from kvtransfer.transports.ucx_core import Peer

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(60)]

SETTINGS: dict[str, Any] = {
    "transports": ("ucx", "grpc"),
    "default_transport": "ucx",
    # Not read from the sender's memory: that is told by gRPC.
    "ucx_same_host": "contained",
    "fetch_wait_s": 0.5,
    "progress_timeout_s": 5.0,
}


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair(settings=small_settings(**SETTINGS)) as pair:
        yield pair


def transfer_of(pair: NodePair, num_tokens: int) -> Transfer:
    return pair.transfer(num_tokens, "ucx")


async def leased(pair: NodePair, state: str = "fetching") -> None:
    await until(lambda: pair.senders[0].status().lease_states.get(state) == 1, 5)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 1000])
async def test_every_block_arrives_and_no_stream_is_opened(pair: NodePair, num_tokens: int) -> None:
    transfer = transfer_of(pair, num_tokens)
    (answer,) = await complete(transfer)
    assert answer.seal.token_hash == transfer.hash
    assert answer.total_s >= answer.seconds >= 0
    await pair.settled()
    sender, receiver = pair.senders[0].counters(), pair.receivers[0].counters()
    assert (receiver["asked_directly"], receiver["pulls_delivered"]) == (1, 1)
    assert (sender["ucx.asks"], sender["completed_directly"], sender["lease.delivered"]) == (1, 1, 1)
    assert "complete_by_grpc" not in receiver


async def test_what_is_staged_before_it_is_asked_for_goes_at_once(pair: NodePair) -> None:
    transfer = transfer_of(pair, 100)
    await transfer.reserve()
    transfer.gather()
    await transfer.pull()
    assert_scattered(transfer)
    await pair.settled()


async def test_chunks_travel_while_the_engine_still_gathers(pair: NodePair) -> None:
    transfer = transfer_of(pair, 160)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    done = threading.Event()
    transfer.gather(0, 4)
    transfer.gather(4, 5, ready=done.is_set)
    await until(lambda: pair.receivers[0].status().session_states.get("receiving") == 1, 5)
    assert pair.receivers[0].receive_view(transfer.id) is None, "nothing is shown before all of it is verified"
    done.set()
    transfer.gather(5, 10)
    await pull
    assert_scattered(transfer)
    await pair.settled()


async def test_a_device_that_is_waited_for_wakes_the_sender(pair: NodePair) -> None:
    """What has `wait` is waited for on a thread, which tells UCX's thread itself."""

    class Copy:
        done = threading.Event()

        def __call__(self) -> bool:
            return self.done.is_set()

        def wait(self) -> None:
            self.done.wait(20)

        def wait_nearly(self) -> bool:
            self.done.wait(20)
            return True

    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    await leased(pair)
    transfer.gather(ready=Copy())
    assert not (await asyncio.wait([pull], timeout=0.05))[0]
    Copy.done.set()
    await pull
    assert_scattered(transfer)
    await pair.settled()


async def test_many_at_once(pair: NodePair) -> None:
    transfers = [transfer_of(pair, n) for n in (1, 17, 40, 64, 100, 5, 33, 80)]
    await asyncio.gather(*(complete(t) for t in transfers))
    await pair.settled()
    assert pair.receivers[0].counters()["asked_directly"] == len(transfers)


async def test_a_capability_that_is_not_the_transfers_gets_nothing(pair: NodePair) -> None:
    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    transfer.gather()
    right = transfer.grant.capability
    transfer.grant.capability = new_capability()
    error = await error_of(transfer.pull())
    assert error.code is Code.TRANSFER_REFUSED
    assert "capability" in error.message
    assert pair.senders[0].status().lease_states["sealed"] == 1, "a forged ask ends nobody's lease"
    transfer.grant.capability = right
    await pair.send_control.release(transfer.id, "test")
    await pair.settled()


async def test_an_ask_for_another_prompt_is_refused(pair: NodePair) -> None:
    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    transfer.gather()
    error = await error_of(transfer.pull(token_hash=bytes(32)))
    assert error.code is Code.TRANSFER_REFUSED
    await pair.send_control.release(transfer.id, "test")
    await pair.settled()


async def test_an_ask_waits_for_its_reservation_and_no_longer_than_this_side_says(pair: NodePair) -> None:
    transfer = transfer_of(pair, 40)
    pull = asyncio.create_task(transfer.pull())
    await until(lambda: pair.senders[0]._rt.pending_fetches == 1, 5)
    sender = pair.senders[0]
    transport = next(t for t in sender._rt.transports.values() if t.scheme == "ucx")
    forged = pb.FetchRequest(
        grant=pb.TransferGrant(transfer_id=transfer.id, capability=new_capability()),
        sender_incarnation=sender.endpoint.incarnation,
        transport="ucx",
        remaining_s=5.0,
    )
    refusals: list[Any] = []
    answers: Any = SimpleNamespace(error=refusals.append)
    transport._core.run(lambda: transport._asks._serves.asked(forged, answers))
    await until(lambda: sender._rt.pending_fetches == 2, 5)
    await transfer.reserve()
    transfer.gather()
    await pull
    assert_scattered(transfer)
    await until(lambda: bool(refusals), 5)
    assert "capability" in refusals[0].message, "who guesses stands in nobody's way"
    error = await error_of(transfer_of(pair, 40).pull())
    assert error.code is Code.TRANSFER_REFUSED
    assert "nothing was reserved" in error.message
    await pair.settled()


async def test_a_receiver_that_leaves_ends_the_lease(pair: NodePair) -> None:
    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    await leased(pair)
    pull.cancel()
    await asyncio.wait([pull])
    await pair.settled()
    assert pair.senders[0].counters()["lease.released"] == 1


async def test_a_receiver_that_leaves_before_the_reservation_is_not_sent_to() -> None:
    async with NodePair(settings=small_settings(**{**SETTINGS, "fetch_wait_s": 30.0})) as pair:
        transfer = transfer_of(pair, 40)
        pull = asyncio.create_task(transfer.pull())
        await until(lambda: pair.senders[0]._rt.pending_fetches == 1, 5)
        pull.cancel()
        await asyncio.wait([pull])
        await until(lambda: pair.senders[0]._rt.pending_fetches == 0, 5)
        await pair.settled()


async def test_a_sender_that_ends_its_lease_is_heard(pair: NodePair) -> None:
    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    await leased(pair)
    await pair.send_control.release(transfer.id, "test")
    error = await error_of(pull)
    assert error.code is Code.TRANSFER_REFUSED
    assert "over" in error.message
    await pair.settled()


async def test_a_deadline_of_the_receiver_ends_both(pair: NodePair) -> None:
    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    error = await error_of(transfer.pull(remaining_s=0.3))
    assert error.code is Code.DEADLINE_EXCEEDED
    await pair.settled()


async def test_damaged_bytes_are_not_believed(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = next(t for t in pair.senders[0]._rt.transports.values() if t.scheme == "ucx")._asks._serves
    header = direct._servicer.header

    def damaged(*args: Any) -> pb.ChunkHeader:
        made: pb.ChunkHeader = header(*args)
        made.checksum.value ^= 1
        return made

    monkeypatch.setattr(direct._servicer, "header", damaged)
    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    transfer.gather()
    error = await error_of(transfer.pull())
    assert error.code is Code.TRANSFER_FAILED
    assert "checksum" in error.message
    assert transfer.scatter() == [None]
    await pair.settled()
    monkeypatch.undo()
    await complete(transfer_of(pair, 40))


async def test_a_fault_of_ours_costs_one_transfer_and_not_the_thread(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = next(t for t in pair.senders[0]._rt.transports.values() if t.scheme == "ucx")

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(transport._asks._serves._servicer, "fetched", broken)
    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    error = await error_of(transfer.pull())
    assert error.code is Code.INTERNAL
    assert pair.senders[0].counters()["ucx.faults"] == 1
    monkeypatch.undo()
    await pair.send_control.release(transfer.id, "test")
    await complete(transfer_of(pair, 40))
    await pair.settled()


@pytest.mark.parametrize("stopped", ["sender", "receiver"])
async def test_stopping_amid_transfers_ends_them(stopped: str) -> None:
    async with NodePair(settings=small_settings(**{**SETTINGS, "peer_heartbeat_s": 0.5})) as pair:
        transfers = [transfer_of(pair, 64) for _ in range(3)]
        pulls = [asyncio.create_task(t.pull()) for t in transfers]
        for transfer in transfers:
            await transfer.reserve()
            transfer.gather(0, 2)
        await until(lambda: len(pair.senders[0]._rt.fetches) == 3, 5)
        left = pair.senders[0] if stopped == "receiver" else pair.receivers[0]
        await asyncio.to_thread((pair.senders if stopped == "sender" else pair.receivers)[0].stop)
        codes = {(await error_of(pull)).code for pull in pulls}
        assert stopped == "receiver" or codes == {Code.WORKER_LOST}, "the sender says so, no deadline has to pass"
        await until(lambda: left.status().leases + left.status().sessions == 0, 10)


async def test_messages_that_are_none_change_nothing(pair: NodePair) -> None:
    """Whoever reaches UCX's port may say anything."""
    await complete(transfer_of(pair, 40))
    transport = next(t for t in pair.receivers[0]._rt.transports.values() if t.scheme == "ucx")
    core = transport._core
    (peer,) = [p for p in core._thread.endpoints.peers if isinstance(p, Peer)]
    settled: list[object] = []
    forged = pb.CompleteRequest(grant=pb.TransferGrant(transfer_id=bytes(16), capability=bytes(16)), outcome="delivered")
    # A channel that is no tag's, in an address that is well formed.
    beyond = WorkerAddress(core.address, channel=1 << 50).encode()
    messages = [
        (ASK_TAG, b"\xff" * 100),
        (ASK_TAG, bytes(40_000)),
        (ASK_TAG, pb.FetchRequest(remaining_s=1).SerializeToString()),
        (ASK_TAG, pb.FetchRequest(remaining_s=1, ucx_worker_address=beyond, transport="ucx").SerializeToString()),
        (ASK_TAG + 2, b"nobody takes this one"),
        (COMPLETE_TAG, b"\xff"),
        (COMPLETE_TAG, forged.SerializeToString()),
    ]

    def say() -> None:
        for tag, data in messages:
            memory = np.frombuffer(bytearray(data), np.uint8)
            core.post(core.prepare_operation(peer, memory, tag, 1.0, settled.append, sending=True))

    core.run(say)
    await until(lambda: len(settled) == len(messages), 10)
    sender = pair.senders[0]
    await until(lambda: sender.counters().get("ucx.asks_not_understood", 0) == 4, 5)
    await until(lambda: sender.counters().get("lease.complete_unknown", 0) == 1, 5)
    await complete(transfer_of(pair, 40))
    await pair.settled()


class LoneAsking:
    """The receiver's end of an ask without UCX: the test answers, lets bytes land and moves the clock. One second's limit."""

    def __init__(self) -> None:
        core = SimpleNamespace(lost=lambda peer: False, post=lambda operation: None, condition=lambda peer: "all is well")
        self._asks: Any = SimpleNamespace(now=0.0, core=core)
        self.failures: list[Exception] = []
        takes: Any = SimpleNamespace(
            place=lambda header, ahead: np.zeros(1, np.uint8),
            coming=lambda header, memory: None,
            landed=lambda header, memory: None,
            summed=lambda index, value: None,
            failed=self.failures.append,
        )
        self._landed: list[Any] = []
        peer = Peer("sender", b"address", error_handling=True)
        self._asking = Asking(self._asks, peer, 7, takes, self._operation, 1.0, pb.TransferGrant())

    def _operation(self, header: pb.ChunkHeader, memory: Any, settled: Any, *, announced: bool) -> Any:
        self._landed.append(settled)

    def answer(self, **fields: Any) -> None:
        self._asking._answered(pb.FetchAnswer(proof=self._asking._proof, **fields).SerializeToString())

    def land(self, index: int) -> None:
        self._landed[index](None)

    def look(self, now: float) -> None:
        self._asks.now = now
        self._asking.check(now)


def test_a_slow_link_is_not_late_while_chunks_land() -> None:
    """All are announced at once and share the link: the last one may take many times as long as one chunk's limit."""
    lone = LoneAsking()
    for index in range(3):
        lone.answer(header=pb.ChunkHeader(index=index))
    for index, landed_at in enumerate((0.9, 1.8)):
        lone.look(landed_at)
        lone.land(index)
    lone.look(2.7)
    assert not lone.failures
    lone.look(2.9)
    assert isinstance(lone.failures[0], TransportError)
    assert lone.failures[0].reason == "timeout"


@pytest.mark.parametrize("lost", ["checksum", "bytes"])
def test_what_is_announced_is_late_only_once_some_of_it_has_come(lost: str) -> None:
    lone = LoneAsking()
    for index, computed_at in enumerate((10.0, 20.0)):
        lone.answer(header=pb.ChunkHeader(index=index), announced=True)
        lone.look(computed_at)
        assert not lone.failures, "the prompt is still computed"
        if index == 0 or lost == "bytes":
            lone.answer(checksum=pb.ChunkChecksum(index=index))
        if index == 0 or lost == "checksum":
            lone.land(index)
    lone.look(20.9)
    assert not lone.failures
    lone.look(21.1)
    assert isinstance(lone.failures[0], TransportError)
    assert "1 is due" in str(lone.failures[0])


class Copy:
    """A gather on a device that has begun."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def __call__(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait(20)

    def wait_nearly(self) -> bool:
        return True


async def announced(pair: NodePair, transfer: Transfer, crcs: np.ndarray | None = None) -> tuple[asyncio.Task[Any], Copy]:
    """A pull whose header has come while its blocks are still being gathered."""
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    await leased(pair)
    copy = Copy()
    transfer.gather(ready=copy, crcs=crcs)
    await until(lambda: pair.receivers[0].status().session_states.get("receiving") == 1, 5)
    return pull, copy


def block_crcs(transfer: Transfer) -> np.ndarray:
    return np.array([google_crc32c.value(block.tobytes()) for block in transfer.data], np.uint32)


@pytest.mark.parametrize("gather_sums", [True, False])
@pytest.mark.parametrize("num_tokens", [40, 320])
async def test_a_header_comes_while_its_blocks_are_gathered_and_its_checksum_later(
    pair: NodePair, num_tokens: int, gather_sums: bool
) -> None:
    """Of the first chunk; several follow at once."""
    transfer = transfer_of(pair, num_tokens)
    pull, copy = await announced(pair, transfer, block_crcs(transfer) if gather_sums else None)
    assert pair.receivers[0].receive_view(transfer.id) is None
    assert not pull.done()
    copy.done.set()
    await pull
    assert_scattered(transfer)
    await pair.settled()


async def test_an_announced_chunk_with_another_checksum_is_not_believed(pair: NodePair) -> None:
    transfer = transfer_of(pair, 40)
    pull, copy = await announced(pair, transfer, block_crcs(transfer) ^ np.uint32(1))
    copy.done.set()
    error = await error_of(pull)
    assert error.code is Code.TRANSFER_FAILED
    assert "rejected, checksum" in error.message
    assert pair.receivers[0].receive_view(transfer.id) is None
    await pair.settled()


async def test_what_ends_between_the_header_and_its_bytes_leaves_nothing(pair: NodePair) -> None:
    transfer = transfer_of(pair, 40)
    pull, copy = await announced(pair, transfer)
    await pair.send_control.release(transfer.id, "test")
    await error_of(pull)
    assert pair.senders[0].status().send.quarantined_bytes > 0, "the gather may still write"
    copy.done.set()
    await pair.settled()
    await complete(transfer_of(pair, 40))
    await pair.settled()


async def test_a_receiver_that_takes_no_announcements_gets_headers_with_their_checksums(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version."""
    monkeypatch.setattr(DirectSend, "_announce", lambda self: None)
    transfer = transfer_of(pair, 40)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    await leased(pair)
    copy = Copy()
    transfer.gather(ready=copy)
    copy.done.set()
    await pull
    assert_scattered(transfer)
    await pair.settled()


def test_under_mutual_tls_a_capability_travels_by_grpc_alone() -> None:
    served: list[Any] = []
    transport = SimpleNamespace(serve=served.append, open_answer=lambda request: None)
    for tls, count in ((object(), 0), (None, 1)):
        runtime: Any = SimpleNamespace(settings=SimpleNamespace(tls=tls), transports={"ucx": transport})
        KvTransferServicer(runtime).serve_directly()
        assert len(served) == count


SENDER = """
import json, sys
from tests.support.kv_nodes import make_node, small_settings

node = make_node(small_settings(**json.loads(sys.argv[1])), incarnation="killed")
print(node.start().SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.fault
async def test_a_sender_that_is_killed_while_it_is_asked_ends_the_pull_and_costs_nothing_else() -> None:
    settings = small_settings(**{**SETTINGS, "peer_heartbeat_s": 0.5})
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", SENDER, json.dumps(SETTINGS))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        endpoint = pb.RankEndpoint.FromString(bytes.fromhex((await process.stdout.readline()).decode()))
        async with NodePair(settings=settings) as pair:
            control = RankControl([endpoint], TOKEN)
            transfer = transfer_of(pair, 40)
            await control.reserve(transfer.grant, prompt_tokens=40, token_hash=transfer.hash, remaining_s=10)
            pull = asyncio.create_task(transfer.pull(senders=[endpoint]))
            async with asyncio.timeout(10):
                while not (await control.status())[0].lease_states.get("fetching"):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.01)
            process.kill()
            error = await error_of(pull)
            assert error.code in (Code.TRANSFER_FAILED, Code.WORKER_LOST)
            await control.close()
            await pair.receive_control.fence("killed")
            await pair.settled(10)
            await complete(transfer_of(pair, 40))
            await pair.settled()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
