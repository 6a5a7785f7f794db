"""Nodes of two workers in one process, each on its own thread, over real gRPC: what an undisturbed transfer does, and the
node's own life.

Whatever happens, staging is idle afterwards: `settled` is the last line of nearly every test.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

import grpc
import pytest

from kvtransfer.transports.base import TransportError
from protos.errors import SplitpointError
from protos.ids import new_transfer_id
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc
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


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair() as pair:
        yield pair


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


async def test_a_node_starts_and_stops_leaving_no_thread() -> None:
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
            raise TransportError("refused", "no such device")

    node = make_node(transports=[Broken()])
    with pytest.raises(SplitpointError, match="no such device"):
        await asyncio.to_thread(node.start)


async def test_an_advertised_address_that_leads_elsewhere_is_refused_at_start() -> None:
    node = make_node(small_settings(advertise_host="127.0.0.2", handshake_timeout_s=2))
    with pytest.raises(SplitpointError, match=r"advertise_host: 127\.0\.0\.2"):
        await asyncio.to_thread(node.start)


async def test_stopping_amid_transfers_ends_them() -> None:
    async with NodePair() as pair:
        transfers = [pair.transfer(64) for _ in range(3)]
        pulls = [asyncio.create_task(t.pull()) for t in transfers]
        for transfer in transfers:
            await transfer.reserve()
            transfer.gather(0, 2)
        await until(lambda: len(pair.senders[0]._rt.fetches) == 3)
        await asyncio.to_thread(pair.receivers[0].stop)
        for pull in pulls:
            await error_of(pull)
        await until(lambda: pair.senders[0].status().leases == 0)


async def test_metrics_are_exposed(pair: NodePair) -> None:
    await complete(pair.transfer(20))
    text = pair.receivers[0].metrics_text().decode()
    assert 'splitpoint_kv_transfer_bytes_total{transport="grpc"} 16384.0' in text
    assert 'splitpoint_kv_transfer_seconds_count{transport="grpc"} 1.0' in text
    assert 'splitpoint_kv_transfer_inflight{transport="grpc"} 0.0' in text


async def test_nodes_leave_no_descriptor() -> None:
    async def run() -> int:
        async with NodePair() as pair:
            await asyncio.gather(*(complete(pair.transfer(40)) for _ in range(3)))
            await pair.settled()
        return len(os.listdir("/proc/self/fd"))

    await run()  # gRPC keeps a few for the process
    before = await run()
    # A leak grows with every run; what a library closes a moment later does not.
    assert min([await run() for _ in range(3)]) <= before
