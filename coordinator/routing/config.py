"""Settings of routing, frozen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from coordinator.routing.views import Role


class RoutingSettings(BaseModel):
    """How the workers of a path are chosen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    colocated_roles: tuple[tuple[Role, ...], ...] = Field(
        ((Role.COLOCATED,), (Role.DECODE, Role.PREFILL)),
        min_length=1,
        description="Tiers of roles that are offered whole requests; a tier is used when the ones before it have no worker.",
    )
    heartbeat_request_tokens: NonNegativeInt = Field(
        256, description="What one running or waiting request of a heartbeat weighs against this gateway's own tokens in flight."
    )
    breaker_failures: PositiveInt = Field(3, description="Faults in a row that take a worker or a pair out.")
    breaker_cooldown_s: float = Field(10.0, gt=0, description="How long it stays out before one request may try it again.")
