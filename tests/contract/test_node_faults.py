"""Transports that drop, delay, cut, double, swap, flip, close and stall: right bytes or an explicit error, and idle staging."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvtransfer.transports.faulty import Fault, Faults, FaultyTransport, at_byte, at_message, seeded
from protos.errors import Code, SplitpointError
from tests.support.kv_nodes import BLOCK_BYTES, NodePair, Transfer, assert_scattered, error_of, fresh, small_settings

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair() as pair:
        yield pair


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


@pytest.mark.parametrize("scheme", ["inproc", "ucx"])
@pytest.mark.parametrize("fault", Fault)
async def test_each_fault_beside_the_stream(fault: Fault, scheme: str) -> None:
    if scheme == "ucx":
        pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
    async with faulty_pair(scheme, at_message(1, fault)) as pair:
        ok = await survives(pair, pair.transfer(160, scheme))
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
