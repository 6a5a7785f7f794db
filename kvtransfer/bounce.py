"""Device memory to bytes on the wire and back, through page-locked host memory: two buffers, so that the copy of one piece runs
while another is used. Torch comes with the tensors that a caller brings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvtransfer.transports.base import Memory

BUFFERS = 2


class Bounce:
    """Page-locked buffers of `piece_bytes` beside the GPU where `memory` lies, and a stream of their own. Not thread-safe."""

    def __init__(self, memory: Memory, piece_bytes: int) -> None:
        torch = sys.modules["torch"]
        self._torch: Any = torch
        self._device = memory.device
        self._piece_bytes = piece_bytes
        self._stream = torch.cuda.Stream(self._device)
        self._buffers = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        self._done = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._turn = 0

    def pieces(self, payload: Memory) -> Iterator[np.ndarray]:
        """The payload, final on its device, in pieces on the host. A piece is valid until the next is asked for."""
        starts = range(0, len(payload), self._piece_bytes)
        ahead = self._fetch(payload, 0) if len(payload) else None
        for start in starts:
            assert ahead is not None
            index, size = ahead
            following = start + self._piece_bytes
            ahead = self._fetch(payload, following) if following < len(payload) else None
            self._done[index].synchronize()
            yield self._buffers[index][:size].numpy()

    def land(self, target: Memory, source: Any) -> None:
        """Start copying `source` (bytes or a memoryview) into `target` on the device. `source` may go when this returns."""
        data = np.frombuffer(source, dtype=np.uint8)
        if len(data) != len(target):
            raise ValueError(f"{len(data)} bytes into {len(target)}")
        for start in range(0, len(data), self._piece_bytes):
            part = data[start : start + self._piece_bytes]
            index = self._next()
            self._done[index].synchronize()
            self._buffers[index].numpy()[: len(part)] = part
            with self._torch.cuda.stream(self._stream):
                target[start : start + len(part)].copy_(self._buffers[index][: len(part)], non_blocking=True)
                self._done[index].record()

    def finish(self) -> None:
        """Wait until all that was landed is there."""
        self._stream.synchronize()

    def _fetch(self, payload: Memory, start: int) -> tuple[int, int]:
        part = payload[start : start + self._piece_bytes]
        index = self._next()
        with self._torch.cuda.stream(self._stream):
            self._buffers[index][: len(part)].copy_(part, non_blocking=True)
            self._done[index].record()
        return index, len(part)

    def _next(self) -> int:
        self._turn = (self._turn + 1) % BUFFERS
        return self._turn
