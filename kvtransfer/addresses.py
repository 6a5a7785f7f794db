"""Addresses that servers listen at and peers dial. Pure: settings use it, and load no gRPC for it."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether what is bound to `host` can be reached from this machine alone. A name other than `localhost` counts as not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_reachable(bind_host: str, advertise_host: str) -> None:
    """Raises `ValueError` when a server that listens everywhere tells peers an address that leads each of them to itself."""
    if bind_host in ("0.0.0.0", "::") and is_loopback(advertise_host):
        raise ValueError(f"advertise_host {advertise_host} leads other hosts to themselves; bind_host {bind_host} is for them")
