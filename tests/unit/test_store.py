"""Desired state survives the process that wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.pools.reconcile import PoolTarget
from coordinator.pools.reports import ProcessRef
from coordinator.pools.store import KnownProcess, Store
from coordinator.routing.views import Role
from protos.ids import WorkerId

PREFILL = PoolTarget(name="prefill", role=Role.PREFILL, replicas=1)
DECODE = PoolTarget(name="decode", role=Role.DECODE, replicas=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state.sqlite3"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store(path)
    yield store
    store.close()


def test_a_run_keeps_what_operators_asked_for_across_a_restart(store: Store, path: Path) -> None:
    assert store.begin_run("run-1", [PREFILL, DECODE])
    store.put_target(PoolTarget(name="decode", role=Role.DECODE, replicas=5))
    store.put_draining(WorkerId("decode-1"), 60)
    again = Store(path)
    assert not again.begin_run("run-1", [PREFILL, DECODE])
    assert [(t.name, t.replicas) for t in again.targets()] == [("prefill", 1), ("decode", 5)]
    assert set(again.draining()) == {"decode-1"}
    again.close()


def test_a_new_run_starts_from_its_own_configuration(store: Store) -> None:
    store.begin_run("run-1", [PREFILL, DECODE])
    store.put_draining(WorkerId("decode-1"), 60)
    assert store.begin_run("run-2", [DECODE])
    assert store.targets() == [DECODE]
    assert store.draining() == {}


def test_worker_ids_are_never_given_twice(store: Store, path: Path) -> None:
    store.begin_run("run-1", [DECODE])
    given = [store.next_worker_id("decode"), store.next_worker_id("decode"), store.next_worker_id("prefill")]
    store.close()
    again = Store(path)
    again.begin_run("run-2", [DECODE])
    given.append(again.next_worker_id("decode"))
    assert given == ["decode-1", "decode-2", "prefill-1", "decode-3"]
    again.close()


def test_a_drain_keeps_its_earlier_end(store: Store) -> None:
    store.put_draining(WorkerId("decode-1"), 10)
    store.put_draining(WorkerId("decode-1"), 1000)
    assert 0 < store.draining()[WorkerId("decode-1")] <= 10
    store.put_draining(WorkerId("decode-1"), -5)
    assert store.draining()[WorkerId("decode-1")] <= -5


def test_forgetting_is_idempotent(store: Store) -> None:
    store.put_draining(WorkerId("decode-1"), 10)
    store.forget(WorkerId("decode-1"))
    store.forget(WorkerId("decode-1"))
    assert store.draining() == {}


def test_a_negative_target_is_refused_by_the_disk_too(store: Store) -> None:
    with pytest.raises(Exception, match="CHECK"):
        store.put_target(PoolTarget(name="decode", role=Role.DECODE, replicas=-1))


def test_deaths_that_are_still_to_be_told_survive_a_restart_and_no_new_run(store: Store, path: Path) -> None:
    store.begin_run("run-1", [PREFILL])
    served = KnownProcess(
        worker_id=WorkerId("prefill-1"),
        incarnation="inc-1",
        node_id="n",
        processes=(ProcessRef(7, 1.5, ("psm_a",)), ProcessRef(8, 2.0)),
    )
    store.put_process(served)
    store.put_process(served)
    again = Store(path)
    assert again.processes() == [served]
    again.put_fence("inc-1")
    again.put_fence("inc-1")
    again.forget(WorkerId("prefill-1"))
    assert (again.processes(), again.fences()) == ([], ["inc-1"])
    again.close()
    assert store.fences() == ["inc-1"]
    store.fenced("inc-1")
    store.fenced("inc-1")
    assert store.fences() == []
    store.put_process(served)
    store.put_fence("inc-0")
    store.begin_run("run-2", [PREFILL])
    assert (store.processes(), store.fences()) == ([], [])
