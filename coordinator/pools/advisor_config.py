"""Settings of the advisor, frozen: `[advisor]` of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_S = 604_800.0
"""A week: the longest time that any of them may be."""


class AdvisorSettings(BaseModel):
    """When workers move between the phases, and what undoes it. Goals that are None are `gateway.auto.slo_ttft_s` and
    `slo_tpot_s`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = Field(False, description="Look, and propose.")
    apply: bool = Field(False, description="Carry out what is proposed, and roll back what has made goodput worse.")
    ttft_goal_s: float | None = Field(None, gt=0, le=MAX_S)
    tpot_goal_s: float | None = Field(None, gt=0, le=MAX_S)
    interval_s: float = Field(5.0, ge=0.05, le=3600, description="Between two looks.")
    window_s: float = Field(
        60.0, gt=0, le=86_400, description="What one look takes into account; pools have to stand still for it."
    )
    hold_s: float = Field(
        90.0, ge=0, le=MAX_S, description="A change has to have been worth all the requests of so long, as far as is known."
    )
    dwell_s: float = Field(600.0, ge=0, le=MAX_S, description="From one change to the next, at least.")
    horizon_s: float = Field(1800.0, gt=0, le=MAX_S, description="For so long a change is taken to gain what it gains now.")
    min_gain: float = Field(0.05, ge=0, le=1, description="A change that brings fewer of the requests in time is none; a share.")
    margin: float = Field(0.1, gt=0, lt=1, description="By which share goodput has to fall after a change to be rolled back.")
    comparable: float = Field(
        0.25, gt=0, lt=1, description="Loads that differ by no more than this share are compared with each other."
    )
    backoff_s: float = Field(
        3600.0, ge=0, le=MAX_S, description="After a roll-back; doubles with each one in a row, up to 8 times."
    )
    relabel_s: float = Field(5.0, ge=0, le=86_400, description="Of a relabelling, until one has been measured.")
    restart_s: float = Field(300.0, ge=0, le=86_400, description="Of a drain and a start, until one has been measured.")

    @model_validator(mode="after")
    def _ordered(self) -> AdvisorSettings:
        if self.window_s < 2 * self.interval_s:
            raise ValueError(f"window_s must be at least twice interval_s ({self.interval_s:g}), got {self.window_s:g}")
        if self.window_s > 1000 * self.interval_s:
            raise ValueError(f"window_s must be at most 1000 times interval_s ({self.interval_s:g}), got {self.window_s:g}")
        if self.apply and not self.enabled:
            raise ValueError("apply is true and enabled is not: what nobody proposes is not carried out")
        return self
