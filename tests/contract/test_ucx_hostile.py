"""What the UCX path does when a peer lies, floods or stands still, and when UCX itself ends: nothing grows, nothing is believed
without proof, no memory is freed that UCX may still touch, and whoever waits is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvtransfer.control import RankControl
from kvtransfer.rpc import control_metadata
from protos.errors import Code, SplitpointError
from protos.ids import new_capability, new_transfer_id
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from tests.support.kv_nodes import BLOCK_BYTES, TOKEN, NodePair, assert_scattered, complete, error_of, small_settings, until

pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
from kvtransfer.transports import ucx_channels
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.ucx import UcxTransport, WorkerAddress
from kvtransfer.transports.ucx_asks import ASK_TAG, COMPLETE_TAG
from kvtransfer.transports.ucx_core import CHUNK_BITS, Peer, UcxCore
from kvtransfer.transports.ucx_endpoints import MAX_STRANGERS, STRANGER_KEPT_S, Endpoints
from tests.contract.test_ucx import Rig, begin, pattern

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(60)]

SETTINGS: dict[str, Any] = {
    "transports": ("ucx", "grpc"),
    "default_transport": "ucx",
    "ucx_same_host": "contained",
    "fetch_wait_s": 0.5,
    "progress_timeout_s": 5.0,
}
PENDING = 8
FLOOD = 200


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair(settings=small_settings(**SETTINGS)) as pair:
        yield pair


def transport_of(node: Any) -> UcxTransport:
    return next(t for t in node._rt.transports.values() if isinstance(t, UcxTransport))


def core_of(node: Any) -> UcxCore:
    return transport_of(node)._core


def say(core: UcxCore, peer: Peer, tag: int, message: Any) -> None:
    """One message, from any thread."""
    memory = np.frombuffer(bytearray(message.SerializeToString()), np.uint8)
    core.run(lambda: core.post(core.prepare_operation(peer, memory, tag, 1.0, lambda failure: None, sending=True)))


def hold_loop(node: Any) -> threading.Event:
    """The node's loop does nothing until the event is set."""
    go_on = threading.Event()
    node._rt.loop.call_soon_threadsafe(go_on.wait, 40.0)
    return go_on


class Flood:
    """Asks for what nobody reserved, each from an incarnation of its own: addresses are well formed and lead somewhere."""

    def __init__(self, pair: NodePair) -> None:
        self._sender, core = pair.senders[0], core_of(pair.receivers[0])
        self._core = core
        (self._peer,) = [p for p in core._thread.endpoints.peers if p.incarnation == self._sender.endpoint.incarnation]
        self._address = WorkerAddress(core.address, channel=77).encode()

    def send(self, count: int, *, and_leave: bool = False) -> None:
        """`and_leave`: each asker says at once that it wants nothing."""
        for number in range(count):
            request = pb.FetchRequest(
                grant=pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability()),
                sender_incarnation=self._sender.endpoint.incarnation,
                receiver_incarnation=f"stranger-{number}",
                ucx_worker_address=self._address,
                transport="ucx",
                remaining_s=5.0,
            )
            say(self._core, self._peer, ASK_TAG, request)
            if and_leave:
                say(self._core, self._peer, COMPLETE_TAG, pb.CompleteRequest(grant=request.grant, outcome="cancelled"))


async def test_a_flood_of_asks_that_no_lease_knows_makes_few_connections(pair: NodePair) -> None:
    await complete(pair.transfer(40, "ucx"))
    sender = pair.senders[0]
    connections, descriptors = sender.counters()["ucx.endpoints"], len(os.listdir("/proc/self/fd"))
    Flood(pair).send(FLOOD)
    await until(lambda: sender.counters().get("ucx.asks", 0) == FLOOD + 1, 20)
    await until(lambda: sender.counters().get("refused.unknown", 0) + sender.counters().get("refused.pending", 0) == FLOOD, 20)
    # Whoever is known is answered, after everybody before it.
    error = await error_of(pair.transfer(40, "ucx").pull())
    assert "nothing was reserved" in error.message
    counters = sender.counters()
    made = counters["ucx.endpoints"] - connections
    assert made <= MAX_STRANGERS
    assert counters["ucx.answers_withheld"] == FLOOD - made
    assert len(os.listdir("/proc/self/fd")) - descriptors <= 4 * MAX_STRANGERS
    await complete(pair.transfer(40, "ucx"))
    await pair.settled()


