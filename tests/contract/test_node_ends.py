"""Every way in which a transfer ends early or waits for room; staging is idle afterwards."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest

from kvtransfer.rpc import control_metadata
from protos.errors import Code
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from tests.support.kv_nodes import BLOCK_BYTES, BLOCK_TOKENS, TOKEN, NodePair, assert_scattered, error_of, fresh, until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair() as pair:
        yield pair


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
    await until(lambda: len(pair.senders[0]._rt.fetches) == 1)
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
    await until(lambda: len(pair.senders[0]._rt.fetches) == 1)
    assert await pair.receive_control.release(transfer.id, "client_left") is True
    error = await error_of(pull)
    assert error.code is Code.CANCELLED
    await pair.settled()


async def test_a_pull_that_comes_after_its_release_ends_the_senders_lease(pair: NodePair) -> None:
    """Nobody asked the sender, so only the pull that was refused knows of it."""
    transfer = pair.transfer(64)
    await transfer.reserve(remaining_s=60.0)
    assert await pair.receive_control.release(transfer.id, "client_left") is False
    error = await error_of(transfer.pull())
    assert error.code is Code.TRANSFER_REFUSED
    await pair.settled()
    assert pair.senders[0].counters()["lease.released"] == 1


async def test_cancelling_a_pull_ends_it_everywhere(pair: NodePair) -> None:
    transfer = pair.transfer(64)
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    transfer.gather(0, 2)
    await until(lambda: len(pair.senders[0]._rt.fetches) == 1)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await pair.settled()
    for node in pair.nodes:
        await until(lambda node=node: not node._rt.pulls and not node._rt.fetches and len(node._rt.tasks) == 0)


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
    await until(lambda: len(pair.senders[0]._rt.fetches) == 1)
    await asyncio.to_thread(pair.senders[0].stop)
    error = await error_of(pull)
    assert error.code in (Code.WORKER_LOST, Code.TRANSFER_REFUSED, Code.CANCELLED)
    await until(lambda: pair.receivers[0].status().sessions == 0)
    assert (await error_of(pair.transfer(20).pull())).code is Code.WORKER_LOST


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


async def test_a_pull_that_ends_leaves_no_checksum_behind(caplog: pytest.LogCaptureFixture) -> None:
    """The slot of an ended pull may hold another transfer when its last checksum is done: nobody may compare the two."""
    # A transport that leaves the checksum to the node: gRPC computes it while a chunk lands.
    async with NodePair(transports=lambda: [fresh("inproc")]) as pair:
        runtime = pair.receivers[0]._rt
        begun, go_on = threading.Event(), asyncio.Event()

        async def slow(memory: object, algorithm: str | None = None) -> pb.Checksum:
            begun.set()
            await go_on.wait()
            return pb.Checksum(algorithm="crc32c", value=1)

        transfer = pair.transfer(64, "inproc")
        await transfer.reserve()
        runtime.checksum = slow  # type: ignore[method-assign, assignment]
        pull = asyncio.create_task(transfer.pull())
        assert transfer.gather(0, 1)
        await until(begun.is_set)
        await pair.receive_control.release(transfer.id, "test")
        assert (await error_of(pull)).code is Code.CANCELLED
        runtime.loop.call_soon_threadsafe(go_on.set)
        await pair.send_control.release(transfer.id, "test")
        await pair.settled()
        await until(lambda: not [t for t in asyncio.all_tasks(runtime.loop) if "_check" in str(t)])
        gc.collect()
        assert "never retrieved" not in caplog.text
