"""The prefill side of one rank: leases on send staging, their states, and what late or doubtful messages do (nothing, counted).

Pure: every entry takes `now` and changes only this table and its staging. The shell brings the lock, wakes who waits and
closes what an `Action` says.
"""

from __future__ import annotations

import hmac
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtransfer.machine import Machine, Refusal, Tombstones
from kvtransfer.plan import blocks_for
from kvtransfer.staging import Slot, SlotHold, Staging

Ready = Callable[[], bool]


class LeaseState(StrEnum):
    RESERVED = "reserved"
    GATHERING = "gathering"
    SEALED = "sealed"
    FETCHING = "fetching"  # the peer asked, the engine still gathers
    SENDING = "sending"  # the peer asked, everything is staged
    SENT = "sent"  # all on its way to every receiver, not all have confirmed
    DELIVERED = "delivered"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"


class LeaseEvent(StrEnum):
    COMMIT = "commit"
    SEAL = "seal"  # the commit of the last block
    FETCH = "fetch"
    SENT = "sent"  # to the last receiver
    BROKEN = "broken"  # a receiver's stream ended early
    DELIVERED = "delivered"  # the last receiver has verified its share
    GAVE_UP = "gave_up"  # a receiver says that it will not
    RELEASE = "release"
    EXPIRE = "expire"
    FAIL = "fail"  # the engine staged something else than was reserved


_S, _E = LeaseState, LeaseEvent
LIVE = (_S.RESERVED, _S.GATHERING, _S.SEALED, _S.FETCHING, _S.SENDING, _S.SENT)
TABLE: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (_S.RESERVED, _E.COMMIT): _S.GATHERING,
    (_S.RESERVED, _E.SEAL): _S.SEALED,
    (_S.RESERVED, _E.FETCH): _S.FETCHING,
    (_S.GATHERING, _E.COMMIT): _S.GATHERING,
    (_S.GATHERING, _E.SEAL): _S.SEALED,
    (_S.GATHERING, _E.FETCH): _S.FETCHING,
    (_S.SEALED, _E.FETCH): _S.SENDING,
    (_S.FETCHING, _E.COMMIT): _S.FETCHING,
    (_S.FETCHING, _E.SEAL): _S.SENDING,
    (_S.FETCHING, _E.FETCH): _S.FETCHING,  # another receiver, for its own share
    (_S.SENDING, _E.FETCH): _S.SENDING,
    (_S.FETCHING, _E.BROKEN): _S.RELEASED,
    (_S.SENDING, _E.BROKEN): _S.RELEASED,
    (_S.SENDING, _E.SENT): _S.SENT,
    (_S.SENT, _E.DELIVERED): _S.DELIVERED,
    **{(state, _E.GAVE_UP): _S.RELEASED for state in LIVE},
    **{(state, _E.RELEASE): _S.RELEASED for state in LIVE},
    **{(state, _E.EXPIRE): _S.EXPIRED for state in LIVE},
    **{(state, _E.FAIL): _S.FAILED for state in (_S.RESERVED, _S.GATHERING, _S.FETCHING)},
}


class Action(StrEnum):
    """What the shell does after an entry of the table returned."""

    WAKE = "wake"  # whoever waits for this transfer looks again
    END_FETCH = "end_fetch"  # the peer's stream must end: its lease is over


@dataclass(slots=True)
class Gather:
    """One committed chunk whose copy may still be running. `ready` is None when it was done at commit."""

    end_block: int
    ready: Ready | None


GATHER, SEND = "gather", "send"  # pins of a lease's slot


