"""What the store keeps of a worker's heartbeat, as JSON: who it is and where it is reached, not what it holds. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from coordinator.pools.reports import Beat, ProcessRef
from coordinator.routing.views import RankView, Role, WorkerState, WorkerView


def lasting(beat: Beat) -> Beat:
    """The part of a heartbeat that is the same in the next one."""
    view = replace(beat.view, running=0, waiting=0, leases=0, kv_usage=0.0, heartbeat_age_s=0.0, detail="")
    return replace(beat, view=view, refusing=False, uptime_s=0.0, resources=None, former_legs=0)


def to_json(beat: Beat) -> str:
    """`lasting` of it. Bytes are written in hex."""
    return json.dumps(asdict(lasting(beat)), default=bytes.hex)


def from_json(text: str) -> Beat:
    """The other direction."""
    kept: dict[str, Any] = json.loads(text)
    view: dict[str, Any] = kept.pop("view")
    ranks = tuple(RankView(**{**rank, "ucx_worker_address": bytes.fromhex(rank["ucx_worker_address"])}) for rank in view["ranks"])
    view |= {
        "role": Role(view["role"]),
        "state": WorkerState(view["state"]),
        "fingerprint": bytes.fromhex(view["fingerprint"]),
        "transports": tuple(view["transports"]),
        "ranks": ranks,
    }
    processes = tuple(ProcessRef(ref["pid"], ref["started_s"], tuple(ref["segments"])) for ref in kept.pop("processes"))
    return Beat(view=WorkerView(**view), processes=processes, **kept)
