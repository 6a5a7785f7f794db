"""What every transport keeps: `check_*` take a started pair of transports and run over each scheme.

The stream of a `Fetch` is a queue here; the node, its checksums and its leases come in test_node.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest

from kvtransfer.config import KvTransferSettings
from kvtransfer.rpc import host_id
from kvtransfer.transports import TransportContext, create_transport, known_schemes
from kvtransfer.transports.base import ReadByPeer, ReceiveChannel, SendChannel, Transport, TransportError
from protos.ids import new_incarnation, new_transfer_id
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

SCHEMES = tuple(os.environ.get("SPLITPOINT_TEST_SCHEMES", "inproc grpc ucx").split())
"""`nixl` runs in a process of its own: test_nixl.py."""
TIMEOUT_S = 10.0
MESSAGE_BYTES = 4000
STAGING_BYTES = 4 << 20


@dataclass
class Staging:
    """One side's staging: the only memory that a transport is ever given."""

    memory: np.ndarray
    used: int = 0

    def slot(self, data: np.ndarray) -> np.ndarray:
        """A piece of it that begins with these bytes."""
        start, self.used = self.used, self.used + len(data)
        self.memory[start : self.used] = data
        return self.memory[start : self.used]


@dataclass
class Pair:
    """Sender's and receiver's transport, as two processes of one host would have them."""

    send: Transport
    receive: Transport
    sender: pb.RankEndpoint
    receiver_incarnation: str
    sending: Staging
    receiving: Staging

    def open(self) -> tuple[SendChannel, ReceiveChannel]:
        """Both channels of one fetch."""
        request = pb.FetchRequest(
            grant=pb.TransferGrant(transfer_id=new_transfer_id()),
            transport=self.send.scheme,
            sender_incarnation=self.sender.incarnation,
            receiver_incarnation=self.receiver_incarnation,
            receiver_host_id=host_id(),
            remaining_s=TIMEOUT_S,
        )
        receive = self.receive.open_receive(self.sender, request)
        return self.send.open_send(request), receive


@pytest.fixture(params=SCHEMES)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    scheme = request.param
    if scheme in ("ucx", "nixl"):
        libraries = {"ucx": ("ucxx",), "nixl": ("nixl_cu12", "nixl_cu13")}[scheme]
        if not any(importlib.util.find_spec(library) for library in libraries):
            pytest.skip(f"the library of {scheme} is not installed")
    settings = KvTransferSettings(grpc_message_bytes=MESSAGE_BYTES)
    incarnations = new_incarnation(), new_incarnation()
    areas = [np.zeros(STAGING_BYTES, np.uint8) for _ in range(4)]
    send, receive = (
        create_transport(scheme, TransportContext(settings, 0, incarnation, host_id(), *areas[2 * side : 2 * side + 2]))
        for side, incarnation in enumerate(incarnations)
    )
    await send.start()
    await receive.start()
    endpoint = pb.RankEndpoint(
        address="127.0.0.1:1", host_id=host_id(), incarnation=incarnations[0], ucx_worker_address=send.worker_address()
    )
    endpoint.transport_addresses[scheme] = send.worker_address()
    try:
        yield Pair(send, receive, endpoint, incarnations[1], Staging(areas[0]), Staging(areas[3]))
    finally:
        await receive.stop()
        await send.stop()


def headers(sizes: list[int]) -> list[pb.ChunkHeader]:
    offsets = np.cumsum([0, *sizes])
    return [pb.ChunkHeader(index=i, offset=int(offsets[i]), bytes=size, last=i == len(sizes) - 1) for i, size in enumerate(sizes)]


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


async def stream(channel: SendChannel, data: np.ndarray, sizes: list[int], queue: asyncio.Queue[bytes | None]) -> None:
    """Send every chunk and put each message on the wire, serialised as gRPC would."""
    for header in headers(sizes):
        async for response in channel.send(header, data[header.offset : header.offset + header.bytes]):
            await queue.put(response.SerializeToString())
    await queue.put(None)


