"""What UCX must be told before it is loaded. What the user set is left alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvtransfer.addresses import is_loopback

UCX_ENVIRONMENT = {
    "UCX_MEMTYPE_CACHE": "n",  # the cache misses frees of CUDA memory by other libraries
    "UCX_RNDV_THRESH": "8192",  # above it a send completes only when the receiver has the bytes
    "UCX_MM_ERROR_HANDLING": "y",  # lets shared memory carry endpoints with error handling
    "UCX_KEEPALIVE_INTERVAL": "1s",  # how soon a killed peer of this host is seen
    "UCX_MAX_RNDV_RAILS": "1",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


def devices_for(bind_host: str) -> str:
    """UCX listens on every network device, for anybody. A rank that is bound to loopback keeps it there; elsewhere UCX picks
    the devices, as an operator does with `UCX_NET_DEVICES`. Empty: leave it to UCX."""
    return "lo" if is_loopback(bind_host) and "UCX_NET_DEVICES" not in os.environ else ""


def devices_missing(asked: str) -> list[str]:
    """Names in `asked`, a value of `UCX_NET_DEVICES`, that no network device of this process has. UCX itself only warns, and then
    finds no way to any peer. Patterns and negated lists are left to UCX."""
    if asked.startswith("^"):
        return []
    names = [name.partition(":")[0] for name in asked.split(",") if name and not set(name) & set("*?[")]
    known = {"all", *(name for _, name in socket.if_nameindex())}
    verbs = Path("/sys/class/infiniband")
    if verbs.is_dir():
        known |= {device.name for device in verbs.iterdir()}
    return [name for name in names if name not in known]
