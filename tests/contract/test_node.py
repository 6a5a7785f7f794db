"""Nodes of two workers in one process, each on its own thread, over real gRPC: what a transfer does, and how it ends.

Whatever happens, staging is idle afterwards: `settled` is the last line of nearly every test.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest

from kvtransfer.control import RankControl
from kvtransfer.rpc import control_metadata
from kvtransfer.testing import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    TOKEN,
    NodePair,
    Transfer,
    compatibility,
    make_node,
    small_settings,
    until,
)
from kvtransfer.transports import TransportContext, create_transport
from kvtransfer.transports.faulty import Fault, Faults, FaultyTransport, at_byte, at_message, seeded
from protos.errors import Code, SplitpointError
from protos.ids import new_capability, new_transfer_id
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair() as pair:
        yield pair


async def error_of(work: object) -> SplitpointError:
    with pytest.raises(SplitpointError) as caught:
        await work  # type: ignore[misc]
    return caught.value


def assert_scattered(transfer: Transfer) -> None:
    for copy in transfer.scatter():
        assert copy is not None
        assert np.array_equal(copy, transfer.data)


async def complete(transfer: Transfer) -> list[pb.PullResponse]:
    """A whole undisturbed transfer."""
    pull = asyncio.create_task(transfer.pull())
    await transfer.reserve()
    assert transfer.gather()
    answers = await pull
    assert_scattered(transfer)
    return answers


# -- undisturbed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 65, 1000])
async def test_every_block_arrives(pair: NodePair, num_tokens: int) -> None:
    transfer = pair.transfer(num_tokens)
    (answer,) = await complete(transfer)
    blocks = -(-num_tokens // BLOCK_TOKENS)
    assert answer.bytes == answer.seal.bytes == blocks * BLOCK_BYTES
    assert answer.seal.prompt_tokens == num_tokens
    assert answer.seal.token_hash == transfer.hash
    assert answer.seal.incarnation == pair.senders[0].endpoint.incarnation
    assert answer.transport == "grpc"
    await pair.settled()
    assert pair.senders[0].counters()["lease.delivered"] == 1
    assert pair.receivers[0].counters()["pulls_delivered"] == 1


async def test_ranks_take_their_own_share() -> None:
    async with NodePair(world_size=2) as pair:
        answers = await complete(pair.transfer(100))
        assert len(answers) == 2
        await pair.settled()


async def test_chunks_travel_while_the_engine_still_gathers(pair: NodePair) -> None:
    transfer = pair.transfer(160)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    transfer.gather(0, 4)
    await until(lambda: pair.receivers[0].status().receive.used_bytes > 0)
    assert not pull.done()
    assert pair.receivers[0].receive_view(transfer.id) is None, "nothing is shown before all of it is verified"
    transfer.gather(4, 5)
    transfer.gather(5, 10)
    await pull
    assert_scattered(transfer)
    await pair.settled()


async def test_a_gather_is_sent_only_when_it_is_ready(pair: NodePair) -> None:
    transfer = pair.transfer(32)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    done = threading.Event()
    transfer.gather(0, 1)
    transfer.gather(1, 2, ready=done.is_set)
    await until(lambda: pair.receivers[0].status().sessions == 1)
    assert not (await asyncio.wait([pull], timeout=0.1))[0]
    done.set()
    await pull
    assert_scattered(transfer)
    await pair.settled()


async def test_many_at_once(pair: NodePair) -> None:
    transfers = [pair.transfer(n) for n in (1, 17, 40, 64, 100, 5, 33, 80)]
    await asyncio.gather(*(complete(t) for t in transfers))
    await pair.settled()
    assert pair.receivers[0].counters()["pulls_delivered"] == len(transfers)


async def test_the_peer_is_shaken_hands_with_once(pair: NodePair) -> None:
    await asyncio.gather(*(complete(pair.transfer(20)) for _ in range(4)))
    assert pair.receivers[0]._rt.peers.handshakes == 1


async def test_both_directions_between_two_workers(pair: NodePair) -> None:
    back = Transfer(pair, 30, "grpc")
    forth = pair.transfer(30)
    pair_back = NodePair.__new__(NodePair)
    pair_back.senders, pair_back.receivers = pair.receivers, pair.senders
    pair_back.send_control, pair_back.receive_control = pair.receive_control, pair.send_control
    back.pair = pair_back
    await asyncio.gather(complete(forth), complete(back))
    await pair.settled()


@pytest.mark.parametrize("scheme", ["inproc", "ucx"])
async def test_other_transports(scheme: str) -> None:
    if scheme == "ucx":
        pytest.importorskip("ucxx", exc_type=ImportError)
    async with NodePair(transports=lambda: [fresh(scheme)]) as pair:
        for num_tokens in (1, 100, 1000):
            await complete(pair.transfer(num_tokens, scheme))
        await pair.settled()


# -- refusals --------------------------------------------------------------------------------------------------------------


async def test_incompatible_workers_refuse_by_field_name() -> None:
    async with NodePair(receiver_fields={"cache_dtype": "float8"}) as pair:
        transfer = pair.transfer(20)
        await transfer.reserve()
        error = await error_of(transfer.pull())
        assert error.code is Code.INCOMPATIBLE_PEER
        assert "cache_dtype: 'uint8' here, 'float8' there" in error.message
        await pair.send_control.release(transfer.id, "test")
        await pair.settled()


async def test_another_protocol_version_is_refused_by_name() -> None:
    async with NodePair(receiver_fields={"protocol_version": 99}) as pair:
        error = await error_of(pair.transfer(20).pull())
        assert error.code is Code.INCOMPATIBLE_PEER
        assert "protocol_version" in error.message


async def test_a_restarted_peer_is_not_the_peer(pair: NodePair) -> None:
    transfer = pair.transfer(20)
    sender = pair.senders[0].endpoint
    sender.incarnation = "earlier"
    error = await error_of(transfer.pull(senders=[sender]))
    assert error.code is Code.INCOMPATIBLE_PEER
    assert "incarnation" in error.message
    await pair.settled()


async def test_world_sizes_must_match(pair: NodePair) -> None:
    error = await error_of(pair.transfer(20).pull(senders=[]))
    assert error.code is Code.INCOMPATIBLE_PEER
    assert "world size" in error.message


async def test_a_wrong_capability_takes_nothing(pair: NodePair) -> None:
    transfer = pair.transfer(20)
    await transfer.reserve()
    transfer.gather()
    right = transfer.grant.capability
    transfer.grant.capability = new_capability()
    error = await error_of(transfer.pull())
    assert error.code is Code.TRANSFER_REFUSED
    assert "capability" in error.message
    assert pair.senders[0].status().leases == 1, "a guess must not end somebody else's lease"
    request = fetch_request(pair, transfer)
    request.grant.capability = right
    assert len(await fetch(pair, request)) > 0
    await pair.send_control.release(transfer.id, "test")
    await pair.settled()


async def test_a_transfer_is_fetched_once(pair: NodePair) -> None:
    transfer = pair.transfer(20)
    await transfer.reserve()
    transfer.gather()
    request = fetch_request(pair, transfer)
    messages = await fetch(pair, request)
    assert messages[-1].payload
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fetch(pair, request)
    assert "once" in (caught.value.details() or "")
    assert pair.senders[0].counters()["refused.fetch_again"] == 1
    await pair.send_control.release(transfer.id, "test")
    await pair.settled()


async def test_fetch_of_another_incarnation_is_refused(pair: NodePair) -> None:
    request = fetch_request(pair, pair.transfer(20))
    request.sender_incarnation = "earlier"
    with pytest.raises(grpc.aio.AioRpcError, match="earlier"):
        await fetch(pair, request)


async def test_an_unknown_transfer_is_refused_when_the_time_is_over(pair: NodePair) -> None:
    error = await error_of(pair.transfer(20).pull(remaining_s=0.3))
    assert error.code in (Code.TRANSFER_REFUSED, Code.DEADLINE_EXCEEDED)
    await pair.settled()


async def test_fetches_without_a_reservation_are_bounded() -> None:
    async with NodePair(settings=small_settings(max_pending_fetches=1)) as pair:
        first = asyncio.create_task(fetch(pair, fetch_request(pair, pair.transfer(20), remaining_s=5)))
        await until(lambda: pair.senders[0]._rt.pending_fetches == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="wait for a reservation"):
            await fetch(pair, fetch_request(pair, pair.transfer(20), remaining_s=5))
        first.cancel()
        await until(lambda: pair.senders[0]._rt.pending_fetches == 0)


async def test_an_unavailable_transport_is_refused_naming_the_known_ones(pair: NodePair) -> None:
    error = await error_of(pair.transfer(20, "ucx").pull())
    assert error.code is Code.TRANSFER_REFUSED
    assert "'ucx'" in error.message
    assert "grpc" in error.message
    await pair.settled()


async def test_the_control_service_needs_the_token(pair: NodePair) -> None:
    control = RankControl([pair.senders[0].endpoint], "guess")
    transfer = pair.transfer(20)
    for work in (
        control.status(),
        control.reserve(transfer.grant, prompt_tokens=20, token_hash=transfer.hash, remaining_s=1),
        control.fence("x"),
    ):
        assert (await error_of(work)).code is Code.UNAUTHENTICATED
    assert await control.release(transfer.id, "x") is False
    async with grpc.aio.insecure_channel(pair.senders[0].endpoint.address) as channel:
        stub = pb_grpc.KvControlServiceStub(channel)
        for metadata in ((), control_metadata("")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Pull(pb.PullRequest(), metadata=metadata, timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await control.close()


async def test_a_malformed_grant_is_refused(pair: NodePair) -> None:
    for grant in (pb.TransferGrant(), pb.TransferGrant(transfer_id=b"x" * 16, capability=b"y")):
        work = pair.send_control.reserve(grant, prompt_tokens=5, token_hash=b"", remaining_s=1)
        assert (await error_of(work)).code is Code.TRANSFER_REFUSED
    transfer = pair.transfer(20)
    work = pair.send_control.reserve(transfer.grant, prompt_tokens=0, token_hash=b"", remaining_s=1)
    assert (await error_of(work)).code is Code.TRANSFER_REFUSED
    await pair.settled()


# -- the seal and the engine -------------------------------------------------------------------------------------------------


async def test_kv_of_other_tokens_is_rejected(pair: NodePair) -> None:
    transfer = pair.transfer(20)
    await transfer.reserve()
    transfer.gather()
    error = await error_of(transfer.pull(token_hash=b"\0" * 32))
    assert error.code is Code.TRANSFER_FAILED
    assert "seal.token_hash" in error.message
    await pair.settled()


async def test_another_prompt_length_is_rejected(pair: NodePair) -> None:
    transfer = pair.transfer(33)
    await transfer.reserve()
    transfer.gather()
    error = await error_of(transfer.pull(prompt_tokens=34))
    assert error.code is Code.TRANSFER_FAILED
    assert "seal.prompt_tokens" in error.message
    await pair.settled()


@pytest.mark.parametrize("commits", [[(1, 1, True)], [(0, 1, True)], [(0, 1, False), (0, 2, True)], [(0, 2, False)]], ids=str)
async def test_an_engine_that_stages_something_else_fails_the_transfer(
    pair: NodePair, commits: list[tuple[int, int, bool]]
) -> None:
    transfer = pair.transfer(32)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    for first, count, last in commits:
        pair.senders[0].send_view(transfer.id, first, count)
        pair.senders[0].commit_chunk(transfer.id, first, count, last=last)
    error = await error_of(pull)
    assert error.code is Code.TRANSFER_REFUSED
    assert "failed" in error.message
    await pair.settled()


async def test_engine_calls_about_unknown_transfers_do_nothing(pair: NodePair) -> None:
    node = pair.senders[0]
    unknown = new_transfer_id()
    assert node.send_view(unknown, 0, 1) is None
    assert node.receive_view(unknown) is None
    assert node.staged_blocks(unknown) is None
    assert not node.staged(unknown)
    node.commit_chunk(unknown, 0, 1, last=True)
    node.scattered(unknown)
    counters = node.counters()
    assert counters["lease.view_without_lease"] == 1
    assert counters["lease.commit_without_lease"] == 1
    assert counters["session.scattered_without_session"] == 1


async def test_a_view_beyond_the_reservation_is_not_given(pair: NodePair) -> None:
    transfer = pair.transfer(32)
    await transfer.reserve()
    for first, count in ((0, 3), (2, 1), (-1, 1), (0, 0)):
        assert pair.senders[0].send_view(transfer.id, first, count) is None
    await pair.send_control.release(transfer.id, "test")
    await pair.settled()


async def test_a_preempted_request_goes_on_where_it_was(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    node = pair.senders[0]
    await transfer.reserve()
    transfer.gather(0, 2)
    assert node.send_view(transfer.id, 0, 2) is None
    assert node.staged_blocks(transfer.id) == 2
    transfer.gather(2, 4)
    await transfer.pull()
    assert_scattered(transfer)
    await pair.settled()


# -- endings -----------------------------------------------------------------------------------------------------------------


async def test_release_before_reserve_keeps_the_reservation_out(pair: NodePair) -> None:
    transfer = pair.transfer(20)
    assert await pair.send_control.release(transfer.id, "client_left") is False
    error = await error_of(transfer.reserve())
    assert error.code is Code.TRANSFER_REFUSED
    assert "client_left" in error.message
    await pair.settled()


async def test_release_is_idempotent(pair: NodePair) -> None:
    transfer = pair.transfer(20)
    await transfer.reserve()
    assert await pair.send_control.release(transfer.id, "a") is True
    assert await pair.send_control.release(transfer.id, "b") is False
    await pair.settled()


async def test_release_on_the_sender_ends_a_waiting_pull(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    transfer.gather(0, 2)
    await until(lambda: pair.receivers[0].status().receive.used_bytes > 0)
    await pair.send_control.release(transfer.id, "client_left")
    error = await error_of(pull)
    assert error.code is Code.TRANSFER_REFUSED
    assert "client_left" in error.message
    await pair.settled()


async def test_release_on_the_sender_ends_a_fetch_that_waits_for_the_reservation(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    pull = asyncio.create_task(transfer.pull())
    await until(lambda: pair.senders[0]._rt.pending_fetches == 1)
    await pair.send_control.release(transfer.id, "client_left")
    assert (await error_of(pull)).code is Code.TRANSFER_REFUSED
    await pair.settled()


async def test_release_on_the_receiver_ends_the_pull_and_the_senders_lease(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    transfer.gather(0, 2)
    await until(lambda: pair.receivers[0].status().receive.used_bytes > 0)
    assert await pair.receive_control.release(transfer.id, "client_left") is True
    error = await error_of(pull)
    assert error.code is Code.CANCELLED
    await pair.settled()


async def test_cancelling_a_pull_ends_it_everywhere(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    transfer.gather(0, 2)
    await until(lambda: pair.receivers[0].status().receive.used_bytes > 0)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await pair.settled()
    for node in pair.nodes:
        await until(lambda node=node: not node._rt.pulls and not node._rt.fetches and len(node._rt.tasks) == 1)  # the sweep


async def test_release_of_staged_kv_that_no_engine_took(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    transfer.gather()
    await transfer.pull()
    assert pair.receivers[0].staged(transfer.id)
    assert await pair.receive_control.release(transfer.id, "aborted") is True
    assert not pair.receivers[0].staged(transfer.id)
    assert pair.receivers[0].receive_view(transfer.id) is None
    pair.receivers[0].scattered(transfer.id)
    await pair.settled()


async def test_release_while_the_engine_reads_keeps_the_bytes_until_it_is_done(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    transfer.gather()
    await transfer.pull()
    node = pair.receivers[0]
    view = node.receive_view(transfer.id)
    await pair.receive_control.release(transfer.id, "aborted")
    status = node.status()
    assert status.receive.quarantined_bytes == 4 * BLOCK_BYTES
    assert status.receive.used_bytes == 0
    assert np.array_equal(view, transfer.data)
    node.scattered(transfer.id)
    await pair.settled()


async def test_release_while_the_engine_writes_keeps_the_bytes_until_it_is_done(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    node = pair.senders[0]
    done = threading.Event()
    assert node.send_view(transfer.id, 0, 4) is not None
    await pair.send_control.release(transfer.id, "aborted")
    assert node.status().send.quarantined_bytes == 4 * BLOCK_BYTES
    node.commit_chunk(transfer.id, 0, 4, last=True, ready=done.is_set)
    assert node.status().send.quarantined_bytes == 4 * BLOCK_BYTES
    done.set()
    await pair.settled()


async def test_a_lease_expires(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve(remaining_s=0.05)
    transfer.gather()
    await until(lambda: pair.senders[0].counters().get("expired.send") == 1)
    error = await error_of(transfer.pull())
    assert error.code is Code.TRANSFER_REFUSED
    assert "expired" in error.message
    await pair.settled()


async def test_staged_kv_that_no_engine_takes_expires(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    transfer.gather()
    await transfer.pull(remaining_s=0.5)
    await until(lambda: pair.receivers[0].counters().get("expired.receive") == 1)
    assert pair.receivers[0].receive_view(transfer.id) is None
    await pair.settled()


async def test_a_pull_ends_by_its_deadline(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    transfer.gather(0, 2)
    error = await error_of(transfer.pull(remaining_s=0.3))
    assert error.code is Code.DEADLINE_EXCEEDED
    await pair.settled()


async def test_a_second_pull_of_one_transfer_is_refused_and_harms_nothing(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    await until(lambda: pair.receivers[0].status().sessions == 1)
    stub = pb_grpc.KvControlServiceStub(pair.receive_control._channels[0])
    request = pb.PullRequest(grant=transfer.grant, sender=pair.senders[0].endpoint, prompt_tokens=64, remaining_s=1)
    with pytest.raises(grpc.aio.AioRpcError, match="already being pulled"):
        await stub.Pull(request, metadata=control_metadata(TOKEN), timeout=5)
    transfer.gather()
    await pull
    assert_scattered(transfer)
    await pair.settled()


async def test_one_ranks_failure_fails_and_releases_all() -> None:
    async with NodePair(world_size=2) as pair:
        transfer = pair.transfer(64)
        await transfer.reserve()
        transfer.gather()
        wrong = [pair.senders[0].endpoint, pair.senders[0].endpoint]
        error = await error_of(transfer.pull(senders=wrong))
        assert error.message.startswith("rank 1:")
        await pair.send_control.release(transfer.id, "test")
        await pair.settled()


async def test_a_dead_sender_is_a_lost_worker(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    transfer.gather(0, 2)
    await until(lambda: pair.receivers[0].status().receive.used_bytes > 0)
    await asyncio.to_thread(pair.senders[0].stop)
    error = await error_of(pull)
    assert error.code in (Code.WORKER_LOST, Code.TRANSFER_REFUSED, Code.CANCELLED)
    await until(lambda: pair.receivers[0].status().sessions == 0)
    assert (await error_of(pair.transfer(20).pull())).code is Code.WORKER_LOST


# -- staging -----------------------------------------------------------------------------------------------------------------


async def test_full_staging_waits_in_order_then_refuses(pair: NodePair) -> None:
    first, second, third = pair.transfer(60 * BLOCK_TOKENS), pair.transfer(30 * BLOCK_TOKENS), pair.transfer(1)
    await first.reserve()
    error = await error_of(pair.transfer(30 * BLOCK_TOKENS).reserve(staging_wait_s=0.05))
    assert error.code is Code.STAGING_FULL
    waiting = asyncio.create_task(second.reserve())
    await until(lambda: len(pair.senders[0]._rt.send_room) == 1)
    behind = asyncio.create_task(third.reserve())
    await until(lambda: len(pair.senders[0]._rt.send_room) == 2)
    assert not behind.done(), "a small prompt must not overtake: large ones would starve"
    await pair.send_control.release(first.id, "test")
    await waiting
    await behind
    for transfer in (second, third):
        await pair.send_control.release(transfer.id, "test")
    await pair.settled()


async def test_release_ends_a_reservation_that_waits(pair: NodePair) -> None:
    first, second = pair.transfer(60 * BLOCK_TOKENS), pair.transfer(30 * BLOCK_TOKENS)
    await first.reserve()
    waiting = asyncio.create_task(second.reserve())
    await until(lambda: len(pair.senders[0]._rt.send_room) == 1)
    await pair.send_control.release(second.id, "client_left")
    assert (await error_of(waiting)).code is Code.TRANSFER_REFUSED
    await pair.send_control.release(first.id, "test")
    await pair.settled()


async def test_full_receive_staging_refuses_the_pull(pair: NodePair) -> None:
    first, second = pair.transfer(60 * BLOCK_TOKENS), pair.transfer(30 * BLOCK_TOKENS)
    await first.reserve()
    first.gather()
    await first.pull()
    await second.reserve(staging_wait_s=5)
    error = await error_of(second.pull(staging_wait_s=0.05))
    assert error.code is Code.STAGING_FULL
    assert pair.senders[0].status().leases == 1, "the sender was not asked: another receiver may still come"
    assert_scattered(first)
    await pair.send_control.release(second.id, "test")
    await pair.settled()


async def test_a_prompt_that_never_fits_is_refused_at_once(pair: NodePair) -> None:
    transfer = pair.transfer(65 * BLOCK_TOKENS)
    for work in (transfer.reserve(), transfer.pull()):
        error = await error_of(work)
        assert error.code is Code.TRANSFER_REFUSED
        assert "never fit" in error.message
    await pair.settled()


# -- faults ------------------------------------------------------------------------------------------------------------------


def fresh(scheme: str) -> object:
    return create_transport(scheme, TransportContext(small_settings(), 0, "", "host"))


def faulty_pair(scheme: str, faults: Faults) -> NodePair:
    return NodePair(transports=lambda: [FaultyTransport(fresh(scheme), faults)])


async def survives(pair: NodePair, transfer: Transfer) -> bool:
    """True: verified and byte for byte right. False: an explicit error. Nothing else is allowed, and nothing stays."""
    pull = asyncio.create_task(transfer.pull(remaining_s=3.0))
    await transfer.reserve(remaining_s=3.0)
    transfer.gather()
    (answer,) = await asyncio.gather(pull, return_exceptions=True)
    if isinstance(answer, list):
        assert_scattered(transfer)
        return True
    assert isinstance(answer, SplitpointError), answer
    assert answer.code in (Code.TRANSFER_FAILED, Code.TRANSFER_REFUSED, Code.WORKER_LOST, Code.DEADLINE_EXCEEDED)
    assert transfer.scatter() == [None]
    return False


@pytest.mark.parametrize("message", [0, 1, 5])
@pytest.mark.parametrize("fault", Fault)
async def test_each_fault_ends_in_right_bytes_or_an_error(fault: Fault, message: int) -> None:
    async with faulty_pair("grpc", at_message(message, fault)) as pair:
        ok = await survives(pair, pair.transfer(160))
        assert ok == (fault in (Fault.DELAY,))
        await pair.settled()


@pytest.mark.parametrize("fault", Fault)
async def test_each_fault_beside_the_stream(fault: Fault) -> None:
    async with faulty_pair("inproc", at_message(1, fault)) as pair:
        ok = await survives(pair, pair.transfer(160, "inproc"))
        assert ok == (fault in (Fault.DELAY,))
        await pair.settled()


@pytest.mark.parametrize("offset", [1, 4 * BLOCK_BYTES, 9 * BLOCK_BYTES])
async def test_a_sender_that_closes_at_a_byte(offset: int) -> None:
    async with faulty_pair("grpc", at_byte(offset, Fault.CLOSE)) as pair:
        assert not await survives(pair, pair.transfer(160))
        await pair.settled()


@pytest.mark.parametrize("seed", range(6))
async def test_random_faults(seed: int) -> None:
    rates = dict.fromkeys(Fault, 0.004)
    async with faulty_pair("grpc", seeded(seed, rates)) as pair:
        outcomes = await asyncio.gather(*(survives(pair, pair.transfer(n)) for n in (1, 20, 64, 100, 160)))
        assert len(outcomes) == 5
        await pair.settled()


@pytest.mark.parametrize("seed", range(3))
async def test_random_releases(pair: NodePair, seed: int) -> None:
    """Releases from either side at any moment: no wrong bytes, nothing left."""
    rng = np.random.default_rng(seed)

    async def one(number: int) -> None:
        transfer = pair.transfer(int(rng.integers(1, 200)))
        delay_s = float(rng.uniform(0, 0.02))
        control = pair.send_control if number % 2 else pair.receive_control

        async def release() -> None:
            await asyncio.sleep(delay_s)
            await control.release(transfer.id, "random")
            await (pair.receive_control if number % 2 else pair.send_control).release(transfer.id, "random")

        async def run() -> None:
            pull = asyncio.create_task(transfer.pull())
            try:
                await transfer.reserve()
                for first in range(len(transfer.data)):
                    transfer.gather(first, first + 1)
                    await asyncio.sleep(0)
                await pull
            except SplitpointError:
                await asyncio.gather(pull, return_exceptions=True)
            (copy,) = transfer.scatter()
            assert copy is None or np.array_equal(copy, transfer.data)

        await asyncio.gather(run(), release())

    await asyncio.gather(*(one(number) for number in range(12)))
    await pair.settled()


async def test_flips_pass_unseen_only_where_checksums_are_off() -> None:
    settings = small_settings(checksum="off")
    made = lambda: [FaultyTransport(fresh("grpc"), at_message(0, Fault.FLIP))]  # noqa: E731
    async with NodePair(settings=settings, transports=made) as pair:
        transfer = pair.transfer(20)
        await transfer.reserve()
        transfer.gather()
        await transfer.pull()
        (copy,) = transfer.scatter()
        assert int(np.unpackbits(copy ^ transfer.data).sum()) == 1
        await pair.settled()


async def test_a_receiver_that_wants_checksums_refuses_a_sender_without() -> None:
    async with NodePair() as pair:
        pair.senders[0]._rt.settings = small_settings(checksum="off")
        transfer = pair.transfer(20)
        await transfer.reserve()
        transfer.gather()
        error = await error_of(transfer.pull())
        assert "algorithm" in error.message
        await pair.settled()


# -- life --------------------------------------------------------------------------------------------------------------------


class Actor(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.requests: list[worker_pb2.RegisterRankRequest] = []
        self.tokens: list[str] = []

    async def RegisterRank(self, request, context):
        self.requests.append(request)
        self.tokens.append(dict(context.invocation_metadata()).get("x-splitpoint-control-token", ""))
        return worker_pb2.RegisterRankResponse()


async def test_a_node_registers_with_its_actor(pair: NodePair) -> None:
    actor = Actor()
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(actor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    node = pair.senders[0]
    await asyncio.to_thread(node.register, f"127.0.0.1:{port}", 1)
    await server.stop(0)
    (request,) = actor.requests
    assert actor.tokens == [TOKEN]
    assert request.endpoint == node.endpoint
    assert request.compatibility == compatibility()
    assert (request.world_size, request.bytes_per_block) == (1, BLOCK_BYTES)
    assert request.send_staging_bytes == request.receive_staging_bytes == 64 * BLOCK_BYTES
    assert list(request.transports) == ["grpc"]


async def test_a_node_starts_and_stops_leaving_no_thread_and_no_descriptor() -> None:
    before = {thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")}
    node = make_node()
    await asyncio.to_thread(node.start)
    assert node.transports == ("grpc",)
    assert node.endpoint.address.startswith("127.0.0.1:")
    await asyncio.to_thread(node.stop)
    await asyncio.to_thread(node.stop)
    node.commit_chunk(new_transfer_id(), 0, 1, last=True)
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")} <= before
    with pytest.raises(RuntimeError, match="started before"):
        node.start()


async def test_a_node_that_can_use_no_transport_does_not_start() -> None:
    class Broken:
        scheme = "ucx"

        async def start(self) -> None:
            from kvtransfer.transports.base import TransportError

            raise TransportError("refused", "no such device")

    node = make_node(transports=[Broken()])
    with pytest.raises(SplitpointError, match="no such device"):
        await asyncio.to_thread(node.start)


async def test_stopping_amid_transfers_ends_them() -> None:
    async with NodePair() as pair:
        transfers = [pair.transfer(64) for _ in range(3)]
        pulls = [asyncio.create_task(t.pull()) for t in transfers]
        for transfer in transfers:
            await transfer.reserve()
            transfer.gather(0, 2)
        await until(lambda: pair.receivers[0].status().receive.used_bytes > 0)
        await asyncio.to_thread(pair.receivers[0].stop)
        for pull in pulls:
            await error_of(pull)
        await until(lambda: pair.senders[0].status().leases == 0)


async def test_metrics_are_exposed(pair: NodePair) -> None:
    await complete(pair.transfer(20))
    text = pair.receivers[0].metrics_text().decode()
    assert 'splitpoint_kv_transfer_bytes_total{transport="grpc"} 16384.0' in text
    assert 'splitpoint_kv_transfer_seconds_count{transport="grpc"} 1.0' in text
    assert "splitpoint_kv_transfer_inflight 0.0" in text


# -- raw peers ---------------------------------------------------------------------------------------------------------------


def fetch_request(pair: NodePair, transfer: Transfer, remaining_s: float = 2.0) -> pb.FetchRequest:
    return pb.FetchRequest(
        grant=transfer.grant,
        sender_incarnation=pair.senders[0].endpoint.incarnation,
        transport="grpc",
        remaining_s=remaining_s,
    )


async def fetch(pair: NodePair, request: pb.FetchRequest) -> list[pb.FetchResponse]:
    """The whole stream, as a peer of any make would take it."""
    async with grpc.aio.insecure_channel(pair.senders[0].endpoint.address) as channel:
        call = pb_grpc.KvTransferServiceStub(channel).Fetch(request, timeout=10)
        return [message async for message in call]
