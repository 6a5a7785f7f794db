"""What requests make a running system hold, as its operators see it, and what it held when it was idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protos.splitpoint.v1 import admin_pb2

EXTRA_FILES = 4
"""Descriptors that one process tree may have more than when idle: Ray and gRPC open a connection now and then (a probe, a call
to an actor not spoken to before) and keep it a while. It does not grow with the number of requests."""


def held(status: admin_pb2.GetStatusResponse) -> dict[str, int]:
    """Everything that must be zero on an idle system and is not."""
    found: dict[str, int] = {}
    for gateway in status.gateways:
        found[f"{gateway.gateway_id} in_flight"] = gateway.in_flight
    for worker in status.workers:
        resources = worker.resources
        values = {
            "running": worker.running,
            "waiting": worker.waiting,
            "open transfers": worker.leases,
            "kv_blocks_held": resources.kv_blocks_held,
            "legs": resources.legs,
            "leases": resources.leases,
            "sessions": resources.sessions,
            "send used_bytes": resources.send_staging.used_bytes,
            "send quarantined_bytes": resources.send_staging.quarantined_bytes,
            "receive used_bytes": resources.receive_staging.used_bytes,
            "receive quarantined_bytes": resources.receive_staging.quarantined_bytes,
        }
        found |= {f"{worker.worker_id} {name}": value for name, value in values.items()}
    return {name: value for name, value in found.items() if value}


def counts(status: admin_pb2.GetStatusResponse) -> tuple[dict[str, int], dict[str, int]]:
    """Asyncio tasks, and open files, of every process tree by its name."""
    tasks = {w.worker_id: w.resources.tasks for w in status.workers} | {g.gateway_id: g.tasks for g in status.gateways}
    files = {w.worker_id: w.resources.open_files for w in status.workers} | {g.gateway_id: g.open_files for g in status.gateways}
    return tasks, files


@dataclass(frozen=True)
class Idle:
    """The most tasks and files that each process tree had in several looks at an idle system."""

    tasks: Mapping[str, int]
    files: Mapping[str, int]

    @staticmethod
    def of(looks: list[admin_pb2.GetStatusResponse]) -> Idle:
        tasks: dict[str, int] = {}
        files: dict[str, int] = {}
        for status in looks:
            for most, now in zip((tasks, files), counts(status), strict=True):
                most.update({name: max(value, most.get(name, 0)) for name, value in now.items()})
        return Idle(tasks, files)

    def exceeded(self, status: admin_pb2.GetStatusResponse) -> dict[str, str]:
        """What is above the idle counts now; processes that were not there before are left out."""
        tasks, files = counts(status)
        over = {f"{n} tasks": f"{v}, idle {self.tasks[n]}" for n, v in tasks.items() if v > self.tasks.get(n, v)}
        limit = {name: value + EXTRA_FILES for name, value in self.files.items()}
        return over | {f"{n} files": f"{v}, idle {self.files[n]}" for n, v in files.items() if v > limit.get(n, v)}
