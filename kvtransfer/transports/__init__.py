"""The ways to move payload, by scheme. A transport's module is imported when it is made, not before."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.transport_choice import Reach

if TYPE_CHECKING:
    from kvtransfer.config import KvTransferSettings
    from kvtransfer.transports.base import Memory, Transport


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What a transport may know of its rank when it is made."""

    settings: KvTransferSettings
    rank: int
    incarnation: str
    host_id: str
    send_memory: Memory = None
    receive_memory: Memory = None
    """This rank's staging, for a transport that registers it: valid until the transport has stopped."""


# scheme -> (module, function taking a `TransportContext` and returning a `Transport`)
_FACTORIES = {
    "ucx": ("kvtransfer.transports.ucx", "create"),
    "grpc": ("kvtransfer.transports.grpc", "create"),
    "nixl": ("kvtransfer.transports.nixl", "create"),
    "inproc": ("kvtransfer.transports.inproc", "create"),
}

_INSTALL = {"nixl": ": install splitpoint[nixl]"}


def reach_of(transport: Transport) -> Reach:
    """What a started transport can use, by its own description."""
    facts = transport.describe()
    return Reach(scheme=transport.scheme, tcp=True, rdma=facts.get("verbs") == "yes" and bool(rdma_devices()))


def rdma_devices() -> tuple[str, ...]:
    """InfiniBand and RoCE devices of this host."""
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


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
    try:
        made = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as exc:
        raise ImportError(f"the package {exc.name} is missing{_INSTALL.get(scheme, '')}", name=exc.name) from exc
    transport: Transport = made(context)
    return transport
