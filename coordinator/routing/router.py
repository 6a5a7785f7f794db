"""From goals to a route: the whole decision of one gateway. Pure: the caller brings membership, time and the random source."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from coordinator.routing.breaker import Breakers, PairKey
from coordinator.routing.config import RoutingSettings
from coordinator.routing.filters import PROMPT_EXCEEDS_TRANSFER, Table, build_table, leg_filter, overridden, rounds, sparing
from coordinator.routing.goals import Goal, LocalGoal, PairGoal, PairRoute, Refusal, Route, SoloGoal, SoloRoute, workers_of
from coordinator.routing.pairs import PairFinder
from coordinator.routing.policies import Ask, LeastLoaded, Policy, PowerOfTwo, RoundRobin, SessionAffinity
from coordinator.routing.policy import Candidate, LoadBook
from coordinator.routing.prefix_aware import PrefixAware
from coordinator.routing.prefix_index import PrefixIndex, block_hashes
from coordinator.routing.views import Role, WorkerState, WorkerView
from kvtransfer.transport_choice import agreed_order
from protos.ids import Incarnation

TRANSPORT_PROBED = "transport_probed"
"""This request tries a pair's transport that was out."""
NO_PAIR = "no_pair"
LOCAL_RECOMPUTE = "local_recompute"
BREAKER_OVERRIDDEN = "breaker_overridden"
LAST_RESORT_TAKEN = "last_resort_taken"
"""Nobody else could take it than a worker whose stream is down, or that answers the coordinator nothing."""


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
        self._pairs = PairFinder(settings, self.breakers, self.load, self._policy, self._decode_policy)

    def update(self, views: Iterable[WorkerView]) -> None:
        """Replace the membership."""
        old = self._table.by_incarnation
        candidates = self.load.candidates(v for v in views if v.state is not WorkerState.DEAD)
        self._table = build_table(candidates, self._settings.placement)
        by_role = self._table.by_role
        self._tiers = [tuple(c for role in tier for c in by_role[role]) for tier in self._settings.colocated_roles]
        asked = (*self._tiers, *by_role.values(), *(group.prefill.members for group in self._table.groups))
        self._policy.members(candidates, asked)
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
                if self.last_resort(route):
                    route = replace(route, notes=(*route.notes, LAST_RESORT_TAKEN))
                return self._tell_breakers(replace(route, expected_cached_tokens=expected), now_s)
        said = [f"no worker for the {role} leg" for role in self.lacking(goals)]
        said += [f"{name}: {count}" for name, count in sorted(reasons.items())]
        placement = self._settings.placement
        said += [f"gateway.routing.placement is {placement}"] if placement.refusal in reasons else []
        return Refusal(message="no worker can take this request" + (f" ({', '.join(said)})" if said else ""), reasons=reasons)

    def lacking(self, goals: Sequence[Goal]) -> tuple[Role, ...]:
        """The legs that the first of `goals` wants and no ready worker is offered."""
        if not goals or isinstance(goals[0], LocalGoal):
            return ()
        if isinstance(goals[0], PairGoal):
            return tuple(role for role in (Role.PREFILL, Role.DECODE) if not self._table.by_role[role])
        return () if any(self._tiers) else (Role.COLOCATED,)

    def last_resort(self, route: Route) -> bool:
        """It has a worker that is to be offered only what nobody else can take."""
        return any(view.incarnation in self.load.last_resort for view in workers_of(route))

    def preview(self, goal: Goal, now_s: float, ask: Ask) -> Route | None:
        """What `choose` would take for this goal alone, as far as chance decides alike. No worker is told of it."""
        route = self._try(goal, ask, now_s, Counter(), [])
        if route is None:
            return None
        return replace(route, expected_cached_tokens=self._policy.expected(workers_of(route)[0], ask))

    def preview_solo(self, goal: SoloGoal, now_s: float, ask: Ask) -> list[SoloRoute]:
        """`preview` of the whole request on one worker of each role that is offered such requests now; the one taken where
        nobody names a role comes first.

        Tokens compare workers of one role: those of a queued prompt take longer than as many that are under way in an answer.
        """
        accept = leg_filter(self.breakers, goal.exclude, now_s, goal.pools)
        for override, spared in self._solo_rounds():
            for roles in self._settings.colocated_roles:
                own = sparing(overridden(accept) if override else accept, spared)
                picked = [self._policy.pick(self._table.by_role[role], ask, own, Counter(), now_s) for role in roles]
                if found := sorted((each for each in picked if each is not None), key=lambda each: each.cost):
                    views = [each.candidate.view for each in found]
                    return [SoloRoute(worker=v, expected_cached_tokens=self._policy.expected(v, ask)) for v in views]
        return []

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
            route = self._pairs.find(self._table, goal, ask, now_s, self._transports, reasons)
            if route is None:
                # Told apart: a prompt too long for staging is a matter of configuration, a missing pair one of health.
                told = (PROMPT_EXCEEDS_TRANSFER, self._settings.placement.refusal)
                notes.append(next((name for name in told if reasons[name]), NO_PAIR))
            return route
        if isinstance(goal, LocalGoal):
            view = self._table.by_incarnation.get(goal.incarnation)
            if view is None or view.state is not WorkerState.READY:
                return None
            return SoloRoute(worker=view, local=True, notes=(*notes, LOCAL_RECOMPUTE))
        return self._solo(goal, ask, now_s, reasons, notes)

    # One worker -----------------------------------------------------------------------------------------------------------

    def _solo(self, goal: SoloGoal, ask: Ask, now_s: float, reasons: Counter[str], notes: list[str]) -> SoloRoute | None:
        accept = leg_filter(self.breakers, goal.exclude, now_s, goal.pools)
        tiers = self._tiers if goal.role is None else [self._table.by_role[goal.role]]
        for override, spared in self._solo_rounds():
            for tier in tiers:
                own = sparing(overridden(accept) if override else accept, spared)
                best = self._policy.pick(tier, ask, own, Counter() if override or spared else reasons, now_s)
                if best is not None:
                    return SoloRoute(worker=best.candidate.view, notes=tuple(notes))
        return None

    def _solo_rounds(self) -> Iterator[tuple[bool, frozenset[str]]]:
        """Whether breakers are overridden, and who is spared: in every tier the others come first."""
        for override in rounds(self.breakers):
            yield from ((override, spared) for spared in dict.fromkeys((self.load.last_resort, frozenset[str]())))

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