class Lease:
    """One transfer's send slot. `staged_blocks` of it hold final bytes; `committed_blocks` may still be being copied.

    `receivers` ranks fetch it, each once (0: none has fetched and said how many). Ranks are in `fetched`, then in `sent_to`, then
    in `delivered_to`.
    """

    def __init__(
        self,
        transfer_id: bytes,
        capability: bytes,
        *,
        prompt_tokens: int,
        token_hash: bytes,
        num_blocks: int,
        hold: SlotHold,
        expires_at: float,
        now: float,
    ) -> None:
        self.transfer_id = transfer_id
        self.capability = capability
        self.prompt_tokens = prompt_tokens
        self.token_hash = token_hash
        self.num_blocks = num_blocks
        self.hold = hold
        self.expires_at = expires_at
        self.reason = ""
        self.committed_blocks = 0
        self.staged_blocks = 0
        self.views: set[tuple[int, int]] = set()
        self.gathers: deque[Gather] = deque()
        self.receivers = 0
        self.fetched: set[int] = set()
        self.sent_to: set[int] = set()
        self.delivered_to: set[int] = set()
        self.crcs: list[tuple[int, int, Any]] = []
        """First block, end block and their pieces' CRC32Cs (kvtransfer/pieces.py), where the gather computed them."""
        self.machine = Machine(f"lease {transfer_id.hex()}", TABLE, _S.RESERVED, now)

    @property
    def state(self) -> LeaseState:
        return self.machine.state

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def slot(self) -> Slot:
        return self.hold.slot


