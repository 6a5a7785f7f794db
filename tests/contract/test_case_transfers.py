"""Transfers between nodes under the faults that other systems fell for: cancelled midway, expired, their slot used again at
once, many peers at one busy sender (docs/failure-cases.md). Bytes are right or the transfer says that it failed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvtransfer.config import KvTransferSettings
from kvtransfer.control import RankControl
from kvtransfer.layout import PROTOCOL_VERSION
from kvtransfer.node import KvNode
from kvtransfer.rpc import control_metadata
from kvtransfer.transports import base
from kvtransfer.transports.faulty import Fault, FaultyTransport
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from tests.support.kv_nodes import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    TOKEN,
    NodePair,
    Transfer,
    assert_scattered,
    compatibility,
    complete,
    error_of,
    fresh,
    make_node,
    small_settings,
    until,
)

pytestmark = pytest.mark.timeout(60)

SCHEMES = ["grpc", pytest.param("ucx", marks=pytest.mark.ucx)]


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair(settings=patient()) as pair:
        yield pair


def patient(**fields: Any) -> KvTransferSettings:
    """Nothing here ends by a time-out, however busy the machine is."""
    return small_settings(**{"progress_timeout_s": 20.0, "handshake_timeout_s": 20.0, **fields})


def need(scheme: str) -> None:
    if scheme == "ucx":
        pytest.importorskip("ucxx", exc_type=ImportError)


class Brake:
    """A fault schedule that a test sets: the message at which each new channel stalls; None lets all pass."""

    def __init__(self) -> None:
        self.at: int | None = None

    def __call__(self) -> object:
        at = self.at
        return lambda message, _: Fault.STALL if message == at else None


# Cancelled midway -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("who", ["the pull", "decode's release", "prefill's release"])
async def test_a_transfer_cancelled_at_any_message_frees_both_sides_once(scheme: str, who: str) -> None:
    need(scheme)
    brake = Brake()
    made = lambda: [FaultyTransport(fresh(scheme), brake)]  # noqa: E731
    async with NodePair(transports=made, settings=patient(chunk_bytes=BLOCK_BYTES)) as pair:
        stalling = pair.senders[0]._rt.transports[scheme]
        assert isinstance(stalling, FaultyTransport)
        for number, message in enumerate((0, 1, 4, 9), 1):
            brake.at = message
            transfer = pair.transfer(160, scheme)
            await transfer.reserve()
            pull = asyncio.create_task(transfer.pull())
            transfer.gather()
            await until(lambda number=number: stalling.injected[Fault.STALL] == number, 20.0)
            if who == "the pull":
                pull.cancel()
            else:
                control = pair.receive_control if who == "decode's release" else pair.send_control
                await control.release(transfer.id, "client_left")
            (ended,) = await asyncio.gather(pull, return_exceptions=True)
            assert isinstance(ended, SplitpointError | asyncio.CancelledError)
            assert transfer.scatter() == [None]
            await pair.settled(15.0)
            # The next one finds nothing of it in its way.
            brake.at = None
            await complete(pair.transfer(16 * BLOCK_TOKENS, scheme))
            await pair.settled(15.0)
        counters = pair.senders[0].counters()
        assert (counters["lease.released"], counters["lease.delivered"]) == (4, 4)


async def test_a_transfer_cancelled_while_its_gather_runs_is_freed_by_the_gathers_end(pair: NodePair) -> None:
    """An abort may find chunk n being sent, n+1 being copied by the device and n+2 not computed yet."""
    node, done = pair.senders[0], threading.Event()
    transfer = pair.transfer(160)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    transfer.gather(0, 4)
    transfer.gather(4, 8, ready=done.is_set)
    await until(lambda: pair.receivers[0].status().session_states.get("receiving", 0) == 1, 20.0)
    await pair.send_control.release(transfer.id, "client_left")
    await error_of(pull)
    await until(lambda: pair.receivers[0].status().sessions == 0, 20.0)
    status = node.status()
    assert (status.send.used_bytes, status.send.quarantined_bytes) == (0, 10 * BLOCK_BYTES)
    assert not transfer.gather(8, 10), "the engine's next chunk finds no slot"
    done.set()
    await pair.settled(15.0)


# Expired ----------------------------------------------------------------------------------------------------------------

TIGHT = {"send_staging_bytes": 8 * BLOCK_BYTES}


async def expire(node: KvNode, transfer: Transfer) -> None:
    """The lease's time is over now."""
    with node._rt.lock:
        lease = node._rt.leases.live(transfer.id)
        assert lease is not None
        lease.expires_at = node._rt.now()
    await until(lambda: node.counters().get("expired.send") == 1, 20.0)


