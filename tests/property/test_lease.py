"""The lease table under every order of messages: no byte has two owners, every ending gives all bytes back, nothing raises."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.lease import GATHER, LIVE, SEND, TABLE, Action, Lease, LeaseEvent, LeaseState, LeaseTable
from kvtransfer.machine import InvalidTransition, Machine, Refusal, Tombstones
from kvtransfer.staging import Staging

BLOCK_TOKENS, BLOCK_BYTES, PAGE = 4, 32, 32
recent = st.integers(0, 3)  # one of the transfers heard of last, 0 the very last
RIGHT, WRONG = b"c" * 16, b"w" * 16


class Messages(RuleBasedStateMachine):
    """Any message at any time from engine, actor and peer, late, doubled and forged ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(12 * BLOCK_BYTES, PAGE)
        self.table = LeaseTable(self.staging, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, max_tombstones=1000)
        self.now = 0.0
        self.ids = [bytes(16)]
        self.reserved: set[bytes] = set()
        self.released: set[bytes] = set()
        self.fetched: list[tuple[Lease, int]] = []
        """Every stream that was begun: its lease and its receiver."""
        self.open: list[tuple[Lease, int]] = []
        """Those whose channel may still read."""
        self.receivers: dict[bytes, int] = {}
        self.confirmed: dict[bytes, set[int]] = {}
        self.writing: dict[bytes, tuple[Lease, int, int]] = {}
        self.unready: list[list[bool]] = []
        self.last_generation = 0

    def id(self, place: int) -> bytes:
        return self.ids[-1 - place % len(self.ids)]

    def over(self, transfer_id: bytes) -> bool:
        return transfer_id in self.released or (transfer_id in self.reserved and self.table.live(transfer_id) is None)

    @rule(place=recent, fresh=st.booleans(), tokens=st.integers(1, 20), ttl=st.floats(0.5, 20))
    def reserve(self, place: int, fresh: bool, tokens: int, ttl: float) -> None:
        if fresh:
            self.ids.append(len(self.ids).to_bytes(16, "big"))
            place = 0
        transfer_id = self.id(place)
        slot = self.staging.allocate(self.table.slot_bytes(tokens))
        if slot is None:
            return
        known, over = self.table.live(transfer_id) is not None, self.over(transfer_id)
        before = self.staging.free_bytes
        answer = self.table.reserve(
            transfer_id, RIGHT, prompt_tokens=tokens, token_hash=b"h", slot=slot, expires_at=self.now + ttl, now=self.now
        )
        if isinstance(answer, Refusal):
            assert known or over
            assert self.staging.free_bytes == before + slot.span_bytes, "a refused reservation keeps nothing"
            return
        assert not known
        assert not over, "a transfer that is over must not begin again"
        self.reserved.add(transfer_id)
        assert answer.slot.generation > self.last_generation
        self.last_generation = answer.slot.generation

    @rule(place=recent, count=st.integers(1, 3), jump=st.integers(0, 1))
    def view(self, place: int, count: int, jump: int) -> None:
        transfer_id = self.id(place)
        lease = self.table.live(transfer_id)
        first = (0 if lease is None else lease.committed_blocks) + jump
        got = self.table.open_view(transfer_id, first, count)
        if got is not None:
            assert got is lease
            assert first + count <= got.num_blocks
            assert got.hold.pinned(GATHER)
            self.writing[transfer_id] = (got, first, count)

    @rule(place=recent, wrong_last=st.booleans(), ready=st.booleans())
    def commit(self, place: int, wrong_last: bool, ready: bool) -> None:
        transfer_id = self.id(place)
        entry = self.writing.pop(transfer_id, None)
        if entry is None:
            self.table.commit(transfer_id, 0, 1, last=False, ready=None, now=self.now)
            return
        lease, first, count = entry
        done = [ready]
        if not ready:
            self.unready.append(done)
        last = (first + count == lease.num_blocks) != wrong_last
        self.table.commit(transfer_id, first, count, last=last, ready=lambda: done[0], now=self.now)

    @rule(place=recent, count=st.integers(1, 5))
    def engine_step(self, place: int, count: int) -> None:
        """As an engine does it: the next blocks of the prompt, written and committed."""
        lease = self.table.live(self.id(place))
        if lease is None or lease.views or lease.committed_blocks == lease.num_blocks:
            return
        first, end = lease.committed_blocks, min(lease.num_blocks, lease.committed_blocks + count)
        assert self.table.open_view(lease.transfer_id, first, end - first) is lease
        last = end == lease.num_blocks
        actions = self.table.commit(lease.transfer_id, first, end - first, last=last, ready=None, now=self.now)
        assert actions == [Action.WAKE]
        assert lease.committed_blocks == end

    @rule()
    def gathers_finish(self) -> None:
        for done in self.unready:
            done[0] = True
        self.unready.clear()
        for lease in self.table.leases():
            while lease.gathers and (lease.gathers[0].ready is None or lease.gathers[0].ready()):
                self.table.settle(lease)

    @rule(
        place=recent,
        capability=st.sampled_from([RIGHT, RIGHT, WRONG]),
        receiver=st.integers(0, 2),
        receivers=st.sampled_from([1, 1, 2, 2, 3, 0]),
    )
    def fetch(self, place: int, capability: bytes, receiver: int, receivers: int) -> None:
        """Mostly ranks of one worker, which agree on how many they are; sometimes a stranger."""
        transfer_id = self.id(place)
        lease = self.table.live(transfer_id)
        before = (lease.state, set(lease.fetched), lease.receivers) if lease else None
        answer = self.table.fetch(transfer_id, capability, self.now, receiver=receiver, receivers=receivers)
        if isinstance(answer, Lease):
            assert capability == RIGHT
            assert (answer, receiver) not in self.fetched, "a capability is used once by each receiver"
            assert self.receivers.setdefault(transfer_id, receivers) == receivers, "the first says how many there are"
            assert answer.hold.pinned(SEND)
            self.fetched.append((answer, receiver))
            self.open.append((answer, receiver))
            assert len([one for one, _ in self.fetched if one is answer]) <= receivers
        elif lease is not None:
            assert isinstance(answer, Refusal)
            assert (lease.state, set(lease.fetched), lease.receivers) == before, "a refused fetch changes nothing"

    @rule(choice=st.integers(0, 5), how=st.sampled_from(["sent", "broken", "drained"]))
    def stream(self, choice: int, how: str) -> None:
        if not self.open:
            return
        lease, receiver = self.open[choice % len(self.open)]
        if how == "sent" and lease.staged_blocks == lease.num_blocks:
            self.table.sent(lease, self.now, receiver=receiver)
        elif how == "broken":
            whole = receiver in lease.sent_to
            was_live = lease.live
            actions = self.table.broken(lease, "peer left", self.now, receiver=receiver)
            assert not (whole and actions), "a stream that brought everything has not broken"
            assert whole or not (was_live and lease.live), "a share that does not come ends the transfer for all"
            if len(lease.fetched) > 1 and actions:
                assert Action.END_FETCH in actions, "the other receivers' streams end too"
            self.note(lease, actions)
        elif how == "drained" and not lease.live:
            self.open.remove((lease, receiver))
            self.table.drained(lease)

    @rule(
        place=recent,
        capability=st.sampled_from([RIGHT, RIGHT, WRONG]),
        outcome=st.sampled_from(["delivered", "delivered", "gave up"]),
        receiver=st.integers(0, 2),
    )
    def complete(self, place: int, capability: bytes, outcome: str, receiver: int) -> None:
        transfer_id = self.id(place)
        lease = self.table.live(transfer_id)
        before = lease.state if lease else None
        counted = self.table.counters["complete_early"] + self.table.counters["complete_again"]
        actions = self.table.completed(transfer_id, capability, outcome, self.now, receiver=receiver)
        counted = self.table.counters["complete_early"] + self.table.counters["complete_again"] - counted
        if lease is None:
            return
        if capability == WRONG:
            assert lease.state is before
            return
        self.note(lease, actions)
        if outcome == "delivered":
            confirmed = self.confirmed.setdefault(transfer_id, set())
            if not counted:
                assert receiver not in confirmed, "completion is counted once for each receiver"
                confirmed.add(receiver)
            assert confirmed <= lease.fetched
            assert (lease.state is LeaseState.DELIVERED) == (len(confirmed) == self.receivers.get(transfer_id, -1))
        else:
            assert lease.state is LeaseState.RELEASED
        if lease.state is LeaseState.DELIVERED:
            assert lease.committed_blocks == lease.num_blocks

    @rule(place=recent, really=st.integers(0, 3))
    def release(self, place: int, really: int) -> None:
        if really:
            return
        transfer_id = self.id(place)
        lease = self.table.live(transfer_id)
        known, actions = self.table.release(transfer_id, "test", self.now)
        assert known == (lease is not None)
        assert self.table.live(transfer_id) is None
        assert self.table.release(transfer_id, "again", self.now) == (False, [])
        self.released.add(transfer_id)
        if lease is not None:
            self.note(lease, actions)

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for lease, _ in self.table.expire(self.now):
            assert lease.state is LeaseState.EXPIRED
            assert lease.expires_at <= self.now

    def note(self, lease: Lease, actions: list[Action]) -> None:
        if Action.END_FETCH in actions:
            assert not lease.live
            assert lease.hold.pinned(SEND)

    @invariant()
    def bytes_have_one_owner(self) -> None:
        self.staging.check()
        owners = [lease.slot for lease in self.table.leases()]
        assert sum(slot.span_bytes for slot in owners) == self.staging.used_bytes + self.staging.quarantined_bytes
        for lease in self.table.leases():
            assert not lease.hold.freed
            assert lease.live or lease.hold.pinned(GATHER) or lease.hold.pinned(SEND)
            assert lease.staged_blocks <= lease.committed_blocks <= lease.num_blocks

    def teardown(self) -> None:
        """From wherever this run has come: end everything, let copies and streams finish, and all bytes are back."""
        for transfer_id in self.ids:
            self.table.release(transfer_id, "teardown", self.now)
        for lease, _ in self.open:
            self.table.drained(lease)
        for lease in self.table.leases():
            for first, count in sorted(lease.views):
                self.table.commit(lease.transfer_id, first, count, last=False, ready=None, now=self.now)
            if lease.views:
                raise AssertionError("a committed view stays open")
        self.gathers_finish()
        assert len(self.table) == 0
        assert self.table.ending == 0
        assert self.staging.idle


