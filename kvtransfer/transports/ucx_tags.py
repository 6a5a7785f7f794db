"""Which tags belong to whom, and what becomes of messages that nobody waits for.

A tag is a channel's number and a message's. What was announced for a channel that is closed is taken off UCX's queue into a
buffer of one byte: that completes the peer's send and with it frees the peer's slot.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from typing import Any

import numpy as np

from kvtransfer.transports.ucx_operation import Array, ucx

CHANNEL_BITS = 40
CHUNK_BITS = 24
WARM_CHANNEL = 0
ASK_CHANNEL = (1 << CHANNEL_BITS) - 1
"""Of what peers ask for and say (ucx_asks.py): no transfer's."""
WARM_BYTES = 64 * 1024
_CHANNEL_MASK = ((1 << CHANNEL_BITS) - 1) << CHUNK_BITS
CLOSED_CHANNEL_KEPT_S = 60.0


class Tags:
    """`open`, `close` and `keep` belong to the event loop, the rest to UCX's thread. `counters`: warmed, sunk."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._open_channels: set[int] = set()
        self._kept_tags: set[int] = set()
        self._closed_channels: deque[tuple[float, int]] = deque(maxlen=256)
        self._sinks: list[tuple[Any, Any]] = []

    def open(self) -> int:
        """A number that the tags of one transfer's messages to this worker begin with. Random: whoever was told of one transfer's
        cannot name another's, and a number does not come back soon enough to meet what was sent for it before."""
        taken = {WARM_CHANNEL, ASK_CHANNEL} | self._open_channels
        while (channel := secrets.randbits(CHANNEL_BITS)) in taken:
            pass
        self._open_channels.add(channel)
        return channel

    def keep(self, *tags: int) -> None:
        """Somebody takes what comes for these, for as long as this runs."""
        self._kept_tags |= set(tags)

    def close(self, channel: int) -> bool:
        """What still comes for it is thrown away. False: it was closed before."""
        if channel not in self._open_channels:
            return False
        self._open_channels.discard(channel)
        self._closed_channels.append((time.monotonic(), channel))
        return True

    # -- on UCX's thread -------------------------------------------------------------------------------------------------

    @property
    def sinking(self) -> list[tuple[Any, Any]]:
        """Requests for what is being thrown away, and their memory."""
        return self._sinks

    def settle(self) -> None:
        """Forget what has been thrown away."""
        self._sinks = [entry for entry in self._sinks if not entry[0].completed]

    def sweep(self, worker: Any, now: float, *, whole: bool) -> None:
        """Take messages that nobody waits for off UCX's queue. `whole`: a warm-up may be received whole, which where a peer is
        without error handling can end this process (`Peer`)."""
        while (found := worker.tag_probe(ucx.UCXXTag(0), ucx.UCXXTagMask(0))).matched:
            tag = found.sender_tag.value
            if tag in self._kept_tags or tag >> CHUNK_BITS in self._open_channels:
                break
            self.sink(worker, found, whole=whole)
        while self._closed_channels and now - self._closed_channels[0][0] > CLOSED_CHANNEL_KEPT_S:
            self._closed_channels.popleft()
        # A message for an open channel at the head of the queue hides what is behind it.
        if found.matched:
            for _, channel in list(self._closed_channels):
                while (hidden := worker.tag_probe(ucx.UCXXTag(channel << CHUNK_BITS), ucx.UCXXTagMask(_CHANNEL_MASK))).matched:
                    self.sink(worker, hidden, whole=whole)

    def sink(self, worker: Any, found: Any, *, whole: bool) -> None:
        """Receive an announced message into a buffer that is too short, which completes its send without a byte moved. A warm-up
        is received whole where it may be."""
        warm = found.sender_tag.value >> CHUNK_BITS == WARM_CHANNEL and found.length <= WARM_BYTES
        scratch = np.zeros(found.length if warm and whole else 1, np.uint8)
        array = Array(scratch)
        request = worker.tag_recv(array, ucx.UCXXTag(found.sender_tag.value))
        self._sinks.append((request, array))
        self._counters["warmed" if warm else "sunk"] += 1
