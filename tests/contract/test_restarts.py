"""A prefill rank that restarts on the same host and port, again and again, under a receiver that goes on."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

import kvtransfer.node
from protos.errors import Code
from tests.support.kv_nodes import TOKEN, NodePair, complete, error_of, make_node, small_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RESTARTS = 20
FD_BUDGET_PER_RESTART = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize("scheme", ["grpc", "ucx"])
async def test_twenty_restarts_on_the_same_port(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if scheme == "ucx":
        pytest.importorskip("kvtransfer.transports.ucx", exc_type=ImportError)
    settings = small_settings(transports=(scheme,), default_transport=scheme)
    async with NodePair(settings=settings) as pair:
        receiver, port = pair.receivers[0], free_port()
        bind = kvtransfer.node.bind
        monkeypatch.setattr(kvtransfer.node, "bind", lambda server, _, tls: bind(server, f"127.0.0.1:{port}", tls))
        descriptors = 0
        former = None
        for life in range(RESTARTS):
            sender = make_node(settings, incarnation=f"life-{life}")
            await asyncio.to_thread(sender.start)
            assert sender.endpoint.address == f"127.0.0.1:{port}"
            pair.senders = [sender]
            control, pair.send_control = pair.send_control, type(pair.send_control)([sender.endpoint], TOKEN)
            await control.close()
            if former is not None:
                # Who still believes in the dead one is told by name that it is another; once its death is known, not even asked.
                error = await error_of(pair.transfer(20, scheme).pull(senders=[former]))
                assert error.code is Code.INCOMPATIBLE_PEER
                assert f"life-{life}" in error.message
                assert f"life-{life - 1}" in error.message
                await pair.receive_control.fence(former.incarnation)
                handshakes = receiver._rt.peers.handshakes
                error = await error_of(pair.transfer(20, scheme).pull(senders=[former]))
                assert "is dead" in error.message
                assert receiver._rt.peers.handshakes == handshakes
            await complete(pair.transfer(100, scheme))
            assert len(receiver._rt.peers) == 1
            former = sender.endpoint
            await asyncio.to_thread(sender.stop)
            if life == 1:
                descriptors = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) - descriptors <= (RESTARTS - 2) * FD_BUDGET_PER_RESTART
        status = receiver.status()
        assert (status.sessions, status.receive.used_bytes + status.receive.quarantined_bytes) == (0, 0)
        assert receiver.counters()["peer_fenced"] == RESTARTS - 1
