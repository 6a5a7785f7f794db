"""Desired state survives the process that wrote it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.config import PoolSettings
from coordinator.pools.reports import ProcessRef
from coordinator.pools.store import SCHEMA_VERSION, KnownProcess, Store, StoredPools, StoreVersionError, check_version
from coordinator.routing.views import Role
from protos.ids import WorkerId

PREFILL = {"prefill": PoolSettings(role=Role.PREFILL)}
DECODE = {"decode": PoolSettings(role=Role.DECODE, replicas=2, engine={"max_num_seqs": 4})}
BOTH = PREFILL | DECODE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state.sqlite3"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store(path)
    yield store
    store.close()


def test_a_run_keeps_what_operators_asked_for_across_a_restart(store: Store, path: Path) -> None:
    assert store.begin_run("run-1", BOTH)
    before = store.desired().version
    more = PREFILL | {"decode": PoolSettings(role=Role.DECODE, replicas=5, engine={"max_num_seqs": 8})}
    given = store.put_pools(more, budget_ranks=6)
    store.put_label(WorkerId("prefill-3"), "decode")
    store.put_cordoned(WorkerId("decode-2"), True)
    assert given > before
    store.put_draining(WorkerId("decode-1"), 60)
    again = Store(path)
    assert not again.begin_run("run-1", BOTH)
    assert again.desired() == StoredPools(version=given, budget_ranks=6, pools=more)
    assert list(again.desired().pools) == ["prefill", "decode"]
    assert set(again.draining()) == {"decode-1"}
    assert again.labels() == {"prefill-3": "decode"}
    assert again.cordoned() == {"decode-2"}
    again.close()


def test_a_new_run_starts_from_its_own_configuration(store: Store) -> None:
    store.begin_run("run-1", BOTH)
    store.put_draining(WorkerId("decode-1"), 60)
    store.put_label(WorkerId("prefill-3"), "decode")
    store.put_cordoned(WorkerId("decode-2"), True)
    version = store.desired().version
    assert store.begin_run("run-2", DECODE)
    assert store.desired().pools == DECODE
    assert store.desired().version > version, "a version is never given twice"
    assert (store.draining(), store.labels(), store.cordoned()) == ({}, {}, set())


def test_worker_ids_are_never_given_twice(store: Store, path: Path) -> None:
    store.begin_run("run-1", DECODE)
    given = [store.next_worker_id("decode"), store.next_worker_id("decode"), store.next_worker_id("prefill")]
    store.close()
    again = Store(path)
    again.begin_run("run-2", DECODE)
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
    store.put_label(WorkerId("decode-1"), "prefill")
    store.put_cordoned(WorkerId("decode-1"), True)
    store.forget(WorkerId("decode-1"))
    store.forget(WorkerId("decode-1"))
    assert (store.draining(), store.labels(), store.cordoned()) == ({}, {}, set())


def test_a_cordon_is_taken_back(store: Store) -> None:
    for cordoned in (True, True, False, False):
        store.put_cordoned(WorkerId("decode-1"), cordoned)
    assert store.cordoned() == set()


def test_a_negative_target_is_refused_by_the_disk_too_and_nothing_of_it_stays(store: Store) -> None:
    store.begin_run("run-1", BOTH)
    before = store.desired()
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        store.put_pools({"decode": PoolSettings.model_construct(role=Role.DECODE, replicas=-1, engine={})}, 1)
    assert store.desired() == before
    assert store.put_pools(BOTH, 1) > before.version


def test_a_file_of_an_older_version_is_taken_over(path: Path) -> None:
    path.parent.mkdir(parents=True)
    old = sqlite3.connect(path)
    old.executescript(
        "CREATE TABLE pool (name TEXT PRIMARY KEY, role TEXT NOT NULL, replicas INTEGER NOT NULL);"
        "INSERT INTO pool VALUES ('decode', 'decode', 3);"
    )
    old.close()
    store = Store(path)
    assert store.begin_run("run-1", BOTH)
    assert store.desired().pools == BOTH
    store.close()


def test_a_file_from_before_versions_keeps_only_what_is_never_given_twice(store: Store, path: Path) -> None:
    store.begin_run("run-1", BOTH)
    store.next_worker_id("decode")
    version = store.desired().version
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.executescript(
            "PRAGMA user_version = 0; DROP TABLE process; CREATE TABLE process (worker_id TEXT PRIMARY KEY, refs TEXT NOT NULL);"
        )
    again = Store(path)
    assert again.begin_run("run-1", DECODE), "the run of an older version is over"
    assert (again.desired().pools, again.desired().version) == (DECODE, version + 1)
    assert again.next_worker_id("decode") == "decode-2"
    assert again.processes() == []
    again.close()


def test_a_file_of_a_newer_version_is_refused_by_name_and_left_as_it_is(store: Store, path: Path) -> None:
    store.begin_run("run-1", BOTH)
    store.close()
    newer = SCHEMA_VERSION + 1
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {newer}")
    for opens in (Store, check_version):
        with pytest.raises(StoreVersionError, match=f"schema version {newer}.*up to {SCHEMA_VERSION}.*coordinator.state_dir"):
            opens(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (newer,)
        assert db.execute("SELECT run_id FROM run").fetchone() == ("run-1",)


def test_deaths_that_are_still_to_be_told_survive_a_restart_and_no_new_run(store: Store, path: Path) -> None:
    store.begin_run("run-1", PREFILL)
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
    store.begin_run("run-2", PREFILL)
    assert (store.processes(), store.fences()) == ([], [])
