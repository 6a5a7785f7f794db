"""Reading another process' memory: what lands, what is refused, and that nothing the other process does ends this one."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import google_crc32c
import grpc
import numpy as np
import pytest

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.same_host import (
    PIECE_BYTES,
    ProcessId,
    address_of,
    read,
    read_all,
    this_process,
    why_unreadable,
)
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import NodePair, complete, small_settings, until

pytestmark = pytest.mark.timeout(60)

SETTINGS = small_settings(transports=("ucx",), default_transport="ucx", ucx_same_host="one_copy")

CHILD = """
import sys
import numpy as np
from kvtransfer.transports.same_host import address_of, this_process
data = np.random.default_rng(int(sys.argv[1])).integers(0, 256, int(sys.argv[2]), dtype=np.uint8)
print(this_process().encode().hex(), address_of(data), flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(num_bytes: int, seed: int = 1) -> Iterator[tuple[subprocess.Popen[str], ProcessId, int]]:
    """A process that holds a pattern: itself, how it announces itself, and the pattern's address."""
    command = [sys.executable, "-c", CHILD, str(seed), str(num_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        identity, address = process.stdout.readline().split()
        yield process, ProcessId.decode(bytes.fromhex(identity)), int(address)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def pattern(num_bytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def take(identity: ProcessId, address: int, target: np.ndarray, **changes: Any) -> int:
    arguments: dict[str, Any] = {"check": True, "stopped": lambda: False, "moved": lambda: None, **changes}
    return read_all(identity, address, target, **arguments)


@pytest.mark.parametrize("num_bytes", [1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7])
def test_bytes_and_their_checksum_arrive(num_bytes: int) -> None:
    with other_process(num_bytes) as (_, identity, address):
        memory = np.full(num_bytes + 2, 9, np.uint8)
        value = take(identity, address, memory[1:-1])
    assert np.array_equal(memory[1:-1], pattern(num_bytes))
    assert value == google_crc32c.value(pattern(num_bytes).tobytes())
    assert (memory[0], memory[-1]) == (9, 9), "written outside its target"


def test_a_process_that_is_not_the_announced_one_is_noticed() -> None:
    """As when its process id went to another one, or belongs to another id namespace."""
    with other_process(100) as (_, identity, address):
        strangers = {
            "another value there": replace(identity, nonce=bytes(16)),
            "nothing mapped there": replace(identity, nonce_address=4096),
            "another process": replace(identity, pid=os.getppid()),
        }
        for name, stranger in strangers.items():
            assert why_unreadable(stranger), name
            with pytest.raises(TransportError) as raised:
                take(stranger, address, np.zeros(100, np.uint8))
            assert raised.value.reason in ("peer_lost", "refused"), name
        assert why_unreadable(identity) == ""
    assert why_unreadable(ProcessId()) == "the peer does not offer it"


@pytest.mark.fault
def test_a_peer_killed_while_it_is_read_is_an_error() -> None:
    with other_process(4 * PIECE_BYTES) as (process, identity, address):
        pieces = 0

        def kill_after_the_first() -> None:
            nonlocal pieces
            pieces += 1
            process.kill()
            process.wait()

        with pytest.raises(TransportError) as raised:
            take(identity, address, np.zeros(4 * PIECE_BYTES, np.uint8), moved=kill_after_the_first)
        assert raised.value.reason == "peer_lost"
        assert pieces == 1
        assert why_unreadable(identity)


@pytest.mark.fault
def test_a_stopped_peer_can_be_read() -> None:
    with other_process(1000) as (process, identity, address):
        os.kill(process.pid, signal.SIGSTOP)
        target = np.zeros(1000, np.uint8)
        take(identity, address, target)
        assert np.array_equal(target, pattern(1000))


def test_memory_that_ends_early_is_an_error() -> None:
    with other_process(1000) as (_, identity, _), pytest.raises(TransportError) as raised:
        take(identity, 4096, np.zeros(1000, np.uint8))
    assert raised.value.reason == "peer_lost"


def test_a_read_stops_between_two_pieces() -> None:
    with other_process(3 * PIECE_BYTES) as (_, identity, address):
        target = np.zeros(3 * PIECE_BYTES, np.uint8)
        answers = iter([False, True])
        with pytest.raises(TransportError) as raised:
            take(identity, address, target, stopped=lambda: next(answers))
    assert raised.value.reason == "closed"
    assert np.array_equal(target[:PIECE_BYTES], pattern(3 * PIECE_BYTES)[:PIECE_BYTES])
    assert not target[PIECE_BYTES:].any(), "written after it was told to stop"


def test_what_the_kernel_does_not_permit_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become a user that may not read this process")
    stranger = (
        "import os, sys; from kvtransfer.transports.same_host import ProcessId, why_unreadable; os.setuid(65534); "
        "print(why_unreadable(ProcessId.decode(bytes.fromhex(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", stranger, this_process().encode().hex()]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert "Operation not permitted" in said


def test_only_memory_that_can_be_read_gets_an_address() -> None:
    memory = pattern(100)
    assert address_of(memory) == memory.ctypes.data
    assert address_of(memory[::2]) == 0
    target = np.zeros(100, np.uint8)
    read(this_process(), address_of(memory), target)
    assert np.array_equal(target, memory)


# ---- two nodes


@pytest.fixture
async def pair() -> AsyncIterator[NodePair]:
    pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
    async with NodePair(settings=SETTINGS) as made:
        yield made


async def test_a_transfer_is_read_and_counted(pair: NodePair) -> None:
    transfer = pair.transfer(200, "ucx")
    (answer,) = await complete(transfer)
    await pair.settled()
    read_here = pair.receivers[0].counters()
    assert read_here["ucx.bytes_read"] == answer.bytes
    assert read_here["ucx.chunks_read"] == pair.senders[0].counters()["ucx.chunks_offered"] == answer.seal.num_chunks
    assert "process_vm_readv" in pair.receivers[0].describe()["ucx"]["same_host"]


async def test_where_reading_is_refused_ucx_carries_it(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transports.ucx.why_unreadable", lambda process: "not permitted here")
    await complete(pair.transfer(200, "ucx"))
    await complete(pair.transfer(20, "ucx"))
    await pair.settled()
    counters = pair.receivers[0].counters()
    assert counters["ucx.one_copy_refused"] == 2
    assert "ucx.bytes_read" not in counters


async def test_a_changed_byte_is_seen(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum computed while reading is what decides."""
    from kvtransfer.transports import same_host

    whole = same_host.Reads.read

    def damaged(reads: same_host.Reads, address: int, to: int, num_bytes: int) -> None:
        whole(reads, address, to, num_bytes)
        if num_bytes > 1:
            (ctypes.c_ubyte * num_bytes).from_address(to)[num_bytes // 2] ^= 1

    monkeypatch.setattr(same_host.Reads, "read", damaged)
    with pytest.raises(Exception, match="checksum"):
        await complete(pair.transfer(200, "ucx"))
    await pair.settled()
    assert pair.receivers[0].counters()["pulls_failed.rejected.checksum"] == 1


async def test_the_senders_slot_is_held_until_the_receiver_has_spoken(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Complete` that is lost is sent again; until it has arrived the slot's bytes are not given to anybody else."""
    from kvtransfer import completion, push

    monkeypatch.setattr(completion, "COMPLETE_PAUSE_S", 0.01)
    deaf = True
    original = push.KvTransferServicer.Complete

    async def hearing(self: push.KvTransferServicer, request: pb.CompleteRequest, context: Any) -> pb.CompleteResponse:
        if deaf:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        return await original(self, request, context)

    monkeypatch.setattr(push.KvTransferServicer, "Complete", hearing)
    async with NodePair(settings=SETTINGS) as two:
        transfer = two.transfer(200, "ucx")
        await complete(transfer)
        await two.send_control.release(transfer.id, "over")
        await until(lambda: two.receivers[0].counters().get("complete_again", 0) >= 2, 10)
        assert two.senders[0].status().send.quarantined_bytes > 0
        deaf = False
        await two.settled(10)
