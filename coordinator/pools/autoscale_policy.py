"""What an operator says about one autoscaled pool: Ray Serve's field names, and targets for each phase. Values; no I/O."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coordinator.routing.views import Role

DEFAULT_ONGOING_REQUESTS = 2.0
"""Ray Serve's own target, where none of ours is given."""
LOAD_TARGETS = ("target_ongoing_requests", "target_queued_tokens", "target_kv_usage", "target_decode_batch")
"""Each is for one worker; the pool gets as many workers as the largest of them wants."""
MAX_DELAY_S = 86_400.0
MAX_SAMPLES = 1000
"""Of one look-back period."""


class AutoscalePolicy(BaseModel):
    """Limits, targets and delays of one pool. Targets that are None say nothing.

    `target_queued_tokens` are prompt tokens whose first token is awaited, `target_kv_usage` a share of KV blocks,
    `target_decode_batch` sequences that run, each for one worker. `ttft_goal_s` and `tpot_goal_s` are to be kept by
    `target_attainment` of the requests. `tolerance`: by how much a load must miss its target before it counts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_replicas: int = Field(1, ge=0, le=4096)
    max_replicas: int = Field(ge=1, le=4096)
    target_ongoing_requests: float | None = Field(None, gt=0)
    target_queued_tokens: float | None = Field(None, gt=0)
    target_kv_usage: float | None = Field(None, gt=0, le=1)
    target_decode_batch: float | None = Field(None, gt=0)
    ttft_goal_s: float | None = Field(None, gt=0)
    tpot_goal_s: float | None = Field(None, gt=0)
    target_attainment: float = Field(0.95, gt=0, le=1)
    upscale_delay_s: float = Field(30.0, ge=0, le=MAX_DELAY_S)
    downscale_delay_s: float = Field(600.0, ge=0, le=MAX_DELAY_S)
    downscale_to_zero_delay_s: float | None = Field(None, ge=0, le=MAX_DELAY_S)
    metrics_interval_s: float = Field(10.0, ge=0.1, le=3600.0)
    look_back_period_s: float = Field(30.0, gt=0, le=3600.0)
    aggregation_function: Literal["mean", "max", "min"] = "mean"
    upscaling_factor: float = Field(1.0, gt=0, le=10)
    downscaling_factor: float = Field(1.0, gt=0, le=1)
    tolerance: float = Field(0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _ordered(self) -> AutoscalePolicy:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas must be at least min_replicas ({self.min_replicas}), got {self.max_replicas}")
        if self.look_back_period_s < self.metrics_interval_s:
            limit = f"metrics_interval_s ({self.metrics_interval_s:g})"
            raise ValueError(f"look_back_period_s must be at least {limit}, got {self.look_back_period_s:g}")
        if self.look_back_period_s > MAX_SAMPLES * self.metrics_interval_s:
            limit = f"{MAX_SAMPLES} times metrics_interval_s ({self.metrics_interval_s:g})"
            raise ValueError(f"look_back_period_s must be at most {limit}, got {self.look_back_period_s:g}")
        return self

    @property
    def targets(self) -> dict[str, float]:
        """The load targets that hold, by name. Without a target and without a goal it is Ray Serve's default."""
        given = {name: float(value) for name in LOAD_TARGETS if (value := getattr(self, name)) is not None}
        if not given and self.ttft_goal_s is None and self.tpot_goal_s is None:
            return {"target_ongoing_requests": DEFAULT_ONGOING_REQUESTS}
        return given

    def misplaced(self, role: Role) -> str:
        """Why a target can say nothing about workers of `role`; "" when all can. Fields are named."""
        if role is Role.DECODE and (self.ttft_goal_s is not None or self.target_queued_tokens is not None):
            return "ttft_goal_s and target_queued_tokens are for pools that compute prompts, this one decodes"
        if role is Role.PREFILL and (self.tpot_goal_s is not None or self.target_decode_batch is not None):
            return "tpot_goal_s and target_decode_batch are for pools that decode, this one computes prompts"
        return ""
