"""The coordinator's table of workers: heartbeats, probes and deaths in; records for `reconcile` and views for gateways out.

No Ray, no clock of its own: every method takes `now_s`. One event loop owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.config import Settings
from coordinator.pools.reconcile import Backoff, Rules
from coordinator.pools.records import Restart, WorkerRecord
from coordinator.pools.reports import Beat
from coordinator.pools.silence import in_words, is_silent
from coordinator.routing.views import Role, WorkerState, WorkerView
from protos.ids import Incarnation, WorkerId

log = logging.getLogger(__name__)

_PLACED_S = 20.0
"""An actor that has said nothing for so long is worth a word to the operator."""

_HEALTHY_LIFE_S = 60.0
"""A worker that died after serving for this long starts a new series of failures."""


def rules_of(settings: Settings) -> Rules:
    """The reconcile loop's limits from the configuration."""
    c = settings.coordinator
    return Rules(
        heartbeat_interval_s=c.heartbeat_interval_s,
        heartbeat_limit_s=c.heartbeat_limit_s,
        probe_interval_s=max(5.0, 2 * c.heartbeat_interval_s),
        max_failed_probes=c.missed_heartbeats,
        partition_grace_s=c.partition_grace_s,
        restart_backoff_s=c.restart_backoff_s,
        restart_backoff_max_s=c.restart_backoff_max_s,
        whole_roles=frozenset(role for tier in settings.gateway.routing.colocated_roles for role in tier),
    )


@dataclass(slots=True)
class Member:
    """One known worker. `beat` is None until it has been heard."""

    record: WorkerRecord
    slot: int
    beat: Beat | None = None
    ready_s: float | None = None
    stopping: bool = False
    """It was told to end; that it does says nothing about the health of its pool."""
    silent: bool = False
    """As gateways hear it."""

    def view(self, now_s: float) -> WorkerView:
        """As gateways and operators see it; the record's state overrules the worker's own."""
        record = self.record
        detail = record.dead_reason
        if self.beat is None:
            if record.state is WorkerState.PLACED:
                detail = "its place is reserved" if record.place_reserved else "no node has its place free"
            elif not detail and now_s - record.created_s > _PLACED_S:
                detail = "not placed yet: no node has its bundles free, or its process is still starting"
            return WorkerView(
                worker_id=record.worker_id,
                incarnation=Incarnation(""),
                pool=record.pool,
                role=record.role,
                state=record.state,
                cordoned=record.cordoned,
                spare=record.spare,
                address="",
                pid=0,
                fingerprint=b"",
                ranks=(),
                max_transfer_tokens=0,
                transports=(),
                detail=detail,
                node_id=record.node_id,
            )
        age_s = now_s - (record.heartbeat_s if record.heartbeat_s is not None else record.created_s)
        return replace(
            self.beat.view,
            pool=record.pool,
            role=record.role,
            state=record.state,
            cordoned=record.cordoned,
            spare=record.spare,
            heartbeat_age_s=max(0.0, age_s),
            silent=self.silent,
            detail=detail or in_words(record, self.silent) or self.beat.view.detail,
        )


