"""A receive session verifies exactly the stream it was told to expect, and every ending gives its bytes back."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.machine import Refusal
from kvtransfer.plan import TransferPlan
from kvtransfer.session import (
    ENDED,
    RECEIVE,
    SCATTER,
    TABLE,
    Expected,
    ReceiveSession,
    RejectedChunkError,
    SessionEvent,
    SessionState,
)
from kvtransfer.sessions import SessionTable
from kvtransfer.staging import SlotHold, Staging
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

BLOCK_BYTES, PAGE = 32, 32
TRANSFER = b"t" * 16


def plan(num_blocks: int) -> TransferPlan:
    return TransferPlan(
        sender_rank=0, receiver_rank=0, prompt_tokens=num_blocks * 4 - 1, num_blocks=num_blocks, block_bytes=BLOCK_BYTES
    )


def expected(num_blocks: int) -> Expected:
    return Expected(
        transfer_id=TRANSFER,
        plan=plan(num_blocks),
        token_hash=b"h" * 32,
        fingerprint=b"f" * 32,
        incarnation="inc",
        checksum="crc32c",
    )


def stream(sizes: list[int]) -> list[pb.ChunkHeader]:
    """The right headers for chunks of so many blocks."""
    total, first, headers = sum(sizes), 0, []
    for index, count in enumerate(sizes):
        header = pb.ChunkHeader(
            transfer_id=TRANSFER,
            generation=7,
            index=index,
            first_block=first,
            num_blocks=count,
            offset=first * BLOCK_BYTES,
            bytes=count * BLOCK_BYTES,
            checksum=pb.Checksum(algorithm="crc32c", value=1000 + index),
            last=index == len(sizes) - 1,
        )
        first += count
        if header.last:
            seal = pb.Seal(transfer_id=TRANSFER, prompt_tokens=plan(total).prompt_tokens, token_hash=b"h" * 32)
            seal.fingerprint, seal.incarnation, seal.num_chunks, seal.bytes = b"f" * 32, "inc", len(sizes), total * BLOCK_BYTES
            header.seal.CopyFrom(seal)
        headers.append(header)
    return headers


def begun(num_blocks: int) -> tuple[ReceiveSession, Staging]:
    staging = Staging(64 * PAGE, PAGE)
    session = ReceiveSession(TRANSFER, expires_at=9.0, now=0.0)
    slot = staging.allocate(num_blocks * BLOCK_BYTES)
    assert slot is not None
    session.begin(expected(num_blocks), SlotHold(staging, slot))
    return session, staging


def feed(session: ReceiveSession, headers: list[pb.ChunkHeader]) -> bool:
    done = False
    for header in headers:
        start, end = session.announce(header, 1.0)
        assert (start, end) == (header.offset, header.offset + header.bytes)
        done = session.landed(header.index, header.checksum, 1.0)
    return done


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(SIZES)
def test_the_right_stream_verifies(sizes: list[int]) -> None:
    session, _ = begun(sum(sizes))
    assert feed(session, stream(sizes))
    assert session.state is SessionState.VERIFIED
    assert session.seal is not None
    assert session.seal.bytes == sum(sizes) * BLOCK_BYTES


@given(SIZES, st.randoms(use_true_random=False))
def test_payload_may_land_in_any_order_once_announced(sizes: list[int], rng: object) -> None:
    session, _ = begun(sum(sizes))
    headers = stream(sizes)
    for header in headers:
        session.announce(header, 1.0)
    order = list(headers)
    rng.shuffle(order)  # type: ignore[attr-defined]
    done = [session.landed(header.index, header.checksum, 2.0) for header in order]
    assert done == [False] * (len(order) - 1) + [True]


def announced(headers: list[pb.ChunkHeader]) -> list[pb.ChunkHeader]:
    """As they come before the sender knows their checksums."""
    made = []
    for header in headers:
        early = pb.ChunkHeader()
        early.CopyFrom(header)
        early.checksum.value = 0
        made.append(early)
    return made


@given(SIZES, st.randoms(use_true_random=False))
def test_checksums_that_follow_their_headers_come_before_or_after_the_bytes(sizes: list[int], rng: object) -> None:
    session, _ = begun(sum(sizes))
    headers = stream(sizes)
    for early in announced(headers):
        session.announce(early, 1.0, ahead=True)
    events = [(what, header) for header in headers for what in ("landed", "summed")]
    rng.shuffle(events)  # type: ignore[attr-defined]
    done = []
    for what, header in events:
        assert session.state is SessionState.RECEIVING
        done.append(getattr(session, what)(header.index, header.checksum, 2.0))
    assert done == [False] * (len(events) - 1) + [True]
    assert session.state is SessionState.VERIFIED


@given(st.booleans(), st.integers(1, 1 << 31))
def test_a_checksum_that_follows_is_compared_whichever_comes_first(bytes_first: bool, flip: int) -> None:
    session, _ = begun(2)
    (header,) = stream([2])
    session.announce(announced([header])[0], 1.0, ahead=True)
    wrong = pb.Checksum(algorithm="crc32c", value=header.checksum.value ^ flip)
    steps = [lambda: session.landed(0, wrong, 1.0), lambda: session.summed(0, header.checksum, 1.0)]
    first, second = steps if bytes_first else reversed(steps)
    assert first() is False
    with pytest.raises(RejectedChunkError) as caught:
        second()
    assert caught.value.reason == "checksum"
    assert session.state is not SessionState.VERIFIED


@pytest.mark.parametrize(
    ("index", "algorithm", "ahead", "times", "reason"),
    [
        (0, "crc32c-8k", True, 1, "algorithm"),
        (0, "off", True, 1, "algorithm"),
        (1, "crc32c", True, 1, "order"),
        (0, "crc32c", False, 1, "order"),
        (0, "crc32c", True, 2, "order"),
    ],
)
def test_a_checksum_nobody_waits_for_is_rejected(index: int, algorithm: str, ahead: bool, times: int, reason: str) -> None:
    session, _ = begun(2)
    session.announce(stream([2])[0], 1.0, ahead=ahead)
    for _ in range(times - 1):
        session.summed(index, pb.Checksum(algorithm=algorithm, value=1), 1.0)
    with pytest.raises(RejectedChunkError) as caught:
        session.summed(index, pb.Checksum(algorithm=algorithm, value=1), 1.0)
    assert caught.value.reason == reason


def test_announced_bytes_land_once() -> None:
    session, _ = begun(2)
    (header,) = stream([2])
    session.announce(header, 1.0, ahead=True)
    session.landed(0, header.checksum, 1.0)
    with pytest.raises(RejectedChunkError, match="landed twice"):
        session.landed(0, header.checksum, 1.0)


@given(SIZES.filter(lambda sizes: len(sizes) > 1), st.data())
def test_a_lost_doubled_or_swapped_header_is_rejected(sizes: list[int], data: st.DataObject) -> None:
    headers = stream(sizes)
    place = data.draw(st.integers(0, len(headers) - 2))
    how = data.draw(st.sampled_from(["lost", "doubled", "swapped"]))
    if how == "lost":
        del headers[place]
    elif how == "doubled":
        headers.insert(place, headers[place])
    else:
        headers[place], headers[place + 1] = headers[place + 1], headers[place]
    session, _ = begun(sum(sizes))
    with pytest.raises(RejectedChunkError) as caught:
        feed(session, headers)
    assert caught.value.reason == "order"
    assert session.state is not SessionState.VERIFIED


CHANGES = {
    "transfer_id": b"x" * 16,
    "generation": 8,
    "index": 9,
    "first_block": 3,
    "num_blocks": 3,
    "offset": BLOCK_BYTES,
    "bytes": 5,
    "last": None,
}


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize("place", [1, 2])
def test_each_field_of_a_header_is_checked(field: str, place: int) -> None:
    headers = stream([2, 2, 2])
    value = CHANGES[field]
    setattr(headers[place], field, not headers[place].last if value is None else value)
    session, _ = begun(6)
    with pytest.raises(RejectedChunkError):
        feed(session, headers)
    assert session.state is not SessionState.VERIFIED


@pytest.mark.parametrize("field", [field.name for field in pb.Seal.DESCRIPTOR.fields])
def test_each_field_of_the_seal_is_checked(field: str) -> None:
    headers = stream([1, 2])
    if field == "ranks":
        headers[1].seal.ranks.add(rank=1)
    else:
        old = getattr(headers[1].seal, field)
        setattr(headers[1].seal, field, old + 1 if isinstance(old, int) else old + (b"x" if isinstance(old, bytes) else "x"))
    session, _ = begun(3)
    with pytest.raises(RejectedChunkError) as caught:
        feed(session, headers)
    assert caught.value.reason == f"seal.{field}"


def test_a_missing_seal_is_rejected() -> None:
    headers = stream([2])
    headers[0].ClearField("seal")
    session, _ = begun(2)
    with pytest.raises(RejectedChunkError, match="seal"):
        feed(session, headers)


@pytest.mark.parametrize("checksum", [pb.Checksum(algorithm="crc32c", value=1), pb.Checksum(algorithm="off", value=1000)])
def test_a_checksum_that_differs_is_rejected(checksum: pb.Checksum) -> None:
    session, _ = begun(2)
    session.announce(stream([2])[0], 1.0)
    with pytest.raises(RejectedChunkError) as caught:
        session.landed(0, checksum, 1.0)
    assert caught.value.reason == "checksum"
    assert session.state is SessionState.RECEIVING


def test_the_sender_does_not_choose_the_checksum() -> None:
    header = stream([2])[0]
    header.checksum.CopyFrom(pb.Checksum(algorithm="off"))
    session, _ = begun(2)
    with pytest.raises(RejectedChunkError) as caught:
        session.announce(header, 1.0)
    assert caught.value.reason == "algorithm"


def test_chunks_that_were_not_announced_or_landed_before() -> None:
    session, _ = begun(4)
    first, _ = stream([2, 2])
    with pytest.raises(RejectedChunkError):
        session.landed(0, first.checksum, 1.0)
    session.announce(first, 1.0)
    session.landed(0, first.checksum, 1.0)
    with pytest.raises(RejectedChunkError):
        session.landed(0, first.checksum, 1.0)


def test_no_chunk_follows_the_last() -> None:
    session, _ = begun(2)
    (header,) = stream([2])
    session.announce(header, 1.0)
    again = copy.deepcopy(header)
    again.index = 1
    with pytest.raises(RejectedChunkError) as caught:
        session.announce(again, 1.0)
    assert caught.value.reason == "after_last"


@given(st.lists(SIZES, min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_shares_of_several_senders_come_in_any_order_and_all_are_needed(shares: list[list[int]], rng: object) -> None:
    """Each sender's chunks come in its own order; the session is verified by the last chunk of the last of them."""
    staging = Staging(256 * PAGE, PAGE)
    session = ReceiveSession(TRANSFER, expires_at=9.0, now=0.0)
    slot = staging.allocate(sum(map(sum, shares)) * BLOCK_BYTES)
    assert slot is not None
    session.begin([expected(sum(sizes)) for sizes in shares], SlotHold(staging, slot), content_bytes=BLOCK_BYTES)
    turns = [source for source, sizes in enumerate(shares) for _ in sizes]
    rng.shuffle(turns)  # type: ignore[attr-defined]
    headers = [iter(stream(sizes)) for sizes in shares]
    verified = []
    for source in turns:
        header = next(headers[source])
        session.announce(header, 1.0, source=source)
        verified.append(session.landed(header.index, header.checksum, 1.0, source=source))
    assert verified == [False] * (len(turns) - 1) + [True]
    assert [seal.bytes for seal in session.seals] == [sum(sizes) * BLOCK_BYTES for sizes in shares]
    assert session.content_bytes == BLOCK_BYTES


