"""The whole configuration: one TOML composed of each package's frozen settings.

Precedence, highest first:

1. `--set path=value`, for example `--set engine.max_num_seqs=32`
2. environment, `SPLITPOINT__ENGINE__MAX_NUM_SEQS=32`: two underscores separate the parts of a path
3. the TOML file
4. defaults

A value given as text (1 and 2) is read as TOML (`32`, `true`, `[1, 2]`, `"text"`) and taken as plain text when it is none.
Byte sizes may be written `"256MiB"`: a key that ends in `_bytes` is parsed once, here. A relative model path is taken from
the working directory of the process that loads the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from coordinator import path_model
from coordinator.config_layers import ConfigError, fault_lines, given, layers, merge, parse_sizes, paths
from coordinator.gateway.config import GatewaySettings
from coordinator.pools.advisor_config import AdvisorSettings
from coordinator.pools.autoscale_policy import AutoscalePolicy
from coordinator.pools.config import DurableGcs, PlacementSettings
from coordinator.pools.records import SpareKind
from coordinator.routing.views import Role
from decode.config import DecodeSettings
from engine.config import EngineSettings
from engine.worker.config import WorkerSettings
from kvtransfer.config import KvTransferSettings
from kvtransfer.tls import TlsSettings
from prefill.config import PrefillSettings


class PoolSettings(BaseModel):
    """One pool of equal workers. `engine` overrides single fields of the common `[engine]` table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    replicas: NonNegativeInt = 1
    engine: dict[str, Any] = Field(default_factory=dict)
    spares: int = Field(0, ge=0, le=64, description="Workers that stand by beside `replicas` and take over when one is lost.")
    spare_kind: SpareKind = Field(
        SpareKind.WARM,
        description='"warm": its engine runs, connected and idle. "placed": its accelerators are reserved, its engine is started '
        "when it is needed.",
    )
    autoscaling_config: AutoscalePolicy | None = Field(
        None,
        description="From the start on: `replicas` is then only what it begins with. Changed later by `splitpoint autoscale`.",
    )


