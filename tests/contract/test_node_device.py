"""What a node promises an engine that computes on a device: copies end later than the calls that start them, and the checksum
of a chunk may come with its gather. The device is an event here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import google_crc32c
import numpy as np
import pytest

from kvtransfer import pieces, push, runtime
from protos.errors import Code
from tests.support.kv_nodes import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    NodePair,
    Transfer,
    assert_scattered,
    error_of,
    fetch,
    fetch_request,
    until,
)

pytestmark = pytest.mark.timeout(60)


class Copy:
    """A copy that the device does when it is told to. `waited`: a thread waits for it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.waited = threading.Event()

    def __call__(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self.done.wait(30.0)


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair() as pair:
        yield pair


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders compute their checksums as a device does."""
    for module in (push, runtime):
        monkeypatch.setattr(module, "algorithm_for", lambda setting, memory: pieces.ALGORITHM)


async def test_nothing_is_sent_before_the_gather_is_done(pair: NodePair) -> None:
    transfer, copy = pair.transfer(3 * BLOCK_TOKENS), Copy()
    await transfer.reserve()
    pull = asyncio.create_task(transfer.pull())
    assert transfer.gather(ready=copy)
    await until(copy.waited.is_set)
    lease = pair.senders[0]._rt.leases.live(transfer.id)
    assert lease is not None
    assert (lease.committed_blocks, lease.staged_blocks) == (3, 0)
    assert not pull.done()
    copy.done.set()
    await pull
    assert_scattered(transfer)
    await pair.settled()


async def test_a_slot_is_not_used_again_before_the_scatter_is_done(pair: NodePair) -> None:
    # One prompt fills receive staging, so a second one must wait for the first one's slot.
    first, second = (pair.transfer(64 * BLOCK_TOKENS) for _ in range(2))
    await first.reserve()
    assert first.gather()
    await first.pull()
    node, copy = pair.receivers[0], Copy()
    assert node.receive_view(first.id) is not None
    node.scattered(first.id, ready=copy)
    await until(copy.waited.is_set)
    assert node.status().receive.used_bytes == 64 * BLOCK_BYTES
    await until(lambda: pair.senders[0].status().leases == 0)
    await second.reserve()
    assert second.gather()
    pull = asyncio.create_task(second.pull())
    await until(lambda: node.status().sessions == 2)
    assert not pull.done()
    copy.done.set()
    await pull
    assert_scattered(second)
    await pair.settled()


async def test_a_scatter_that_outlives_its_request_still_holds_the_slot(pair: NodePair) -> None:
    transfer = pair.transfer(4 * BLOCK_TOKENS)
    await transfer.reserve()
    assert transfer.gather()
    await transfer.pull()
    node, copy = pair.receivers[0], Copy()
    assert node.receive_view(transfer.id) is not None
    node.scattered(transfer.id, ready=copy)
    await until(copy.waited.is_set)
    await pair.receive_control.release(transfer.id, "client_left")
    status = node.status().receive
    assert status.used_bytes + status.quarantined_bytes == 4 * BLOCK_BYTES
    copy.done.set()
    await pair.settled()


def commit(transfer: Transfer, first: int, end: int, crcs: np.ndarray) -> None:
    node = transfer.pair.senders[0]
    view = node.send_view(transfer.id, first, end - first)
    assert view is not None
    view[:] = transfer.data[first:end]
    node.commit_chunk(transfer.id, first, end - first, last=end == len(transfer.data), crcs=crcs)


async def test_a_chunk_carries_what_its_gathers_computed(pair: NodePair, device: None) -> None:
    transfer = pair.transfer(5 * BLOCK_TOKENS)
    await transfer.reserve()
    crcs = pieces.piece_crcs(transfer.data.reshape(-1))
    # Gathers and messages need not have the same bounds: these are of 3 and 2 blocks, messages of at most 4.
    commit(transfer, 0, 3, crcs[:3])
    commit(transfer, 3, 5, crcs[3:])
    messages = await fetch(pair, fetch_request(pair, transfer))
    headers = [message.header for message in messages if message.HasField("header")]
    assert [header.checksum.algorithm for header in headers] == [pieces.ALGORITHM] * len(headers)
    for header in headers:
        sent = transfer.data[header.first_block : header.first_block + header.num_blocks].reshape(-1)
        assert header.checksum.value == pieces.checksum(sent)


async def test_a_receiver_on_the_host_checks_what_a_device_computed(pair: NodePair, device: None) -> None:
    good, bad = (pair.transfer(3 * BLOCK_TOKENS) for _ in range(2))
    for transfer in (good, bad):
        await transfer.reserve()
    crcs = pieces.piece_crcs(good.data.reshape(-1))
    commit(good, 0, 3, crcs)
    await good.pull()
    assert_scattered(good)
    # These belong to other bytes: as if staging had changed between gather and send.
    commit(bad, 0, 3, crcs)
    error = await error_of(bad.pull())
    assert error.code is Code.TRANSFER_FAILED
    assert "checksum" in error.message
    await pair.settled()


async def test_a_chunk_of_host_memory_carries_what_its_gathers_computed(pair: NodePair) -> None:
    good, bad = (pair.transfer(5 * BLOCK_TOKENS) for _ in range(2))
    for transfer in (good, bad):
        await transfer.reserve()
    crcs = np.array([google_crc32c.value(row.tobytes()) for row in good.data], np.uint32)
    commit(good, 0, 3, crcs[:3])
    commit(good, 3, 5, crcs[3:])
    await good.pull()
    assert_scattered(good)
    # The second block was written to after it was gathered.
    crcs = np.array([google_crc32c.value(row.tobytes()) for row in bad.data], np.uint32)
    crcs[1] ^= 1
    commit(bad, 0, 5, crcs)
    error = await error_of(bad.pull())
    assert error.code is Code.TRANSFER_FAILED
    assert "checksum" in error.message
    await pair.settled()


async def test_without_a_gathers_values_the_sender_computes_them(pair: NodePair, device: None) -> None:
    transfer = pair.transfer(3 * BLOCK_TOKENS)
    await transfer.reserve()
    assert transfer.gather()
    await transfer.pull()
    assert_scattered(transfer)
    await pair.settled()
