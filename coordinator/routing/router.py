"""From goals to a route: the whole decision of one gateway. Pure: the caller brings membership, time and the random source."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from coordinator.routing.breaker import Breakers
from coordinator.routing.config import RoutingSettings
from coordinator.routing.filters import (
    BREAKER_OPEN,
    EXCLUDED,
    INCOMPATIBLE,
    PROMPT_EXCEEDS_TRANSFER,
    Group,
    Table,
    build_table,
    pair_refusal,
)
from coordinator.routing.goals import Goal, LocalGoal, PairGoal, PairRoute, Refusal, Route, SoloGoal, SoloRoute
from coordinator.routing.policy import LoadBook, least_loaded
from coordinator.routing.views import Role, WorkerState, WorkerView
from protos.ids import Incarnation

TRANSPORT_FALLBACK = "transport_fallback"
NO_PAIR = "no_pair"
LOCAL_RECOMPUTE = "local_recompute"
BREAKER_OVERRIDDEN = "breaker_overridden"


class Router:
    """Chooses paths and workers. A decision scans the ready workers once and copies none of them."""

    def __init__(self, settings: RoutingSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._table: Table = build_table(())
        self.load = LoadBook(heartbeat_request_tokens=settings.heartbeat_request_tokens)
        self.breakers = Breakers(failures=settings.breaker_failures, cooldown_s=settings.breaker_cooldown_s)

    def update(self, views: Iterable[WorkerView]) -> None:
        """Replace the membership."""
        old = self._table.by_incarnation
        self._table = build_table(views)
        for incarnation in old.keys() - self._table.by_incarnation.keys():
            self.breakers.forget(incarnation)
            self.load.forget(incarnation)

    def view(self, incarnation: Incarnation) -> WorkerView | None:
        """The present view of a worker that is not dead."""
        return self._table.by_incarnation.get(incarnation)

    def ready_workers(self, role: Role) -> tuple[WorkerView, ...]:
        return self._table.by_role[role]

    def has_pair(self) -> bool:
        """Some ready prefill worker has a ready decode worker of its kind."""
        return bool(self._table.groups)

    def choose(self, goals: Sequence[Goal], now_s: float) -> Route | Refusal:
        """The first goal that some worker meets. Goals that were passed over leave a note on the route."""
        reasons: Counter[str] = Counter()
        notes: list[str] = []
        for goal in goals:
            route = self._try(goal, now_s, reasons, notes)
            if route is not None:
                return self._tell_breakers(route, now_s)
        detail = ", ".join(f"{name}: {count}" for name, count in sorted(reasons.items()))
        return Refusal(message="no worker can take this request" + (f" ({detail})" if detail else ""), reasons=reasons)

    def _try(self, goal: Goal, now_s: float, reasons: Counter[str], notes: list[str]) -> Route | None:
        if isinstance(goal, PairGoal):
            route = self._pair(goal, now_s, reasons)
            if route is None:
                # Told apart: a prompt too long for staging is a matter of configuration, a missing pair one of health.
                notes.append(PROMPT_EXCEEDS_TRANSFER if reasons[PROMPT_EXCEEDS_TRANSFER] else NO_PAIR)
            return route
        if isinstance(goal, LocalGoal):
            view = self._table.by_incarnation.get(goal.incarnation)
            if view is None or view.state is not WorkerState.READY:
                return None
            return SoloRoute(worker=view, local=True, notes=(*notes, LOCAL_RECOMPUTE))
        return self._solo(goal, now_s, reasons, notes)

    def _solo(self, goal: SoloGoal, now_s: float, reasons: Counter[str], notes: list[str]) -> SoloRoute | None:
        for tier in self._settings.colocated_roles:
            members = (view for role in tier for view in self._table.by_role[role])
            best = least_loaded(self._usable(members, goal.exclude, now_s, reasons), self.load, self._rng)
            if best is not None:
                return SoloRoute(worker=best, notes=tuple(notes))
        return None

    def _pair(self, goal: PairGoal, now_s: float, reasons: Counter[str]) -> PairRoute | None:
        if self._table.lonely_prefill:
            reasons[INCOMPATIBLE] += self._table.lonely_prefill
        wanted = (goal.transport,) if goal.transport is not None else self._settings.transports
        for rank, transport in enumerate(wanted):
            pair = self._pair_over(goal, transport, now_s, reasons)
            if pair is not None:
                notes = (TRANSPORT_FALLBACK,) if rank else ()
                return PairRoute(prefill=pair[0], decode=pair[1], transport=transport, notes=notes)
        return None

    def _pair_over(
        self, goal: PairGoal, transport: str, now_s: float, reasons: Counter[str]
    ) -> tuple[WorkerView, WorkerView] | None:
        tried: set[str] = set()
        while True:
            prefill, group = self._best_prefill(goal, transport, now_s, reasons, tried)
            if prefill is None or group is None:
                return None
            ends = self._ends(group.decode, goal, transport, now_s, reasons)
            if self.breakers:
                ends = self._pairing(prefill, ends, now_s, reasons)
            decode = least_loaded(ends, self.load, self._rng)
            if decode is not None:
                return prefill, decode
            tried.add(prefill.incarnation)

    def _best_prefill(
        self, goal: PairGoal, transport: str, now_s: float, reasons: Counter[str], tried: set[str]
    ) -> tuple[WorkerView | None, Group | None]:
        best: WorkerView | None = None
        home: Group | None = None
        for group in self._table.groups:
            ends = self._ends(group.prefill, goal, transport, now_s, reasons)
            if tried:
                ends = (view for view in ends if view.incarnation not in tried)
            mine = least_loaded(self._preferred(ends, goal), self.load, self._rng)
            if mine is not None and (best is None or self.load.score(mine) < self.load.score(best)):
                best, home = mine, group
        return best, home

    def _preferred(self, ends: Iterator[WorkerView], goal: PairGoal) -> Iterable[WorkerView]:
        if goal.prefer_prefill is None:
            return ends
        all_ends = list(ends)
        return [view for view in all_ends if view.incarnation == goal.prefer_prefill] or all_ends

    def _ends(
        self, members: Iterable[WorkerView], goal: PairGoal, transport: str, now_s: float, reasons: Counter[str]
    ) -> Iterator[WorkerView]:
        """Workers that can be one end of the wanted transfer."""
        prompt_tokens = goal.prompt_tokens
        for view in self._usable(members, goal.exclude, now_s, reasons):
            refusal = pair_refusal(view, prompt_tokens=prompt_tokens, transport=transport)
            if refusal is None:
                yield view
            else:
                reasons[refusal] += 1

    def _usable(
        self, members: Iterable[WorkerView], exclude: frozenset[Incarnation], now_s: float, reasons: Counter[str]
    ) -> Iterator[WorkerView]:
        if not exclude and not self.breakers:
            yield from members
            return
        broken: list[WorkerView] = []
        found = False
        for view in members:
            if view.incarnation in exclude:
                reasons[EXCLUDED] += 1
            elif self.breakers.allows(view.incarnation, now_s):
                found = True
                yield view
            else:
                reasons[BREAKER_OPEN] += 1
                broken.append(view)
        if not found:
            # With no other worker left a suspected one is better than none, or one poisonous prompt takes the pool down.
            yield from broken

    def _pairing(
        self, prefill: WorkerView, ends: Iterator[WorkerView], now_s: float, reasons: Counter[str]
    ) -> Iterator[WorkerView]:
        for view in ends:
            if self.breakers.allows((prefill.incarnation, view.incarnation), now_s):
                yield view
            else:
                reasons[BREAKER_OPEN] += 1

    def _tell_breakers(self, route: Route, now_s: float) -> Route:
        if not self.breakers:
            return route
        workers = (route.prefill, route.decode) if isinstance(route, PairRoute) else (route.worker,)
        overridden = not all(self.breakers.allows(view.incarnation, now_s) for view in workers)
        keys: list[Hashable] = [view.incarnation for view in workers]
        if isinstance(route, PairRoute):
            keys.append(tuple(keys))
        for key in keys:
            self.breakers.chosen(key, now_s)
        return replace(route, notes=(*route.notes, BREAKER_OVERRIDDEN)) if overridden else route
