"""Settings of the decode service, frozen; they also bound the colocated path."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class DecodeSettings(BaseModel):
    """Admission bounds of one worker's decode and colocated legs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_waiting_requests: PositiveInt = 64
    max_waiting_tokens: PositiveInt = 65536
    staging_wait_s: float = Field(2.0, ge=0, description="How long a pull may wait for receive staging before it is refused.")
