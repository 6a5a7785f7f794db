"""The desired pools, kept in the store, and what they mean for the workers there are. No Ray, no clock."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from coordinator.config import PoolSettings, Settings
from coordinator.pools.assign import Assignment, assign
from coordinator.pools.desired import Desired, Strategy, changed, check_version, desired
from coordinator.pools.fleet import Fleet
from coordinator.pools.plan import Step, living, plan, unsettled
from coordinator.pools.reconcile import check_scale
from coordinator.pools.records import PoolTarget, Restart, SpareKind
from coordinator.pools.replacement import answers
from coordinator.pools.reports import GatewayReport, WorkerSpec
from coordinator.pools.store import Place, Store
from coordinator.routing.views import Role, WorkerState
from protos.errors import Code, SplitpointError
from protos.ids import WorkerId

log = logging.getLogger(__name__)


class DesiredPools:
    """Belongs to the coordinator's event loop. Every change is on disk before it is acted on."""

    def __init__(self, run: Settings, store: Store, fleet: Fleet, whole_roles: frozenset[Role]) -> None:
        self._run = run
        self._store = store
        self._fleet = fleet
        self._whole_roles = whole_roles
        self.present = self._read()
        self.steps: list[Step] = []
        """What the last change meant for each worker."""

    def _read(self) -> Desired:
        kept = self._store.desired()
        return desired(
            self._run,
            kept.pools,
            version=kept.version,
            budget_ranks=kept.budget_ranks,
            asked_unavailable=kept.max_unavailable,
        )

    @property
    def targets(self) -> tuple[PoolTarget, ...]:
        return self.present.targets

    def scale(
        self, pool: str, replicas: int, *, current: int | None = None, expected: int | None = None, dry_run: bool = False
    ) -> tuple[PoolTarget, list[Step]]:
        """The pool's new target, and what it means. `dry_run` changes nothing.

        Raises:
            SplitpointError: `NOT_FOUND` unknown pool; `CONFLICT` the present target is not `current`, the present version is
                not `expected`, or nothing would be left to serve a whole request.
        """
        check_version(self.present, expected)
        target = check_scale(self.targets, pool, replicas, current, self._whole_roles)
        pools = dict(self.present.settings.pools)
        pools[pool] = pools[pool].model_copy(update={"replicas": replicas})
        steps = self._change(pools, expected, dry_run)
        if not dry_run:
            log.info("pool %s is to have %d workers", pool, replicas)
        return target, steps

    def apply(
        self,
        pools: Mapping[str, PoolSettings],
        *,
        expected: int | None = None,
        dry_run: bool = False,
        strategy: Strategy | None = None,
    ) -> list[Step]:
        """`pools` replace the whole desired set; what that means for each worker. `dry_run` changes nothing. `strategy`: how
        workers are replaced; None: as configured, or as the change was asked for that still runs.

        Raises:
            SplitpointError: see `changed`.
        """
        steps = self._change(pools, expected, dry_run, strategy)
        if not dry_run:
            shown = ", ".join(f"{t.name} ({t.role}) {t.replicas}" + _spares(t) for t in self.targets)
            log.info("the pools are to be %s, version %d", shown, self.present.version)
        return steps

    def _change(
        self, pools: Mapping[str, PoolSettings], expected: int | None, dry_run: bool, strategy: Strategy | None = None
    ) -> list[Step]:
        new = changed(
            self._run,
            self.present,
            pools,
            expected=expected,
            whole_roles=self._whole_roles,
            replacing=self._assignment(self.present).replacing,
            strategy=strategy,
        )
        steps = plan(self._assignment(new))
        if not dry_run:
            self._store.put_pools(pools, new.budget_ranks, new.asked_unavailable)
            self.present = self._read()
            self.steps = steps
        return steps

    def new_worker(self, pool: str, now_s: float, *, spare: bool = False) -> WorkerId:
        """One more of `pool`, under an id of its own; where placed spares are wanted, a `spare` is the place for one."""
        target = self.present.target(pool)
        assert target is not None, "only workers of pools that there are are started"
        worker_id, placed = self._store.next_worker_id(pool), spare and target.spare_kind is SpareKind.PLACED
        if spare:
            self._store.put_spare(worker_id, True, Place(target.engine, target.ranks) if placed else None)
        self._fleet.created(
            worker_id,
            pool,
            target.role,
            self._fleet.free_slot(),
            now_s,
            engine=target.engine,
            ranks=target.ranks,
            start_timeout_s=target.start_timeout_s,
            spare=spare,
            placed=placed,
        )
        log.info(
            "%s %s", "reserving a place for" if placed else "starting", f"spare {worker_id}" if spare else f"worker {worker_id}"
        )
        return worker_id

    def spec(self, worker_id: WorkerId, log_dir: Path) -> WorkerSpec:
        """What its actor is started with."""
        member = self._fleet.members[worker_id]
        record = member.record
        return WorkerSpec(
            worker_id=worker_id,
            pool=record.pool,
            role=record.role,
            slot=member.slot,
            settings=self.present.settings,
            log_dir=log_dir,
            engine=record.engine or "",
        )

    def stand_by(self, worker_id: WorkerId, spare: bool, now_s: float, reason: str) -> None:
        """Whether gateways are to offer it nothing, as a spare. Idempotent."""
        record = self._fleet.members[worker_id].record
        if record.spare is not spare:
            log.info("worker %s %s: %s", worker_id, "stands by" if spare else "takes over", reason)
            self._store.put_spare(worker_id, spare)
            self._fleet.stand_by(worker_id, spare, now_s)

    def places(self) -> set[WorkerId]:
        """Spares that are placed, as written down: of them no process runs that could say so."""
        return {worker_id for worker_id, place in self._store.spares().items() if place is not None}

    def resume_spares(self, now_s: float) -> None:
        """After a restart, once the workers are known."""
        for worker_id, place in self._store.spares().items():
            home = self.home(worker_id)
            if place is not None:
                pool, role = (home.name, home.role) if home is not None else (worker_id.rpartition("-")[0], Role.COLOCATED)
                slot = self._fleet.free_slot()
                self._fleet.created(
                    worker_id, pool, role, slot, now_s, engine=place.engine, ranks=place.ranks, spare=True, placed=True
                )
            self._fleet.stand_by(worker_id, True, now_s)

    def relabel(
        self, worker_id: WorkerId, pool: str, role: Role, reason: str, *, spare: bool = False, now_s: float = 0.0
    ) -> None:
        """Gateways choose the worker by its new label from now on, or keep it in reserve as a `spare`. A place stands by on: its
        engine would have to be started first. Idempotent."""
        record = self._fleet.members[worker_id].record
        if record.state is not WorkerState.PLACED:
            self.stand_by(worker_id, spare, now_s, reason)
        if (record.pool, record.role) != (pool, role):
            log.info("worker %s: %s", worker_id, reason)
            self._store.put_label(worker_id, pool)
            self._fleet.relabel(worker_id, pool, role)

    def cordon(self, worker_id: str, cordoned: bool) -> WorkerId:
        """Whether it is offered nothing new; it keeps its place in its pool. Idempotent.

        Raises:
            SplitpointError: `NOT_FOUND`.
        """
        known = self.worker(worker_id)
        self._store.put_cordoned(known, cordoned)
        self._fleet.cordon(known, cordoned)
        log.info("worker %s is %s", known, "cordoned" if cordoned else "not cordoned any more")
        return known

    def drain(self, worker_id: WorkerId, timeout_s: float, now_s: float, reason: str) -> None:
        """It is offered nothing new from now on, and what it still has after `timeout_s` is ended. One that drains already
        keeps the earlier end. `now_s` is monotonic. Unknown and dead workers are passed over."""
        member, until_s = self._fleet.members.get(worker_id), now_s + timeout_s
        if member is None or member.record.state is WorkerState.DEAD:
            return
        before_s = member.record.draining_until_s
        if before_s is not None and before_s <= until_s:
            return
        log.info("draining worker %s, at most %.0f s: %s", worker_id, timeout_s, reason)
        self._store.put_draining(worker_id, timeout_s)
        self._fleet.drain(worker_id, until_s)

    def worker(self, worker_id: str) -> WorkerId:
        """Raises `SplitpointError(NOT_FOUND)` naming those there are."""
        if worker_id not in self._fleet.members:
            known = ", ".join(self._fleet.members) or "none"
            raise SplitpointError(Code.NOT_FOUND, f"no worker {worker_id!r}; workers: {known}", param="worker_id")
        return WorkerId(worker_id)

    def home(self, worker_id: WorkerId) -> PoolTarget | None:
        """The pool of a worker that has not been heard: the label it was given last, else the pool in its id."""
        return self.present.target(self._store.labels().get(worker_id, worker_id.rpartition("-")[0]))

    def adopt(self, silent: Collection[WorkerId], now_s: float) -> None:
        """After a restart: workers that live and have not been heard. One that served is taken as it was last, so gateways keep
        their streams to it and nobody ends it for a worker that still loads; the others load, or are stopped."""
        beats = {known.worker_id: known.beat for known in self._store.processes()}
        for worker_id in silent:
            beat, target = beats.get(worker_id), self.home(worker_id)
            if beat is not None:
                self._fleet.restored(beat, now_s)
                if (label := self.present.target(self._store.labels().get(worker_id, beat.view.pool))) is not None:
                    self._fleet.relabel(worker_id, label.name, label.role)
                continue
            pool, role = (target.name, target.role) if target is not None else (worker_id.rpartition("-")[0], Role.COLOCATED)
            limit_s = target.start_timeout_s if target is not None else self._run.engine.start_timeout_s
            self._fleet.created(worker_id, pool, role, self._fleet.free_slot(), now_s, start_timeout_s=limit_s)

    def updated(self, target: PoolTarget) -> int:
        """How many workers of the pool stay and have its present engine arguments, whether they serve yet or not."""
        have = [r for r in living(self._fleet.records()) if r.pool == target.name and not r.leaving]
        return sum(record.engine == target.engine for record in have)

    def restart(self, pools: Sequence[str], *, surge: bool) -> list[WorkerId]:
        """Every worker that serves one of `pools` now is replaced by a fresh one, one of each pool at a time; they, in the order
        in which they go. `surge`: each goes when its successor serves.

        Raises:
            SplitpointError: `NOT_FOUND` unknown pool; `CONFLICT` nobody would serve while a worker of the pool is away.
        """
        for name in pools:
            if self.present.target(name) is None:
                raise SplitpointError(
                    Code.NOT_FOUND, f"no pool {name!r}; pools: {', '.join(t.name for t in self.targets)}", param="pools"
                )
            left = {t.role for t in self.targets if t.running - (t.name == name) > 0}
            if not surge and not answers(left, self._whole_roles):
                message = f"nobody would serve a request while the worker of pool {name} is away: let it surge, or scale first"
                raise SplitpointError(Code.CONFLICT, message, param="pools")
        how = Restart.SURGE if surge else Restart.IN_PLACE
        due = [r for r in living(self._fleet.records()) if r.pool in pools and not r.leaving]
        names = [r.worker_id for r in sorted(due, key=lambda record: record.created_s)]
        self._store.put_restarts(names, how)
        for name in names:
            self._fleet.restart(name, how)
        log.info("to be restarted, %s: %s", how, ", ".join(names) or "nobody")
        return names

    def resume_restarts(self) -> None:
        """After a restart, once the workers are known."""
        for name, how in self._store.restarts().items():
            self._fleet.restart(WorkerId(name), how)

    def resume_cordons(self) -> None:
        """After a restart, once the workers are known."""
        for worker_id in self._store.cordoned():
            self._fleet.cordon(worker_id, True)

    def unsettled(self, gateways: Collection[GatewayReport]) -> list[str]:
        """What is not yet as desired, or not yet known to every gateway; nothing when all is."""
        legs = {w: m.beat.former_legs for w, m in self._fleet.members.items() if m.beat is not None}
        lines = unsettled(self._assignment(self.present), legs)
        away = self._away(gateways)
        lines += [f"pool {pool} had failed starts, the last: {why}" for pool, why in self._fleet.failures.items() if lines]
        return [*lines, *([f"{away} gateways do not answer"] if away > 0 else []), *self._behind(gateways)]

    def gateways_behind(self, gateways: Collection[GatewayReport]) -> bool:
        """Some gateway does not reach every ready worker yet, or is away."""
        return bool(self._away(gateways) > 0 or self._behind(gateways))

    def _away(self, gateways: Collection[GatewayReport]) -> int:
        return self._run.coordinator.gateways - len(gateways)

    def _behind(self, gateways: Collection[GatewayReport]) -> Sequence[str]:
        lines = []
        for gateway in gateways:
            if gateway.epoch != self._fleet.epoch or gateway.version < self._fleet.last_change:
                lines.append(f"{gateway.gateway_id} has not heard of the last change")
            elif gateway.unconnected:
                lines.append(f"{gateway.gateway_id} has no stream yet to {', '.join(gateway.unconnected)}")
        return lines

    def _assignment(self, wanted: Desired) -> Assignment:
        alive = living(self._fleet.records())
        return assign(
            wanted.targets,
            alive,
            budget_ranks=wanted.budget_ranks,
            max_unavailable=wanted.max_unavailable,
            whole_roles=self._whole_roles,
        )


def _spares(target: PoolTarget) -> str:
    return f" + {target.spares} {target.spare_kind}" if target.spares else ""
