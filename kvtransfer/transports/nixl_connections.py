"""The agents that one NIXL agent knows, and what it tells them. Only NIXL's thread comes here."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nixl_library import ERRORS, UNREACHABLE
from kvtransfer.transports.nixl_messages import Notice
from kvtransfer.transports.nixl_operation import Peer

logger = logging.getLogger(__name__)

_TELL_ERRORS: tuple[type[Exception], ...] = (*ERRORS, TransportError)


class Connections:
    """By agent name. `counters`: peers, reconnects, notices_failed, disconnect_failed."""

    def __init__(self, agent: Any, counters: Counter[str], writing_to: Callable[[Peer], bool]) -> None:
        """`writing_to`: whether a write to this peer is under way, which its connection must outlive."""
        self._agent = agent
        self._counters = counters
        self._writing_to = writing_to
        self._peers: dict[str, Peer] = {}
        self._dead: set[str] = set()

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, agent: str) -> Peer | None:
        """Who that is; None when there is no connection."""
        return self._peers.get(agent)

    def connect(self, peer: Peer) -> None:
        """Know it. Raises `TransportError`."""
        if peer.incarnation in self._dead:
            raise TransportError("peer_lost", f"incarnation {peer.incarnation!r} is dead")
        if self._peers.get(peer.agent) == peer:
            return
        try:
            found = self._agent.add_remote_agent(peer.metadata)
        except ERRORS as exc:
            # Its process may be gone: then the shared memory that the address names is, too.
            reason = "peer_lost" if isinstance(exc, UNREACHABLE) else "refused"
            raise TransportError(reason, f"NIXL does not reach {peer.agent}: {exc}") from exc
        name = found.decode() if isinstance(found, bytes) else found
        if name != peer.agent:
            self.disconnect(name)
            raise TransportError("refused", f"the address of {peer.agent} is that of {name}")
        self._peers[peer.agent] = peer
        self._counters["peers"] += 1

    def disconnect(self, agent: str) -> None:
        """Forget it."""
        self._peers.pop(agent, None)
        try:
            self._agent.remove_remote_agent(agent)
        except ERRORS as exc:
            self._counters["disconnect_failed"] += 1
            logger.warning("nixl: %s was not removed: %s", agent, exc)

    def tell(self, peer: Peer, notice: Notice) -> bool:
        """Send a notice, over a new connection when the old one has failed. False: it may not arrive."""
        for again in (False, True):
            try:
                if again:
                    if self._writing_to(peer):
                        return False
                    self.disconnect(peer.agent)
                    self._counters["reconnects"] += 1
                self.connect(peer)
                self._agent.send_notif(peer.agent, notice.encode())
            except _TELL_ERRORS as exc:
                self._counters["notices_failed"] += 1
                logger.info("nixl: %s to %s: %s", notice.kind.name, peer.agent, exc)
            else:
                return True
        return False

    def bury(self, incarnation: str) -> None:
        """Its process is gone; nobody connects to it again."""
        self._dead.add(incarnation)
        for agent in [peer.agent for peer in self._peers.values() if peer.incarnation == incarnation]:
            self.disconnect(agent)

    def close(self) -> None:
        """All of them."""
        for agent in list(self._peers):
            self.disconnect(agent)
