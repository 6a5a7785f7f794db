"""Desired state on the head's disk: pool targets, draining workers, the next worker number. SQLite, one small file.

Survives the coordinator actor. What is *actual* is asked of the live workers; stored of it is only what the dead cannot say any
more: which processes served, and whose deaths are still to be told.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.pools.reconcile import PoolTarget
from coordinator.pools.reports import ProcessRef
from coordinator.routing.views import Role
from protos.ids import WorkerId

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pool (name TEXT PRIMARY KEY, role TEXT NOT NULL, replicas INTEGER NOT NULL CHECK (replicas >= 0));
CREATE TABLE IF NOT EXISTS draining (worker_id TEXT PRIMARY KEY, until_unix_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS run (only INTEGER PRIMARY KEY CHECK (only = 0), run_id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS process
  (worker_id TEXT PRIMARY KEY, incarnation TEXT NOT NULL, node_id TEXT NOT NULL, refs TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS fence (incarnation TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProcess:
    """A worker that served, and what to kill to be sure that it is dead."""

    worker_id: WorkerId
    incarnation: str
    node_id: str
    processes: tuple[ProcessRef, ...]


class Store:
    """One connection, used from one thread. Every call is one transaction and is on disk when it returns.

    Raises:
        sqlite3.Error: the disk or the file is broken; callers let it end the coordinator, whose restart retries.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)

    def begin_run(self, run_id: str, targets: Sequence[PoolTarget]) -> bool:
        """A new run takes `targets` and forgets the former run's drains; the same run, after a restart of the coordinator,
        keeps what operators have asked for since. True for a new run."""
        row = self._db.execute("SELECT run_id FROM run").fetchone()
        if row is not None and row[0] == run_id:
            return False
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("INSERT OR REPLACE INTO run VALUES (0, ?)", (run_id,))
        self._db.execute("DELETE FROM pool")
        for table in ("draining", "process", "fence"):
            self._db.execute(f"DELETE FROM {table}")
        self._db.executemany("INSERT INTO pool VALUES (?, ?, ?)", [(t.name, t.role.value, t.replicas) for t in targets])
        self._db.execute("COMMIT")
        return True

    def targets(self) -> list[PoolTarget]:
        """In the order they were first put."""
        rows = self._db.execute("SELECT name, role, replicas FROM pool ORDER BY rowid")
        return [PoolTarget(name=name, role=Role(role), replicas=replicas) for name, role, replicas in rows]

    def put_target(self, target: PoolTarget) -> None:
        self._db.execute(
            "INSERT INTO pool VALUES (?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET role = excluded.role, replicas = excluded.replicas",
            (target.name, target.role.value, target.replicas),
        )

    def draining(self) -> dict[WorkerId, float]:
        """Seconds left of each drain; negative when its time is over. Kept as wall-clock time: it must survive a restart."""
        now = time.time()
        return {WorkerId(worker): until - now for worker, until in self._db.execute("SELECT * FROM draining")}

    def put_draining(self, worker_id: WorkerId, timeout_s: float) -> None:
        """Keeps the earlier end when the worker is draining already."""
        self._db.execute(
            "INSERT INTO draining VALUES (?, ?)"
            " ON CONFLICT (worker_id) DO UPDATE SET until_unix_s = min(until_unix_s, excluded.until_unix_s)",
            (worker_id, time.time() + timeout_s),
        )

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone. Idempotent."""
        self._db.execute("DELETE FROM draining WHERE worker_id = ?", (worker_id,))
        self._db.execute("DELETE FROM process WHERE worker_id = ?", (worker_id,))

    def put_process(self, known: KnownProcess) -> None:
        """A worker serves: should it die while no coordinator runs, the next one can make sure and tell the others."""
        refs = json.dumps([[ref.pid, ref.started_s, list(ref.segments)] for ref in known.processes])
        row = (known.worker_id, known.incarnation, known.node_id, refs)
        self._db.execute("INSERT OR REPLACE INTO process VALUES (?, ?, ?, ?)", row)

    def processes(self) -> list[KnownProcess]:
        """Workers that served and were not forgotten."""
        rows = self._db.execute("SELECT worker_id, incarnation, node_id, refs FROM process ORDER BY rowid")
        return [
            KnownProcess(
                worker_id=WorkerId(worker_id),
                incarnation=incarnation,
                node_id=node_id,
                processes=tuple(ProcessRef(pid, started_s, tuple(segments)) for pid, started_s, segments in json.loads(refs)),
            )
            for worker_id, incarnation, node_id, refs in rows
        ]

    def put_fence(self, incarnation: str) -> None:
        """This process is known dead, and not every other worker has heard so yet. Idempotent."""
        self._db.execute("INSERT OR IGNORE INTO fence VALUES (?)", (incarnation,))

    def fences(self) -> list[str]:
        """Deaths of which some worker may not have heard."""
        return [incarnation for (incarnation,) in self._db.execute("SELECT incarnation FROM fence ORDER BY rowid")]

    def fenced(self, incarnation: str) -> None:
        """Everybody has heard. Idempotent."""
        self._db.execute("DELETE FROM fence WHERE incarnation = ?", (incarnation,))

    def next_worker_id(self, pool: str) -> WorkerId:
        """Never given twice, also after a restart."""
        row = self._db.execute(
            "INSERT INTO counter VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value",
            (f"worker/{pool}",),
        ).fetchone()
        return WorkerId(f"{pool}-{row[0]}")

    def close(self) -> None:
        self._db.close()