async def land(channel: ReceiveChannel, slot: np.ndarray, queue: asyncio.Queue[bytes | None]) -> list[pb.ChunkHeader]:
    """Take every message; the headers in the order in which their payload was whole."""
    done = []
    while (raw := await queue.get()) is not None:
        message = pb.FetchResponse.FromString(raw)
        header = await channel.accept(message, lambda h: slot[h.offset : h.offset + h.bytes], TIMEOUT_S)
        if header is not None:
            done.append(header)
    return done


async def move(pair: Pair, data: np.ndarray, slot: np.ndarray, sizes: list[int]) -> list[pb.ChunkHeader]:
    """One whole fetch, both ends drained and closed."""
    send, receive = pair.open()
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=4)
    async with asyncio.timeout(TIMEOUT_S):
        _, done = await asyncio.gather(stream(send, data, sizes, queue), land(receive, slot, queue))
        assert await receive.drained(TIMEOUT_S)
        if isinstance(send, ReadByPeer):
            send.peer_done()  # what `Complete` does in a node
        assert await send.drained(TIMEOUT_S)
    await receive.close()
    await send.close()
    return done


async def check_bytes_and_headers_arrive_in_order(pair: Pair) -> None:
    for sizes in ([1], [MESSAGE_BYTES], [MESSAGE_BYTES + 1, MESSAGE_BYTES - 1], [70_000, 3, 1 << 20, 8192]):
        data = pair.sending.slot(random_bytes(sum(sizes), 1))
        slot = pair.receiving.slot(np.zeros(sum(sizes), np.uint8))
        done = await move(pair, data, slot, sizes)
        assert np.array_equal(slot, data)
        expected = headers(sizes)
        assert [(h.index, h.offset, h.bytes, h.last) for h in done] == [(h.index, h.offset, h.bytes, h.last) for h in expected]


async def check_nothing_is_written_outside_the_target(pair: Pair) -> None:
    memory = pair.receiving.slot(np.full(3 * 65536, 7, np.uint8))
    data = pair.sending.slot(random_bytes(65536, 2))
    await move(pair, data, memory[65536:131072], [40_000, 25_536])
    assert np.array_equal(memory[65536:131072], data)
    assert (memory[:65536] == 7).all()
    assert (memory[131072:] == 7).all()


async def check_concurrent_channels_do_not_mix(pair: Pair) -> None:
    datas = [pair.sending.slot(random_bytes(50_000, seed)) for seed in range(6)]
    slots = [pair.receiving.slot(np.zeros(50_000, np.uint8)) for _ in datas]
    await asyncio.gather(*(move(pair, d, s, [20_000, 30_000]) for d, s in zip(datas, slots, strict=True)))
    for data, slot in zip(datas, slots, strict=True):
        assert np.array_equal(slot, data)


async def check_a_refused_target_writes_nothing(pair: Pair) -> None:
    send, receive = pair.open()
    data = pair.sending.slot(random_bytes(10_000, 3))
    header = headers([10_000])[0]
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def refuse(_: pb.ChunkHeader) -> np.ndarray:
        raise TransportError("corrupt", "out of bounds")

    sending = asyncio.create_task(stream(send, data, [10_000], queue))
    message = pb.FetchResponse.FromString(await queue.get() or b"")
    assert message.header.bytes == header.bytes
    with pytest.raises(TransportError) as caught:
        await receive.accept(message, refuse, TIMEOUT_S)
    assert caught.value.reason == "corrupt"
    await end(pair, send, receive, sending)


