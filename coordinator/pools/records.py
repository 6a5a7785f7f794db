"""What the pools' decisions are made of: targets, and what is known of each worker. Values; no clock, no I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from coordinator.routing.views import Role, WorkerState
from protos.ids import WorkerId


class Restart(enum.StrEnum):
    """How a worker that is to be restarted makes room for its successor."""

    IN_PLACE = "in_place"
    """It goes first."""
    SURGE = "surge"
    """It goes when the successor serves, which takes the accelerators of one worker more."""


class SpareKind(enum.StrEnum):
    """What a pool keeps in reserve for each worker that it may lose."""

    WARM = "warm"
    """A worker whose engine runs and that gateways are connected to: it serves as soon as it is named."""
    PLACED = "placed"
    """A reserved place: the accelerators are its own, the engine is started when it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTarget:
    """What the operator wants of one pool.

    `engine` stands for the resolved engine arguments of its workers: equal where a worker of one pool can serve another as it
    runs. `ranks` is how many accelerators one worker takes, `start_timeout_s` how long its engine may take to start.
    `spares` workers of `spare_kind` stand by beside those that serve, as long as any are to serve.
    """

    name: str
    role: Role
    replicas: int
    engine: str = ""
    ranks: int = 1
    start_timeout_s: float = 300.0
    spares: int = 0
    spare_kind: SpareKind = SpareKind.WARM

    @property
    def workers(self) -> int:
        """Those that are to serve, and those that are to stand by: all that hold accelerators."""
        return self.replicas + self.spares if self.replicas else 0

    @property
    def running(self) -> int:
        """Those of its workers that have an engine."""
        return self.workers if self.spare_kind is SpareKind.WARM else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What is known of one worker. All times are seconds on the coordinator's monotonic clock.

    `pool` and `role` are its label, as the coordinator wants it; `label_heard` is False while its heartbeats carry another.
    `engine` is what it was started with, as in `PoolTarget`; None until it has been heard. `start_timeout_s` is its engine's.
    `heartbeat_s` is when the last heartbeat arrived. `probed_s` is when the last data-plane probe ended and
    `failed_probes` how many have failed in a row up to then, the first of them at `failing_since_s`; `host_silent`: the last
    of these heard nothing from its host at all. `drain_since_s` is when this worker confirmed that it refuses
    new legs; `idle_since_s` when its heartbeats began to report no request and no lease after that. `draining_until_s` is
    set as soon as a drain is wanted. `cordoned`: it serves what it has and is offered nothing new. `dead_reason` is set when
    its process is known to be gone. `restart`: it is to be replaced by a fresh one when its turn comes. `spare`: it stands by and
    is offered nothing. `node_id` is Ray's, of the node it runs on or has its place on, "" when that is not known;
    `place_reserved`: one that is `placed` has got its place.
    """

    worker_id: WorkerId
    pool: str
    role: Role
    state: WorkerState
    created_s: float
    engine: str | None = None
    ranks: int = 1
    start_timeout_s: float = 300.0
    label_heard: bool = True
    cordoned: bool = False
    heartbeat_s: float | None = None
    probed_s: float | None = None
    failed_probes: int = 0
    failing_since_s: float | None = None
    host_silent: bool = False
    draining_until_s: float | None = None
    drain_since_s: float | None = None
    idle_since_s: float | None = None
    dead_reason: str = ""
    restart: Restart | None = None
    spare: bool = False
    node_id: str = ""
    place_reserved: bool = False

    @property
    def leaving(self) -> bool:
        """It drains, or ends as soon as it would serve."""
        return self.state is WorkerState.DRAINING or self.draining_until_s is not None
