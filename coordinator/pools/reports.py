"""What worker and gateway actors tell the coordinator. Plain values, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.config import Settings
from coordinator.gateway.pool_loads import PoolLoad
from coordinator.manifest import RunManifest
from coordinator.routing.views import Role, WorkerView
from protos.ids import WorkerId


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """One process of a node, safe against reused pids. `started_s` is psutil's creation time; `segments` the shared memory
    that has to be removed if nobody has it mapped after this process's death."""

    pid: int
    started_s: float
    segments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker actor is started with. `slot` numbers the live workers from 0, for pinning CPU engines to cores; `engine`
    stands for the arguments of its engine, as in `PoolTarget`. `pool` and `role` are its label, which may change later."""

    worker_id: WorkerId
    pool: str
    role: Role
    slot: int
    settings: Settings
    log_dir: Path
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """One direction's staging of all ranks together. `quarantined_bytes` belong to transfers that are over."""

    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What requests make a worker hold; see `WorkerResources` in admin.proto."""

    kv_blocks_held: int
    legs: int
    leases: int
    sessions: int
    lease_states: dict[str, int]
    session_states: dict[str, int]
    send_staging: Staging
    receive_staging: Staging
    tasks: int
    open_files: int
    memory_bytes: int = 0
    device_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One heartbeat. `view.state` is STARTING until the engine serves; `refusing` confirms a drain. `processes` are the
    actor and everything it started, for fencing."""

    view: WorkerView
    slot: int
    node_id: str
    processes: tuple[ProcessRef, ...]
    refusing: bool
    uptime_s: float
    resources: Resources | None = None
    """None until the engine serves."""
    engine: str = ""
    """What `WorkerSpec.engine` was."""
    ranks: int = 1
    """Accelerators it takes."""
    start_timeout_s: float = 300.0
    """What its engine may take to start."""
    former_legs: int = 0
    """Legs and transfers of a role that it had before, under way."""
    metrics_address: str = ""
    """Where Prometheus finds the worker; empty when it has no such endpoint."""
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """The network interface of its node behind each address that it advertises; "" where none has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What the run manifest records of one worker."""

    worker_id: str
    incarnation: str
    pool: str
    start_arguments: dict[str, Any]
    versions: dict[str, str]
    transports: dict[str, Any]
    hardware: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReport:
    """One gateway as it serves now. `membership_age_s` is how old its worker views are; `ready`: it reaches workers."""

    gateway_id: str
    http_address: str
    grpc_address: str
    admin_address: str
    in_flight: int
    pid: int
    tasks: int
    open_files: int
    membership_age_s: float
    ready: bool
    epoch: str = ""
    version: int = -1
    """Of the membership it knows."""
    unconnected: tuple[str, ...] = ()
    """Ready workers that it has no stream to yet."""
    open_circuits: tuple[str, ...] = ()
    admin_http_address: str = ""
    """Empty: none."""
    loads: Mapping[str, PoolLoad] = field(default_factory=dict)
    """Its part of every pool's load, by pool."""
    lacking: Mapping[Role, int] = field(default_factory=dict)
    """Choices that asked for a leg of which no worker was there, since its start."""
    node_id: str = ""
    """Ray's id of its node, where gateways are spread."""
    detail: str = ""
    """What the coordinator finds wrong with it, or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSpec:
    """What the coordinator actor is (re)started with. A new `run_id` takes the pools' targets from `settings`; the same one,
    after a restart, keeps what operators asked for since."""

    run_id: str
    settings: Settings
    num_gpus: int
    manifest: RunManifest

    @property
    def log_dir(self) -> Path:
        """One file per actor of this run."""
        return self.settings.coordinator.state_dir / self.run_id
