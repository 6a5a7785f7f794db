"""The connections of one UCX worker to its peers: made when first needed, replaced when UCX has seen one fail, closed when their
peer is dead or when what was given up on them has to end. Only UCX's thread comes here."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Any

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.ucx_operation import Operation, Peer, ucx

CLOSE_PERIOD_NS = 100_000_000
CLOSE_ATTEMPTS = 5
MAX_STRANGERS = 32
"""Connections to askers who have proved nothing: enough for peers that err, and all that a flood gets."""
STRANGER_KEPT_S = 2.0
"""An answer has left by then."""


class Endpoints:
    """One per peer incarnation and rank. `counters`: endpoints, endpoints_closed, endpoints_retired."""

    def __init__(self, worker: Any, counters: Counter[str]) -> None:
        self._worker = worker
        self._counters = counters
        self._open: dict[Peer, Any] = {}
        self._retired: list[tuple[Peer, Any]] = []
        """To be closed as soon as nobody waits for anything on them."""
        self._reached: set[Peer] = set()
        self._dead: set[str] = set()
        self._strangers: OrderedDict[Peer, float] = OrderedDict()
        """By when they were last answered, the longest ago first."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def peers(self) -> Collection[Peer]:
        """Whoever has one."""
        return self._open.keys()

    def get(self, peer: Peer) -> Any:
        """The cached endpoint, or a new one when there is none or UCX has seen it fail. Raises `TransportError`."""
        if peer.incarnation in self._dead:
            raise TransportError("peer_lost", f"incarnation {peer.incarnation!r} is dead")
        endpoint = self._open.get(peer)
        if endpoint is not None and not endpoint.alive:
            self.drop(peer)
            endpoint = None
        if endpoint is None:
            try:
                address = ucx.UCXAddress.create_from_buffer(bytearray(peer.address))
                endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, address, peer.error_handling)
            except (ucx.UCXError, RuntimeError, ValueError) as exc:
                reason = "peer_lost" if peer in self._reached else "refused"
                raise TransportError(reason, f"no UCX path to incarnation {peer.incarnation!r}: {exc}") from exc
            self._open[peer] = endpoint
            self._reached.add(peer)
            self._counters["endpoints"] += 1
        return endpoint

    def trust(self, peer: Peer) -> None:
        """It has proved that it may have an endpoint."""
        self._strangers.pop(peer, None)

    def admit(self, peer: Peer, now: float) -> Peer | None:
        """How to reach an asker who has proved nothing; None: not at all, too many were answered just now. One that has a
        connection is reached by that."""
        if peer not in self._strangers and self.working(peer) is not None:
            return peer
        peer = dataclasses.replace(peer, error_handling=True)  # what does without can cost this process
        if peer not in self._strangers and len(self._strangers) >= MAX_STRANGERS:
            oldest, answered_at = next(iter(self._strangers.items()))
            if now - answered_at < STRANGER_KEPT_S:
                return None
            self.drop(oldest)
        self._strangers[peer] = now
        self._strangers.move_to_end(peer)
        return peer

    def working(self, peer: Peer) -> Any:
        """The cached endpoint; None when there is none or it has failed."""
        endpoint = self._open.get(peer)
        return endpoint if endpoint is not None and endpoint.alive else None

    def lost(self, peer: Peer) -> bool:
        """The peer is known dead, or its endpoint has failed."""
        endpoint = self._open.get(peer)
        return peer.incarnation in self._dead or (endpoint is not None and not endpoint.alive)

    def drop(self, peer: Peer) -> None:
        """Close an endpoint. With error handling everything on it completes; bounded, progresses UCX meanwhile."""
        endpoint = self._open.pop(peer, None)
        if self._strangers.pop(peer, None) is not None:
            self._reached.discard(peer)
        if endpoint is not None:
            self._close(peer, endpoint)

    def retire(self, peer: Peer, operations: Collection[Operation]) -> bool:
        """Take an endpoint out of use on which something was given up; `close_retired` closes it. False: there is none."""
        endpoint = self._open.get(peer)
        if endpoint is None or not any(op.endpoint is endpoint and op.cancelled for op in operations):
            return False
        del self._open[peer]
        self._retired.append((peer, endpoint))
        self._counters["endpoints_retired"] += 1
        return True

    def close_retired(self, operations: Collection[Operation]) -> None:
        """Those on which nothing healthy is left."""
        for entry in list(self._retired):
            if not any(op.endpoint is entry[1] and not (op.cancelled or op.message) for op in operations):
                self._retired.remove(entry)
                self._close(*entry)

    def bury(self, incarnation: str) -> None:
        """The process is gone: nothing reaches it any more."""
        self._dead.add(incarnation)
        for peer in [p for p in self._strangers if p.incarnation == incarnation]:
            self.drop(peer)
        self._reached = {peer for peer in self._reached if peer.incarnation != incarnation}
        for peer in [p for p in self._open if p.incarnation == incarnation]:
            self.drop(peer)
        for entry in [e for e in self._retired if e[0].incarnation == incarnation]:
            self._retired.remove(entry)
            self._close(*entry)

    def close(self) -> None:
        """All of them."""
        for peer in list(self._open):
            self.drop(peer)
        while self._retired:
            self._close(*self._retired.pop())

    def _close(self, peer: Peer, endpoint: Any) -> None:
        self._counters["endpoints_closed"] += 1
        if not peer.error_handling:
            endpoint.close()  # close_blocking can hang here
        elif endpoint.alive:  # closing one that has failed crashes ucxx
            endpoint.close_blocking(CLOSE_PERIOD_NS, CLOSE_ATTEMPTS)
        self._quiet()

    def _quiet(self) -> None:
        """Progress until UCX has nothing to do, so that bytes already here land before their slot is called free."""
        for _ in range(10_000):
            if not self._worker.progress_once():
                return
