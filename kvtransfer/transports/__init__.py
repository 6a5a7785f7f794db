"""The ways to move payload, by scheme. A transport's module is imported when it is made, not before."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.config import KvTransferSettings
    from kvtransfer.transports.base import Transport


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What a transport may know of its rank when it is made."""

    settings: KvTransferSettings
    rank: int
    incarnation: str
    host_id: str


# scheme -> (module, function taking a `TransportContext` and returning a `Transport`)
_FACTORIES = {
    "ucx": ("kvtransfer.transports.ucx", "create"),
    "grpc": ("kvtransfer.transports.grpc", "create"),
    "inproc": ("kvtransfer.transports.inproc", "create"),
}


def known_schemes() -> tuple[str, ...]:
    return tuple(_FACTORIES)


def create_transport(scheme: str, context: TransportContext) -> Transport:
    """A transport that is not started.

    Raises:
        ValueError: no such scheme; the message lists the known ones.
        ImportError: its library is not installed.
    """
    if scheme not in _FACTORIES:
        raise ValueError(f"unknown transport {scheme!r}; known: {', '.join(_FACTORIES)}")
    module, function = _FACTORIES[scheme]
    transport: Transport = getattr(importlib.import_module(module), function)(context)
    return transport
