"""Workers of different shapes exchange KV through real nodes: every byte in its place, every slot back, each failure named."""

from __future__ import annotations

import asyncio
import os
import random

import grpc
import pytest

from kvtransfer.control import RankControl
from kvtransfer.transports.faulty import Fault, FaultyTransport, at_message, seeded
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from tests.support.kv_nodes import TOKEN, error_of, fresh, until
from tests.support.shape_nodes import ShapePair, ShapeTransfer
from tests.support.shapes import Shape

pytestmark = pytest.mark.timeout(60)

PACKED = {"axes": "head", "packing": "cpu_attn:vec", "total_heads": 4}
CASES: dict[str, tuple[Shape, Shape]] = {
    "tp 1 to 2, packed heads": (Shape(tp=1, **PACKED), Shape(tp=2, **PACKED)),  # type: ignore[arg-type]
    "tp 2 to 1, packed heads": (Shape(tp=2, **PACKED), Shape(tp=1, **PACKED)),  # type: ignore[arg-type]
    "tp 1 to 2, tokens outside": (Shape(tp=1, axes="token,head"), Shape(tp=2, axes="token,head")),
    "tp 2 to 1, tokens outside": (Shape(tp=2, axes="token,head"), Shape(tp=1, axes="token,head")),
    "tp 4 to 8": (Shape(tp=4, total_heads=8), Shape(tp=8, total_heads=8)),
    "tp 4 to 8, replicated heads": (Shape(tp=4, total_heads=2), Shape(tp=8, total_heads=2)),
    "tp 4 to 1, replicated heads": (Shape(tp=4, total_heads=2), Shape(tp=1, total_heads=2)),
    "pipeline stages 5+3 to 2+6": (Shape(stages=(5, 3)), Shape(stages=(2, 6))),
    "stages and tensor parallelism": (Shape(tp=2, stages=(3, 1)), Shape(stages=(1, 2, 1))),
    "blocks of 4 to 16": (Shape(block_tokens=4), Shape(block_tokens=16)),
    "blocks of 6 to 4": (Shape(block_tokens=6), Shape(block_tokens=4)),
    "kernel blocks": (Shape(block_tokens=8, kernel_tokens=4, axes="sub,head,token"), Shape(block_tokens=4)),
    "heads outside to tokens outside": (Shape(axes="head,token"), Shape(axes="token,head")),
    "keys and values apart": (Shape(axes="head,token"), Shape(axes="kv,token,head")),
    "everything at once": (
        Shape(tp=2, stages=(3, 1), total_heads=4, block_tokens=6, axes="token,head"),
        Shape(tp=4, stages=(2, 2), total_heads=4, block_tokens=8, kernel_tokens=4, axes="kv,sub,head,token"),
    ),
}
SCHEMES = tuple(os.environ.get("SPLITPOINT_TEST_SCHEMES", "grpc ucx").split())
"""Of a share that is cut: NIXL has a process of its own (`test_nixl.py`)."""
PROMPTS = (1, 4, 37)
SEEDS = 6


