"""A worker whose death is known, or that is given up, leaves the membership at once, whether or not the GCS answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.config import load
from coordinator.pools import ray_workers
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.ray_workers import Workers
from coordinator.pools.reconcile import FenceWorker, ForgetWorker
from coordinator.pools.reports import Beat, ProcessRef
from coordinator.pools.store import Store
from coordinator.routing.views import Role, WorkerState
from protos.ids import WorkerId
from tests.support.views import worker_view

LOST = WorkerId("decode-1")
NOW = 100.0


class Ray:
    """What is asked of it: `killed` of the worker's node, `freed` of the GCS, which is away until it is told otherwise."""

    def __init__(self) -> None:
        self.away = True
        self.killed: list[WorkerId] = []
        self.freed: list[WorkerId] = []

    async def kill_worker(self, worker_id: WorkerId, beat: Beat | None) -> None:
        self.killed.append(worker_id)

    async def gcs_call(self, call: Any, *args: Any) -> Any:
        if self.away:
            raise TimeoutError
        return call(*args)

    def free_worker(self, worker_id: WorkerId, handle: object) -> None:
        self.freed.append(worker_id)


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake = Ray()
    for name in ("kill_worker", "gcs_call", "free_worker"):
        monkeypatch.setattr(ray_workers, name, getattr(fake, name))
    return fake


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    settings = load(sets=["engine.kind=simulated", f"coordinator.state_dir={tmp_path}"], environment={})
    store, fleet = Store(tmp_path / "state.sqlite3"), Fleet()
    store.begin_run("run", settings.pools)
    pools = DesiredPools(settings, store, fleet, rules_of(settings).whole_roles)
    fleet.created(LOST, "decode", Role.DECODE, 0, NOW)
    view = worker_view(LOST, Role.DECODE)
    fleet.heard(Beat(view=view, slot=0, node_id="n", processes=(ProcessRef(7, 1.0),), refusing=False, uptime_s=1.0), NOW)
    yield Workers(SimpleNamespace(settings=settings), store, fleet, pools, asyncio.Event())  # type: ignore[arg-type]
    store.close()


async def carried_out(workers: Workers, action: FenceWorker | ForgetWorker) -> None:
    workers.carry_out(action, NOW)
    await asyncio.gather(*workers._busy.values())


async def test_a_fenced_worker_is_dead_before_the_gcs_has_given_its_place_back(workers: Workers, gcs: Ray) -> None:
    await carried_out(workers, FenceWorker(LOST, "silent"))
    assert gcs.killed == [LOST]
    assert [view.state for view in workers._fleet.views(NOW)] == [WorkerState.DEAD]
    assert workers._store.fences() == [worker_view(LOST).incarnation], "its peers are told"
    gcs.away = False
    await carried_out(workers, ForgetWorker(LOST, "silent"))
    assert gcs.freed == [LOST]
    assert not workers._fleet.members


async def test_a_worker_of_a_silent_host_is_given_up_without_the_gcs(workers: Workers, gcs: Ray) -> None:
    workers._fleet.probed(LOST, False, NOW, host_silent=True)
    await carried_out(workers, FenceWorker(LOST, "silent"))
    assert not gcs.killed
    assert [view.state for view in workers._fleet.views(NOW)] == [WorkerState.DEAD]
    assert not workers._store.fences(), "it is not known to be dead"
