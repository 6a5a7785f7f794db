"""gRPC of the transfer channel: options, addresses, and the control token."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from pathlib import Path
from typing import Any

import grpc

from kvtransfer.config import KvTransferSettings
from protos.errors import Code, SplitpointError
from protos.grpc_errors import abort

CONTROL_TOKEN_KEY = "x-splitpoint-control-token"

# A stopped or vanished peer answers no ping: its streams end after 15 s at the latest, also while nothing is being sent.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),  # for what no longer reaches the peer
    ("grpc.http2.ping_timeout_ms", 5_000),  # for a peer that takes bytes and does not answer
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
# A proxy in the environment is for the outside; ranks, peers and actors are inside.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    ("grpc.enable_http_proxy", 0),
    # A worker that restarts at the address of a dead one is reached at once: gRPC shares connections by address, and with them
    # the pause after a failure, which grows to two minutes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Not a pause, whatever its name: how long one attempt to connect may take. A distant peer answers after several hundred.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
]
# Payload leaves a node's server and never enters it: whoever sends it more than a few addresses is no peer.
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 1024 * 1024),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]


def control_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of every call between a worker's actor and its ranks."""
    return ((CONTROL_TOKEN_KEY, token),)


async def require_control_token(context: Any, token: str) -> None:
    """Refuse the call unless it carries `token`."""
    for key, value in context.invocation_metadata() or ():
        if key == CONTROL_TOKEN_KEY and hmac.compare_digest(str(value).encode(), token.encode()):
            return
    await abort(context, SplitpointError(Code.UNAUTHENTICATED, f"{CONTROL_TOKEN_KEY} is missing or wrong"))


def is_peer_lost(exc: grpc.RpcError) -> bool:
    """The connection is gone or its server stops, as opposed to an answer that refuses. A call that this side has cancelled ends
    otherwise, with `CancelledError`."""
    gone = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return bool(exc.code() in gone and not exc.trailing_metadata())


def host_port(host: str, port: int) -> str:
    """As gRPC and URLs want it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def at_rank(settings: KvTransferSettings, register_address: str) -> KvTransferSettings:
    """`advertise_host = "auto"` becomes the address of this rank's own host on the way to its worker's actor, and then the rank
    binds it too: the ranks of one worker may live on several hosts. Sends nothing.

    Raises:
        OSError: no route leads from here to `register_address`.
    """
    if settings.advertise_host != "auto":
        return settings
    host, _, port = register_address.rpartition(":")
    family, kind, protocol, _, there = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)
        here = str(probe.getsockname()[0])
    return settings.model_copy(update={"advertise_host": here, "bind_host": here})


def host_id() -> str:
    """Equal exactly in processes of one boot of one host that share an IPC namespace: shared memory may be used."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/ipc').st_ino}"


def quiet_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Several gRPC loops of one process share a wake-up socket; the loop that finds it already read reports that as an error."""
    if isinstance(context.get("exception"), BlockingIOError) and "PollerCompletionQueue" in str(context.get("handle")):
        return
    loop.default_exception_handler(context)
