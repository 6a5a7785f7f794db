"""The fence around unit tests stands (tests/conftest.py)."""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio
import pytest


def test_a_network_socket_is_refused() -> None:
    with pytest.raises(RuntimeError, match="network socket"):
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with pytest.raises(RuntimeError, match="network socket"):
        socket.create_connection(("127.0.0.1", 9), timeout=1)


def test_grpc_is_refused() -> None:
    for make in (grpc.insecure_channel, grpc.aio.insecure_channel, grpc.aio.server):
        with pytest.raises(RuntimeError, match="grpc"):
            make("127.0.0.1:9")


async def test_an_event_loop_works() -> None:
    assert await asyncio.to_thread(lambda: 7) == 7