class Fleet:
    """Every worker that is not known to be gone. `rules`: the default limits unless given."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or rules_of(Settings())
        self.members: dict[WorkerId, Member] = {}
        self.backoff: dict[str, Backoff] = {}
        self.failures: dict[str, str] = {}
        """Why each pool's last worker failed, as long as its backoff runs."""
        self.faults: Mapping[WorkerId, str] = {}
        """Why workers cannot be reached at what they advertise, as `Reach` finds it."""
        self._gone: set[WorkerId] = set()
        self.epoch = secrets.token_hex(4)
        """Names this table's life: versions rise within it and mean nothing in another."""
        self.version = 0
        self.last_change = 0
        """The version that gateways must know to choose right."""
        self._changed = asyncio.Event()

    async def newer(self, epoch: str, version: int, timeout_s: float) -> None:
        """Returns at once when the membership has changed since `version` of `epoch`, else on its next change, at the
        latest after `timeout_s`. Loads alone, which come with every heartbeat, raise the version but wake nobody."""
        if epoch == self.epoch and version >= self.last_change:
            await self.next_change(timeout_s)

    async def next_change(self, timeout_s: float) -> None:
        """Returns on the next change of the membership, at the latest after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _bump(self) -> None:
        self.version += 1
        self.last_change = self.version
        self._changed.set()
        self._changed = asyncio.Event()

    def created(
        self,
        worker_id: WorkerId,
        pool: str,
        role: Role,
        slot: int,
        now_s: float,
        *,
        engine: str | None = None,
        ranks: int = 1,
        start_timeout_s: float = 300.0,
        spare: bool = False,
        placed: bool = False,
    ) -> None:
        """An actor with this id exists or is being made; or, `placed`, a place for one. Idempotent. `engine`: None until it says
        what it was started with; `start_timeout_s` is what its engine may take; `spare`: it is to stand by."""
        if worker_id in self.members or worker_id in self._gone:
            return
        state = WorkerState.PLACED if placed else WorkerState.STARTING
        record = WorkerRecord(
            worker_id=worker_id,
            pool=pool,
            role=role,
            state=state,
            created_s=now_s,
            engine=engine,
            ranks=ranks,
            start_timeout_s=start_timeout_s,
            spare=spare,
        )
        self.members[worker_id] = Member(record=record, slot=slot)
        self._bump()

    def restored(self, beat: Beat, now_s: float) -> None:
        """A live worker that this table has not heard, as it was when a former one heard it last. It serves until its silence
        or its data plane say otherwise, as any other that falls silent. Idempotent."""
        view = beat.view
        if view.worker_id in self.members or view.worker_id in self._gone:
            return
        self.created(view.worker_id, view.pool, view.role, beat.slot, now_s, engine=beat.engine, ranks=beat.ranks)
        member = self.members[view.worker_id]
        member.beat, member.ready_s = beat, now_s
        member.record = replace(member.record, state=WorkerState.READY, start_timeout_s=beat.start_timeout_s)
        self._bump()

    def heard(self, beat: Beat, now_s: float) -> bool:
        """A heartbeat arrived. False: this worker was given up and must end itself."""
        worker_id = beat.view.worker_id
        if worker_id in self._gone:
            return False
        if worker_id not in self.members:
            # A coordinator that restarted learns its workers from their heartbeats.
            self.created(worker_id, beat.view.pool, beat.view.role, beat.slot, now_s - beat.uptime_s)
        member = self.members[worker_id]
        old, record = member.view(now_s), member.record
        state = record.state
        if state is WorkerState.DEAD:
            return False
        if state is WorkerState.STARTING and beat.view.state is WorkerState.READY:
            state = WorkerState.READY if record.draining_until_s is None else WorkerState.DRAINING
            member.ready_s = now_s
            log.info("worker %s is ready, incarnation %s", worker_id, beat.view.incarnation)
        busy = beat.view.running + beat.view.waiting + beat.view.leases > 0
        drain_since_s = record.drain_since_s
        if beat.refusing and drain_since_s is None:
            drain_since_s = now_s
            state = WorkerState.DRAINING
        idle_since_s = None
        if drain_since_s is not None and not busy:
            idle_since_s = record.idle_since_s if record.idle_since_s is not None else now_s
        member.beat = beat
        member.slot = beat.slot
        member.record = replace(
            record,
            state=state,
            engine=beat.engine,
            ranks=beat.ranks,
            node_id=beat.node_id,
            start_timeout_s=beat.start_timeout_s,
            # One that was restored is as old as it says.
            created_s=min(record.created_s, now_s - beat.uptime_s),
            label_heard=(beat.view.pool, beat.view.role) == (record.pool, record.role),
            heartbeat_s=now_s,
            drain_since_s=drain_since_s,
            idle_since_s=idle_since_s,
        )
        self._end_series(member, now_s)
        self._judge(member, now_s)
        new = member.view(now_s)
        self.version += 1
        if _membership(old) != _membership(new):
            self._bump()
        return True

    def _end_series(self, member: Member, now_s: float) -> None:
        """A pool whose worker has served long enough since the last failure has no trouble any more."""
        pool, ready_s = member.record.pool, member.ready_s
        backoff = self.backoff.get(pool)
        if (
            backoff is not None
            and ready_s is not None
            and ready_s >= backoff.last_failure_s
            and now_s - ready_s > _HEALTHY_LIFE_S
        ):
            del self.backoff[pool]
            self.failures.pop(pool, None)

    def probed(self, worker_id: WorkerId, answered: bool, now_s: float, *, host_silent: bool = False) -> None:
        """A data-plane probe ended. `host_silent`: not even the worker's host answered. Gateways hear when a silence begins and
        when it is over."""
        member = self.members.get(worker_id)
        if member is None:
            return
        failed = 0 if answered else member.record.failed_probes + 1
        since_s = None if answered else member.record.failing_since_s
        if failed:
            who = "its host is silent" if host_silent else "its host answers"
            log.warning("worker %s does not answer its data plane (%d in a row, %s)", worker_id, failed, who)
        member.record = replace(
            member.record,
            probed_s=now_s,
            failed_probes=failed,
            failing_since_s=now_s if failed and since_s is None else since_s,
            host_silent=host_silent and bool(failed),
        )
        if self._judge(member, now_s):
            self._bump()

    def _judge(self, member: Member, now_s: float) -> bool:
        """Whether gateways hear something new of its silence."""
        before, member.silent = member.silent, is_silent(member.record, now_s, self._rules)
        if before and not member.silent and member.record.failed_probes:
            log.warning("worker %s is offered requests again: %s", member.record.worker_id, in_words(member.record, False))
        return before is not member.silent

    def drain(self, worker_id: WorkerId, until_s: float) -> None:
        """A drain is wanted; gateways stop choosing the worker at once. Idempotent, keeps the earlier end. One that does not
        serve yet stays what it is: it has nothing to finish."""
        member = self.members.get(worker_id)
        if member is None or member.record.state is WorkerState.DEAD:
            return
        record = member.record
        earlier = until_s if record.draining_until_s is None else min(until_s, record.draining_until_s)
        unborn = record.state in (WorkerState.STARTING, WorkerState.PLACED)
        state = record.state if unborn else WorkerState.DRAINING
        changed = record.state is not state
        member.record = replace(record, state=state, draining_until_s=earlier)
        if changed:
            self._bump()

    def relabel(self, worker_id: WorkerId, pool: str, role: Role) -> None:
        """It serves `pool` from now on: gateways offer it that pool's legs at once, what it has runs to its end. Idempotent."""
        member = self.members.get(worker_id)
        if member is None or (member.record.pool, member.record.role) == (pool, role):
            return
        # Where nothing runs, nobody has to hear it.
        unheard = member.record.state is not WorkerState.PLACED
        member.record = replace(member.record, pool=pool, role=role, label_heard=not unheard)
        self._bump()

    def stand_by(self, worker_id: WorkerId, spare: bool, now_s: float) -> None:
        """Whether it is a spare, to which gateways offer nothing. A place that stops being one is where a worker starts now.
        Idempotent."""
        member = self.members.get(worker_id)
        if member is None or member.record.spare is spare:
            return
        record = replace(member.record, spare=spare)
        if record.state is WorkerState.PLACED and not spare:
            record = replace(record, state=WorkerState.STARTING, created_s=now_s, probed_s=None)
        member.record = record
        self._bump()

    def reserved(self, worker_id: WorkerId, node_id: str | None, now_s: float) -> None:
        """A place was asked for, and is on that node; None: no node has room for it yet."""
        member = self.members.get(worker_id)
        if member is not None:
            member.record = replace(member.record, probed_s=now_s, node_id=node_id or "", place_reserved=node_id is not None)
            if node_id is not None:
                self._bump()

    def cordon(self, worker_id: WorkerId, cordoned: bool) -> None:
        """Whether it is offered nothing new. Idempotent."""
        member = self.members.get(worker_id)
        if member is not None and member.record.cordoned is not cordoned:
            member.record = replace(member.record, cordoned=cordoned)
            self._bump()

    def restart(self, worker_id: WorkerId, how: Restart) -> None:
        """It is to be replaced by a fresh one. Idempotent."""
        member = self.members.get(worker_id)
        if member is not None:
            member.record = replace(member.record, restart=how)

    def stopping(self, worker_id: WorkerId) -> None:
        """We end it: its death, which may be heard before our own note of it, is wanted."""
        member = self.members.get(worker_id)
        if member is not None:
            member.stopping = True

    def died(self, worker_id: WorkerId, reason: str, now_s: float, *, wanted: bool = False) -> bool:
        """Its process is known to be gone (or could not be started). True when that is news. `wanted`: we ended it, so it
        says nothing about the health of its pool; else a short life counts as a failed start."""
        member = self.members.get(worker_id)
        if member is None or member.record.state is WorkerState.DEAD:
            return False
        pool = member.record.pool
        if not (wanted or member.stopping):
            lived_s = 0.0 if member.ready_s is None else now_s - member.ready_s
            before = self.backoff.get(pool, Backoff()) if lived_s < _HEALTHY_LIFE_S else Backoff()
            self.backoff[pool] = before.failed(now_s)
            self.failures[pool] = f"{worker_id}: {reason}"
        member.record = replace(member.record, state=WorkerState.DEAD, dead_reason=reason)
        self._bump()
        return True

    def forget(self, worker_id: WorkerId) -> Member | None:
        """Nothing of it is left. Late heartbeats under this id are told to end."""
        self._gone.add(worker_id)
        member = self.members.pop(worker_id, None)
        if member is not None:
            self._bump()
        return member

    def free_slot(self) -> int:
        """The smallest number no live worker has."""
        taken = {m.slot for m in self.members.values()}
        return next(i for i in range(len(taken) + 1) if i not in taken)

    @property
    def silent_nodes(self) -> set[str]:
        """Nodes of workers whose host does not answer, by Ray's id."""
        return {m.beat.node_id for m in self.members.values() if m.beat is not None and m.record.host_silent}

    def views(self, now_s: float) -> tuple[WorkerView, ...]:
        """All members, in the order they came."""
        return tuple(self._view(member, now_s) for member in self.members.values())

    def _view(self, member: Member, now_s: float) -> WorkerView:
        view, fault = member.view(now_s), self.faults.get(member.record.worker_id)
        return replace(view, detail=fault) if fault and not view.detail else view

    def records(self) -> list[WorkerRecord]:
        return [member.record for member in self.members.values()]


def _membership(view: WorkerView) -> tuple[object, ...]:
    """What gateways must hear of at once; loads may be a heartbeat old."""
    who = (view.incarnation, view.pool, view.role, view.state, view.cordoned, view.spare, view.silent)
    return (*who, view.address, view.ranks, view.fingerprint)
