"""What a worker says of itself, in one value: for its Ray actor's heartbeats, and for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.worker.server import WorkerServer
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHeartbeat:
    """A snapshot. `running` are requests in the engine's batch; `waiting` are all other legs: in the engine's queue, or
    outside it for staging or for KV. `leases` is zero exactly when a drain need not wait for any (rule 10)."""

    worker_id: str
    incarnation: str
    address: str
    metrics_address: str
    serving: bool
    draining: bool
    running: int = 0
    waiting: int = 0
    leases: int = 0
    kv_usage: float = 0.0
    send_staging_used: float = 0.0
    """Share of the fullest rank, quarantined bytes included."""
    receive_staging_used: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    """The worker's events, and its ranks' added up under `rank_...`."""
    kv_blocks_held: int = 0
    legs: int = 0
    """Running legs and the cleanups after them."""
    rank_leases: int = 0
    rank_sessions: int = 0
    lease_states: dict[str, int] = field(default_factory=dict)
    session_states: dict[str, int] = field(default_factory=dict)
    rank_tasks: int = 0
    """Asyncio tasks of the ranks' transfer nodes."""
    send_staging: kv_transfer_pb2.StagingStatus = field(default_factory=kv_transfer_pb2.StagingStatus)
    """All ranks together, bytes."""
    receive_staging: kv_transfer_pb2.StagingStatus = field(default_factory=kv_transfer_pb2.StagingStatus)
    device_memory_bytes: int = 0
    """What the ranks have reserved on their GPUs."""
    dead: str = ""
    """Why the engine cannot serve any more."""
    detail: str = ""
    """A rank that does not answer."""
    rank_lost: bool = False
    """Nobody listens where a rank did: its transfer node has ended, or its process. One that is only slow is not lost."""


async def heartbeat(server: WorkerServer, timeout_s: float) -> WorkerHeartbeat:
    """Ask the engine and the ranks, each at most `timeout_s`. Never raises for a rank or an engine that is silent or dead."""
    counters = dict(server.metrics.events)
    leases, send, receive, detail, rank_lost = server.open_transfers(), 0.0, 0.0, "", False
    ranks: list[kv_transfer_pb2.GetNodeStatusResponse] = []
    try:
        ranks = await server.rank_status(timeout_s)
    except (TimeoutError, SplitpointError) as error:
        server.metrics.event("status_failed")
        detail = f"a rank does not answer: {error or 'timed out'}"
        rank_lost = isinstance(error, SplitpointError) and error.code is Code.WORKER_LOST
        # It may hold some: a drain must not end because nobody could be asked.
        leases = max(leases, 1)
    else:
        leases = max([leases, *(r.leases + r.sessions for r in ranks)])
        send = max((_share(r.send) for r in ranks), default=0.0)
        receive = max((_share(r.receive) for r in ranks), default=0.0)
        for rank in ranks:
            for name, value in rank.counters.items():
                counters[f"rank_{name}"] = counters.get(f"rank_{name}", 0) + value
    load = server.engine.load() if server.engine is not None else None
    running = load.running if load is not None else 0
    return WorkerHeartbeat(
        worker_id=server.identity.worker_id,
        incarnation=server.identity.incarnation,
        address=server.address,
        metrics_address=server.metrics_address,
        serving=server.serving,
        draining=server.draining,
        running=running,
        waiting=max(load.waiting if load is not None else 0, len(server.attempts) - running),
        leases=leases,
        kv_usage=load.kv_usage if load is not None else 0.0,
        send_staging_used=send,
        receive_staging_used=receive,
        counters=counters,
        kv_blocks_held=round(load.kv_usage * server.info.num_kv_blocks) if load is not None and server.info is not None else 0,
        legs=server.attempts.busy,
        rank_leases=sum(r.leases for r in ranks),
        rank_sessions=sum(r.sessions for r in ranks),
        lease_states=dict(sum((Counter(r.lease_states) for r in ranks), Counter())),
        session_states=dict(sum((Counter(r.session_states) for r in ranks), Counter())),
        rank_tasks=sum(r.tasks for r in ranks),
        send_staging=_sum(r.send for r in ranks),
        receive_staging=_sum(r.receive for r in ranks),
        device_memory_bytes=sum(r.device_memory_bytes for r in ranks),
        dead=str(server.engine_death or ""),
        detail=detail,
        rank_lost=rank_lost,
    )


def _sum(stagings: Iterable[kv_transfer_pb2.StagingStatus]) -> kv_transfer_pb2.StagingStatus:
    total = kv_transfer_pb2.StagingStatus()
    for staging in stagings:
        total.capacity_bytes += staging.capacity_bytes
        total.used_bytes += staging.used_bytes
        total.quarantined_bytes += staging.quarantined_bytes
    return total


def _share(staging: kv_transfer_pb2.StagingStatus) -> float:
    used = staging.used_bytes + staging.quarantined_bytes
    return used / staging.capacity_bytes if staging.capacity_bytes else 0.0