class LeaseTable:
    """All leases of one rank: live ones, ended ones whose slot is still pinned, and tombstones. Not thread-safe."""

    def __init__(self, staging: Staging, *, block_tokens: int, block_bytes: int, max_tombstones: int = 4096) -> None:
        self.staging = staging
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.counters: Counter[str] = Counter()
        self.tombstones = Tombstones(max_tombstones)
        self._live: dict[bytes, Lease] = {}
        self._ending: dict[bytes, Lease] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def ending(self) -> int:
        """Leases that are over while something may still touch their slot."""
        return len(self._ending)

    def live(self, transfer_id: bytes) -> Lease | None:
        return self._live.get(transfer_id)

    def leases(self) -> Iterator[Lease]:
        """Live and ending ones; a snapshot."""
        return iter([*self._live.values(), *self._ending.values()])

    def slot_bytes(self, prompt_tokens: int) -> int:
        """Staging bytes that a prompt takes. Raises `ValueError` for no tokens."""
        return blocks_for(prompt_tokens, self.block_tokens) * self.block_bytes

    # -- control ---------------------------------------------------------------------------------------------------

    def refuses(self, transfer_id: bytes) -> Refusal | None:
        """Why `reserve` would refuse this id now."""
        if transfer_id in self._live:
            return Refusal("duplicate_reserve", "this transfer is already reserved")
        ended = self.tombstones.get(transfer_id)
        if ended is not None:
            return Refusal("late_reserve", f"this transfer is already over: {ended}")
        return None

    def reserve(
        self,
        transfer_id: bytes,
        capability: bytes,
        *,
        prompt_tokens: int,
        token_hash: bytes,
        slot: Slot,
        expires_at: float,
        now: float,
    ) -> Lease | Refusal:
        """Lease `slot` to a transfer. On a refusal the slot is free again."""
        hold = SlotHold(self.staging, slot)
        refusal = self.refuses(transfer_id)
        if refusal is not None:
            self.counters[refusal.reason] += 1
            hold.end()
            return refusal
        lease = Lease(
            transfer_id,
            capability,
            prompt_tokens=prompt_tokens,
            token_hash=token_hash,
            num_blocks=blocks_for(prompt_tokens, self.block_tokens),
            hold=hold,
            expires_at=expires_at,
            now=now,
        )
        self._live[transfer_id] = lease
        return lease

    def release(self, transfer_id: bytes, reason: str, now: float) -> tuple[bool, list[Action]]:
        """End a transfer from any state. Idempotent. False when it was not live; a later `reserve` is then refused."""
        lease = self._live.get(transfer_id)
        if lease is None:
            self.counters["release_again" if self.tombstones.get(transfer_id) else "release_unknown"] += 1
            self.tombstones.add(transfer_id, f"released ({reason})")
            return False, []
        return True, self._end(lease, _E.RELEASE, reason, now)

    def expire(self, now: float) -> list[tuple[Lease, list[Action]]]:
        """End every lease whose time is over."""
        due = [lease for lease in self._live.values() if lease.expires_at <= now]
        return [(lease, self._end(lease, _E.EXPIRE, "expired", now)) for lease in due]

    # -- the engine thread: nothing here raises for an unknown or ended transfer ---------------------------------------

    def open_view(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Lease | None:
        """Let the engine write these blocks. The slot is pinned until a commit reaches beyond the view's first block."""
        lease = self._live.get(transfer_id)
        if lease is None:
            self.counters["view_without_lease"] += 1
            return None
        if first_block < 0 or num_blocks <= 0 or first_block + num_blocks > lease.num_blocks:
            self.counters["view_beyond_reservation"] += 1
            return None
        if first_block < lease.committed_blocks:
            # A preempted request computes its prompt again. What is committed may be on its way and must not change.
            self.counters["view_of_committed"] += 1
            return None
        lease.views.add((first_block, num_blocks))
        self._repin(lease)
        return lease

    def commit(
        self, transfer_id: bytes, first_block: int, num_blocks: int, *, last: bool, ready: Ready | None, now: float
    ) -> list[Action]:
        """The engine has written (or, with `ready`, has begun to write) these blocks; `last`: they end the prompt."""
        lease = self._live.get(transfer_id) or self._ending.get(transfer_id)
        if lease is None:
            self.counters["commit_without_lease"] += 1
            return []
        end = first_block + num_blocks
        fresh = lease.live and end > lease.committed_blocks
        in_order = first_block == lease.committed_blocks and last == (end == lease.num_blocks)
        lease.views = {view for view in lease.views if view[0] >= end}
        lease.gathers.append(Gather(end if fresh and in_order else 0, ready))
        self._repin(lease)
        actions: list[Action] = []
        if not fresh:
            self.counters["commit_again" if lease.live else "commit_after_end"] += 1
        elif not in_order:
            why = f"blocks {first_block}+{num_blocks} (last: {last}) after {lease.committed_blocks} of {lease.num_blocks}"
            actions = self._end(lease, _E.FAIL, why, now)
        else:
            lease.committed_blocks = end
            lease.machine.fire(_E.SEAL if last else _E.COMMIT, now)
            actions = [Action.WAKE]
        while lease.gathers and lease.gathers[0].ready is None:
            self.settle(lease)
        return actions

    def settle(self, lease: Lease) -> None:
        """The oldest gather of this lease is done: its blocks may be sent."""
        gather = lease.gathers.popleft()
        lease.staged_blocks = max(lease.staged_blocks, gather.end_block)
        self._repin(lease)

    def _repin(self, lease: Lease) -> None:
        """The engine may touch the slot while a view is open or a gather runs."""
        writing = bool(lease.views or lease.gathers)
        if writing and not lease.hold.pinned(GATHER):
            lease.hold.pin(GATHER)
        elif not writing and lease.hold.pinned(GATHER):
            lease.hold.unpin(GATHER)
            self._forget_if_freed(lease)

    # -- the peer ----------------------------------------------------------------------------------------------------

    def fetch(
        self, transfer_id: bytes, capability: bytes, now: float, *, receiver: int = 0, receivers: int = 1, token_hash: bytes = b""
    ) -> Lease | Refusal | None:
        """Begin to send to rank `receiver`, one of `receivers` that take a share. None: not reserved yet, the caller may wait.
        The capability is spent by each receiver's first success; the first of them says how many there are. `token_hash`: of the
        prompt that the receiver expects, where it says so."""
        lease = self._live.get(transfer_id)
        if lease is None:
            ended = self.tombstones.get(transfer_id)
            return None if ended is None else self._refuse("fetch_after_end", f"this transfer is over: {ended}")
        if not hmac.compare_digest(lease.capability, capability):
            return self._refuse("capability", "the capability is not this transfer's")
        if token_hash and token_hash != lease.token_hash:
            return self._refuse("token_hash", "another prompt is reserved under this transfer's id")
        if receivers < 1 or (lease.fetched and receivers != lease.receivers):
            return self._refuse("receivers", f"{receivers} receivers where {lease.receivers} were announced")
        if receiver in lease.fetched or len(lease.fetched) == receivers or not lease.machine.allows(_E.FETCH):
            return self._refuse("fetch_again", "this transfer was already fetched; a capability is used once")
        lease.machine.fire(_E.FETCH, now, f"rank {receiver} of {receivers}")
        lease.receivers = receivers
        lease.fetched.add(receiver)
        lease.hold.pin(SEND)
        return lease

    def sent(self, lease: Lease, now: float, *, receiver: int = 0) -> None:
        """The last chunk for this receiver is on its way."""
        lease.sent_to.add(receiver)
        if len(lease.sent_to) == lease.receivers and lease.machine.allows(_E.SENT):
            lease.machine.fire(_E.SENT, now)

    def broken(self, lease: Lease, reason: str, now: float, *, receiver: int = 0) -> list[Action]:
        """A receiver's stream ended before everything was sent to it: nobody can use the transfer any more."""
        if receiver in lease.sent_to or not lease.machine.allows(_E.BROKEN):
            return []
        return self._end(lease, _E.BROKEN, reason, now)

    def drained(self, lease: Lease) -> None:
        """The channel of this lease can read its slot no more. Called once for each successful `fetch`."""
        lease.hold.unpin(SEND)
        self._forget_if_freed(lease)

    def completed(self, transfer_id: bytes, capability: bytes, outcome: str, now: float, *, receiver: int = 0) -> list[Action]:
        """A receiver's last word. The lease is over when every receiver has its share, or one gives up. Unknown, late, repeated
        and forged ones are counted."""
        lease = self._live.get(transfer_id)
        if lease is None:
            self.counters["complete_after_end" if self.tombstones.get(transfer_id) else "complete_unknown"] += 1
            return []
        if not hmac.compare_digest(lease.capability, capability):
            self.counters["capability"] += 1
            return []
        if outcome != "delivered":
            return self._end(lease, _E.GAVE_UP, outcome, now)
        if receiver not in lease.fetched or lease.state not in (_S.SENDING, _S.SENT):
            self.counters["complete_early"] += 1
            return []
        if receiver in lease.delivered_to:
            self.counters["complete_again"] += 1
            return []
        # The confirmation can overtake our own notice that the last message went out.
        self.sent(lease, now, receiver=receiver)
        lease.delivered_to.add(receiver)
        return self._end(lease, _E.DELIVERED, outcome, now) if len(lease.delivered_to) == lease.receivers else []

    # -- endings -----------------------------------------------------------------------------------------------------

    def _end(self, lease: Lease, event: LeaseEvent, reason: str, now: float) -> list[Action]:
        fetched = lease.hold.pinned(SEND)
        state = lease.machine.fire(event, now, reason)
        lease.reason = reason
        self.counters[str(state)] += 1
        del self._live[lease.transfer_id]
        self._ending[lease.transfer_id] = lease
        self.tombstones.add(lease.transfer_id, f"{state} ({reason})")
        lease.hold.end()
        self._forget_if_freed(lease)
        # A broken stream has ended by itself, other receivers' have not; a delivered one ends when its last message is out.
        over_by_itself = event is _E.DELIVERED or (event is _E.BROKEN and lease.receivers == 1)
        return [Action.WAKE, Action.END_FETCH] if fetched and not over_by_itself else [Action.WAKE]

    def _forget_if_freed(self, lease: Lease) -> None:
        if lease.hold.freed:
            self._ending.pop(lease.transfer_id, None)

    def _refuse(self, reason: str, message: str) -> Refusal:
        self.counters[reason] += 1
        return Refusal(reason, message)
