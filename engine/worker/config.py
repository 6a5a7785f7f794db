"""Settings of a worker process's server, frozen."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from kvtransfer.addresses import require_reachable
from kvtransfer.tls import TlsSettings


class WorkerSettings(BaseModel):
    """The gRPC server that a worker runs, and how long it waits for what it started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bind_host: str = "127.0.0.1"
    advertise_host: str = Field(default="127.0.0.1", description="The address gateways and ranks dial.")
    port: int = Field(default=0, ge=0, le=65535, description="0: the system chooses.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Prometheus over HTTP on bind_host; 0: the system chooses; None: no endpoint."
    )
    max_pending_events: PositiveInt = Field(default=4096, description="Per gateway; beyond it that gateway's legs wait.")
    cleanup_timeout_s: float = Field(default=5.0, gt=0, description="For undoing one leg after its end.")
    rank_timeout_s: float = Field(default=30.0, gt=0, description="From the engine's start until every rank has registered.")
    lease_memory_s: float = Field(
        default=10.0, gt=0, description="A transfer is released with its broken stream until this long after its deadline."
    )
    drain_poll_s: float = Field(default=0.05, gt=0, description="How often a drain asks the ranks for leases.")
    keepalive_time_s: float = Field(default=10.0, gt=0)
    keepalive_timeout_s: float = Field(default=5.0, gt=0)
    max_message_bytes: PositiveInt = 64 * 1024 * 1024
    tls: TlsSettings | None = Field(default=None, description="Filled from `[security]`.")

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        require_reachable(self.bind_host, self.advertise_host)
        return self
