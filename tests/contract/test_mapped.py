"""A sender's staging read where it lies: what may be mapped, when the sender gets its slot back, and that nothing the other
process does changes what an engine is given, or ends this one."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer import lending
from kvtransfer.control import RankControl
from kvtransfer.node import KvNode
from kvtransfer.shared_area import HUGE_BYTES, Mapping, SharedArea, why_not_here
from kvtransfer.staging import PAGE_BYTES, Staging
from kvtransfer.transports.base import TransportError
from protos.errors import Code
from protos.ids import new_capability, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import (
    BLOCK_BYTES,
    TOKEN,
    NodePair,
    Transfer,
    assert_scattered,
    complete,
    error_of,
    make_node,
    prompt_bytes,
    small_settings,
    until,
)
from tests.support.mapped_peer import sender, settings

pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
pytestmark = pytest.mark.timeout(90)


def mapped_here() -> int:
    """Areas that this process maps, its own among them."""
    return sum("splitpoint-staging" in line for line in Path("/proc/self/maps").read_text().splitlines())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- the file


def test_what_the_owner_writes_is_seen_and_cannot_be_written() -> None:
    area = SharedArea(10 * PAGE_BYTES + 100)
    mapping = Mapping(os.getpid(), area.announcement)
    view = mapping.view(PAGE_BYTES, 200)
    assert not view.any()
    area.memory[PAGE_BYTES : PAGE_BYTES + 200] = 7
    assert (view == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    path = f"/proc/{os.getpid()}/fd/{area.announcement.descriptor}"
    with open(path, "r+b") as file, pytest.raises(OSError, match="not permitted"):
        mmap.mmap(file.fileno(), 0)
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(path, 0)
    first = area.memory.ctypes.data
    assert mapping.offset(first, len(area.memory)) == 0
    for address, num_bytes in ((first - 1, 10), (first + 1, len(area.memory)), (0, 1)):
        assert mapping.offset(address, num_bytes) is None


def test_a_slot_that_was_given_to_somebody_else_is_noticed() -> None:
    area = SharedArea(8 * PAGE_BYTES)
    staging = Staging(8 * PAGE_BYTES, mark=area.mark)
    mapping = Mapping(os.getpid(), area.announcement)
    first, second = staging.allocate(100), staging.allocate(3 * PAGE_BYTES)
    assert first is not None
    assert second is not None
    assert mapping.holds(second.offset, second.generation)
    assert not mapping.holds(second.offset, first.generation)
    assert not mapping.holds(second.offset + 1, second.generation)
    staging.quarantine(second)
    assert mapping.holds(second.offset, second.generation), "nobody else has it yet"
    staging.free(second)
    assert not mapping.holds(second.offset, second.generation)
    again = staging.allocate(100)
    assert again is not None
    assert again.offset == second.offset
    assert not mapping.holds(second.offset, second.generation)
    assert mapping.holds(first.offset, first.generation)


def test_only_the_announced_file_is_mapped() -> None:
    area, other = SharedArea(PAGE_BYTES), SharedArea(PAGE_BYTES)
    reads, writes = os.pipe()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 3 * PAGE_BYTES)
    good = area.announcement
    changes: dict[str, dict[str, Any]] = {
        "another area": {"descriptor": other.announcement.descriptor},
        "another token": {"token": bytes(16)},
        "no token": {"token": b""},
        "another length": {"bytes": 2 * PAGE_BYTES},
        "no length": {"bytes": 0},
        "a length beyond everything": {"bytes": 1 << 63},
        "a pipe": {"descriptor": reads},
        "a file that may be cut": {"descriptor": unsealed},
        "nothing": {"descriptor": 1 << 30},
    }
    files, areas = open_files(), mapped_here()
    for name, fields in changes.items():
        announced = pb.SharedStaging()
        announced.CopyFrom(good)
        for field, value in fields.items():
            setattr(announced, field, value)
        with pytest.raises(TransportError) as raised:
            Mapping(os.getpid(), announced)
        assert raised.value.reason == "refused", name
    with pytest.raises(TransportError):
        Mapping(2**22 + 1, good)
    assert (open_files(), mapped_here()) == (files, areas)
    for descriptor in (reads, writes, unsealed):
        os.close(descriptor)
    Mapping(os.getpid(), good)
    area.close()
    with pytest.raises(TransportError):
        Mapping(os.getpid(), good)


@pytest.mark.parametrize("num_bytes", [PAGE_BYTES, HUGE_BYTES, 3 * HUGE_BYTES + PAGE_BYTES])
def test_touching_changes_no_byte(num_bytes: int) -> None:
    area = SharedArea(num_bytes)
    mapping = Mapping(os.getpid(), area.announcement)
    area.memory[:] = 3
    for start, length in ((0, 1), (num_bytes - 1, 1), (0, num_bytes), (0, num_bytes)):
        area.touch(start, length)
    assert (mapping.view(0, num_bytes) == 3).all()
    fresh = SharedArea(num_bytes)
    fresh.touch(0, num_bytes)
    assert not fresh.memory.any()


def test_it_can_be_mapped_here() -> None:
    assert why_not_here() == ""


def test_it_is_unmapped_with_its_last_view_and_its_files_are_closed() -> None:
    files, areas = open_files(), mapped_here()
    area = SharedArea(PAGE_BYTES)
    assert (open_files(), mapped_here()) == (files + 1, areas + 1)
    mapping = Mapping(os.getpid(), area.announcement)
    assert (open_files(), mapped_here()) == (files + 1, areas + 2), "the descriptor is not needed any more"
    area.memory[0] = 5
    view = mapping.view(0, 10)
    del area, mapping
    assert (open_files(), mapped_here()) == (files, areas + 1)
    assert view[0] == 5
    del view
    assert mapped_here() == areas


def test_what_the_kernel_does_not_permit_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become a user that may not read this process")
    area = SharedArea(PAGE_BYTES)
    stranger = (
        "import os, sys; from kvtransfer.shared_area import Mapping; from protos.splitpoint.v1 import kv_transfer_pb2 as pb\n"
        "os.setuid(65534)\n"
        "try: Mapping(int(sys.argv[1]), pb.SharedStaging.FromString(bytes.fromhex(sys.argv[2])))\n"
        "except Exception as exc: print(exc.reason, exc)"
    )
    command = [sys.executable, "-c", stranger, str(os.getpid()), area.announcement.SerializeToString().hex()]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert said.startswith("refused")
    assert "ermission" in said


# ---- two nodes of one process


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    async with NodePair(settings=settings()) as made:
        yield made


async def staged(pair: NodePair, num_tokens: int = 200) -> Transfer:
    """A transfer that is verified and that no engine has taken."""
    transfer = pair.transfer(num_tokens, "ucx")
    pull = asyncio.create_task(transfer.pull())
    await transfer.reserve()
    assert transfer.gather()
    await pull
    return transfer


async def test_a_transfer_is_left_where_it_was_staged(pair: NodePair) -> None:
    transfer = pair.transfer(200, "ucx")
    (answer,) = await complete(transfer)
    await pair.settled()
    here, there = pair.receivers[0].counters(), pair.senders[0].counters()
    assert here["ucx.bytes_mapped"] == answer.bytes
    assert here["ucx.chunks_mapped"] == there["ucx.chunks_offered"] == answer.seal.num_chunks
    assert here["ucx.mappings"] == 1
    assert "ucx.chunks_read" not in here
    assert not pair.receivers[0]._rt.receive_memory.any(), "copied all the same"
    assert "mapped" in pair.receivers[0].describe()["ucx"]["same_host"]


async def test_the_senders_slot_is_held_until_the_engine_has_read(pair: NodePair) -> None:
    transfer = await staged(pair)
    view = pair.receivers[0].receive_view(transfer.id)
    assert dict(pair.senders[0].status().lease_states) == {"sent": 1}
    assert await pair.send_control.release(transfer.id, "over")
    assert pair.senders[0].status().send.quarantined_bytes > 0
    assert np.array_equal(view, transfer.data)
    assert pair.receivers[0].scattered(transfer.id)
    await pair.settled()


async def test_an_engine_that_needs_none_of_it_gives_it_back(pair: NodePair) -> None:
    transfer = await staged(pair)
    assert pair.receivers[0].scattered(transfer.id)
    await pair.settled()
    assert pair.senders[0].counters()["lease.delivered"] == 1


async def test_a_release_gives_it_back_but_not_under_the_engine(pair: NodePair) -> None:
    transfer = await staged(pair)
    assert await pair.receive_control.release(transfer.id, "aborted")
    await pair.settled()
    transfer = await staged(pair)
    view = pair.receivers[0].receive_view(transfer.id)
    assert await pair.receive_control.release(transfer.id, "aborted")
    assert await pair.send_control.release(transfer.id, "aborted")
    assert not pair.idle
    assert np.array_equal(view, transfer.data)
    assert pair.receivers[0].scattered(transfer.id)
    await pair.settled()


async def test_staged_kv_that_no_engine_takes_expires_and_is_given_back(pair: NodePair) -> None:
    transfer = pair.transfer(200, "ucx")
    await transfer.reserve()
    assert transfer.gather()
    await transfer.pull(remaining_s=0.2)
    await until(lambda: pair.receivers[0].counters().get("expired.receive") == 1)
    await pair.settled()
    assert pair.senders[0].counters()["lease.delivered"] == 1


@pytest.mark.parametrize("blocks", [0, 6])
async def test_a_pull_that_is_cancelled_or_too_late_gives_it_back(pair: NodePair, blocks: int) -> None:
    """Before anything was sent, and with some chunks mapped."""

    def mapped() -> int:
        return pair.receivers[0].counters().get("ucx.chunks_mapped", 0)

    for late in (False, True):
        transfer = pair.transfer(200, "ucx")
        await transfer.reserve()
        if blocks:
            assert transfer.gather(0, blocks)
        seen = mapped()
        pull = asyncio.create_task(transfer.pull(remaining_s=0.5 if late else 10.0))
        await until(lambda: dict(pair.senders[0].status().lease_states) == {"fetching": 1})
        await until(lambda before=seen: not blocks or mapped() > before)  # type: ignore[misc]
        if late:
            assert (await error_of(pull)).code is Code.DEADLINE_EXCEEDED
        else:
            assert await pair.receive_control.release(transfer.id, "aborted")
            assert (await error_of(pull)).code is Code.CANCELLED
        await pair.send_control.release(transfer.id, "over")
        await pair.settled()


async def test_a_byte_that_changed_in_the_senders_staging_is_seen(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtransfer.transports.ucx_channels import UcxSendChannel

    whole = UcxSendChannel.send

    def damaged(channel: UcxSendChannel, header: pb.ChunkHeader, payload: np.ndarray) -> Any:
        payload[len(payload) // 2] ^= 1
        return whole(channel, header, payload)

    monkeypatch.setattr(UcxSendChannel, "send", damaged)
    with pytest.raises(Exception, match="checksum"):
        await complete(pair.transfer(200, "ucx"))
    await pair.settled()
    assert pair.receivers[0].counters()["pulls_failed.rejected.checksum"] == 1


@pytest.mark.parametrize("field", ["address", "generation"])
async def test_chunks_of_another_slot_are_refused(pair: NodePair, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    from kvtransfer.transports.ucx_channels import UcxReceiveChannel

    whole = UcxReceiveChannel.accept

    async def changed(channel: UcxReceiveChannel, message: pb.FetchResponse, *rest: Any) -> Any:
        header = message.header
        if field == "generation":
            header.generation += 1
        elif header.index == 1:
            header.address += PAGE_BYTES
        return await whole(channel, message, *rest)

    monkeypatch.setattr(UcxReceiveChannel, "accept", changed)
    with pytest.raises(Exception, match="does not lie in the slot"):
        await complete(pair.transfer(200, "ucx"))
    await pair.settled()


async def reused(pair: NodePair, transfer: Transfer) -> Transfer:
    """The sender takes the receiver for dead and gives its slot, with all of its staging, to another prompt."""
    await pair.send_control.fence(pair.receivers[0].endpoint.incarnation)
    await pair.send_control.release(transfer.id, "the receiver is dead")
    await until(lambda: pair.senders[0].status().send.used_bytes + pair.senders[0].status().send.quarantined_bytes == 0)
    other = pair.transfer(64 * 16, "ucx")
    await other.reserve()
    assert other.gather()
    return other


async def test_a_slot_written_again_while_the_engine_reads_is_told(pair: NodePair) -> None:
    transfer = await staged(pair)
    view = pair.receivers[0].receive_view(transfer.id)
    other = await reused(pair, transfer)
    assert not np.array_equal(view, transfer.data), "the test does not do what it says"
    assert not pair.receivers[0].scattered(transfer.id)
    assert pair.receivers[0].counters()["session.lent_slot_reused"] == 1
    await pair.send_control.release(other.id, "over")
    await pair.settled()


async def test_an_engine_that_is_slow_to_take_a_prompt_does_not_hold_its_sender(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "COPY_AFTER_S", 0.0)
    transfer = await staged(pair)
    await until(lambda: pair.receivers[0].counters().get("lent_slot_copied") == 1)
    await until(lambda: pair.senders[0].status().leases == 0)
    await reused(pair, transfer)
    assert_scattered(transfer)
    assert await pair.send_control.release(transfer.id, "over") is False


async def test_a_slot_written_again_before_it_was_copied_is_not_given_to_the_engine(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def held(self: lending.Lending, session: Any, limit_s: float | None) -> bool:
        loop.call_soon_threadsafe(copying.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go.wait(), loop))
        return False

    monkeypatch.setattr(lending.Lending, "_let_go", held)
    transfer = await staged(pair)
    await asyncio.wait_for(copying.wait(), 10)
    other = await reused(pair, transfer)
    go.set()
    await until(lambda: pair.receivers[0].counters().get("session.lent_slot_reused") == 1)
    assert pair.receivers[0].receive_view(transfer.id) is None
    await pair.send_control.release(other.id, "over")
    await pair.settled()


async def test_where_it_cannot_be_mapped_it_is_copied(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str, announced: pb.SharedStaging) -> np.ndarray:
        raise PermissionError("not permitted here")

    monkeypatch.setattr(Mapping, "_open", staticmethod(refuse))
    for number in (1, 2):
        await complete(pair.transfer(200, "ucx"))
        await pair.settled()
        counters = pair.receivers[0].counters()
        assert counters["ucx.mapping_refused"] == number
    assert counters["ucx.chunks_read"] > 0
    assert "ucx.chunks_mapped" not in counters
    assert sum("cannot be mapped" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("maps", ["the sender", "the receiver", "a receiver without memfd"])
async def test_peers_that_do_not_share_are_read(maps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_copy = small_settings(transports=("ucx",), default_transport="ucx", ucx_same_host="one_copy")
    both = (settings(), one_copy) if maps == "the sender" else (one_copy, settings())
    if maps == "a receiver without memfd":
        monkeypatch.delattr(os, "memfd_create")
        both = settings(), settings()
    async with NodePair(settings=both[0], receiver_settings=both[1]) as two:
        assert two.senders[0].endpoint.HasField("shared_staging") == (maps == "the sender")
        await complete(two.transfer(200, "ucx"))
        await two.settled()
        assert two.receivers[0].counters()["ucx.chunks_read"] > 0
        counters = two.receivers[0].counters()
        assert "ucx.mapping_refused" not in counters
        assert counters.get("staging_not_shared", 0) == (maps == "a receiver without memfd")


async def test_nothing_is_left_of_many_transfers(pair: NodePair) -> None:
    await complete(pair.transfer(200, "ucx"))
    await pair.settled()
    gc.collect()  # of the tests before
    files, areas = open_files(), mapped_here()
    for _ in range(50):
        await complete(pair.transfer(200, "ucx"))
    await pair.settled()
    assert (open_files(), mapped_here()) == (files, areas)
    assert pair.receivers[0].status().tasks < 30


# ---- a sender in another process


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[KvNode, RankControl]]:
    node = make_node(settings())
    endpoint = await asyncio.to_thread(node.start)
    control = RankControl([endpoint], TOKEN)
    yield node, control
    await control.close()
    await asyncio.to_thread(node.stop)


def pull(control: RankControl, endpoint: pb.RankEndpoint, grant: pb.TransferGrant, tokens: list[int]) -> Any:
    return control.pull(
        grant,
        attempt_id="att",
        senders=[endpoint],
        prompt_tokens=len(tokens),
        token_hash=token_hash(tokens),
        transport="ucx",
        remaining_s=20.0,
    )


def empty(node: KvNode) -> bool:
    status = node.status()
    return status.receive.used_bytes + status.receive.quarantined_bytes + status.sessions == 0


@pytest.mark.fault
async def test_a_sender_killed_after_verification_does_not_matter(receiver: tuple[KvNode, RankControl]) -> None:
    """Nor does one that is stopped, nor how many there have been."""
    node, control = receiver
    gc.collect()  # of the tests before
    own, files = mapped_here(), []
    for number in range(4):
        tokens = list(range(number, number + 200))
        grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
        with sender() as peer:
            peer.stage(grant, tokens, 13)
            await pull(control, peer.endpoint, grant, tokens)
            view = node.receive_view(grant.transfer_id)
            if number % 2:
                os.kill(peer.process.pid, signal.SIGSTOP)
                assert np.array_equal(view, prompt_bytes(tokens))
            peer.kill()
            assert np.array_equal(view, prompt_bytes(tokens))
            assert node.scattered(grant.transfer_id)
        del view
        await until(lambda: empty(node) and node.counters()["ucx.mappings"] == 0, 10)
        await until(lambda: mapped_here() <= own, 10)
        files.append(open_files())
    assert node.counters()["ucx.chunks_mapped"] == 4 * 4
    assert files[-1] <= files[0] + 3


@pytest.mark.fault
async def test_a_sender_killed_before_verification_costs_its_transfer(receiver: tuple[KvNode, RankControl]) -> None:
    node, control = receiver
    tokens = list(range(200))
    grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
    with sender() as peer:
        peer.stage(grant, tokens, 8)
        pulling = asyncio.create_task(pull(control, peer.endpoint, grant, tokens))
        await until(lambda: node.counters().get("ucx.chunks_mapped", 0) == 2, 10)
        peer.kill()
        assert (await error_of(pulling)).code is Code.WORKER_LOST
    assert node.receive_view(grant.transfer_id) is None
    await until(lambda: empty(node) and node.counters()["ucx.mappings"] == 0, 10)


@pytest.mark.fault
async def test_a_stopped_sender_can_be_mapped() -> None:
    with sender() as peer:
        os.kill(peer.process.pid, signal.SIGSTOP)
        mapping = Mapping(peer.process.pid, peer.endpoint.shared_staging)
        assert not mapping.view(0, BLOCK_BYTES).any()
