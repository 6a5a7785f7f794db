"""Every gRPC port and channel inside the system is made by `kvtransfer.tls`: nothing else could leave TLS out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKERS = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
HOME = "kvtransfer/tls.py"
# Clients of the public API and of the admin port, and the gateway that opens both: a proxy does TLS before those.
PUBLIC = {
    "coordinator/admin_call.py",
    "coordinator/cli.py",
    "coordinator/demo.py",
    "coordinator/compare/admin_rig.py",
    "coordinator/compare/cli.py",
    "coordinator/compare/load.py",
    "coordinator/compare/quality/client.py",
    "coordinator/compare/usage.py",
    "coordinator/pools/gateway_process.py",
}
ROOMS = ("kvtransfer", "engine", "prefill", "decode", "coordinator")


def calls(source: str) -> set[str]:
    """The makers of ports and channels that are named in `source`."""
    named = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return named & MAKERS


def sources() -> list[Path]:
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [path for path in found if "bench" not in path.parts]


def test_nobody_else_opens_or_dials() -> None:
    makers = {str(path.relative_to(ROOT)) for path in sources() if calls(path.read_text())}
    assert HOME in makers
    assert makers - {HOME} <= PUBLIC


@pytest.mark.parametrize("text", ["grpc.aio.insecure_channel('a')", "server.add_insecure_port(x)"])
def test_the_search_finds_them(text: str) -> None:
    assert calls(text)