@pytest.mark.parametrize("moment", ["before the gather", "inside the gather", "while the device copies", "after the seal"])
async def test_a_lease_that_expires_is_never_read_and_its_bytes_are_used_again(moment: str) -> None:
    async with NodePair(settings=patient(**TIGHT)) as pair:
        node, late, copied = pair.senders[0], pair.transfer(128), threading.Event()
        await late.reserve()
        view = None
        if moment == "inside the gather":
            view = node.send_view(late.id, 0, 8)
        elif moment == "while the device copies":
            assert late.gather(ready=copied.is_set)
        elif moment == "after the seal":
            assert late.gather()
        await expire(node, late)
        if moment == "before the gather":
            assert not late.gather()
        # Its bytes are somebody else's only when nobody writes them any more.
        successor = pair.transfer(128)
        reserving = asyncio.create_task(successor.reserve())
        if moment in ("inside the gather", "while the device copies"):
            assert node.status().send.quarantined_bytes == 8 * BLOCK_BYTES
            await until(lambda: len(node._rt.send_room) == 1, 20.0)
            if view is not None:
                view[:] = late.data
                node.commit_chunk(late.id, 0, 8, last=True)
            copied.set()
        await reserving
        error = await error_of(late.pull())
        assert error.code is Code.TRANSFER_REFUSED
        assert "expired" in error.message
        assert successor.gather()
        await successor.pull()
        assert_scattered(successor)
        await pair.settled(15.0)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_lease_that_expires_while_it_is_sent_fails_the_pull(scheme: str) -> None:
    need(scheme)
    async with NodePair(settings=patient(**TIGHT), transports=lambda: [fresh(scheme)]) as pair:
        late = pair.transfer(128, scheme)
        await late.reserve()
        pull = asyncio.create_task(late.pull())
        assert late.gather(0, 4)
        await until(lambda: pair.receivers[0].status().session_states.get("receiving", 0) == 1, 20.0)
        await expire(pair.senders[0], late)
        error = await error_of(pull)
        assert error.status.retryable
        assert late.scatter() == [None], "half of a prompt is nothing"
        await complete(pair.transfer(128, scheme))
        await pair.settled(15.0)


# Used again at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_slot_taken_over_from_an_aborted_transfer_holds_its_own_bytes(scheme: str) -> None:
    """Staging of one prompt on either side, so that each transfer gets its aborted predecessor's very bytes."""
    need(scheme)
    settings = patient(send_staging_bytes=8 * BLOCK_BYTES, receive_staging_bytes=8 * BLOCK_BYTES, chunk_bytes=2 * BLOCK_BYTES)
    rng = random.Random(7)
    async with NodePair(settings=settings, transports=lambda: [fresh(scheme)]) as pair:
        for _ in range(40):
            aborted, heir = pair.transfer(128, scheme), pair.transfer(128, scheme)
            await aborted.reserve()
            pull = asyncio.create_task(aborted.pull())
            aborted.gather()
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            pull.cancel()
            await asyncio.gather(pull, return_exceptions=True)
            aborting = asyncio.gather(*(c.release(aborted.id, "abort") for c in (pair.send_control, pair.receive_control)))
            await complete(heir)
            await aborting
        await pair.settled(15.0)


