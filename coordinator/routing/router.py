"""From goals to a route: the whole decision of one gateway. Pure: the caller brings membership, time and the random source."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from coordinator.routing.breaker import Breakers, PairKey
from coordinator.routing.config import RoutingSettings
from coordinator.routing.filters import (
    BREAKER_OPEN,
    EXCLUDED,
    INCOMPATIBLE,
    OTHER_POOL,
    PAIR_BREAKER_OPEN,
    PROMPT_EXCEEDS_TRANSFER,
    End,
    Group,
    Table,
    build_table,
    transfer_refusal,
)
from coordinator.routing.goals import Goal, LocalGoal, PairGoal, PairRoute, Refusal, Route, SoloGoal, SoloRoute, workers_of
from coordinator.routing.policies import Ask, LeastLoaded, Picked, Policy, PowerOfTwo, RoundRobin, SessionAffinity
from coordinator.routing.policy import Accept, Candidate, LoadBook
from coordinator.routing.prefix_aware import PrefixAware
from coordinator.routing.prefix_index import PrefixIndex, block_hashes
from coordinator.routing.views import Role, WorkerState, WorkerView
from kvtransfer.transport_choice import agreed_order
from protos.ids import Incarnation

TRANSPORT_FALLBACK = "transport_fallback"
TRANSPORT_DOWNGRADED = "transport_downgraded"
"""Not the transport that was to be asked for first, because it failed between these workers."""
TRANSPORT_PROBED = "transport_probed"
"""This request tries a pair's transport that was out."""
NO_PAIR = "no_pair"
LOCAL_RECOMPUTE = "local_recompute"
BREAKER_OVERRIDDEN = "breaker_overridden"