class CoordinatorSettings(BaseModel):
    """The coordinator actor, its liveness rules and the Ray cluster under it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ray_address: str = Field("embedded", description='"embedded": a private Ray of this launcher; else an address, or "auto".')
    node_ip: str = Field("127.0.0.1", description="Where an embedded Ray listens.")
    state_dir: Path = Field(Path("runs"), description="On the head: desired state, and one folder per run (manifest, logs).")
    gateways: PositiveInt = Field(1, description="Gateway actors; each has its fixed ports 10 above the one before it.")
    heartbeat_interval_s: float = Field(1.0, gt=0)
    missed_heartbeats: PositiveInt = Field(3, description="Missed in a row before a worker is probed and, if silent, fenced.")
    probe_timeout_s: float = Field(2.0, gt=0)
    partition_grace_s: float = Field(
        20.0, ge=0, description="A worker whose whole host is silent is given up after so long; then it is replaced elsewhere."
    )
    accelerator_budget: PositiveInt | None = Field(
        None, description="Accelerators that autoscalers may take all pools together to. None: no limit."
    )
    metrics_host: str = Field("127.0.0.1", description="Where `metrics_port` is bound, on the head.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Prometheus over HTTP: pools, autoscaler, advisor. 0: the system chooses; None: none."
    )
    drain_timeout_s: float = Field(120.0, gt=0, description="Longer than the longest generation; then the rest is ended.")
    max_unavailable: float = Field(
        0.25, ge=0, le=1, description="Share of a pool that may be away while other engine arguments replace its workers."
    )
    restart_backoff_s: float = Field(1.0, gt=0, description="After a start that failed; doubles with each further one.")
    restart_backoff_max_s: float = Field(60.0, gt=0)
    start_timeout_s: float = Field(600.0, gt=0, description="`serve` gives up when not every pool is ready by then.")
    worker_cpus: float = Field(0.1, gt=0, description="Ray CPUs of one rank's bundle on machines without accelerators.")
    placement: PlacementSettings = PlacementSettings()
    require_durable_gcs: bool = Field(
        False,
        description="Refuse a joined Ray whose GCS keeps its state in memory, or who knows where, instead of warning.",
    )
    gcs_storage: DurableGcs | None = Field(
        None, description="Where the GCS of a joined Ray keeps its state, for one that does not say it; what it says counts more."
    )
    worker_gpus: float | None = Field(None, ge=0, description="Ray GPUs of one rank's bundle. None: 1 if the cluster has any.")
    pin_cpus: bool = Field(
        True, description="CPU engines with several threads: give each worker of a node its own cores, as far as there are."
    )

    @model_validator(mode="after")
    def _ordered(self) -> CoordinatorSettings:
        if self.restart_backoff_max_s < self.restart_backoff_s:
            raise ValueError("restart_backoff_max_s must be at least restart_backoff_s")
        return self

    @property
    def heartbeat_limit_s(self) -> float:
        """A heartbeat older than this makes a worker suspect."""
        return self.heartbeat_interval_s * self.missed_heartbeats


def _default_pools() -> dict[str, PoolSettings]:
    return {"prefill": PoolSettings(role=Role.PREFILL), "decode": PoolSettings(role=Role.DECODE)}


class Settings(BaseModel):
    """Everything `splitpoint serve` needs to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineSettings = EngineSettings()
    kvtransfer: KvTransferSettings = KvTransferSettings()
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    worker: WorkerSettings = WorkerSettings()
    gateway: GatewaySettings = GatewaySettings()
    pools: dict[str, PoolSettings] = Field(default_factory=_default_pools)
    coordinator: CoordinatorSettings = CoordinatorSettings()
    advisor: AdvisorSettings = AdvisorSettings()
    security: TlsSettings | None = Field(None, description="TLS between gateways, workers and ranks. None: plaintext.")
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="before")
    @classmethod
    def _secured(cls, data: Any) -> Any:
        """`[security]` into every part that opens or dials a port of the system."""
        if not isinstance(data, Mapping) or data.get("security") is None:
            return data
        try:
            tls = TlsSettings.model_validate(data["security"])
        except ValidationError:
            return data  # said once, by the field itself
        gateway = data.get("gateway", {})
        client = gateway.get("worker_client", {}) if isinstance(gateway, Mapping) else gateway.worker_client
        return {
            **data,
            "kvtransfer": _with(data.get("kvtransfer", {}), tls=tls),
            "worker": _with(data.get("worker", {}), tls=tls),
            "gateway": _with(gateway, worker_client=_with(client, tls=tls)),
        }

    @model_validator(mode="after")
    def _one_security(self) -> Settings:
        parts = {
            "kvtransfer.tls": self.kvtransfer.tls,
            "worker.tls": self.worker.tls,
            "gateway.worker_client.tls": self.gateway.worker_client.tls,
        }
        problems = [f"{path}: set [security], which is for all of them" for path, tls in parts.items() if tls != self.security]
        if problems:
            raise ConfigError(problems)
        return self

    @model_validator(mode="after")
    def _pools_serve(self) -> Settings:
        if not any(pool.replicas for pool in self.pools.values()):
            raise ValueError("pools: at least one pool needs a replica")
        problems = _shared_ports(self.gateway, self.coordinator)
        for name, pool in self.pools.items():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                problems.append(f"pools.{name}: a pool's name is lower-case letters, digits and '-'")
            if pool.autoscaling_config is not None and (problem := pool.autoscaling_config.misplaced(pool.role)):
                problems.append(f"pools.{name}.autoscaling_config: {problem}")
            try:
                self.engine_of(name)
            except ValidationError as error:
                problems.extend(fault_lines(error, EngineSettings, f"pools.{name}.engine.", {}))
            else:
                if "kind" in pool.engine or "model_path" in pool.engine or "served_model_name" in pool.engine:
                    problems.append(f"pools.{name}.engine: kind, model_path and served_model_name are the same for all pools")
        if problems:
            raise ConfigError(problems)
        return self

    @model_validator(mode="after")
    def _gateways_are_found(self) -> Settings:
        if self.coordinator.placement.gateways == "head":
            return self
        hosts = {f"gateway.{name}_host": getattr(self.gateway, f"{name}_host") for name in self.gateway_doors}
        problems = [
            f'{path} is {host}: with coordinator.placement.gateways = "spread" it is "auto", each node\'s own address, or 0.0.0.0'
            for path, host in hosts.items()
            if host not in EVERY_NODE
        ]
        if self.coordinator.ray_address == "embedded":
            problems.append('coordinator.placement.gateways is "spread": an embedded Ray has one node')
        if problems:
            raise ConfigError(problems)
        return self

    @property
    def gateway_doors(self) -> tuple[str, ...]:
        """Those of `GATEWAY_PORTS` that gateways have."""
        return tuple(name for name in GATEWAY_PORTS if getattr(self.gateway, f"{name}_port") is not None)

    def with_pools(self, pools: Mapping[str, PoolSettings]) -> Settings:
        """The same configuration with other pools.

        Raises:
            ConfigError: they are refused; every problem names its path.
        """
        parts = {name: getattr(self, name) for name in type(self).model_fields}
        try:
            return Settings.model_validate({**parts, "pools": dict(pools)})
        except ValidationError as error:
            raise ConfigError(fault_lines(error, Settings, "", {})) from error

    def engine_of(self, pool: str) -> EngineSettings:
        """The engine settings of one pool's workers: the common ones with the pool's overrides.

        Raises:
            KeyError: no such pool.
            ValidationError: an override is refused.
        """
        overrides = dict(self.pools[pool].engine)
        merged = merge(self.engine.model_dump(), overrides)
        return EngineSettings.model_validate(merged)