# Many peers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_many_peers_at_once_reach_a_sender_whose_loop_stands_still(scheme: str) -> None:
    """All handshakes, connections and fetches arrive while the sender's event loop runs nothing; then all succeed."""
    need(scheme)
    made = lambda: [fresh(scheme)]  # noqa: E731
    async with NodePair(settings=patient(), transports=made) as pair:
        others = [make_node(patient(), transports=made()) for _ in range(5)]
        controls = []
        try:
            for node in others:
                await asyncio.to_thread(node.start)
                controls.append(RankControl([node.endpoint], TOKEN))
            transfers = []
            for node, control in zip(others, controls, strict=True):
                mine = NodePair.__new__(NodePair)
                mine.senders, mine.receivers = pair.senders, [node]
                mine.send_control, mine.receive_control = pair.send_control, control
                transfers += [Transfer(mine, 33, scheme) for _ in range(4)]
            await asyncio.gather(*(transfer.reserve() for transfer in transfers))
            go_on = threading.Event()
            pair.senders[0]._rt.loop.call_soon_threadsafe(go_on.wait, 20.0)
            pulls = [asyncio.create_task(transfer.pull()) for transfer in transfers]
            await until(lambda: sum(node.status().sessions for node in others) == len(transfers), 20.0)
            assert not any(pull.done() for pull in pulls)
            go_on.set()
            for transfer in transfers:
                assert transfer.gather()
            await asyncio.gather(*pulls)
            for transfer in transfers:
                assert_scattered(transfer)
            assert [node._rt.peers.handshakes for node in others] == [1] * len(others)
            await pair.settled(15.0)
        finally:
            for control in controls:
                await control.close()
            for node in others:
                await asyncio.to_thread(node.stop)


async def test_a_peer_that_stops_before_the_handshake_costs_its_time_out() -> None:
    async with NodePair(settings=patient(handshake_timeout_s=0.5)) as pair:
        transfer = pair.transfer(64)
        await transfer.reserve()
        assert transfer.gather()
        go_on = threading.Event()
        pair.senders[0]._rt.loop.call_soon_threadsafe(go_on.wait, 30.0)
        try:
            error = await error_of(transfer.pull(remaining_s=30.0))
            assert error.status.retryable or error.code is Code.DEADLINE_EXCEEDED
            await until(lambda: pair.receivers[0].status().sessions == 0, 20.0)
            assert pair.receivers[0].status().receive.used_bytes == 0
        finally:
            go_on.set()
        await pair.send_control.release(transfer.id, "test")
        # It goes on, and the same two nodes meet.
        pair.receivers[0]._rt.peers._timeout_s = 20.0
        await complete(pair.transfer(64))
        await pair.settled(15.0)


async def test_a_refused_reservation_holds_nothing_on_any_rank_when_it_returns() -> None:
    async with NodePair(world_size=2, settings=patient()) as pair:
        blocker = pair.transfer(64 * BLOCK_TOKENS)
        request = pb.ReserveRequest(grant=blocker.grant, prompt_tokens=len(blocker.tokens), remaining_s=60.0)
        async with grpc.aio.insecure_channel(pair.senders[1].endpoint.address) as channel:
            await pb_grpc.KvControlServiceStub(channel).Reserve(request, metadata=control_metadata(TOKEN), timeout=20)
        error = await error_of(pair.transfer(64).reserve(staging_wait_s=0.05))
        assert error.code is Code.STAGING_FULL
        assert [node.status().leases for node in pair.senders] == [0, 1]
        await pair.send_control.release(blocker.id, "test")
        await pair.settled(15.0)


# What cannot start, says so ---------------------------------------------------------------------------------------------


async def test_a_node_that_cannot_listen_does_not_start() -> None:
    node = make_node(patient(bind_host="192.0.2.1", advertise_host="192.0.2.1"))
    with pytest.raises((RuntimeError, OSError), match=r"192\.0\.2\.1"):
        await asyncio.to_thread(node.start)