def test_a_chunk_longer_than_its_room_is_rejected() -> None:
    staging = Staging(64 * PAGE, PAGE)
    session = ReceiveSession(TRANSFER, expires_at=9.0, now=0.0)
    slot = staging.allocate(4 * BLOCK_BYTES)
    assert slot is not None
    session.begin(dataclasses.replace(expected(4), max_chunk_bytes=2 * BLOCK_BYTES), SlotHold(staging, slot))
    first, second = stream([1, 3])
    session.announce(first, 1.0)
    with pytest.raises(RejectedChunkError) as caught:
        session.announce(second, 1.0)
    assert caught.value.reason == "bytes"


class Sessions(RuleBasedStateMachine):
    """Control, streams and engine in any order."""

    recent = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(8 * PAGE, PAGE)
        self.table = SessionTable(self.staging, max_tombstones=1000)
        self.now = 0.0
        self.ids = [bytes(16)]
        self.opened: set[bytes] = set()
        self.released: set[bytes] = set()
        self.receiving: list[ReceiveSession] = []
        """Once for each sender whose channel may still write."""
        self.resting: list[ReceiveSession] = []
        self.reading: set[bytes] = set()

    def id(self, place: int) -> bytes:
        return self.ids[-1 - place % len(self.ids)]

    @rule(place=recent, fresh=st.booleans())
    def open(self, place: int, fresh: bool) -> None:
        if fresh:
            self.ids.append(len(self.ids).to_bytes(16, "big"))
            place = 0
        transfer_id = self.id(place)
        known = self.table.live(transfer_id) is not None
        over = transfer_id in self.released or (transfer_id in self.opened and not known)
        answer = self.table.open(transfer_id, expires_at=self.now + 5, now=self.now)
        assert isinstance(answer, Refusal) == (known or over)
        self.opened.add(transfer_id)

    @rule(place=recent, num_blocks=st.integers(1, 4), senders=st.integers(1, 2), rests=st.booleans())
    def begin(self, place: int, num_blocks: int, senders: int, rests: bool) -> None:
        transfer_id = self.id(place)
        session = self.table.live(transfer_id)
        if session is None or session.hold is not None:
            return
        slot = self.staging.allocate(num_blocks * BLOCK_BYTES)
        if slot is None:
            return
        one = Expected(**{**as_dict(expected(num_blocks)), "transfer_id": transfer_id})
        self.table.begin(session, slot, [one] * senders)
        if rests:
            self.table.rest(session)
            self.resting.append(session)
        else:
            self.receiving += [session] * senders

    @rule()
    def pull_follows(self) -> None:
        if not self.resting:
            return
        session = self.resting.pop()
        assert self.table.resume(session) == (not session.ended)
        if not session.ended:
            self.receiving += [session] * len(session.inflows)

    @rule(place=recent, good=st.booleans(), source=st.integers(0, 1))
    def arrives(self, place: int, good: bool, source: int) -> None:
        transfer_id = self.id(place)
        session = self.table.live(transfer_id)
        if session is None or session not in self.receiving or source >= len(session.inflows):
            return
        if session.inflows[source].seal is not None or session.state not in (SessionState.WAITING, SessionState.RECEIVING):
            return
        (header,) = stream([session.inflows[source].expected.plan.num_blocks])
        header.transfer_id = header.seal.transfer_id = transfer_id
        session.announce(header, self.now, source=source)
        if good:
            verified = session.landed(0, header.checksum, self.now, source=source)
            assert verified == all(inflow.seal is not None for inflow in session.inflows)
            assert verified == (session.state is SessionState.VERIFIED)
        else:
            self.table.end(session, SessionEvent.FAIL, "bad", self.now)

    @rule(choice=st.integers(0, 5))
    def channel_drains(self, choice: int) -> None:
        if self.receiving:
            session = self.receiving.pop(choice % len(self.receiving))
            self.table.drained(session)

    @rule(place=recent)
    def engine_takes(self, place: int) -> None:
        transfer_id = self.id(place)
        session = self.table.live(transfer_id)
        may = session is not None and session.state in (SessionState.VERIFIED, SessionState.TAKEN)
        got = self.table.take(transfer_id, self.now)
        assert (got is not None) == may, "an engine sees verified KV and nothing else"
        if got is not None:
            self.reading.add(transfer_id)

    @rule(place=recent)
    def engine_is_done(self, place: int) -> None:
        transfer_id = self.id(place)
        self.table.scattered(transfer_id, self.now)
        self.reading.discard(transfer_id)

    @rule(place=recent, really=st.integers(0, 3))
    def release(self, place: int, really: int) -> None:
        if really:
            return
        transfer_id = self.id(place)
        known = self.table.live(transfer_id) is not None
        assert self.table.release(transfer_id, "test", self.now) == known
        assert not self.table.release(transfer_id, "again", self.now)
        self.released.add(transfer_id)

    @rule(seconds=st.floats(0, 2))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for session in self.table.expire(self.now):
            assert session.state is SessionState.ABANDONED
            assert session.expires_at <= self.now

    @invariant()
    def bytes_being_read_are_held(self) -> None:
        self.staging.check()
        for session in self.table.sessions():
            assert session.state not in ENDED
            assert session.hold is None or session.hold.pinned(RECEIVE) == (session in self.receiving)
            if session.transfer_id in self.reading:
                assert session.hold is not None
                assert session.hold.pinned(SCATTER)
                assert not session.hold.freed

    def teardown(self) -> None:
        for transfer_id in self.ids:
            self.table.release(transfer_id, "teardown", self.now)
        for session in self.receiving:
            self.table.drained(session)
        for transfer_id in self.reading:
            self.table.scattered(transfer_id, self.now)
        assert len(self.table) == 0
        assert self.table.ending == 0
        assert self.staging.idle


def as_dict(value: Expected) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__slots__}


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_no_ended_session_goes_on_and_every_state_is_reached() -> None:
    assert not [pair for pair in TABLE if pair[0] in ENDED]
    assert {SessionState.WAITING, *TABLE.values()} == set(SessionState)
