"""Settings of the pools' shell, frozen. Composed into the whole configuration by `coordinator.config`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Strategy = Literal["pack", "spread", "same_host", "same_rack"]
DurableGcs = Literal["rocksdb", "redis"]
"""In Ray's own words."""


class PlacementSettings(BaseModel):
    """On which nodes of a Ray cluster workers go. `pools.placement` decides by it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategy: Strategy = Field(
        "pack",
        description='"pack": Ray chooses. "spread": each pool over as many nodes as there are. "same_host", "same_rack": prefill '
        "and decode workers in pairs.",
    )
    rack_label: str = Field("splitpoint/rack", description="The Ray node label that names a node's rack, for same_rack.")
    gateways: Literal["head", "spread"] = Field(
        "head",
        description='"head": beside the coordinator. "spread": over all nodes, one after the other; their hosts are then "auto" '
        "or 0.0.0.0, and each is found at its own node's address.",
    )
    pool_labels: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="By pool: Ray node labels that a node must have to get its workers."
    )
