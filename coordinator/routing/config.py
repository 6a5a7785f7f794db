"""Settings of routing, frozen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)

from coordinator.routing.views import Placement, Role

MAX_SLO_MS = 3_600_000.0
"""The longest TTFT or TPOT that may be asked for."""


class RoutingSettings(BaseModel):
    """How the workers of a path are chosen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["least_loaded", "power_of_two", "prefix_aware", "session_affinity", "round_robin"] = Field(
        "least_loaded", description="Who computes a prompt: the prefill worker of a pair, or the worker of a whole request."
    )
    decode_policy: Literal["least_loaded", "power_of_two", "round_robin"] = Field(
        "least_loaded", description="Who decodes, when another worker computes the prompt."
    )
    placement: Placement = Field(
        Placement.ANY,
        description="Where the decode worker of a pair is, seen from its prefill worker. prefer_node, prefer_rack: in the same "
        "place, before the policies choose and within placement_imbalance_tokens. spread: on another node, likewise. "
        "require_node, require_rack: in the same place, or there is no pair. A rack is what coordinator.placement.rack_label "
        "names; a node without it is a rack of its own.",
    )
    placement_imbalance_tokens: NonNegativeInt = Field(
        16_384, description="How much more load than the least loaded pair one that is placed well may have to be taken."
    )
    max_load_ratio: float = Field(
        1.2,
        ge=1.0,
        description="prefix_aware and session_affinity pass over a worker that would be loaded above this times the mean.",
    )
    idle_tokens: NonNegativeInt = Field(16_384, description="A worker with no more load than this is never passed over for it.")
    prefix_hit_weight: float = Field(
        10.0, ge=1.0, description="How many tokens of load one token of the prompt outweighs that need not be computed."
    )
    prefix_block_tokens: PositiveInt = Field(
        128, description="Prompts are compared block by block of so many tokens; a shared beginning that is shorter is not seen."
    )
    prefix_index_blocks: PositiveInt = Field(
        524_288, description="Entries of the index (one worker, one block; about 0.4 KiB), shared evenly by the workers."
    )
    prefix_worker_tokens: PositiveInt = Field(
        262_144, description="KV that a worker can cache, for workers that do not say it themselves."
    )
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


class KeyObjective(BaseModel):
    """What requests with one API key are to meet. The key itself is in no configuration: only its SHA-256 is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key_sha256: str = Field(description="Of the key's bytes, 64 hexadecimal digits.")
    ttft_ms: float = Field(gt=0, le=MAX_SLO_MS, allow_inf_nan=False)
    tpot_ms: float = Field(gt=0, le=MAX_SLO_MS, allow_inf_nan=False)

    @field_validator("key_sha256", mode="before")
    @classmethod
    def _digest(cls, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
            # What was given is not shown: it may be the key.
            raise ValueError("must be the SHA-256 of the key, 64 hexadecimal digits")
        return value.lower()


KeyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class AutoPathSettings(BaseModel):
    """Path `auto`: chosen per request by the predicted TTFT and TPOT of both paths."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_file: Path | None = Field(
        None,
        description="What predictions start from: step times (JSON) or a break-even map with a fit. None: no path auto.",
    )
    slo_ttft_s: PositiveFloat = Field(1.0, description="For requests that bring no objective of their own.")
    slo_tpot_s: PositiveFloat = Field(0.05, description="For requests that bring no objective of their own.")
    hysteresis: NonNegativeFloat = Field(
        0.1,
        description="How much less of the objective the other path must use before requests of a kind change over, as a share, "
        "where both add as few misses.",
    )
    explore_share: float = Field(0.02, ge=0, le=0.5, description="Of the requests that go the other way, so that a drift shows.")
    learning_rate: float = Field(0.02, gt=0, le=1, description="The weight of one request in the correction of a prediction.")
    decisions: PositiveInt = Field(4096, description="The last decisions, remembered for `splitpoint decisions`.")
    keys: dict[KeyName, KeyObjective] = Field(
        default_factory=dict,
        description="By a name of yours: what requests with an API key are to meet. A key is looked up, never checked.",
    )

    @model_validator(mode="after")
    def _keys_count(self) -> AutoPathSettings:
        names: dict[str, str] = {}
        for name, key in self.keys.items():
            if (other := names.setdefault(key.key_sha256, name)) != name:
                raise ValueError(f"keys.{name}.key_sha256 is that of keys.{other}: which objective would be meant?")
        if self.keys and self.model_file is None:
            raise ValueError("keys are for path auto, which needs model_file")
        return self

    @property
    def key_names(self) -> dict[str, str]:
        """The name of each key, by its SHA-256."""
        return {key.key_sha256: name for name, key in self.keys.items()}
