"""What routing sees of a worker. Pure values; the coordinator publishes them, gateways add what they know themselves."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from protos.ids import Incarnation, WorkerId


class Role(enum.StrEnum):
    """A worker's label. Every worker can serve every leg; the label says which ones it is offered."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class WorkerState(enum.StrEnum):
    PLACED = "placed"
    """A spare's place is reserved, and its engine not started."""
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Placement(enum.StrEnum):
    """Where the decode worker of a pair is, seen from its prefill worker: `routing.placement` goes by it."""

    ANY = "any"
    PREFER_NODE = "prefer_node"
    REQUIRE_NODE = "require_node"
    PREFER_RACK = "prefer_rack"
    REQUIRE_RACK = "require_rack"
    SPREAD = "spread"
    """On another node, preferably."""

    @property
    def required(self) -> bool:
        return self in (Placement.REQUIRE_NODE, Placement.REQUIRE_RACK)

    @property
    def refusal(self) -> str:
        """What a prefill worker without such a partner is counted as."""
        return f"placement_{self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank's transfer node, as peers reach it."""

    rank: int
    address: str
    host_id: str
    ucx_worker_address: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as the coordinator last saw it.

    `fingerprint` is equal for workers that can exchange KV, of whatever shape; `running`, `waiting` and `kv_usage` are as old as
    `heartbeat_age_s`. `max_transfer_tokens` is the longest prompt whose KV fits both of this worker's staging pools.
    `kv_capacity_tokens` is how much KV its engine holds, live and cached together; 0: not known. A `cordoned` worker finishes
    what it has and is offered nothing new, and so does a `spare`, until it is needed. `node_id` is the Ray node it runs on,
    `rack` the value of that node's `coordinator.placement.rack_label`, "" where it has none. A `silent` one does
    not answer the coordinator: it is offered what nobody else can take.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    pool: str
    role: Role
    state: WorkerState
    address: str
    pid: int
    fingerprint: bytes
    ranks: tuple[RankView, ...]
    max_transfer_tokens: int
    transports: tuple[str, ...]
    running: int = 0
    waiting: int = 0
    leases: int = 0
    kv_usage: float = 0.0
    heartbeat_age_s: float = 0.0
    kv_capacity_tokens: int = 0
    cordoned: bool = False
    spare: bool = False
    detail: str = ""
    node_id: str = ""
    rack: str = ""
    silent: bool = False
