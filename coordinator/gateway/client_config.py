"""Settings of a gateway's streams to its workers, frozen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from kvtransfer.tls import TlsSettings


class WorkerClientSettings(BaseModel):
    """One stream per worker incarnation: how it is opened, watched and bounded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    connect_timeout_s: float = Field(2.0, gt=0, description="A worker that is not connected by then loses the legs that wait.")
    backoff_initial_s: float = Field(0.05, gt=0)
    backoff_max_s: float = Field(2.0, gt=0)
    keepalive_time_s: float = Field(10.0, gt=0, description="A stopped peer is noticed after this and the time-out.")
    keepalive_timeout_s: float = Field(5.0, gt=0)
    max_waiting_frames: PositiveInt = Field(4096, description="Frames not yet written; beyond it a new leg is refused.")
    max_message_bytes: PositiveInt = Field(64 * 1024 * 1024, description="One frame, either way.")
    close_grace_s: float = Field(
        1.0, ge=0, description="How long a closing stream may take to write its last aborts and releases."
    )
    tls: TlsSettings | None = Field(None, description="Filled from `[security]`.")

    @model_validator(mode="after")
    def _ordered(self) -> WorkerClientSettings:
        if self.backoff_max_s < self.backoff_initial_s:
            raise ValueError("backoff_max_s must be at least backoff_initial_s")
        return self
