"""The ways to move payload, by scheme. A transport's module is imported when it is made, not before."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.transport_choice import Reach, openable

if TYPE_CHECKING:
    from kvtransfer.config import KvTransferSettings
    from kvtransfer.shared_area import SharedArea
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
    shared: SharedArea | None = None
    """What of it peers of this host can map: the send staging, or nothing."""


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


def to_open(settings: KvTransferSettings) -> tuple[str, ...]:
    """The configured transports that a rank of this host opens, from what lies on its disk: loading both UCX libraries to find
    out would be too late."""
    wheels = [found for name in ("nixl_cu12", "nixl_cu13") if (found := _folder(name)) is not None]
    libucx = _folder("libucx")
    devices = bool(rdma_devices())
    return openable(
        settings.transports,
        settings.default_transport,
        ucx_rdma=devices and _prefers_system_ucx(libucx),
        nixl_rdma=devices and any(True for wheel in wheels for _ in wheel.parent.glob(f"{wheel.name}.libs/ucx/libuct_ib*.so*")),
        nixl_installed=bool(wheels),
    )


def _prefers_system_ucx(libucx: Path | None) -> bool:
    """The UCX of PyPI has no verbs; a system's is taken to have them where there is a device."""
    return libucx is None or os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() == "true"


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


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
