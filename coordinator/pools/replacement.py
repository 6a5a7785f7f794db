"""A change of engine arguments in batches: who of the replaced workers goes now, who serves on, and what may be started. Pure.

Workers are replaced group by group: a pool whose engine arguments have changed is one, and all pools that are gone or scaled to 0
are another, with the pools that lack workers. In each, as with a rolling update of Kubernetes:

- it serves with what it shall have less `max_unavailable` of it, in accelerators, rounded down; what is beyond that goes;
- it starts what fits on the accelerators that it gave up, and on those that the budget has beyond the new set (a surge);
- where neither moves anything, and none that stays is cordoned, one worker more than allowed goes, or as many as a successor
  needs: those of the group that is furthest behind.

Nobody goes while some gateway does not reach a successor yet, nor as the last that answers requests, unless there is no room
for a successor beside it. So one that cannot start costs a batch, and the rest serves on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.pools.records import PoolTarget, WorkerRecord
from coordinator.routing.views import Role, WorkerState

MOVED = ""
"""The group of the pools that are gone or scaled to 0. No pool has an empty name."""


@dataclass(frozen=True, slots=True)
class Place:
    """One live worker and the pool it is to serve; None for one that goes. `replaced`: what it goes for is a change that its
    successors take the place of."""

    worker: WorkerRecord
    target: PoolTarget | None
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """`held` are the replaced workers that serve on for now; `startable` says how many workers of each pool to start now."""

    held: Collection[WorkerRecord]
    startable: Mapping[str, int]


@dataclass(slots=True)
class _Group:
    """All in accelerators: what its pools shall serve with and have as spares, what serves, what is there, and what has been
    given up."""

    pools: list[PoolTarget] = field(default_factory=list)
    old: list[WorkerRecord] = field(default_factory=list)
    wanted: int = 0
    reserve: int = 0
    serving: int = 0
    alive: int = 0
    whole: bool = True
    """All that stay or are successors serve: none of them is cordoned."""

    def floor(self, max_unavailable: float) -> int:
        return self.wanted - int(max_unavailable * self.wanted)

    def behind(self) -> float:
        """How much of it is still to be replaced."""
        return sum(w.ranks for w in self.old) / max(1, self.wanted)


def serves(worker: WorkerRecord) -> bool:
    """It is offered requests."""
    return worker.state is WorkerState.READY and not (worker.cordoned or worker.spare)


def answers(roles: Collection[Role], whole_roles: frozenset[Role]) -> bool:
    """Workers of these roles are enough to answer a request: one that is offered whole ones, or a pair of phases."""
    return bool(whole_roles & set(roles)) or {Role.PREFILL, Role.DECODE} <= set(roles)


def batch(
    targets: Collection[PoolTarget],
    places: Collection[Place],
    missing: Mapping[str, int],
    *,
    budget_ranks: int,
    max_unavailable: float,
    whole_roles: frozenset[Role],
    gateways_behind: bool,
) -> Batch:
    """`missing` workers by pool are to be started in the end, and `budget_ranks` accelerators may be held at once."""
    groups = _groups(targets, places, missing)
    room = budget_ranks - sum(p.worker.ranks for p in places)
    startable = _startable(targets, groups, missing, room, max(0, budget_ranks - sum(t.workers * t.ranks for t in targets)))
    if gateways_behind and any(t.replicas for t in targets):
        return Batch([w for group in groups.values() for w in group.old], startable)
    pass_ = _Pass(places, missing, whole_roles)
    for group in groups.values():
        pass_.down_to(group, group.floor(max_unavailable))
    if not pass_.under_way and not any(startable.values()):
        for group in sorted(groups.values(), key=_Group.behind, reverse=True):
            needs = [t.ranks for t in group.pools if missing[t.name]]
            if group.old and group.whole and needs and not pass_.make_room(group, room, min(needs)):
                break
    return Batch([w for group in groups.values() for w in group.old], startable)


class _Pass:
    """Who goes in this pass; what goes leaves its group's `old`."""

    def __init__(self, places: Iterable[Place], missing: Mapping[str, int], whole_roles: frozenset[Role]) -> None:
        self._whole_roles = whole_roles
        staying = [p for p in places if p.target is not None or p.replaced]
        self._roles = Counter(p.target.role if p.target else p.worker.role for p in staying if serves(p.worker))
        coming = any(p.target is not None and p.worker.state is WorkerState.STARTING for p in places)
        self._awaited = coming or any(missing.values())
        """Somebody is to serve who does not yet."""
        going = [p.worker for p in places if p.target is None and not (p.replaced and serves(p.worker))]
        self._freed = sum(w.ranks for w in going)
        self.under_way = coming or bool(going)

    def down_to(self, group: _Group, floor: int) -> None:
        """As many go as leave `floor` accelerators serving."""
        for worker in list(group.old):
            if group.serving - worker.ranks >= floor and not (self._awaited and self._needed(worker)):
                self._go(group, worker)

    def make_room(self, group: _Group, room: int, need: int) -> bool:
        """As many go as make room for one successor. True when nobody answers requests for it, so that others may go in the
        same time."""
        gap = False
        for worker in sorted(group.old, key=self._needed):
            if room + self._freed >= need:
                break
            gap = gap or self._needed(worker)
            self._go(group, worker)
        return gap

    def _needed(self, worker: WorkerRecord) -> bool:
        """Requests are answered, and would not be without it."""
        others = self._roles - Counter([worker.role])
        return answers(self._roles, self._whole_roles) and not answers(others, self._whole_roles)

    def _go(self, group: _Group, worker: WorkerRecord) -> None:
        self._roles = self._roles - Counter([worker.role])
        self._freed += worker.ranks
        self.under_way = True
        group.serving -= worker.ranks
        group.old.remove(worker)


