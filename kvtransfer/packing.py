"""The prefill side's cutting room: what a rank of another shape takes, copied together so that it travels in a few messages."""

from __future__ import annotations

from concurrent.futures import Executor

from kvtransfer.lease import Lease
from kvtransfer.plan import BlockRange, Cut
from kvtransfer.rearrange import cut_blocks
from kvtransfer.runtime import DRAIN_POLL_S, NodeRuntime
from kvtransfer.staging import SlotHold
from kvtransfer.transports.base import Memory, SendChannel
from kvtransfer.waiting import Copies
from protos.errors import Code

PIECES = 4
"""Chunks of one stream that lie in its room at a time: one is filled while the others travel."""
STREAMS = 8
"""Streams for which the room suffices, unless single blocks are very long."""


class Packer:
    """Cuts the chunks of one stream, in order. Owns its part of the room from the first chunk until `close`."""

    def __init__(
        self, runtime: NodeRuntime, lease: Lease, cut: Cut, channel: SendChannel, chunk_bytes: int, *, once: bool
    ) -> None:
        """`once`: no part of the room is written twice; a receiver that does not say `cut` may read it until the end."""
        self._rt = runtime
        self._lease = lease
        self._cut = cut
        self._channel = channel
        executor: Executor = runtime.executor
        self._copies = Copies(executor)
        self._hold: SlotHold | None = None
        self._once = once
        share = runtime.pack.capacity_bytes // (STREAMS * PIECES)
        self.chunk_bytes = max(cut.block_bytes, min(chunk_bytes, share) // cut.block_bytes * cut.block_bytes)
        """The most that a chunk may have; one block at least."""

    @property
    def room_bytes(self) -> int:
        """What it takes of the room."""
        total = self._lease.num_blocks * self._cut.block_bytes
        return total if self._once else min(total, PIECES * self.chunk_bytes)

    async def payload(self, index: int, blocks: BlockRange, deadline: float) -> Memory:
        """Chunk `index`, which is `blocks` of the lease, in the room.

        Raises:
            SplitpointError: TRANSFER_REFUSED, it can never fit; STAGING_FULL, there was no room before `deadline`.
        """
        rt, cut = self._rt, self._cut
        if self._hold is None:
            self._hold = await self._room(deadline)
        if not self._once and index >= PIECES and index % PIECES == 0:
            # Whatever was sent before has begun, and when it is drained all of the room can be written again.
            while not await self._channel.drained(DRAIN_POLL_S):
                pass
        place = blocks.first * cut.block_bytes if self._once else index % PIECES * self.chunk_bytes
        start = rt.send.capacity_bytes + self._hold.slot.offset + place
        out = rt.send_memory[start : start + blocks.count * cut.block_bytes]
        offset = self._lease.slot.offset
        rows = rt.send_memory[offset + blocks.first * rt.block_bytes : offset + blocks.end * rt.block_bytes]
        await self._copies.run(cut_blocks, cut, rows, out)
        return out

    async def close(self) -> None:
        """Give the room back. Only when the channel is drained."""
        await self._copies.settled()
        if self._hold is not None:
            with self._rt.lock:
                self._hold.end()
            self._hold = None
            self._rt.pack_room.pump()

    async def _room(self, deadline: float) -> SlotHold:
        rt = self._rt
        if not rt.pack.fits(self.room_bytes):
            text = f"{self.room_bytes} bytes can never fit kvtransfer.pack_staging_bytes, {rt.pack.capacity_bytes}"
            raise rt.refused("pack_too_large", text)
        wait_s = max(0.0, deadline - rt.now())
        try:
            slot = await rt.pack_room.acquire(self._lease.transfer_id, self.room_bytes, wait_s)
        except TimeoutError:
            text = f"no {self.room_bytes} bytes to cut a share in for {wait_s:.3f} s; {rt.pack.free_bytes} are free"
            raise rt.refused("pack_full", text, Code.STAGING_FULL) from None
        rt.metrics.event("shares_cut")
        return SlotHold(rt.pack, slot)
