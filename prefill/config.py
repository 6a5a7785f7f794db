"""Settings of the prefill service, frozen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class PrefillSettings(BaseModel):
    """Admission bounds of one worker's prefill leg. Beyond them a leg is refused and the gateway tries the next worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_waiting_requests: PositiveInt = 64
    max_waiting_tokens: PositiveInt = 65536
    staging_wait_s: float = Field(2.0, ge=0, description="How long a leg may wait for send staging before it is refused.")