def test_a_strangers_connection_is_another_strangers_when_its_answer_has_left() -> None:
    endpoints = Endpoints(None, Counter())
    strangers = [Peer(str(number), b"address", error_handling=False) for number in range(MAX_STRANGERS + 2)]
    for stranger in strangers[:MAX_STRANGERS]:
        admitted = endpoints.admit(stranger, 0.0)
        assert admitted is not None
        assert admitted.error_handling, "without, its death could cost this process"
    again, late, later = strangers[0], *strangers[MAX_STRANGERS:]
    assert endpoints.admit(late, 1.0) is None
    assert endpoints.admit(again, STRANGER_KEPT_S) is not None, "it has its place"
    assert endpoints.admit(late, STRANGER_KEPT_S) is not None, "in the place of the one answered longest ago"
    assert endpoints.admit(strangers[1], 2 * STRANGER_KEPT_S - 0.1) is not None
    for number in range(3, MAX_STRANGERS):
        endpoints.admit(strangers[number], 2 * STRANGER_KEPT_S - 0.1)
    assert endpoints.admit(later, 2 * STRANGER_KEPT_S - 0.05) is None
    endpoints.trust(dataclasses.replace(again, error_handling=True))
    assert endpoints.admit(later, 2 * STRANGER_KEPT_S - 0.05) is not None, "who has proved itself takes no stranger's place"


async def test_a_flood_of_asks_is_refused_while_the_nodes_loop_stands_still() -> None:
    async with NodePair(settings=small_settings(**SETTINGS, max_pending_fetches=PENDING)) as pair:
        await complete(pair.transfer(40, "ucx"))
        sender = pair.senders[0]
        go_on = hold_loop(sender)
        Flood(pair).send(FLOOD)
        try:
            await until(lambda: sender.counters().get("refused.pending", 0) == FLOOD - PENDING, 30)
            # Strangers hold every place: a lawful ask that overtakes its own reservation is told so at once.
            lawful = pair.transfer(40, "ucx")
            error = await error_of(lawful.pull())
            assert error.code is Code.TRANSFER_REFUSED
            assert f"{PENDING} asks wait for an answer already" in error.message
        finally:
            go_on.set()
        await until(lambda: sender.counters().get("refused.unknown", 0) == PENDING, 20)
        await until(lambda: len(sender._rt.tasks) == 0, 20)
        again = pair.transfer(40, "ucx")
        again.tokens, again.hash, again.data = lawful.tokens, lawful.hash, lawful.data
        await complete(again)
        await pair.settled()


async def test_askers_that_leave_before_the_loop_looks_take_nobodys_place() -> None:
    async with NodePair(settings=small_settings(**SETTINGS, max_pending_fetches=PENDING)) as pair:
        await complete(pair.transfer(40, "ucx"))
        sender = pair.senders[0]
        go_on = hold_loop(sender)
        try:
            Flood(pair).send(PENDING, and_leave=True)
            await until(lambda: sender.counters().get("completed_directly", 0) == PENDING + 1, 20)
        finally:
            go_on.set()
        await until(lambda: len(sender._rt.tasks) == 0, 20)
        error = await error_of(pair.transfer(40, "ucx").pull())
        assert "nothing was reserved" in error.message
        await pair.settled()


async def test_answers_without_proof_are_not_believed(pair: NodePair) -> None:
    """Tags are numbers that can be guessed; whoever reaches UCX's port may say that a transfer failed, or that it comes."""
    transfer = pair.transfer(40, "ucx")
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    sender, receiver = pair.senders[0], pair.receivers[0]
    await until(lambda: sender.status().lease_states.get("fetching") == 1, 15)
    (asking,) = transport_of(receiver)._asks._asking
    stranger = UcxCore("lo")
    await stranger.start()
    try:
        there = Peer("receiver", core_of(receiver).address, error_handling=True)
        error = SplitpointError(Code.TRANSFER_FAILED, "a lie").to_proto()
        forged = [
            pb.FetchAnswer(error=error),
            pb.FetchAnswer(error=error, proof=bytes(16)),
            pb.FetchAnswer(soon=True),
            pb.FetchAnswer(header=pb.ChunkHeader(transfer_id=transfer.id, bytes=1 << 40)),
        ]
        for message in forged:
            say(stranger, there, asking._tag, message)
        await until(lambda: receiver.counters().get("ucx.answers_not_believed", 0) == len(forged), 20)
        assert not pull.done()
        transfer.gather()
        await pull
    finally:
        await stranger.stop()
    assert_scattered(transfer)
    await pair.settled()


