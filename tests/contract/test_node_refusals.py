"""What a node refuses, from peers, from its actor and from its own engine, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from kvtransfer.control import RankControl
from kvtransfer.rpc import control_metadata
from protos.errors import Code
from protos.ids import new_capability, new_transfer_id
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from tests.support.kv_nodes import NodePair, assert_scattered, error_of, fetch, fetch_request, small_settings, until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair() as pair:
        yield pair


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


async def test_a_fetch_waits_no_longer_for_its_reservation_than_this_side_says() -> None:
    async with NodePair(settings=small_settings(fetch_wait_s=0.1)) as pair:
        with pytest.raises(grpc.aio.AioRpcError, match="nothing was reserved"):
            await fetch(pair, fetch_request(pair, pair.transfer(20), remaining_s=3600))
        assert pair.senders[0]._rt.pending_fetches == 0


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


async def test_another_prompt_is_refused_before_a_byte_moves(pair: NodePair) -> None:
    transfer = pair.transfer(20)
    await transfer.reserve()
    transfer.gather()
    error = await error_of(transfer.pull(token_hash=b"\0" * 32))
    assert error.code is Code.TRANSFER_REFUSED
    assert "another prompt" in error.message
    assert pair.senders[0].counters()["refused.token_hash"] == 1
    await pair.settled()


async def test_kv_of_other_tokens_is_rejected(pair: NodePair) -> None:
    """A sender that lies, or errs, about what it has: its seal says so at the latest."""
    transfer = pair.transfer(80)
    await transfer.reserve()
    transfer.gather(0, 4)
    pull = asyncio.create_task(transfer.pull())
    await until(lambda: pair.receivers[0].status().session_states["receiving"] == 1)
    lease = pair.senders[0]._rt.leases.live(transfer.id)
    assert lease is not None
    lease.token_hash = b"\0" * 32
    transfer.gather(4)
    error = await error_of(pull)
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


async def test_a_peers_last_word_is_kept_short(pair: NodePair) -> None:
    """It is remembered with the transfer's tombstone, of which there are thousands."""
    transfer = pair.transfer(20)
    await transfer.reserve()
    async with grpc.aio.insecure_channel(pair.senders[0].endpoint.address) as channel:
        stub = pb_grpc.KvTransferServiceStub(channel)
        await stub.Complete(pb.CompleteRequest(grant=transfer.grant, outcome="x" * 100_000), timeout=10)
    error = await error_of(transfer.reserve())
    assert "already over" in error.message
    assert len(error.message) < 200
    await pair.settled()