def _with(part: Any, **fields: Any) -> Any:
    """A part of the configuration, parsed or not, with `fields` replaced."""
    return {**part, **fields} if isinstance(part, Mapping) else {**part.model_dump(), **fields}


GATEWAY_PORTS = ("http", "grpc", "admin", "admin_http")
"""What a gateway listens on: each has its `_host` and its `_port`."""
AUTO_HOST = "auto"
"""The address of a gateway's own node in the cluster."""
EVERY_NODE = (AUTO_HOST, "0.0.0.0", "::")
"""Hosts by which a gateway can listen on any node."""


def gateway_port(port: int | None, index: int) -> int:
    """What the `index`-th gateway, from 0, binds for a configured port. 0 stays "any free port"; so does None, of one that
    binds none."""
    return port + 10 * index if port else 0


def _shared_ports(gateway: GatewaySettings, coordinator: CoordinatorSettings) -> list[str]:
    """A line for each port that two servers of this configuration would bind."""
    owners: dict[tuple[str, int], str] = {}
    if coordinator.metrics_port:
        owners[coordinator.metrics_host, coordinator.metrics_port] = "coordinator.metrics_port"
    problems = []
    for index in range(coordinator.gateways):
        for name in GATEWAY_PORTS:
            host, port = getattr(gateway, f"{name}_host"), gateway_port(getattr(gateway, f"{name}_port"), index)
            owner = f"gateway.{name}_port of gateway {index}"
            if port and owners.setdefault((host, port), owner) != owner:
                problems.append(f"gateway.{name}_port: {port} of gateway {index} is also {owners[host, port]}")
    return problems


def served_model_name(settings: Settings) -> str:
    """The id clients use for the model."""
    return settings.gateway.served_model_name or settings.engine.served_model_name


def load(
    file: Path | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Read, merge and validate. `environment` defaults to this process's.

    Raises:
        ConfigError: unreadable file, or a bad key or value; every problem names its path and where it was given.
    """
    origins: dict[str, str] = {}
    tree: dict[str, Any] = {}
    # Pools that a file names replace the default ones; single fields given elsewhere change them.
    default_pools = {name: pool.model_dump(mode="json") for name, pool in _default_pools().items()}
    for origin, layer in layers(file, sets, os.environ if environment is None else environment):
        for path in paths(layer):
            origins[path] = origin
        if origin != str(file):
            tree.setdefault("pools", default_pools)
        tree = merge(tree, layer)
    tree = parse_sizes(tree, "", origins)
    try:
        settings = Settings.model_validate(tree)
    except ConfigError:
        raise
    except ValidationError as error:
        raise ConfigError(fault_lines(error, Settings, "", origins)) from error
    engine = settings.engine.model_copy(update={"model_path": settings.engine.model_path.expanduser().absolute()})
    coordinator = settings.coordinator.model_copy(update={"state_dir": settings.coordinator.state_dir.expanduser().absolute()})
    return settings.model_copy(update={"engine": engine, "coordinator": coordinator, "gateway": _with_model(settings, origins)})


def _with_model(settings: Settings, origins: Mapping[str, str]) -> GatewaySettings:
    """The gateway's settings with the whole path of the prediction model of path `auto`, which can be read."""
    gateway, file = settings.gateway, settings.gateway.auto.model_file
    if file is None:
        return gateway
    file = file.expanduser().absolute()
    try:
        path_model.read(file)
    except path_model.PathModelError as error:
        raise ConfigError([f"gateway.auto.model_file: {error}{given(origins, 'gateway.auto.model_file')}"]) from error
    return gateway.model_copy(update={"auto": gateway.auto.model_copy(update={"model_file": file})})


def load_pools(file: Path) -> tuple[dict[str, PoolSettings], list[str]]:
    """The pools of a TOML file, and the names of its other tables, which are not looked at.

    Raises:
        ConfigError: unreadable file, no pools, or a bad key or value of one.
    """
    ((origin, tree),) = layers(file, (), {})
    tables = tree.get("pools")
    if not isinstance(tables, Mapping) or not tables:
        raise ConfigError([f"{file}: no pools: write one table [pools.NAME] for each"])
    pools, problems = {}, []
    for name, table in parse_sizes(tables, "pools.", {}).items():
        try:
            pools[name] = PoolSettings.model_validate(table)
        except ValidationError as error:
            problems += [f"{line} (from {origin})" for line in fault_lines(error, PoolSettings, f"pools.{name}.", {})]
    if problems:
        raise ConfigError(problems)
    return pools, sorted(tree.keys() - {"pools"})