TestMessages = Messages.TestCase
TestMessages.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_every_live_state_can_be_released_and_expired_and_no_ended_one_goes_on() -> None:
    for state in LIVE:
        assert TABLE[state, LeaseEvent.RELEASE] is LeaseState.RELEASED
        assert TABLE[state, LeaseEvent.EXPIRE] is LeaseState.EXPIRED
    ended = set(LeaseState) - set(LIVE)
    assert not [pair for pair in TABLE if pair[0] in ended]


def test_every_state_can_be_reached() -> None:
    assert {LeaseState.RESERVED, *TABLE.values()} == set(LeaseState)


def test_an_illegal_transition_tells_the_story() -> None:
    machine = Machine("lease ab", TABLE, LeaseState.RESERVED, 1.0)
    machine.fire(LeaseEvent.COMMIT, 2.0)
    machine.fire(LeaseEvent.FETCH, 3.0, "att-1")
    with pytest.raises(InvalidTransition) as caught:
        machine.fire(LeaseEvent.SENT, 4.0)
    text = str(caught.value)
    assert text.startswith("lease ab: sent in fetching")
    assert "reserved at 1.000, commit -> gathering at 2.000, fetch(att-1) -> fetching at 3.000" in text
    assert machine.state is LeaseState.FETCHING


def test_tombstones_are_bounded_and_keep_the_first_ending() -> None:
    stones = Tombstones(3)
    stones.add(b"a", "delivered")
    stones.add(b"a", "released")
    assert stones.get(b"a") == "delivered"
    for name in (b"b", b"c", b"d"):
        stones.add(name, "released")
    assert len(stones) == 3
    assert stones.get(b"a") is None
