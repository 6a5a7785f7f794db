"""NIXL itself, loaded with the settings that its own UCX reads once, and quiet: its log would go to standard output."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvtransfer.transports.ucx_environment import UCX_ENVIRONMENT

_WHEELS = ("nixl_cu12", "nixl_cu13")


def _wheel() -> str:
    """The installed wheel that fits the CUDA of this process's torch; any, where no torch is loaded: then there is no CUDA."""
    installed = [wheel for wheel in _WHEELS if importlib.util.find_spec(wheel) is not None]
    if not installed:
        raise ModuleNotFoundError("no wheel of NIXL is installed", name="nixl")
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    fitting = f"nixl_cu{cuda.partition('.')[0]}"
    return fitting if fitting in installed else installed[0]


def _load() -> Any:
    """NIXL's Python API. Raises `ModuleNotFoundError` naming what is missing."""
    for name, value in UCX_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    found = importlib.import_module(f"{_wheel()}._api")
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.setLevel(logging.WARNING)
    log.propagate = True
    return found


api = _load()
ERRORS: tuple[type[Exception], ...] = tuple(
    value for name, value in vars(api.nixlBind).items() if name.startswith("nixl") and name.endswith("Error")
)
"""What its calls raise: they share no base class of their own."""
UNREACHABLE: tuple[type[Exception], ...] = (api.nixlBind.nixlBackendError, api.nixlBind.nixlRemoteDisconnectError)
NIXL_VERSION: tuple[int, int] = tuple(  # type: ignore[assignment]
    int(part) for part in version(api.nixlBind.__name__.partition(".")[0].replace("_", "-")).split(".")[:2]
)


@contextlib.contextmanager
def devices_set(net_devices: str) -> Iterator[None]:
    """NIXL hands its UCX no choice of devices for TCP, and that UCX reads the environment when an agent is made."""
    if not net_devices:
        yield
        return
    os.environ["UCX_NET_DEVICES"] = net_devices
    try:
        yield
    finally:
        del os.environ["UCX_NET_DEVICES"]


def verbs_bundled() -> bool:
    """Whether the UCX inside the loaded wheel has InfiniBand and RoCE."""
    return _bundled("ib")


def cuda_bundled() -> bool:
    """Whether it has CUDA IPC."""
    return _bundled("cuda")


def _bundled(module: str) -> bool:
    package = Path(api.nixlBind.__file__).parent
    return any(package.parent.glob(f"{package.name}.libs/ucx/libuct_{module}*.so*"))
