"""Ends of transfers in every order: each slot is freed once, at its own time, whatever else is live (docs/failure-cases.md)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.lease import Lease, LeaseTable
from kvtransfer.plan import TransferPlan
from kvtransfer.session import Expected, ReceiveSession, RejectedChunkError, SessionState
from kvtransfer.sessions import SessionTable
from kvtransfer.staging import Staging
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

BLOCK_TOKENS, BLOCK_BYTES, PAGE = 4, 32, 32
TRANSFER, CAPABILITY = b"t" * 16, b"c" * 16
FOREVER = 1e9


class BothWays:
    """One transfer from a rank to itself, everything moved, neither end told: both tables hold a slot for the same id."""

    def __init__(self) -> None:
        self.send, self.receive = Staging(4 * PAGE, PAGE), Staging(4 * PAGE, PAGE)
        self.leases = LeaseTable(self.send, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
        self.sessions = SessionTable(self.receive)
        self.freed = {"send": self.send.frees, "receive": self.receive.frees}
        lease = self._sent()
        self._received()
        self.endings: dict[str, Callable[[], object]] = {
            "delivered": lambda: self.leases.completed(TRANSFER, CAPABILITY, "delivered", 2.0),
            "gave up": lambda: self.leases.completed(TRANSFER, CAPABILITY, "cancelled", 2.0),
            "send released": lambda: self.leases.release(TRANSFER, "abort", 2.0),
            "scattered": lambda: self.sessions.scattered(TRANSFER, 2.0),
            "receive released": lambda: self.sessions.release(TRANSFER, "abort", 2.0),
            "expired": lambda: (self.leases.expire(2 * FOREVER), self.sessions.expire(2 * FOREVER)),
        }
        self.lease = lease

    def _sent(self) -> Lease:
        slot = self.send.allocate(2 * BLOCK_BYTES)
        assert slot is not None
        lease = self.leases.reserve(
            TRANSFER, CAPABILITY, prompt_tokens=8, token_hash=b"h", slot=slot, expires_at=FOREVER, now=0.0
        )
        assert isinstance(lease, Lease)
        assert self.leases.open_view(TRANSFER, 0, 2) is lease
        self.leases.commit(TRANSFER, 0, 2, last=True, ready=None, now=0.0)
        assert self.leases.fetch(TRANSFER, CAPABILITY, 0.0) is lease
        self.leases.sent(lease, 1.0)
        return lease

    def _received(self) -> None:
        session = self.sessions.open(TRANSFER, expires_at=FOREVER, now=0.0)
        assert isinstance(session, ReceiveSession)
        slot = self.receive.allocate(2 * BLOCK_BYTES)
        assert slot is not None
        plan = TransferPlan(sender_rank=0, receiver_rank=0, prompt_tokens=8, num_blocks=2, block_bytes=BLOCK_BYTES)
        expected = Expected(
            transfer_id=TRANSFER, plan=plan, token_hash=b"h", fingerprint=b"f", incarnation="i", checksum="crc32c"
        )
        self.sessions.begin(session, slot, expected)
        seal = pb.Seal(
            transfer_id=TRANSFER, prompt_tokens=8, token_hash=b"h", fingerprint=b"f", incarnation="i", num_chunks=1, bytes=64
        )
        header = pb.ChunkHeader(
            transfer_id=TRANSFER, num_blocks=2, bytes=64, last=True, seal=seal, checksum=pb.Checksum(algorithm="crc32c", value=7)
        )
        session.announce(header, 1.0)
        assert session.landed(0, header.checksum, 1.0)
        self.sessions.drained(session)
        assert self.sessions.take(TRANSFER, 1.0) is session
        assert session.state is SessionState.TAKEN

    def check(self) -> None:
        self.send.check()
        self.receive.check()


@pytest.mark.parametrize("last", ["delivered", "gave up", "send released", "scattered", "receive released", "expired"])
def test_a_transfer_that_sends_and_receives_is_freed_once_each_way(last: str) -> None:
    """Every order of the ends, each said twice: staging refuses a second free, so passing means that there was none."""
    names = [name for name in BothWays().endings if name != last]
    for order in permutations(names, 4):
        both = BothWays()
        for name in (*order, last):
            both.endings[name]()
            both.endings[name]()
            both.check()
        # What a copy or a stream may still touch is kept whatever was said, and comes back with its end.
        assert both.send.frees == both.freed["send"], "the stream still reads"
        both.leases.drained(both.lease)
        both.sessions.scattered(TRANSFER, 3.0)
        assert (both.send.frees, both.receive.frees) == (1, 1), order
        assert both.send.idle
        assert both.receive.idle
        assert len(both.leases) + len(both.sessions) + both.leases.ending + both.sessions.ending == 0


LIVES = st.lists(st.floats(0.1, 20, allow_nan=False), min_size=2, max_size=25)


@given(LIVES, st.floats(0, 25, allow_nan=False))
def test_everything_ends_at_its_own_deadline_whatever_stands_before_it(lives_s: list[float], now: float) -> None:
    """One long-lived entry at the head hides nothing: at any moment exactly those whose time is over are gone."""
    lives_s = [1000.0, *lives_s]
    send, receive = Staging(len(lives_s) * PAGE, PAGE), Staging(len(lives_s) * PAGE, PAGE)
    leases = LeaseTable(send, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
    sessions = SessionTable(receive)
    ids = [number.to_bytes(16, "big") for number in range(len(lives_s))]
    for transfer_id, life_s in zip(ids, lives_s, strict=True):
        slot = send.allocate(BLOCK_BYTES)
        assert slot is not None
        leases.reserve(transfer_id, CAPABILITY, prompt_tokens=4, token_hash=b"h", slot=slot, expires_at=life_s, now=0.0)
        sessions.open(transfer_id, expires_at=life_s, now=0.0)
    due = {transfer_id for transfer_id, life_s in zip(ids, lives_s, strict=True) if life_s <= now}
    assert {lease.transfer_id for lease, _ in leases.expire(now)} == due
    assert {session.transfer_id for session in sessions.expire(now)} == due
    assert {transfer_id for transfer_id in ids if leases.live(transfer_id) is None} == due
    assert {transfer_id for transfer_id in ids if sessions.live(transfer_id) is None} == due
    assert send.used_bytes == (len(ids) - len(due)) * PAGE
    assert leases.expire(now) == []
    assert sessions.expire(now) == []


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_no_block_is_sent_before_its_own_copy_and_all_before_it_are_done(chunks: list[int], data: st.DataObject) -> None:
    """Several chunks are being copied at once, and finish when they like: what may be sent ends at the first that runs."""
    total = sum(chunks)
    staging = Staging(total * BLOCK_BYTES, PAGE)
    leases = LeaseTable(staging, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
    slot = staging.allocate(total * BLOCK_BYTES)
    assert slot is not None
    lease = leases.reserve(
        TRANSFER, CAPABILITY, prompt_tokens=total * BLOCK_TOKENS, token_hash=b"h", slot=slot, expires_at=FOREVER, now=0.0
    )
    assert isinstance(lease, Lease)
    done = [False] * len(chunks)
    ends = [sum(chunks[: place + 1]) for place in range(len(chunks))]

    def settle() -> None:
        """As the node does: the oldest copy first, each when it is done."""
        while lease.gathers and (lease.gathers[0].ready is None or lease.gathers[0].ready()):
            leases.settle(lease)

    def check() -> None:
        settle()
        committed = [place for place, end in enumerate(ends) if end <= lease.committed_blocks]
        running = next((place for place in committed if not done[place]), len(committed))
        assert lease.staged_blocks == (ends[running - 1] if running else 0)

    for place, count in enumerate(chunks):
        assert leases.open_view(TRANSFER, ends[place] - count, count) is lease
        ready = (lambda place=place: done[place]) if data.draw(st.booleans(), label="on a device") else None
        done[place] = ready is None
        last = place == len(chunks) - 1
        leases.commit(TRANSFER, ends[place] - count, count, last=last, ready=ready, now=0.0)
        check()
        if data.draw(st.booleans(), label="a copy ends"):
            done[data.draw(st.integers(0, place), label="which")] = True
            check()
    done[:] = [True] * len(chunks)
    check()
    assert lease.staged_blocks == total


def test_a_capability_serves_the_receivers_that_were_announced_and_no_more() -> None:
    staging = Staging(4 * PAGE, PAGE)
    leases = LeaseTable(staging, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
    slot = staging.allocate(2 * BLOCK_BYTES)
    assert slot is not None
    lease = leases.reserve(TRANSFER, CAPABILITY, prompt_tokens=8, token_hash=b"h", slot=slot, expires_at=FOREVER, now=0.0)

    def fetch(receiver: int, receivers: int) -> bool:
        return leases.fetch(TRANSFER, CAPABILITY, 1.0, receiver=receiver, receivers=receivers) is lease

    assert not fetch(4, 0)
    assert fetch(4, 2)
    assert not fetch(4, 2), "once"
    assert not fetch(5, 1), "one more than the first one said"
    assert not fetch(5, 3), "another number than the first one said"
    assert fetch(5, 2)
    assert not fetch(6, 2), "a third of two"
    assert leases.counters == {"receivers": 3, "fetch_again": 2}


def test_an_empty_chunk_is_rejected() -> None:
    """One after the other they would never end."""
    staging = Staging(4 * PAGE, PAGE)
    sessions = SessionTable(staging)
    session, slot = sessions.open(TRANSFER, expires_at=FOREVER, now=0.0), staging.allocate(2 * BLOCK_BYTES)
    assert isinstance(session, ReceiveSession)
    assert slot is not None
    plan = TransferPlan(sender_rank=0, receiver_rank=0, prompt_tokens=8, num_blocks=2, block_bytes=BLOCK_BYTES)
    expected = Expected(transfer_id=TRANSFER, plan=plan, token_hash=b"h", fingerprint=b"f", incarnation="i", checksum="crc32c")
    sessions.begin(session, slot, expected)
    with pytest.raises(RejectedChunkError) as caught:
        session.announce(pb.ChunkHeader(transfer_id=TRANSFER, checksum=pb.Checksum(algorithm="crc32c")), 1.0)
    assert caught.value.reason == "bytes"
