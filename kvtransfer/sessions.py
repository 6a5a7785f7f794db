"""All receive sessions of one rank: running ones, staged ones that wait for their engine, and ended ones whose slot is still
pinned. Pure, like the lease table; not thread-safe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvtransfer.machine import Refusal, Tombstones
from kvtransfer.session import RECEIVE, SCATTER, Expected, ReceiveSession, SessionEvent, SessionState
from kvtransfer.staging import Slot, SlotHold, Staging

LATE_PULL = "late_pull"
"""Why a pull of a transfer that is over is refused."""


class SessionTable:
    def __init__(self, staging: Staging, *, max_tombstones: int = 4096) -> None:
        self.staging = staging
        self.counters: Counter[str] = Counter()
        self.tombstones = Tombstones(max_tombstones)
        self._live: dict[bytes, ReceiveSession] = {}
        self._ending: dict[bytes, ReceiveSession] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def ending(self) -> int:
        """Sessions that are over while something may still touch their slot."""
        return len(self._ending)

    def sessions(self) -> Iterator[ReceiveSession]:
        """Live ones; a snapshot."""
        return iter(list(self._live.values()))

    def live(self, transfer_id: bytes) -> ReceiveSession | None:
        return self._live.get(transfer_id)

    def open(self, transfer_id: bytes, *, expires_at: float, now: float) -> ReceiveSession | Refusal:
        """Begin a session; refused when the transfer is known already, live or over."""
        if transfer_id in self._live:
            return self._refuse("duplicate_pull", "this transfer is already being pulled")
        ended = self.tombstones.get(transfer_id)
        if ended is not None:
            return self._refuse(LATE_PULL, f"this transfer is already over: {ended}")
        session = self._live[transfer_id] = ReceiveSession(transfer_id, expires_at=expires_at, now=now)
        return session

    def begin(
        self,
        session: ReceiveSession,
        slot: Slot,
        expected: Expected | Sequence[Expected],
        content_bytes: int | None = None,
    ) -> None:
        """Give it its slot, pinned until `drained` as often as there are senders. When the session ended meanwhile the slot is
        free again."""
        hold = SlotHold(self.staging, slot)
        if session.ended:
            hold.end()
            return
        session.begin(expected, hold, content_bytes)
        for _ in session.inflows:
            hold.pin(RECEIVE)

    def drained(self, session: ReceiveSession) -> None:
        """One sender's channel can write into the slot no more. Called once for each sender of a `begin` that gave a slot."""
        if session.hold is not None:
            session.hold.unpin(RECEIVE)
            self._forget_if_freed(session)

    def rest(self, session: ReceiveSession) -> None:
        """After `begin`: no sender is asked yet, so nothing can write into the slot; an end gives it back at once."""
        session.resting = session.hold is not None and not session.ended
        for _ in session.inflows:
            self.drained(session)

    def adopt(self, transfer_id: bytes) -> ReceiveSession | None:
        """The session of this transfer that rests, for the one pull that follows; None when none does."""
        session = self._live.get(transfer_id)
        if session is None or not session.resting:
            return None
        session.resting = False
        return session

    def resume(self, session: ReceiveSession) -> bool:
        """After `rest`: the senders are asked now. False when the session ended meanwhile."""
        if session.ended or session.hold is None:
            return False
        for _ in session.inflows:
            session.hold.pin(RECEIVE)
        return True

    def end(self, session: ReceiveSession, event: SessionEvent, reason: str, now: float) -> None:
        """`FAIL` or `ABANDON`. Idempotent."""
        if session.end(event, reason, now):
            self._ended(session)

    def release(self, transfer_id: bytes, reason: str, now: float) -> bool:
        """From any state. Idempotent. False when it was not live; a later `open` is then refused."""
        session = self._live.get(transfer_id)
        if session is None:
            self.counters["release_again" if self.tombstones.get(transfer_id) else "release_unknown"] += 1
            self.tombstones.add(transfer_id, f"released ({reason})")
            return False
        self.end(session, SessionEvent.ABANDON, reason, now)
        return True

    def expire(self, now: float) -> list[ReceiveSession]:
        """End every session whose time is over: an engine that never came for it, or a pull that outlived its deadline."""
        due = [session for session in self._live.values() if session.expires_at <= now]
        for session in due:
            self.counters["expired"] += 1
            self.end(session, SessionEvent.ABANDON, "expired", now)
        return due

    # -- the engine thread: nothing here raises for an unknown or ended transfer ---------------------------------------

    def take(self, transfer_id: bytes, now: float) -> ReceiveSession | None:
        """The engine will read the slot: it stays until `scattered`, whatever else happens."""
        session = self._live.get(transfer_id)
        if session is None or session.hold is None or not session.machine.allows(SessionEvent.TAKE):
            self.counters["take_without_session" if session is None else "take_unverified"] += 1
            return None
        session.machine.fire(SessionEvent.TAKE, now)
        if not session.hold.pinned(SCATTER):
            session.hold.pin(SCATTER)
        return session

    def intact(self, transfer_id: bytes) -> bool:
        """What the engine has read since `take` was this transfer's. False only when its bytes lay with a sender that gave them
        to another transfer meanwhile."""
        session = self._live.get(transfer_id) or self._ending.get(transfer_id)
        if session is None or session.lent is None or session.hold is None or not session.hold.pinned(SCATTER):
            return True
        if session.lent.intact():
            return True
        self.counters["lent_slot_reused"] += 1
        return False

    def scattered(self, transfer_id: bytes, now: float) -> None:
        """The engine is done with the slot, or never wanted it."""
        session = self._live.get(transfer_id) or self._ending.get(transfer_id)
        if session is None:
            self.counters["scattered_without_session"] += 1
            return
        if session.state not in (SessionState.VERIFIED, SessionState.TAKEN, SessionState.ABANDONED):
            self.counters["scattered_unverified"] += 1
            return
        if session.end(SessionEvent.SCATTERED, "scattered", now):
            self.counters["scattered"] += 1
            self._ended(session)
        if session.hold is not None and session.hold.pinned(SCATTER):
            session.hold.unpin(SCATTER)
            self._forget_if_freed(session)

    def _ended(self, session: ReceiveSession) -> None:
        del self._live[session.transfer_id]
        self._ending[session.transfer_id] = session
        self.tombstones.add(session.transfer_id, f"{session.state} ({session.reason})")
        self._forget_if_freed(session)

    def _forget_if_freed(self, session: ReceiveSession) -> None:
        if session.ended and (session.hold is None or session.hold.freed):
            self._ending.pop(session.transfer_id, None)

    def _refuse(self, reason: str, message: str) -> Refusal:
        self.counters[reason] += 1
        return Refusal(reason, message)