class Router:
    """Chooses paths and workers. A decision scans the ready workers and copies none of them.

    `transports` are in order of preference; a pair that has only a later one leaves a note on its route. `follow_workers`: the
    order that all ready workers advertise goes before it (`default_transport = "auto"`).
    """

    def __init__(
        self, settings: RoutingSettings, rng: random.Random, *, transports: Sequence[str], follow_workers: bool = False
    ) -> None:
        self._settings = settings
        self._configured = self._transports = tuple(transports)
        self._follow_workers = follow_workers
        self._policy = make_policy(settings.policy, settings, rng)
        self._decode_policy = make_policy(settings.decode_policy, settings, rng)
        self._table: Table = build_table(())
        self._tiers: list[tuple[Candidate, ...]] = []
        self.load = LoadBook(heartbeat_request_tokens=settings.heartbeat_request_tokens)
        self.breakers = Breakers(failures=settings.breaker_failures, cooldown_s=settings.breaker_cooldown_s)

    def update(self, views: Iterable[WorkerView]) -> None:
        """Replace the membership."""
        old = self._table.by_incarnation
        candidates = self.load.candidates(v for v in views if v.state is not WorkerState.DEAD)
        self._table = build_table(candidates)
        by_role = self._table.by_role
        self._tiers = [tuple(c for role in tier for c in by_role[role]) for tier in self._settings.colocated_roles]
        self._policy.members(candidates, (*self._tiers, *(group.prefill.members for group in self._table.groups)))
        self._decode_policy.members(candidates, [group.decode.members for group in self._table.groups])
        if self._follow_workers:
            ends = [c.view.transports for role in (Role.PREFILL, Role.DECODE) for c in by_role[role]]
            self._transports = agreed_order(ends, self._configured)
        for incarnation in old.keys() - self._table.by_incarnation.keys():
            self.breakers.forget(incarnation)

    def view(self, incarnation: Incarnation) -> WorkerView | None:
        """The present view of a worker that is not dead."""
        return self._table.by_incarnation.get(incarnation)

    def ready_workers(self, role: Role) -> list[WorkerView]:
        return [candidate.view for candidate in self._table.by_role[role]]

    def has_pair(self) -> bool:
        """Some ready prefill worker has a ready decode worker of its kind."""
        return bool(self._table.groups)

    def ask(self, prompt_token_ids: Sequence[int], session: str = "", salt: bytes = b"", *, reads_cache: bool = True) -> Ask:
        """What the policy may know of a request. `salt` keeps the prefixes of tenants apart; `reads_cache`: see `Ask`."""
        blocks: tuple[int, ...] = ()
        if isinstance(self._policy, PrefixAware):
            blocks = block_hashes(prompt_token_ids, self._settings.prefix_block_tokens, salt)
        return Ask(tokens=len(prompt_token_ids), blocks=blocks, session=session, reads_cache=reads_cache)

    def choose(self, goals: Sequence[Goal], now_s: float, ask: Ask | None = None) -> Route | Refusal:
        """The first goal that some worker meets. Goals that were passed over leave a note on the route.

        A route is whole or it is none: its workers are chosen, and the prompt counted as theirs, in this one call. `ask` None:
        nothing is known of the prompt but its length.
        """
        reasons: Counter[str] = Counter()
        notes: list[str] = []
        for goal in goals:
            asked = ask or Ask(tokens=goal.prompt_tokens if isinstance(goal, PairGoal) else 0)
            route = self._try(goal, asked, now_s, reasons, notes)
            if route is not None:
                expected = self._policy.taken(workers_of(route)[0], asked, now_s)
                return self._tell_breakers(replace(route, expected_cached_tokens=expected), now_s)
        said = [f"no worker for the {role} leg" for role in self.lacking(goals)]
        said += [f"{name}: {count}" for name, count in sorted(reasons.items())]
        return Refusal(message="no worker can take this request" + (f" ({', '.join(said)})" if said else ""), reasons=reasons)

    def lacking(self, goals: Sequence[Goal]) -> tuple[Role, ...]:
        """The legs that the first of `goals` wants and no ready worker is offered."""
        if not goals or isinstance(goals[0], LocalGoal):
            return ()
        if isinstance(goals[0], PairGoal):
            return tuple(role for role in (Role.PREFILL, Role.DECODE) if not self._table.by_role[role])
        return () if any(self._tiers) else (Role.COLOCATED,)

    def preview(self, goal: Goal, now_s: float, ask: Ask) -> Route | None:
        """What `choose` would take for this goal alone, as far as chance decides alike. No worker is told of it."""
        route = self._try(goal, ask, now_s, Counter(), [])
        if route is None:
            return None
        return replace(route, expected_cached_tokens=self._policy.expected(workers_of(route)[0], ask))

    def prompt_computed(self, incarnation: Incarnation, ask: Ask, *, expected_cached_tokens: int, cached_tokens: int) -> None:
        """A worker has computed a prompt, and says how much of it was cached; its route expected so much."""
        if isinstance(self._policy, PrefixAware):
            self._policy.index.computed(
                incarnation, ask.blocks, expected_tokens=expected_cached_tokens, cached_tokens=cached_tokens
            )

    def prompt_lost(self, incarnation: Incarnation, ask: Ask) -> None:
        """A worker that was given a prompt is not going to compute it."""
        if isinstance(self._policy, PrefixAware):
            self._policy.index.not_computed(incarnation, ask.blocks)

    def _try(self, goal: Goal, ask: Ask, now_s: float, reasons: Counter[str], notes: list[str]) -> Route | None:
        if isinstance(goal, PairGoal):
            route = self._pair(goal, ask, now_s, reasons)
            if route is None:
                # Told apart: a prompt too long for staging is a matter of configuration, a missing pair one of health.
                notes.append(PROMPT_EXCEEDS_TRANSFER if reasons[PROMPT_EXCEEDS_TRANSFER] else NO_PAIR)
            return route
        if isinstance(goal, LocalGoal):
            view = self._table.by_incarnation.get(goal.incarnation)
            if view is None or view.state is not WorkerState.READY:
                return None
            return SoloRoute(worker=view, local=True, notes=(*notes, LOCAL_RECOMPUTE))
        return self._solo(goal, ask, now_s, reasons, notes)

    # One worker -----------------------------------------------------------------------------------------------------------

    def _solo(self, goal: SoloGoal, ask: Ask, now_s: float, reasons: Counter[str], notes: list[str]) -> SoloRoute | None:
        accept = self._accept(goal.exclude, now_s, goal.pools)
        for override in self._rounds():
            for tier in self._tiers:
                own, counted = (_overridden(accept), Counter[str]()) if override else (accept, reasons)
                best = self._policy.pick(tier, ask, own, counted, now_s)
                if best is not None:
                    return SoloRoute(worker=best.candidate.view, notes=tuple(notes))
        return None

    # Two workers ----------------------------------------------------------------------------------------------------------

    def _pair(self, goal: PairGoal, ask: Ask, now_s: float, reasons: Counter[str]) -> PairRoute | None:
        if self._table.lonely_prefill:
            reasons[INCOMPATIBLE] += self._table.lonely_prefill
        wanted = (goal.transport,) if goal.transport is not None else self._transports
        before = reasons[PAIR_BREAKER_OPEN]
        for override in self._rounds():
            for rank, transport in enumerate(wanted):
                pair = self._pair_over(goal, ask, transport, now_s, Counter() if override else reasons, override)
                if pair is not None:
                    downgraded = reasons[PAIR_BREAKER_OPEN] > before
                    notes = (TRANSPORT_DOWNGRADED if downgraded else TRANSPORT_FALLBACK,) if rank else ()
                    return PairRoute(prefill=pair[0], decode=pair[1], transport=transport, notes=notes)
        return None

    def _pair_over(
        self, goal: PairGoal, ask: Ask, transport: str, now_s: float, reasons: Counter[str], override: bool
    ) -> tuple[WorkerView, WorkerView] | None:
        # A prefill worker may turn out to have no decode worker left (excluded, or broken as a pair): then the next best.
        exclude = goal.exclude
        while True:
            found = self._best_prefill(goal, ask, transport, exclude, now_s, reasons, override)
            if found is None:
                return None
            prefill, group = found
            accept = self._accept_end(group.decode, goal, transport, goal.exclude, now_s, beside=prefill.incarnation)
            before = reasons[PAIR_BREAKER_OPEN]
            own = _overridden(accept) if override else accept
            decode = self._decode_policy.pick(group.decode.members, ask, own, reasons, now_s)
            if decode is not None:
                return prefill, decode.candidate.view
            # Refused for what has nothing to do with this prefill worker, decode refuses every other one of the group as well.
            alone = reasons[PAIR_BREAKER_OPEN] > before
            exclude |= {prefill.incarnation} if alone else {c.view.incarnation for c in group.prefill.members}

    def _best_prefill(
        self,
        goal: PairGoal,
        ask: Ask,
        transport: str,
        exclude: frozenset[Incarnation],
        now_s: float,
        reasons: Counter[str],
        override: bool,
    ) -> tuple[WorkerView, Group] | None:
        best: Picked | None = None
        home: Group | None = None
        for group in self._table.groups:
            accept = self._accept_end(group.prefill, goal, transport, exclude, now_s)
            accept = _overridden(accept) if override else accept
            preferred = self._preferred(group.prefill, goal, accept)
            if preferred is not None:
                return preferred.view, group
            mine = self._policy.pick(group.prefill.members, ask, accept, reasons, now_s)
            if mine is not None and (best is None or mine.cost < best.cost):
                best, home = mine, group
        return (best.candidate.view, home) if best is not None and home is not None else None

    def _preferred(self, end: End, goal: PairGoal, accept: Accept | None) -> Candidate | None:
        if goal.prefer_prefill is None:
            return None
        for candidate in end.members:
            if candidate.view.incarnation == goal.prefer_prefill:
                return candidate if accept is None or accept(candidate.view) is None else None
        return None

    # Filters --------------------------------------------------------------------------------------------------------------

    def _rounds(self) -> tuple[bool, ...]:
        """Whether breakers of workers are overridden, round by round.

        With no other worker left anywhere a suspected one is better than none, or one poisonous prompt takes the pool down. A
        pair that fails together stays out: there is another way to serve the request.
        """
        return (False, True) if self.breakers else (False,)

    def _accept(self, exclude: frozenset[Incarnation], now_s: float, pools: frozenset[str]) -> Accept | None:
        """The filters of every leg, or None when they would let everybody pass."""
        blocked = self.breakers.blocked(now_s) if self.breakers else frozenset()
        if not exclude and not blocked and not pools:
            return None

        def accept(view: WorkerView) -> str | None:
            if pools and view.pool not in pools:
                return OTHER_POOL
            if view.incarnation in exclude:
                return EXCLUDED
            return BREAKER_OPEN if view.incarnation in blocked else None

        return accept

    def _accept_end(
        self,
        end: End,
        goal: PairGoal,
        transport: str,
        exclude: frozenset[Incarnation],
        now_s: float,
        *,
        beside: Incarnation | None = None,
    ) -> Accept | None:
        """The filters of one end of a pair; `beside` is the other end once it is chosen."""
        common = self._accept(exclude, now_s, goal.pools)
        blocked = self.breakers.blocked(now_s) if self.breakers and beside is not None else frozenset()
        if common is None and not blocked and end.all_can(goal.prompt_tokens, transport):
            return None
        prompt_tokens = goal.prompt_tokens

        def accept(view: WorkerView) -> str | None:
            refusal = transfer_refusal(view, prompt_tokens=prompt_tokens, transport=transport)
            if refusal is None and beside is not None and PairKey(beside, view.incarnation, transport) in blocked:
                return PAIR_BREAKER_OPEN
            return refusal or (common(view) if common is not None else None)

        return accept

    def _tell_breakers(self, route: Route, now_s: float) -> Route:
        if not self.breakers:
            return route
        workers = workers_of(route)
        overridden = not all(self.breakers.allows(view.incarnation, now_s) for view in workers)
        for view in workers:
            self.breakers.chosen(view.incarnation, now_s)
        notes = (*route.notes, BREAKER_OVERRIDDEN) if overridden else route.notes
        if isinstance(route, PairRoute):
            key = PairKey(route.prefill.incarnation, route.decode.incarnation, route.transport)
            if self.breakers.chosen(key, now_s):
                notes = (*notes, TRANSPORT_PROBED)
        return replace(route, notes=notes)


def make_policy(name: str, settings: RoutingSettings, rng: random.Random) -> Policy:
    """The policy that a setting names."""
    limit, idle_tokens = settings.max_load_ratio, settings.idle_tokens
    match name:
        case "prefix_aware":
            index = PrefixIndex(block_tokens=settings.prefix_block_tokens, max_blocks=settings.prefix_index_blocks)
            return PrefixAware(
                rng,
                index,
                limit=limit,
                idle_tokens=idle_tokens,
                hit_weight=settings.prefix_hit_weight,
                worker_tokens=settings.prefix_worker_tokens,
            )
        case "session_affinity":
            return SessionAffinity(rng, limit=limit, idle_tokens=idle_tokens)
        case "power_of_two":
            return PowerOfTwo(rng)
        case "round_robin":
            return RoundRobin(rng)
        case _:
            return LeastLoaded(rng)


def _overridden(accept: Accept | None) -> Accept | None:
    if accept is None:
        return None

    def without_breakers(view: WorkerView) -> str | None:
        reason = accept(view)
        return None if reason == BREAKER_OPEN else reason

    return without_breakers