@pytest.mark.ucx
async def test_a_ucx_that_does_not_open_does_not_start() -> None:
    ucx = pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
    transport = ucx.UcxTransport(host_id="host")
    transport._core._thread.config = {"TLS": "no-such-transport"}
    with pytest.raises(base.TransportError) as caught:
        await transport.start()
    assert caught.value.reason == "refused"
    node = make_node(patient(), transports=[transport])
    with pytest.raises(SplitpointError, match="no transport can start: ucx"):
        await asyncio.to_thread(node.start)


async def test_a_ucx_that_is_to_use_a_device_that_is_not_there_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo,no-such-device:1")
    alone = make_node(patient(transports=["ucx"], default_transport="ucx"))
    with pytest.raises(SplitpointError, match="UCX_NET_DEVICES names no-such-device"):
        await asyncio.to_thread(alone.start)
    beside = make_node(patient(transports=["ucx", "grpc"], default_transport="ucx"))
    await asyncio.to_thread(beside.start)
    try:
        assert list(beside.transports) == ["grpc"]
        assert beside.counters()["transport_unavailable.ucx"] == 1
    finally:
        await asyncio.to_thread(beside.stop)


@pytest.mark.parametrize("asked", ["", "all", "lo", "lo:1", "mlx5_[0-3]:1", "^no-such-device"])
async def test_devices_that_ucx_may_be_given(asked: str) -> None:
    environment = pytest.importorskip("kvtransfer.transports.ucx_environment")
    assert environment.devices_missing(asked) == []
    assert environment.devices_missing("no-such-device," + asked.removeprefix("^"))[:1] == ["no-such-device"]


async def test_a_sender_with_other_layers_is_refused_by_name() -> None:
    """As when one side speculates: a draft model's layers are KV that the other side does not have."""
    async with NodePair(settings=patient(), receiver_fields={"num_layers": 3}) as pair:
        transfer = pair.transfer(200)
        await transfer.reserve()
        assert transfer.gather()
        error = await error_of(transfer.pull())
        assert error.code is Code.INCOMPATIBLE_PEER
        assert "num_layers" in error.message
        assert not np.any(pair.receivers[0]._rt.receive_memory), "not a byte has come"
        await pair.send_control.release(transfer.id, "test")
        await pair.settled(15.0)


async def test_a_peer_whose_fingerprint_is_not_that_of_its_fields_is_refused(pair: NodePair) -> None:
    node = pair.senders[0]
    request = pb.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION,
        fingerprint=b"of something else" + bytes(15),
        compatibility=compatibility(),
        expected_incarnation=node.endpoint.incarnation,
    )
    async with grpc.aio.insecure_channel(node.endpoint.address) as channel:
        response = await pb_grpc.KvTransferServiceStub(channel).Handshake(request, timeout=20)
    assert not response.accepted
    assert response.mismatch.startswith("fingerprint:")
    assert node.counters()["refused.handshake"] == 1


async def test_a_pull_of_something_else_than_staging_was_prepared_for_is_refused(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    assert transfer.gather()
    request = pb.PullRequest(
        grant=transfer.grant,
        sender=pair.senders[0].endpoint,
        prompt_tokens=64,
        token_hash=transfer.hash,
        transport="grpc",
        remaining_s=20.0,
    )
    async with grpc.aio.insecure_channel(pair.receivers[0].endpoint.address) as channel:
        stub, metadata = pb_grpc.KvControlServiceStub(channel), control_metadata(TOKEN)
        await stub.PreparePull(pb.PreparePullRequest(pull=request), metadata=metadata, timeout=20)
        assert pair.receivers[0].status().receive.used_bytes == 4 * BLOCK_BYTES
        request.token_hash = bytes(32)
        with pytest.raises(grpc.aio.AioRpcError, match="prepared for"):
            await stub.Pull(request, metadata=metadata, timeout=20)
    assert transfer.scatter() == [None]
    await pair.send_control.release(transfer.id, "test")
    await pair.settled(15.0)
