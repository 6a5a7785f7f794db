"""UCX, loaded with the environment it needs, and one operation of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvtransfer.memory import as_host
from kvtransfer.transports.base import Memory, TransportError
from kvtransfer.transports.ucx_environment import UCX_ENVIRONMENT

# UCX reads its environment when it is loaded, so this stands before the import.
for _name, _value in UCX_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import ucxx._lib.libucxx as ucx  # noqa: E402
from ucxx._lib.arr import Array  # noqa: E402

UCX_VERSION: tuple[int, int, int] = ucx.get_ucx_version()


@dataclass(frozen=True, slots=True)
class Peer:
    """One incarnation's one rank, and how it is reached.

    `error_handling` False lets UCX copy straight from the peer's memory (CMA), about twice as fast, and makes UCX end *this*
    process when the peer is killed while it copies; it also leaves sends to a dead peer pending until `peer_died`.
    """

    incarnation: str
    address: bytes
    error_handling: bool


@dataclass(eq=False, slots=True)
class Operation:
    """One send or receive. `done` resolves to None, or to why the bytes did not move, when UCX can touch `memory` no more.

    `begun` resolves when UCX has been told, or will not be.
    """

    peer: Peer
    memory: Memory
    tag: int
    sending: bool
    begun: asyncio.Future[None] | None
    done: asyncio.Future[TransportError | None]
    spin_until: float
    settled: Callable[[TransportError | None], None] | None = None
    """Called on the thread when `done` is decided, for whoever goes on there."""
    request: Any = None
    array: Any = None
    cancelled: bool = False
    endpoint: Any = None
    """What it was posted on."""
    spin_when_begun_s: float = 0.0
    """Of a receive whose message may be long in coming: the thread sleeps until it does."""
    message: bool = False
    """No payload of a transfer: no connection that has to end is kept for it."""


class Guest(Protocol):
    """Somebody else's work on the thread."""

    def turn(self, now: float) -> bool:
        """Called in every turn. True: the thread should not sleep now."""

    def end(self) -> None:
        """UCX stops."""


def as_array(memory: Memory) -> Any:
    """UCX's view of it. A torch tensor on the host is shown as numpy, one on a device by its CUDA array interface."""
    if isinstance(memory, np.ndarray) or memory.device.type == "cpu":
        return Array(as_host(memory))
    return Array(memory)


def failure_of(request: Any) -> TransportError | None:
    """How a completed request failed; None when it did not."""
    try:
        request.check_error()
    except ucx.UCXMessageTruncatedError as exc:
        return TransportError("corrupt", str(exc))
    except ucx.UCXError as exc:
        return TransportError("peer_lost", f"UCX: {type(exc).__name__}: {exc}")
    return None
