"""Sessions whose bytes were left where their sender staged them: until when the sender's slot is held for them.

It is held until the engine has let go. An engine that is slow to take a prompt would so fill its sender's staging and not only
its own; so after a while the bytes are copied after all, into the slot that the session has had from its beginning.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtransfer.memory import copy_into
from kvtransfer.session import RECEIVE, ReceiveSession, SessionEvent, SessionState
from kvtransfer.waiting import Copies

if TYPE_CHECKING:
    from kvtransfer.runtime import NodeRuntime

COPY_AFTER_S = 0.5
"""An engine that has room takes a verified prompt in its next step; one that has not may take minutes."""


class Lending:
    """On the node's loop."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self._rt = runtime
        self._waiting: set[tuple[ReceiveSession, asyncio.Event]] = set()

    async def given_back(self, session: ReceiveSession) -> None:
        """Until nothing here reads a sender's slot for this session: it was not lent, the session is over and its engine does not
        read, or its bytes lie in the session's own slot. An engine that never says that it has read holds both slots."""
        lent = session.lent
        if lent is None:
            return
        if not await self._let_go(session, COPY_AFTER_S) and not await self._copied(session):
            await self._let_go(session, None)
        lent.give_back()

    def look(self) -> None:
        """Sessions may have ended."""
        for session, event in self._waiting:
            if session.let_go:
                event.set()

    async def _let_go(self, session: ReceiveSession, limit_s: float | None) -> bool:
        entry = session, asyncio.Event()
        self._waiting.add(entry)
        try:
            self.look()
            async with asyncio.timeout(limit_s):
                await entry[1].wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(entry)

    async def _copied(self, session: ReceiveSession) -> bool:
        """Copy, unless the engine reads or the session is over. True: the sender's slot is needed no more."""
        rt, lent, hold = self._rt, session.lent, session.hold
        with rt.lock:
            if session.state is not SessionState.VERIFIED or lent is None or hold is None:
                return session.let_go
            hold.pin(RECEIVE)
        copies = Copies(rt.executor)
        target = rt.receive_memory[hold.slot.offset : hold.slot.offset + session.content_bytes]
        try:
            await copies.run(copy_into, target, lent.view(session.content_bytes))
            with rt.lock:
                if session.state is SessionState.VERIFIED:
                    if lent.intact():
                        session.lent = None
                    else:
                        rt.sessions.counters["lent_slot_reused"] += 1
                        rt.sessions.end(session, SessionEvent.FAIL, "its sender used the slot again", rt.now())
        finally:
            await copies.settled()
            with rt.lock:
                rt.sessions.drained(session)
            rt.follow(session.transfer_id, ())
        if session.lent is None:
            rt.metrics.event("lent_slot_copied")
        return session.lent is None or session.let_go