async def whole(pair: ShapePair, transfer: ShapeTransfer) -> list[pb.PullResponse]:
    """An undisturbed transfer, each rank of the prefill side in its own time."""
    pull = asyncio.create_task(transfer.pull())
    await transfer.reserve()
    ranks = list(range(pair.p.ranks))
    random.Random(transfer.num_tokens).shuffle(ranks)
    for rank in ranks:
        blocks = -(-transfer.num_tokens // pair.p.block_tokens)
        if blocks > 2:
            transfer.gather(rank, 0, 2)
            transfer.gather(rank, 2)
        else:
            transfer.gather(rank)
        await asyncio.sleep(0)
    answers = await pull
    transfer.assert_scattered()
    return answers


@pytest.mark.parametrize("name", CASES)
async def test_every_byte_arrives_in_its_place(name: str) -> None:
    p, d = CASES[name]
    async with ShapePair(p, d) as pair:
        for prompt, num_tokens in enumerate(PROMPTS):
            answers = await whole(pair, pair.transfer(num_tokens, prompt=prompt))
            assert {seal.prompt_tokens for answer in answers for seal in answer.seals} == {num_tokens}
        await pair.settled()
        for node in pair.receivers:
            # The map of a pair of workers is computed once, whatever the number of prompts.
            assert node._rt.maps.computed == 1
        delivered = sum(node.counters().get("lease.delivered", 0) for node in pair.senders)
        unneeded = sum(node.counters().get("lease.released", 0) for node in pair.senders)
        assert delivered + unneeded == len(PROMPTS) * p.ranks, "each sender's lease ends once"


@pytest.mark.parametrize("scheme", ["inproc", "ucx"])
@pytest.mark.parametrize("name", ["tp 1 to 2, tokens outside", "tp 2 to 1, packed heads", "everything at once"])
async def test_bytes_beside_the_stream_too(name: str, scheme: str) -> None:
    """Where a transport reads what is cut after the message went out, nothing of it is written again too early."""
    if scheme == "ucx":
        pytest.importorskip("ucxx", exc_type=ImportError)
    p, d = CASES[name]
    async with ShapePair(p, d, make_transports=lambda: [fresh(scheme)], chunk_bytes=128) as pair:
        for prompt, num_tokens in enumerate((*PROMPTS, 150)):
            await whole(pair, pair.transfer(num_tokens, scheme, prompt))
        await pair.settled()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tp", [(1, 2), (2, 1)])
async def test_a_share_larger_than_its_room_passes_in_pieces(scheme: str, tp: tuple[int, int]) -> None:
    """Also inside one host, where a peer would read whole blocks out of the sender's memory by itself."""
    if scheme == "ucx":
        pytest.importorskip("ucxx", exc_type=ImportError)
    p, d = (Shape(tp=size, stages=(8,), total_heads=4, axes="token,head") for size in tp)
    settings = {"transports": (scheme,), "default_transport": scheme, "pack_staging_bytes": 8192, "chunk_bytes": 1024}
    async with ShapePair(p, d, **settings) as pair:
        transfer = pair.transfer(300, scheme)
        assert p.slot(0, 300).size > 4 * 8192
        await whole(pair, transfer)
        await pair.settled()
        cut = sum(node.counters().get("shares_cut", 0) for node in pair.senders)
        assert cut == (2 if tp == (1, 2) else 0)


async def test_only_what_is_needed_travels() -> None:
    """Between workers that replicate nothing, the bytes on the wire are those of the KV, once."""
    p, d = CASES["tp 1 to 2, tokens outside"]
    async with ShapePair(p, d) as pair:
        transfer = pair.transfer(37)
        answers = await whole(pair, transfer)
        slot = p.slot(0, 37)
        assert sum(answer.bytes for answer in answers) == slot.size
        assert pair.senders[0].counters()["shares_cut"] == 2


async def test_equal_workers_move_whole_blocks() -> None:
    """The common case: one handshake for each rank, nothing cut, nothing rearranged, no map."""
    shape = Shape(tp=2, axes="token,head")
    async with ShapePair(shape, shape) as pair:
        await whole(pair, pair.transfer(37))
        await pair.settled()
        for node in pair.receivers:
            assert node._rt.maps.computed == 0
            assert node._rt.peers.handshakes == 1
        assert not any("shares_cut" in node.counters() for node in pair.senders)


async def test_workers_that_cannot_exchange_refuse_by_name() -> None:
    small, large = Shape(**PACKED), Shape(tp=2, block_tokens=8, **PACKED)  # type: ignore[arg-type]
    async with ShapePair(small, large) as pair:
        transfer = pair.transfer(10)
        await transfer.reserve()
        error = await error_of(transfer.pull())
        assert error.code is Code.INCOMPATIBLE_PEER
        assert "block_tokens: 4 here, 8 there; packing 'cpu_attn:vec' cannot be cut along tokens" in error.message
        await pair.send_control.release(transfer.id, "test")
        await pair.settled()


async def test_one_sender_that_stays_behind_ends_the_pull_for_all() -> None:
    p, d = CASES["tp 2 to 1, tokens outside"]
    async with ShapePair(p, d) as pair:
        transfer = pair.transfer(37)
        await transfer.reserve()
        transfer.gather(0)
        error = await error_of(transfer.pull(remaining_s=1.0))
        assert error.code is Code.DEADLINE_EXCEEDED
        await until(lambda: all(node.status().leases == 0 for node in pair.senders), 30.0)
        await pair.settled()


async def test_one_receiver_that_fails_ends_the_lease_for_all() -> None:
    """Of two receivers of one slot one gives up: the other one's stream ends, and nothing is left on any side."""
    p, d = CASES["tp 1 to 2, tokens outside"]
    async with ShapePair(p, d) as pair:
        transfer = pair.transfer(37)
        await transfer.reserve()
        pull = asyncio.create_task(error_of(transfer.pull()))
        await until(lambda: len(pair.senders[0]._rt.fetches) == 2, 10.0)
        lone = RankControl([_as_rank_0(pair.receivers[1].endpoint)], TOKEN)
        assert await lone.release(transfer.id, "test")
        await lone.close()
        assert (await pull).code in (Code.CANCELLED, Code.TRANSFER_REFUSED)
        await pair.settled()


def _as_rank_0(endpoint: pb.RankEndpoint) -> pb.RankEndpoint:
    endpoint.rank = 0
    return endpoint


@pytest.mark.parametrize("scheme", ["grpc", "inproc"])
@pytest.mark.parametrize("name", ["tp 1 to 2, tokens outside", "tp 2 to 1, packed heads"])
async def test_random_faults_end_in_right_bytes_on_every_rank_or_in_an_error_on_all(name: str, scheme: str) -> None:
    p, d = CASES[name]
    rates = dict.fromkeys(Fault, 0.004)
    schedules = [seeded(0, {}), at_message(0, Fault.FLIP), *(seeded(seed, rates) for seed in range(SEEDS))]
    passed = []
    for prompt, faults in enumerate(schedules):
        made = lambda faults=faults: [FaultyTransport(fresh(scheme), faults, delay_s=0.002)]  # noqa: E731
        async with ShapePair(p, d, make_transports=made, progress_timeout_s=0.3, chunk_bytes=128) as pair:
            transfer = pair.transfer(37, scheme, prompt)
            await transfer.reserve()
            transfer.gather_all()
            try:
                await transfer.pull(remaining_s=2.0)
                transfer.assert_scattered()
                passed.append(prompt)
            except SplitpointError:
                assert all(node.receive_view(transfer.id) is None for node in pair.receivers)
                await pair.send_control.release(transfer.id, "test")
            await pair.settled()
    assert 0 in passed, "without a fault it passes"
    assert 1 not in passed, "with a flipped bit it does not"


async def test_a_share_that_the_sender_does_not_hold_is_refused() -> None:
    p, d = CASES["tp 1 to 2, tokens outside"]
    async with ShapePair(p, d) as pair:
        sender = pair.senders[0]
        request = pb.FetchRequest(sender_incarnation=sender.endpoint.incarnation, transport="grpc", remaining_s=5.0, receivers=2)
        request.share.CopyFrom(pb.KvHolding(first_layer=0, num_layers=9, first_head=0, num_heads=1))
        async with grpc.aio.insecure_channel(sender.endpoint.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="share: "):
                _ = [message async for message in pb_grpc.KvTransferServiceStub(channel).Fetch(request, timeout=10)]
        assert sender.counters()["refused.share"] == 1


async def test_a_share_that_never_fits_its_room_is_refused_by_the_setting_s_name() -> None:
    p, d = CASES["tp 1 to 2, tokens outside"]
    async with ShapePair(p, d, pack_staging_bytes=4096, chunk_bytes=1 << 20) as pair:
        large = Shape(tp=1, axes="token,head", block_tokens=512)
        async with ShapePair(large, Shape(tp=2, axes="token,head", block_tokens=512), pack_staging_bytes=4096) as tight:
            transfer = tight.transfer(600)
            await transfer.reserve()
            transfer.gather_all()
            error = await error_of(transfer.pull())
            assert "pack_staging_bytes" in error.message
            await tight.settled()
        await whole(pair, pair.transfer(37))
        await pair.settled()


class Jitter(RankControl):
    """Its calls arrive in any order: each waits a seeded while before it goes out."""

    def __init__(self, endpoints: list[pb.RankEndpoint], seed: int) -> None:
        super().__init__(endpoints, TOKEN)
        self._random = random.Random(seed)

    async def _rpc(self, rank: int, method: str, request: object, timeout_s: float) -> object:
        if method in ("Reserve", "PreparePull"):
            for _ in range(self._random.randrange(30)):
                await asyncio.sleep(0)
        return await super()._rpc(rank, method, request, timeout_s)


TALL = Shape(tp=2, axes="token,head", block_tokens=64)
"""A prompt of one block takes one page of staging on each rank."""
ONE_EACH = 4096
AT_ONCE = 8


async def test_reservations_that_fill_staging_take_turns_and_never_wait_for_each_other() -> None:
    """Room for one transfer on each rank: who has the first rank gets the others, so everybody gets a turn."""
    async with ShapePair(TALL, TALL, send_staging_bytes=ONE_EACH) as pair:
        pair.send_control = Jitter([node.endpoint for node in pair.senders], 1)

        async def one(prompt: int) -> None:
            transfer = pair.transfer(64, prompt=prompt)
            await transfer.reserve(remaining_s=30.0, staging_wait_s=25.0)
            await pair.send_control.release(transfer.id, "turn is over")

        await asyncio.gather(*(one(prompt) for prompt in range(AT_ONCE)))
        await pair.settled()


async def test_pulls_that_fill_staging_take_turns_and_never_wait_for_each_other() -> None:
    async with ShapePair(TALL, TALL, receive_staging_bytes=ONE_EACH) as pair:
        pair.receive_control = Jitter([node.endpoint for node in pair.receivers], 2)

        async def one(prompt: int) -> None:
            transfer = pair.transfer(64, prompt=prompt)
            await transfer.reserve(remaining_s=30.0)
            transfer.gather_all()
            await transfer.pull(remaining_s=30.0, staging_wait_s=25.0)
            transfer.assert_scattered()

        await asyncio.gather(*(one(prompt) for prompt in range(AT_ONCE)))
        await pair.settled()


async def test_staging_that_was_prepared_comes_back_when_no_pull_follows() -> None:
    shape = Shape(tp=2, axes="token,head")
    async with ShapePair(shape, shape) as pair:
        transfer = pair.transfer(37)
        request = pb.PullRequest(
            grant=transfer.grant,
            sender=pair.senders[0].endpoint,
            prompt_tokens=37,
            token_hash=transfer.hash,
            transport="grpc",
            remaining_s=0.2,
        )
        control = RankControl([pair.receivers[0].endpoint], TOKEN)
        await control._rpc(0, "PreparePull", pb.PreparePullRequest(pull=request), 5.0)
        assert pair.receivers[0].status().receive.used_bytes > 0
        again = await error_of(control._rpc(0, "PreparePull", pb.PreparePullRequest(pull=request), 5.0))
        assert again.code is Code.TRANSFER_REFUSED
        await pair.settled()
        late = await error_of(control._rpc(0, "Pull", request, 5.0))
        assert late.code is Code.TRANSFER_REFUSED
        await control.close()
