"""The failure detector at work: who is silent while a transfer with it is under way, and what ends then.

A receiver sends `Heartbeat` to every sender it pulls from. The answer tells it that the sender turns, the question tells the
sender the same of the receiver; every other message counts as well. Silence ends the transfers with that peer, on whichever
side notices; their slots stay quarantined until nothing can touch them (rule 13).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvtransfer.detector import FailureDetector
from kvtransfer.transports.base import TransportError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)


FIRST_PING_S = 0.05

Key = tuple[str, int]
"""A peer process: incarnation and rank."""


class PeerWatch:
    """Belongs to the node's event loop. `now` is monotonic seconds; `on_event(name)` counts.

    `end_fetch(transfer_id, reason)` ends the sending of one transfer.
    """

    def __init__(
        self,
        incarnation: str,
        rank: int,
        *,
        interval_s: float,
        misses: int,
        now: Callable[[], float],
        end_fetch: Callable[[bytes, str], None],
        on_event: Callable[[str], None],
    ) -> None:
        self._incarnation = incarnation
        self._rank = rank
        self._interval_s = interval_s
        self._now = now
        self._end_fetch = end_fetch
        self._on_event = on_event
        self._senders: FailureDetector[Key] = FailureDetector(interval_s=interval_s, misses=misses)
        self._receivers: FailureDetector[Key] = FailureDetector(interval_s=interval_s, misses=misses)
        self._pulling: dict[Key, set[_Pull]] = {}
        self._pings: dict[Key, asyncio.Task[None]] = {}
        self._fetching: dict[object, tuple[bytes, Key]] = {}
        self._checked_s = now()

    @property
    def limit_s(self) -> float:
        """How long a peer may be silent."""
        return self._senders.limit_s

    # -- receiver --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def pulling(self, stub: Any, sender: pb.RankEndpoint) -> AsyncIterator[None]:
        """Inside, the present task pulls from this sender.

        Raises:
            TransportError: "silent", the sender's process has said nothing for too long.
        """
        task = asyncio.current_task()
        assert task is not None
        key, pull = (sender.incarnation, sender.rank), _Pull(task, stub)
        self._senders.watch(key, self._now())
        self._pulling.setdefault(key, set()).add(pull)
        if key not in self._pings:
            self._pings[key] = asyncio.create_task(self._ping(key), name=f"heartbeat {key[0]}.{key[1]}")
        try:
            yield
        except asyncio.CancelledError:
            if pull.silent_s is None or task.uncancel() > pull.cancels_before:
                raise
            text = f"nothing from rank {key[1]} of incarnation {key[0]!r} for {pull.silent_s:.1f} s"
            raise TransportError("silent", text) from None
        finally:
            self._senders.leave(key)
            self._pulling[key].discard(pull)
            if not self._pulling[key]:
                del self._pulling[key]
                self._pings.pop(key).cancel()

    def heard_sender(self, sender: pb.RankEndpoint) -> None:
        """A message of its came, or bytes."""
        self._senders.heard((sender.incarnation, sender.rank), self._now())

    async def _ping(self, key: Key) -> None:
        request = pb.HeartbeatRequest(incarnation=self._incarnation, expected_incarnation=key[0], rank=self._rank)
        # A transfer of what is staged is over before that, and wants this moment for itself.
        await asyncio.sleep(min(FIRST_PING_S, self._interval_s))
        while True:
            # Whoever pulls now holds its connection open; an earlier one's may be closed.
            stub = next(iter(self._pulling[key])).stub
            try:
                await stub.Heartbeat(request, timeout=self.limit_s)
            except grpc.aio.AioRpcError as exc:
                self._on_event("heartbeat_failed")
                logger.info("heartbeat to rank %d of %r: %s", key[1], key[0], exc.code())
            else:
                self._senders.heard(key, self._now())
            await asyncio.sleep(self._interval_s)

    # -- sender ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def fetching(self, transfer_id: bytes, receiver: Key) -> Iterator[None]:
        """Inside, this receiver fetches this transfer. One that names no incarnation is not watched."""
        if not receiver[0]:
            yield
            return
        self._receivers.watch(receiver, self._now())
        stream = object()
        self._fetching[stream] = transfer_id, receiver
        try:
            yield
        finally:
            self._receivers.leave(receiver)
            del self._fetching[stream]

    def heard_receiver(self, receiver: Key) -> None:
        """A message of its came."""
        self._receivers.heard(receiver, self._now())

    # -- both ------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Called several times per interval: end what belongs to peers that have become suspected."""
        now = self._now()
        gap_s, self._checked_s = now - self._checked_s, now
        if gap_s > self._interval_s:
            # This side did not run itself (stopped, starved), so what it has not heard says nothing.
            self._on_event("watch_paused")
            self._senders.pardon(gap_s)
            self._receivers.pardon(gap_s)
        for key in self._senders.suspects(now):
            self._on_event("sender_silent")
            for pull in list(self._pulling.get(key, ())):
                pull.end(self._senders.silent_s(key, now))
        for key in self._receivers.suspects(now):
            self._on_event("receiver_silent")
            silent_s = self._receivers.silent_s(key, now)
            for transfer_id in {transfer_id for transfer_id, receiver in self._fetching.values() if receiver == key}:
                logger.warning(
                    "transfer %s: rank %d of receiver %r silent for %.1f s", transfer_id.hex(), key[1], key[0], silent_s
                )
                self._end_fetch(transfer_id, "receiver_silent")


class _Pull:
    """A task that waits for a sender. Cancelled by `end`, and told so by `silent_s`."""

    def __init__(self, task: asyncio.Task[Any], stub: Any) -> None:
        self._task = task
        self.stub = stub
        self.cancels_before = task.cancelling()
        self.silent_s: float | None = None

    def end(self, silent_s: float) -> None:
        if self.silent_s is None:
            self.silent_s = silent_s
            self._task.cancel()