async def check_a_receiver_that_leaves_frees_both_slots(pair: Pair) -> None:
    send, receive = pair.open()
    data, slot = pair.sending.slot(random_bytes(200_000, 4)), pair.receiving.slot(np.zeros(200_000, np.uint8))
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    sending = asyncio.create_task(stream(send, data, [100_000, 100_000], queue))
    message = pb.FetchResponse.FromString(await queue.get() or b"")
    await receive.accept(message, lambda h: slot[h.offset : h.offset + h.bytes], TIMEOUT_S)
    await end(pair, send, receive, sending)
    before = slot.copy()
    data[:] = 0  # the sender's slot is used again
    await asyncio.sleep(0)
    assert np.array_equal(slot, before), "a slot changed after both ends had drained"


async def check_a_sender_that_leaves_frees_both_slots(pair: Pair) -> None:
    send, receive = pair.open()
    data = pair.sending.slot(random_bytes(100_000, 5))
    iterator = aiter(send.send(headers([100_000])[0], data))
    await anext(iterator)
    await send.close()
    await end(pair, send, receive, None)


async def end(pair: Pair, send: SendChannel, receive: ReceiveChannel, sending: asyncio.Task[None] | None) -> None:
    """Both sides give up; both must come to rest, at the latest when each hears that the other process is dead."""
    if sending is not None:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    await receive.close()
    await send.close()
    if not (await send.drained(0.5) and await receive.drained(0.5)):
        pair.send.peer_died(pair.receiver_incarnation)
        pair.receive.peer_died(pair.sender.incarnation)
    assert await send.drained(TIMEOUT_S)
    assert await receive.drained(TIMEOUT_S)


async def check_it_goes_on_after_a_broken_channel(pair: Pair) -> None:
    await check_a_sender_that_leaves_frees_both_slots(pair)
    await check_bytes_and_headers_arrive_in_order(pair)


async def check_it_describes_itself(pair: Pair) -> None:
    for transport in (pair.send, pair.receive):
        facts = transport.describe()
        assert facts
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in facts.items())
        assert isinstance(transport.worker_address(), bytes)
        assert transport.scheme in known_schemes()
        transport.peer_died("an incarnation nobody has")


CHECKS: list[Callable[[Pair], Awaitable[None]]] = [
    check_bytes_and_headers_arrive_in_order,
    check_nothing_is_written_outside_the_target,
    check_concurrent_channels_do_not_mix,
    check_a_refused_target_writes_nothing,
    check_a_receiver_that_leaves_frees_both_slots,
    check_a_sender_that_leaves_frees_both_slots,
    check_it_goes_on_after_a_broken_channel,
    check_it_describes_itself,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.timeout(60)
async def test_transport(pair: Pair, check: Callable[[Pair], Awaitable[None]]) -> None:
    await check(pair)


def test_unknown_scheme_lists_the_known_ones() -> None:
    context = TransportContext(KvTransferSettings(), 0, "i", "h")
    with pytest.raises(ValueError, match=r"unknown transport 'carrier-pigeon'; known: ucx, grpc, nixl, inproc"):
        create_transport("carrier-pigeon", context)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([pb.FetchResponse(payload=b"abc")], "without a chunk"),
        ([pb.FetchResponse(header=pb.ChunkHeader(bytes=2), payload=b"abc")], "3 bytes where 2"),
        ([pb.FetchResponse(header=pb.ChunkHeader(bytes=2))], "0 bytes where 2"),
        ([pb.FetchResponse(header=pb.ChunkHeader(bytes=4), payload=b"ab")] * 2, "before chunk 0 was whole"),
    ],
    ids=["no_header", "too_long", "empty", "interrupted"],
)
async def test_grpc_refuses_a_malformed_stream(messages: list[pb.FetchResponse], why: str) -> None:
    context = TransportContext(KvTransferSettings(), 0, "i", "h")
    channel = create_transport("grpc", context).open_receive(pb.RankEndpoint(), pb.FetchRequest())
    slot = np.zeros(16, np.uint8)

    async def take() -> None:
        for message in messages:
            await channel.accept(message, lambda h: slot[: h.bytes], TIMEOUT_S)

    with pytest.raises(TransportError, match=why) as caught:
        await take()
    assert caught.value.reason == "corrupt"
