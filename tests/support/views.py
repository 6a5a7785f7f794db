"""Worker views for tests of routing and of the gateway."""

from __future__ import annotations

from coordinator.routing.views import RankView, Role, WorkerState, WorkerView
from protos.ids import Incarnation, WorkerId


def worker_view(
    name: str,
    role: Role = Role.PREFILL,
    *,
    state: WorkerState = WorkerState.READY,
    fingerprint: bytes = b"same",
    transports: tuple[str, ...] = ("ucx", "grpc"),
    max_transfer_tokens: int = 4096,
    running: int = 0,
    waiting: int = 0,
    kv_capacity_tokens: int = 0,
    address: str = "127.0.0.1:1",
    cordoned: bool = False,
    pool: str = "",
    node_id: str = "",
    rack: str = "",
) -> WorkerView:
    """A ready worker whose incarnation is `name` with "-i" appended, of the pool of its role's name unless told."""
    return WorkerView(
        worker_id=WorkerId(name),
        incarnation=Incarnation(f"{name}-i"),
        pool=pool or role.value,
        role=role,
        state=state,
        address=address,
        pid=1,
        fingerprint=fingerprint,
        ranks=(RankView(rank=0, address="127.0.0.1:2", host_id="host", ucx_worker_address=b"ucx"),),
        max_transfer_tokens=max_transfer_tokens,
        transports=transports,
        running=running,
        waiting=waiting,
        cordoned=cordoned,
        kv_capacity_tokens=kv_capacity_tokens,
        node_id=node_id,
        rack=rack,
    )
