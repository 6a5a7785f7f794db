"""How the process talks to the thread that drives UCX (ucx_thread.py). Nothing here knows of chunks or leases.

Only that thread touches UCX; callers live on one event loop, put commands into its queue and get futures back.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtransfer.transports.base import Memory, TransportError
from kvtransfer.transports.ucx_environment import devices_missing
from kvtransfer.transports.ucx_operation import UCX_VERSION, Guest, Operation, Peer
from kvtransfer.transports.ucx_tags import ASK_CHANNEL, CHUNK_BITS, WARM_CHANNEL, Tags
from kvtransfer.transports.ucx_thread import UcxThread

__all__ = ["ASK_CHANNEL", "CHUNK_BITS", "UCX_VERSION", "WARM_CHANNEL", "Guest", "Operation", "Peer", "UcxCore"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""Destroying a UCX worker takes milliseconds; one whose peers died in the middle of things may never be done."""


class UcxCore:
    """A rank's UCX worker. Every method is called on the event loop on which `start` was, but for those that say otherwise."""

    def __init__(self, net_devices: str = "", prepare_thread: Callable[[], None] = lambda: None) -> None:
        """`net_devices`: as `UCX_NET_DEVICES`; empty leaves the choice to UCX and its environment. `prepare_thread` runs first on
        the thread that drives UCX."""
        self.counters: collections.Counter[str] = collections.Counter()
        self._tags = Tags(self.counters)
        config = {"NET_DEVICES": net_devices} if net_devices else {}
        self._thread = UcxThread(config, prepare_thread, self._tags, self.counters)
        self._started = False

    @property
    def address(self) -> bytes:
        """What peers reach this worker by; empty before `start`."""
        return self._thread.address

    @property
    def info(self) -> str:
        """UCX's description of what it opened."""
        return self._thread.info

    @property
    def queue_watched(self) -> bool:
        """Whether a queue that a killed process of this host has spoilt is noticed (ucx_queue.py)."""
        return self._thread.queue.watched

    async def start(self) -> None:
        """Open UCX. Raises `TransportError("refused")` when it cannot, or is to use a device that is not there."""
        asked = self._thread.config.get("NET_DEVICES") or os.environ.get("UCX_NET_DEVICES", "")
        if missing := devices_missing(asked):
            raise TransportError("refused", f"UCX_NET_DEVICES names {', '.join(missing)}: there is no such network device")
        ready = self._thread.start(asyncio.get_running_loop())
        self._started = True
        if failure := await ready:
            await self.stop()
            raise TransportError("refused", failure)

    async def stop(self) -> None:
        """Close endpoints and end the thread. Operations still outstanding resolve as closed, unless UCX holds the thread for
        longer than `STOP_TIMEOUT_S`: then it and what it had begun are left to the end of the process. Idempotent."""
        started, self._started = self._started, False
        if started:
            self._thread.submit(self._thread.begin_stop)
            if not await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S):
                self.counters["stop_timeouts"] += 1
                logger.error("ucx: its thread has not ended %g s after it was told to; it is left behind", STOP_TIMEOUT_S)

    async def until_failed(self) -> str:
        """Until the thread has ended though nobody stopped it: why. What it had begun is never called done after that, because
        UCX may still touch it."""
        await self._thread.ended.wait()
        return self._thread.failure

    def open_channel(self) -> int:
        """A number that the tags of one transfer's messages to this worker begin with."""
        return self._tags.open()

    def keep_tags(self, *tags: int) -> None:
        """Somebody takes what comes for these, for as long as this runs."""
        self._tags.keep(*tags)

    def close_channel(self, channel: int) -> None:
        """What still comes for it is thrown away."""
        if self._tags.close(channel):
            self._thread.submit(self._thread.linger)

    def expect(self, peer: Peer) -> None:
        """Make the endpoint and be ready for the peer's first message."""
        self._thread.submit(lambda: self._thread.prepare(peer))

    def warm(self, peer: Peer) -> None:
        """Send one throw-away message if this peer is new: the first message pays for wire-up and registration."""
        self._thread.submit(lambda: self._thread.warm(peer))

    def send(self, peer: Peer, memory: Memory, tag: int, spin_s: float) -> Operation:
        return self._operation(peer, memory, tag, spin_s, sending=True)

    def receive(self, peer: Peer, memory: Memory, tag: int, spin_s: float) -> Operation:
        return self._operation(peer, memory, tag, spin_s, sending=False)

    def give_up(self, operation: Operation) -> None:
        """Stop spinning for it. A receive that has not begun ends; anything else ends when UCX says so."""
        operation.cancelled = True
        self._thread.submit(self._thread.linger)

    def reset(self, peer: Peer) -> None:
        """End what was given up on an endpoint that has error handling; no-op on others. UCX cancels no single request, so the
        endpoint is closed, but only when nothing healthy is left on it: new messages take a new one meanwhile."""
        if peer.error_handling:
            self._thread.submit(lambda: self._thread.retire(peer))

    def peer_died(self, incarnation: str) -> None:
        self._thread.submit(lambda: self._thread.bury(incarnation))

    def condition(self, peer: Peer) -> str:
        """As `UcxThread.condition`. Any thread."""
        return self._thread.condition(peer)

    def run(self, command: Callable[[], None]) -> None:
        """Run `command` on the thread, soon. Any thread; after `stop` it is dropped."""
        self._thread.submit(command)

    def _operation(self, peer: Peer, memory: Memory, tag: int, spin_s: float, *, sending: bool) -> Operation:
        operation = self._thread.new_operation(peer, memory, tag, spin_s, sending=sending)
        if not self._started or not self._thread.alive:
            assert operation.begun is not None
            operation.begun.set_result(None)
            operation.done.set_result(TransportError("closed", "UCX is stopped"))
        else:
            self._thread.submit(lambda: self._thread.post(operation))
        return operation

    def invite(self, guest: Guest) -> None:
        """Before `start`: it takes part in every turn."""
        self._thread.guest = guest

    # ---- what a guest calls on the thread

    def prepare_operation(
        self,
        peer: Peer,
        memory: Memory,
        tag: int,
        spin_s: float,
        settled: Callable[[TransportError | None], None],
        *,
        sending: bool,
    ) -> Operation:
        """An operation that `post` begins."""
        operation = self._thread.new_operation(peer, memory, tag, spin_s, sending=sending)
        operation.begun, operation.settled = None, settled
        return operation

    def post(self, operation: Operation) -> None:
        """Begin an operation that `prepare_operation` made."""
        self._thread.post(operation)

    def probe(self, tag: int) -> int | None:
        """As `UcxThread.probe`."""
        return self._thread.probe(tag)

    def take(self, tag: int, memory: np.ndarray) -> Any:
        """As `UcxThread.take`."""
        return self._thread.take(tag, memory)

    def admit(self, peer: Peer) -> Peer | None:
        """As `Endpoints.admit`."""
        return self._thread.admit(peer)

    def lost(self, peer: Peer) -> bool:
        """As `UcxThread.lost`."""
        return self._thread.lost(peer)
