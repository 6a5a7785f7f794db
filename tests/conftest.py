"""What every tier shares. Tiers and their budgets: tests/README.md.

Unit and property tests touch nothing outside their process: a network socket, a gRPC channel or server, or `ray.init` fails
the test that asks for it.
"""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import hypothesis
import pytest

# A busy machine is no fault of the code: what hangs is ended by the time-out of its test.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "models" / "smollm2-135m-instruct"
CLOSED_TIERS = ("unit", "property")
UNIT_TIMEOUT_S = 30


def _tier(item: pytest.Item) -> str:
    parts = item.path.relative_to(ROOT / "tests").parts if item.path.is_relative_to(ROOT / "tests") else ()
    return parts[0] if len(parts) > 1 else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give unit tests a short time-out, and skip what this machine cannot run, by name."""
    have_model = (CHECKPOINT / "model.safetensors").is_file()
    have_gpu = shutil.which("nvidia-smi") is not None
    for item in items:
        if _tier(item) == "unit" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_TIMEOUT_S))
        if item.get_closest_marker("vllm") is not None and not have_model:
            item.add_marker(pytest.mark.skip(reason="no checkpoint: run `splitpoint models fetch smollm2`"))
        if item.get_closest_marker("gpu") is not None and not have_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


class _LocalSocket(socket.socket):
    """Unix sockets alone: an event loop wakes itself through a pair of them."""

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        if fileno is None and family != socket.AF_UNIX:
            raise RuntimeError("a test of this tier opened a network socket (tests/README.md)")
        super().__init__(family, type, proto, fileno)


def _refused(name: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"a test of this tier called {name} (tests/README.md)")

    return refuse


@pytest.fixture(autouse=True)
def _closed_world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if _tier(request.node) in CLOSED_TIERS:
        monkeypatch.setattr(socket, "socket", _LocalSocket)
        for module, names in {
            grpc: ("insecure_channel", "secure_channel", "server"),
            grpc.aio: ("insecure_channel", "secure_channel", "server"),
        }.items():
            for name in names:
                monkeypatch.setattr(module, name, _refused(f"{module.__name__}.{name}"))
        # Only where something loaded Ray already; importing it here would cost every test run a second.
        if "ray" in sys.modules:
            monkeypatch.setattr(sys.modules["ray"], "init", _refused("ray.init"))


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The real small model; tests that use it are marked `vllm`."""
    if not (CHECKPOINT / "model.safetensors").is_file():
        pytest.skip("no checkpoint: run `splitpoint models fetch smollm2`")
    return CHECKPOINT
