"""One chunk on its way between two NIXL agents, and where a staging array lies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtransfer.transports.base import Memory, TransportError


@dataclass(frozen=True, slots=True)
class Peer:
    """One incarnation's one rank."""

    incarnation: str
    agent: str
    metadata: bytes = field(repr=False)


@dataclass(eq=False, slots=True)
class Operation:
    """One chunk on its way. `done` resolves to None, or to why the bytes did not move, when nothing of it can touch `memory`.

    `begun` resolves when the thread has taken it up, or will not. `lost` resolves when the peer cannot be told of it: `done`
    follows when that is certain. `moved_at` is when bytes were last known to move, monotonic seconds.
    """

    peer: Peer
    key: tuple[int, int]
    memory: Memory
    sending: bool
    begun: asyncio.Future[None]
    done: asyncio.Future[TransportError | None]
    lost: asyncio.Future[TransportError | None]
    moved_at: float
    given_up: bool = False
    target: int | None = None
    written: int = 0
    step: int = 0
    handle: Any = None
    revoke_at: float | None = None
    settle_at: float | None = None
    settle_with: TransportError | None = None


def locate(memory: Memory) -> tuple[int, int, str]:
    """Address, device number and NIXL's kind of a staging array."""
    if isinstance(memory, np.ndarray):
        return memory.ctypes.data, 0, "DRAM"
    if memory.device.type == "cpu":
        return memory.data_ptr(), 0, "DRAM"
    return memory.data_ptr(), memory.device.index or 0, "VRAM"
