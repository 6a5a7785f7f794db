"""Desired state on the head's disk: pools, autoscalers, labels, spares, drains, cordons, the next worker number.

SQLite, one small file. Survives the coordinator actor. What is *actual* is asked of the live workers; stored of it is only what
the dead cannot say any more: which processes served, and whose deaths are still to be told.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.config import PoolSettings
from coordinator.pools import kept_beat
from coordinator.pools.records import Restart, SpareKind
from coordinator.pools.reports import Beat, ProcessRef
from coordinator.routing.views import Role
from protos.ids import WorkerId

SCHEMA_VERSION = 5
"""Of the tables below; raise it with every change of one. 0: a new file, or one of before versions were written."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pool (name TEXT PRIMARY KEY, role TEXT NOT NULL, replicas INTEGER NOT NULL CHECK (replicas >= 0),
  engine TEXT NOT NULL, spares INTEGER NOT NULL CHECK (spares >= 0), spare_kind TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS desired
  (only INTEGER PRIMARY KEY CHECK (only = 0), version INTEGER NOT NULL, budget_ranks INTEGER NOT NULL, max_unavailable REAL);
CREATE TABLE IF NOT EXISTS label (worker_id TEXT PRIMARY KEY, pool TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cordoned (worker_id TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS spare (worker_id TEXT PRIMARY KEY, place TEXT);
CREATE TABLE IF NOT EXISTS draining (worker_id TEXT PRIMARY KEY, until_unix_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS run (only INTEGER PRIMARY KEY CHECK (only = 0), run_id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS process
  (worker_id TEXT PRIMARY KEY, incarnation TEXT NOT NULL, node_id TEXT NOT NULL, refs TEXT NOT NULL, beat TEXT);
CREATE TABLE IF NOT EXISTS fence (incarnation TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS autoscaler (pool TEXT PRIMARY KEY, policy TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS accelerator_budget (only INTEGER PRIMARY KEY CHECK (only = 0), accelerators INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS advisor (only INTEGER PRIMARY KEY CHECK (only = 0), memory TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS restart (name TEXT PRIMARY KEY, how TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""

_OF_WORKERS = ("draining", "process", "label", "cordoned", "spare")
"""Tables that know workers by their ids."""

_OF_A_RUN = (*_OF_WORKERS, "fence", "restart", "autoscaler", "accelerator_budget", "advisor")
"""Tables that a new run begins empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPools:
    """The desired pools, in the order they were given. `budget_ranks` and `max_unavailable`: see `assign`; the latter is None
    where nobody asked for another share than the configured one."""

    version: int
    budget_ranks: int
    max_unavailable: float | None = None
    pools: dict[str, PoolSettings]


@dataclass(frozen=True, slots=True)
class Place:
    """What a placed spare is reserved for: engine arguments, as in `PoolTarget`, on so many accelerators."""

    engine: str
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProcess:
    """A worker that served, and what to kill to be sure that it is dead."""

    worker_id: WorkerId
    incarnation: str
    node_id: str
    processes: tuple[ProcessRef, ...]
    beat: Beat | None = None
    """What lasts of its heartbeats (`kept_beat`)."""


class StoreVersionError(ValueError):
    """The file was written by a newer version of this program; the text names both and says what to do."""


def check_version(path: Path) -> None:
    """Raises `StoreVersionError` for the file of a newer version. Creates and changes nothing."""
    if path.is_file():
        with contextlib.closing(sqlite3.connect(path)) as db:
            _check_version(db, path)


def _check_version(db: sqlite3.Connection, path: Path) -> None:
    version = _version(db)
    if version > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path} has schema version {version}, and this program knows versions up to {SCHEMA_VERSION}: run the version that "
            "wrote it, or set coordinator.state_dir to another directory"
        )


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


class Store:
    """One connection, used from one thread. Every call is one transaction and is on disk when it returns.

    Raises:
        sqlite3.Error: the disk or the file is broken; callers let it end the coordinator, whose restart retries.
        StoreVersionError: see there; nothing was changed.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            _check_version(self._db, path)
        except StoreVersionError:
            self._db.close()
            raise
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._bring_up_to_date()

    def _bring_up_to_date(self) -> None:
        """A file of an older version is of a former run, of which only the counters are asked for: what they gave is never
        given twice."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if _version(self._db) != SCHEMA_VERSION:
                tables = [name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
                for name in tables:
                    if name != "counter" and not name.startswith("sqlite_"):
                        self._db.execute(f'DROP TABLE "{name}"')
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def begin_run(self, run_id: str, pools: Mapping[str, PoolSettings], accelerator_budget: int | None = None) -> bool:
        """A new run takes `pools`, their autoscalers and `accelerator_budget`, and forgets the former run's, with its labels,
        drains and cordons; the same run, after a restart of the coordinator, keeps what operators have asked for since. True for
        a new run."""
        row = self._db.execute("SELECT run_id FROM run").fetchone()
        if row is not None and row[0] == run_id:
            return False
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT OR REPLACE INTO run VALUES (0, ?)", (run_id,))
            for table in _OF_A_RUN:
                self._db.execute(f"DELETE FROM {table}")
            self._replace_pools(pools, 0, None)
            for name, pool in pools.items():
                if pool.autoscaling_config is not None:
                    self.put_autoscaler(name, pool.autoscaling_config.model_dump_json())
            self.put_accelerator_budget(accelerator_budget)
        return True

    def desired(self) -> StoredPools:
        """What the last `begin_run` or `put_pools` has written."""
        version, budget_ranks, share = self._db.execute("SELECT version, budget_ranks, max_unavailable FROM desired").fetchone()
        rows = self._db.execute("SELECT name, role, replicas, engine, spares, spare_kind FROM pool ORDER BY rowid")
        pools = {
            name: PoolSettings(
                role=Role(role), replicas=replicas, engine=json.loads(engine), spares=spares, spare_kind=SpareKind(kind)
            )
            for name, role, replicas, engine, spares, kind in rows
        }
        return StoredPools(version=version, budget_ranks=budget_ranks, max_unavailable=share, pools=pools)

    def put_pools(self, pools: Mapping[str, PoolSettings], budget_ranks: int, max_unavailable: float | None = None) -> int:
        """Replace the whole desired set. Returns its version; versions rise and are never given twice, over all runs."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            return self._replace_pools(pools, budget_ranks, max_unavailable)

    def _replace_pools(self, pools: Mapping[str, PoolSettings], budget_ranks: int, max_unavailable: float | None) -> int:
        version = self._count("desired")
        self._db.execute("INSERT OR REPLACE INTO desired VALUES (0, ?, ?, ?)", (version, budget_ranks, max_unavailable))
        self._db.execute("DELETE FROM pool")
        rows = [
            (name, pool.role.value, pool.replicas, json.dumps(pool.engine), pool.spares, pool.spare_kind.value)
            for name, pool in pools.items()
        ]
        self._db.executemany("INSERT INTO pool VALUES (?, ?, ?, ?, ?, ?)", rows)
        return version

    def labels(self) -> dict[WorkerId, str]:
        """The pools of the workers that were given another one than they were started for."""
        return {WorkerId(worker): pool for worker, pool in self._db.execute("SELECT * FROM label")}

    def put_label(self, worker_id: WorkerId, pool: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO label VALUES (?, ?)", (worker_id, pool))

    def cordoned(self) -> set[WorkerId]:
        """Workers that are offered nothing new until somebody says otherwise."""
        return {WorkerId(worker) for (worker,) in self._db.execute("SELECT worker_id FROM cordoned")}

    def put_cordoned(self, worker_id: WorkerId, cordoned: bool) -> None:
        """Idempotent."""
        statement = "INSERT OR IGNORE INTO cordoned VALUES (?)" if cordoned else "DELETE FROM cordoned WHERE worker_id = ?"
        self._db.execute(statement, (worker_id,))

    def spares(self) -> dict[WorkerId, Place | None]:
        """Workers that stand by, and where no engine of theirs was started, what is to be started there."""
        rows = self._db.execute("SELECT worker_id, place FROM spare ORDER BY rowid")
        return {WorkerId(worker): Place(**json.loads(place)) if place is not None else None for worker, place in rows}

    def put_spare(self, worker_id: WorkerId, spare: bool, place: Place | None = None) -> None:
        """Whether it stands by. Idempotent."""
        if spare:
            kept = json.dumps(asdict(place)) if place is not None else None
            self._db.execute("INSERT OR REPLACE INTO spare VALUES (?, ?)", (worker_id, kept))
        else:
            self._db.execute("DELETE FROM spare WHERE worker_id = ?", (worker_id,))

    def autoscalers(self) -> dict[str, str]:
        """The policy of each autoscaled pool, JSON, in the order they were made."""
        return dict(self._db.execute("SELECT pool, policy FROM autoscaler ORDER BY rowid"))

    def put_autoscaler(self, pool: str, policy: str | None) -> None:
        """None: the pool is not autoscaled any more. Idempotent."""
        if policy is None:
            self._db.execute("DELETE FROM autoscaler WHERE pool = ?", (pool,))
        else:
            self._db.execute(
                "INSERT INTO autoscaler VALUES (?, ?) ON CONFLICT (pool) DO UPDATE SET policy = excluded.policy", (pool, policy)
            )

    def accelerator_budget(self) -> int | None:
        """Accelerators that autoscalers may take all pools together to; None: no limit."""
        row = self._db.execute("SELECT accelerators FROM accelerator_budget").fetchone()
        return None if row is None else int(row[0])

    def put_accelerator_budget(self, accelerators: int | None) -> None:
        """Idempotent."""
        if accelerators is None:
            self._db.execute("DELETE FROM accelerator_budget")
        else:
            self._db.execute("INSERT OR REPLACE INTO accelerator_budget VALUES (0, ?)", (accelerators,))

    def advisor(self) -> str | None:
        """What the advisor remembers, JSON; None before it has written."""
        row = self._db.execute("SELECT memory FROM advisor").fetchone()
        return None if row is None else str(row[0])

    def put_advisor(self, memory: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO advisor VALUES (0, ?)", (memory,))

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
        for table in _OF_WORKERS:
            self._db.execute(f"DELETE FROM {table} WHERE worker_id = ?", (worker_id,))
        self.restarted(worker_id)

    def put_restarts(self, names: Iterable[str], how: Restart) -> None:
        """Workers and gateways that are to be replaced by fresh ones. Idempotent."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO restart VALUES (?, ?)", [(name, how.value) for name in names])

    def restarts(self) -> dict[str, Restart]:
        """Those that have not been replaced yet."""
        return {name: Restart(how) for name, how in self._db.execute("SELECT name, how FROM restart ORDER BY rowid")}

    def restarted(self, name: str) -> None:
        """It has been. Idempotent."""
        self._db.execute("DELETE FROM restart WHERE name = ?", (name,))

    def put_process(self, known: KnownProcess) -> None:
        """A worker serves: should it die while no coordinator runs, the next one can make sure and tell the others."""
        refs = json.dumps([[ref.pid, ref.started_s, list(ref.segments)] for ref in known.processes])
        beat = kept_beat.to_json(known.beat) if known.beat is not None else None
        row = (known.worker_id, known.incarnation, known.node_id, refs, beat)
        self._db.execute("INSERT OR REPLACE INTO process VALUES (?, ?, ?, ?, ?)", row)

    def processes(self) -> list[KnownProcess]:
        """Workers that served and were not forgotten."""
        rows = self._db.execute("SELECT worker_id, incarnation, node_id, refs, beat FROM process ORDER BY rowid")
        return [
            KnownProcess(
                worker_id=WorkerId(worker_id),
                incarnation=incarnation,
                node_id=node_id,
                processes=tuple(ProcessRef(pid, started_s, tuple(segments)) for pid, started_s, segments in json.loads(refs)),
                beat=kept_beat.from_json(beat) if beat is not None else None,
            )
            for worker_id, incarnation, node_id, refs, beat in rows
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
        return WorkerId(f"{pool}-{self._count(f'worker/{pool}')}")

    def _count(self, name: str) -> int:
        row = self._db.execute(
            "INSERT INTO counter VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value", (name,)
        ).fetchone()
        return int(row[0])

    def close(self) -> None:
        self._db.close()