def _groups(targets: Iterable[PoolTarget], places: Iterable[Place], missing: Mapping[str, int]) -> dict[str, _Group]:
    by_name = {t.name: t for t in targets if t.replicas}
    own = {p.worker.pool for p in places if p.replaced and p.worker.pool in by_name}
    coming = {p.target.name for p in places if p.target is not None and p.worker.state is WorkerState.STARTING}
    group_of = {name: name for name in own}
    group_of |= {name: MOVED for name in by_name if name not in own and (missing[name] or name in coming)}
    groups = {name: _Group() for name in (*(n for n in by_name if n in own), MOVED)}
    for name, of in group_of.items():
        groups[of].pools.append(by_name[name])
        groups[of].wanted += by_name[name].replicas * by_name[name].ranks
        groups[of].reserve += (by_name[name].workers - by_name[name].replicas) * by_name[name].ranks
    for place in places:
        home = place.target.name if place.target is not None else place.worker.pool
        if home not in group_of and not place.replaced:
            continue
        group, worker = groups[group_of.get(home, MOVED)], place.worker
        group.alive += worker.ranks
        if place.target is not None:
            group.whole = group.whole and not worker.cordoned
        if serves(worker) and (place.replaced or place.target is not None):
            group.serving += worker.ranks
            if place.replaced:
                group.old.append(worker)
    for group in groups.values():
        group.old = _in_order(group.old)
    return groups


def _in_order(workers: Collection[WorkerRecord]) -> list[WorkerRecord]:
    """Who goes first: pools take turns by how many are left of them, of each the newest; of equals prefill before the others,
    which may be offered whole requests."""
    pools: dict[str, list[WorkerRecord]] = {}
    for worker in sorted(workers, key=lambda w: w.created_s):
        pools.setdefault(worker.pool, []).append(worker)
    turns = [(-left, w.role is not Role.PREFILL, name, w) for name, of in pools.items() for left, w in enumerate(of, 1)]
    return [worker for *_, worker in sorted(turns, key=lambda turn: turn[:3])]


def _startable(
    targets: Iterable[PoolTarget], groups: Mapping[str, _Group], missing: Mapping[str, int], room: int, surge: int
) -> dict[str, int]:
    home = {t.name: name for name, group in groups.items() for t in group.pools}
    own_room = {name: group.wanted + group.reserve + surge - group.alive for name, group in groups.items()}
    startable = {}
    for target in targets:
        name = home.get(target.name)
        fits = room if name is None else min(room, own_room[name])
        count = startable[target.name] = min(missing[target.name], max(0, fits) // target.ranks)
        room -= count * target.ranks
        if name is not None:
            own_room[name] -= count * target.ranks
    return startable