@pytest.mark.parametrize("lost", ["header", "payload"])
async def test_what_fails_after_the_last_chunk_was_sent_is_told(
    pair: NodePair, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = pair.transfer(40, "ucx")
    await transfer.reserve(remaining_s=60.0)
    pull = asyncio.create_task(transfer.pull(remaining_s=60.0))
    sender = pair.senders[0]
    await until(lambda: sender.status().lease_states.get("fetching") == 1, 15)
    core, post, cut = core_of(sender), core_of(sender).post, []

    def cutting(operation: Any) -> None:
        header = operation.tag % (1 << CHUNK_BITS) == 0
        if not cut and header == (lost == "header"):
            cut.append(operation)
            # As UCX tells it: later, when everything has been handed over.
            core.run(lambda: core._thread.settle(operation, TransportError("peer_lost", "the connection was cut")))
        else:
            post(operation)

    monkeypatch.setattr(core, "post", cutting)
    begun = time.monotonic()
    transfer.gather()
    error = await error_of(pull)
    assert error.code is Code.TRANSFER_FAILED
    assert "the connection was cut" in error.message
    assert time.monotonic() - begun < SETTINGS["progress_timeout_s"]
    monkeypatch.undo()
    await pair.settled()
    assert sender.counters()["lease.released"] == 1
    await complete(pair.transfer(40, "ucx"))


async def test_a_pull_that_failed_leaves_nothing_verified() -> None:
    """UCX's thread verifies while the loop stands still; when that goes on, the pull's time is over."""
    # What is staged outlives the pull's time by so much that only the pull's end can end it.
    async with NodePair(settings=small_settings(**SETTINGS, lease_grace_s=60.0)) as pair:
        await complete(pair.transfer(40, "ucx"))
        transfer = pair.transfer(40, "ucx")
        await transfer.reserve()
        request = pb.PullRequest(
            grant=transfer.grant,
            senders=[pair.senders[0].endpoint],
            prompt_tokens=40,
            token_hash=transfer.hash,
            transport="ucx",
            remaining_s=1.0,
        )
        # Not by `RankControl`, which releases what failed: the rank itself must have ended it.
        stub = pb_grpc.KvControlServiceStub(pair.receive_control._channels[0])
        pull = asyncio.ensure_future(stub.Pull(request, metadata=control_metadata(TOKEN), timeout=30))
        await until(lambda: pair.senders[0].status().lease_states.get("fetching") == 1, 15)
        receiver = pair.receivers[0]
        go_on, ends_at = hold_loop(receiver), time.monotonic() + 1.0
        try:
            transfer.gather()
            await until(lambda: receiver.staged(transfer.id), 20)
            await until(lambda: time.monotonic() > ends_at)
        finally:
            go_on.set()
        with pytest.raises(grpc.aio.AioRpcError, match="were over in state"):
            await pull
        assert not receiver.staged(transfer.id)
        assert transfer.scatter() == [None]
        await pair.settled()


async def test_a_transfer_that_was_delivered_before_the_loop_looked_is_no_refusal(pair: NodePair) -> None:
    await complete(pair.transfer(40, "ucx"))
    transfer = pair.transfer(40, "ucx")
    await transfer.reserve()
    transfer.gather()
    sender = pair.senders[0]
    go_on = hold_loop(sender)
    try:
        await transfer.pull()
        await until(lambda: sender.counters().get("lease.delivered", 0) == 2, 15)
    finally:
        go_on.set()
    assert_scattered(transfer)
    await pair.settled()
    await until(lambda: len(sender._rt.tasks) == 0 and not sender._rt.fetches)
    assert "refused.ended" not in sender.counters()


@pytest.mark.fault
async def test_an_answer_behind_a_stalled_payload_does_not_keep_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(ucx_channels, "RESET_AFTER_S", 0.2)
    rig = Rig("across")
    await rig.transport.start()
    remote = await rig.remote()
    os.kill(remote.process.pid, signal.SIGSTOP)
    try:
        address = dataclasses.replace(WorkerAddress.decode(remote.endpoint.ucx_worker_address), channel=7)
        request = pb.FetchRequest(
            receiver_incarnation=remote.incarnation,
            receiver_host_id=remote.endpoint.host_id,
            ucx_worker_address=address.encode(),
        )
        channel = rig.transport.open_send(request)
        await begin(channel, pattern(1 << 20, 1))
        rig.transport._way_back(request).error(SplitpointError(Code.TRANSFER_REFUSED, "it is over"))
        await until(lambda: len(rig.transport._core._thread.operations) >= 2, 15)
        await channel.close()
        async with asyncio.timeout(20):
            while not await channel.drained(0.1):
                pass
        assert rig.transport.counters()["endpoints_retired"] == 1
    finally:
        await remote.kill()
        rig.transport.peer_died(remote.incarnation)
        await asyncio.wait_for(rig.transport.stop(), 20)


CHILD = """
import json, sys
from tests.support.kv_nodes import make_node, small_settings

node = make_node(small_settings(**json.loads(sys.argv[1])))
print(node.start().SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


def break_thread(core: UcxCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX's thread ends with an error in its next turn."""

    def broken() -> None:
        raise RuntimeError("a fault nobody foresaw")

    monkeypatch.setattr(core._thread, "_turn", broken)
    core.run(lambda: None)


@pytest.mark.fault
async def test_when_ucxs_thread_ends_nothing_that_was_outstanding_is_called_done(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("contained")
    await rig.transport.start()
    remote = await rig.remote()
    core = rig.transport._core
    thread = core._thread._thread
    assert thread is not None
    try:
        sending = await rig.open_to(remote, 1)
        await begin(sending, pattern(8 << 20, 1))
        there = Peer("receiver", WorkerAddress.decode(remote.endpoint.ucx_worker_address).address, error_handling=True)
        core.expect(there)
        unannounced = core.receive(there, np.zeros(16, np.uint8), core.open_channel() << CHUNK_BITS | 1, 5.0)
        assert unannounced.begun is not None
        await unannounced.begun
        break_thread(core, monkeypatch)
        assert "a fault nobody foresaw" in await asyncio.wait_for(core.until_failed(), 20)
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
        await sending.close()
        assert not await sending.drained(0.2), "the peer may still read it"
        assert await asyncio.wait_for(unannounced.done, 5) is not None
        failure = await core.send(there, np.ones(16, np.uint8), 1 << CHUNK_BITS | 1, 5.0).done
        assert failure is not None
        assert failure.reason == "closed"
    finally:
        await remote.kill()
        await asyncio.wait_for(rig.transport.stop(), 20)


@pytest.mark.fault
async def test_when_ucxs_thread_ends_the_node_ends_and_its_slots_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**SETTINGS, "chunk_bytes": 64 * BLOCK_BYTES}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, json.dumps(fields), stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        receiver = pb.RankEndpoint.FromString(bytes.fromhex((await process.stdout.readline()).decode()))
        async with NodePair(settings=small_settings(**fields)) as pair:
            control, sender = RankControl([receiver], TOKEN), pair.senders[0]
            transfer = pair.transfer(1000, "ucx")
            await transfer.reserve()
            pull = asyncio.create_task(
                control.pull(
                    transfer.grant,
                    attempt_id="att-test",
                    senders=[sender.endpoint],
                    prompt_tokens=1000,
                    token_hash=transfer.hash,
                    transport="ucx",
                    remaining_s=20.0,
                )
            )
            await until(lambda: sender.status().lease_states.get("fetching") == 1, 20)
            os.kill(process.pid, signal.SIGSTOP)  # it takes nothing
            transfer.gather()
            await until(lambda: sender.status().lease_states.get("sent") == 1, 20)
            thread = sender._thread
            assert thread is not None
            break_thread(core_of(sender), monkeypatch)
            await until(lambda: not thread.is_alive(), 20)
            status = sender.status()
            assert status.send.used_bytes + status.send.quarantined_bytes == len(transfer.data) * BLOCK_BYTES
            assert sender.counters()["transport_failed.ucx"] == 1
            assert any("a fault nobody foresaw" in error.message for error in status.recent_errors)
            process.kill()
            assert isinstance((await asyncio.gather(pull, return_exceptions=True))[0], SplitpointError)
            await control.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
