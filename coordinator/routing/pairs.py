"""Two workers between which KV can travel: filters, the policies, and where the two are to be. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import NamedTuple

from coordinator.routing.breaker import Breakers, PairKey
from coordinator.routing.config import RoutingSettings
from coordinator.routing.filters import (
    INCOMPATIBLE,
    PAIR_BREAKER_OPEN,
    End,
    Group,
    Table,
    leg_filter,
    overridden,
    rounds,
    sparing,
    transfer_refusal,
)
from coordinator.routing.goals import PairGoal, PairRoute
from coordinator.routing.placement import PLACEMENT_MISSED, Loads, Places, open_places
from coordinator.routing.policies import Ask, Picked, Policy
from coordinator.routing.policy import Accept, Candidate, LoadBook, acceptable
from coordinator.routing.views import Placement, WorkerView
from protos.ids import Incarnation

TRANSPORT_FALLBACK = "transport_fallback"
TRANSPORT_DOWNGRADED = "transport_downgraded"
"""Not the transport that was to be asked for first, because it failed between these workers."""


class _Over(NamedTuple):
    """One try at a pair: over this transport, with breakers of workers overridden or not, and without the spared ones."""

    groups: Sequence[Group]
    goal: PairGoal
    ask: Ask
    transport: str
    now_s: float
    override: bool
    spared_prefill: frozenset[str]
    spared_decode: frozenset[str]


class PairFinder:
    """One router's. Prefill is chosen first, then decode, in one call: there is a pair or none."""

    def __init__(
        self, settings: RoutingSettings, breakers: Breakers, load: LoadBook, policy: Policy, decode_policy: Policy
    ) -> None:
        self._settings = settings
        self._breakers = breakers
        self._load = load
        self._policy = policy
        self._decode_policy = decode_policy

    def find(
        self, table: Table, goal: PairGoal, ask: Ask, now_s: float, transports: Sequence[str], reasons: Counter[str]
    ) -> PairRoute | None:
        """A pair over the first of `transports` that has one, or None: then `reasons` counted who was passed over and why."""
        if table.lonely_prefill:
            reasons[INCOMPATIBLE] += table.lonely_prefill
        wanted = (goal.transport,) if goal.transport is not None else transports
        downgraded = False
        for override in rounds(self._breakers):
            for spared in self._spared(goal):
                counted = Counter[str]()
                for rank, transport in enumerate(wanted):
                    found = self._pair_over(_Over(table.groups, goal, ask, transport, now_s, override, *spared), counted)
                    if found is not None:
                        prefill, decode, notes = found
                        if rank:
                            downgraded = downgraded or counted[PAIR_BREAKER_OPEN] > 0
                            notes = (TRANSPORT_DOWNGRADED if downgraded else TRANSPORT_FALLBACK, *notes)
                        return PairRoute(prefill=prefill, decode=decode, transport=transport, notes=notes)
                downgraded = downgraded or (not override and counted[PAIR_BREAKER_OPEN] > 0)
                if not (override or any(spared)):
                    reasons.update(counted)
        return None

    def _spared(self, goal: PairGoal) -> Iterable[tuple[frozenset[str], frozenset[str]]]:
        """Who is spared at either end, round by round: both ends' last resorts, one's, nobody."""
        last, nobody = self._load.last_resort, frozenset[str]()
        if not last:
            return ((nobody, nobody),)
        # A prompt that is computed stays where it is: that worker answered this gateway.
        prefill = last - {goal.prefer_prefill} if goal.prefer_prefill is not None else last
        return dict.fromkeys(((prefill, last), (prefill, nobody), (nobody, last), (nobody, nobody)))

    def _pair_over(self, over: _Over, reasons: Counter[str]) -> tuple[WorkerView, WorkerView, tuple[str, ...]] | None:
        """A pair for one transport, with what has to be noted of it."""
        placement = self._settings.placement
        if placement is not Placement.ANY:
            found = self._pair_among(over, reasons if placement.required else Counter(), placed=True)
            if found is not None or placement.required:
                return None if found is None else (*found, ())
        found = self._pair_among(over, reasons, placed=False)
        notes = () if placement is Placement.ANY else (PLACEMENT_MISSED,)
        return None if found is None else (*found, notes)

    def _pair_among(self, over: _Over, reasons: Counter[str], *, placed: bool) -> tuple[WorkerView, WorkerView] | None:
        # A prefill worker may turn out to have no decode worker left (excluded, or broken as a pair): then the next best.
        exclude = over.goal.exclude
        while True:
            found = self._best_prefill(over, exclude, reasons, placed)
            if found is None:
                return None
            prefill, group = found
            accept = self._accept_decode(group, over, beside=prefill.incarnation)
            among: Sequence[Candidate] = group.decode.members
            if placed and group.places is not None:
                among, accept = group.places.partners(prefill.incarnation, accept)
            before = reasons[PAIR_BREAKER_OPEN]
            decode = self._decode_policy.pick(among, over.ask, accept, reasons, over.now_s)
            if decode is not None:
                return prefill, decode.candidate.view
            if placed and not self._settings.placement.required and prefill.incarnation == over.goal.prefer_prefill:
                return None  # that prompt stays where it was computed, with a decode worker of another place
            # Refused for what has nothing to do with this prefill worker, decode refuses every other one of the group as well.
            alone = placed or reasons[PAIR_BREAKER_OPEN] > before
            exclude |= {prefill.incarnation} if alone else {c.view.incarnation for c in group.prefill.members}

    def _best_prefill(
        self, over: _Over, exclude: frozenset[Incarnation], reasons: Counter[str], placed: bool
    ) -> tuple[WorkerView, Group] | None:
        best: Picked | None = None
        home: Group | None = None
        for group, accept in self._open_groups(over, exclude, reasons, placed):
            preferred = self._preferred(group.prefill, over.goal, accept)
            if preferred is not None:
                return preferred.view, group
            mine = self._policy.pick(group.prefill.members, over.ask, accept, reasons, over.now_s)
            if mine is not None and (best is None or mine.cost < best.cost):
                best, home = mine, group
        return (best.candidate.view, home) if best is not None and home is not None else None

    def _open_groups(
        self, over: _Over, exclude: frozenset[Incarnation], reasons: Counter[str], placed: bool
    ) -> Iterable[tuple[Group, Accept | None]]:
        """The groups, with the filters of their prefill workers; `placed`: of those with a decode worker in the right place."""
        groups = [(g, sparing(self._accept_end(g.prefill, over, exclude), over.spared_prefill)) for g in over.groups]
        if not placed:
            return groups
        rules, kept = self._settings, over.goal.prefer_prefill
        takes = [self._accept_decode(group, over) for group, _ in groups]
        decode = [_mask(group.decode, accept) for (group, _), accept in zip(groups, takes, strict=True)]

        def weigh(prefill: Iterable[list[bool] | None]) -> list[Loads]:
            return [_places(group).loads(*ends) for (group, _), *ends in zip(groups, prefill, decode, strict=True)]

        def opened(loads: Sequence[Loads]) -> list[frozenset[int]]:
            tokens = rules.placement_imbalance_tokens
            return open_places(loads, required=rules.placement.required, imbalance_tokens=tokens)

        loads = weigh(_mask(group.prefill, accept) for group, accept in groups)
        places = opened(loads)
        if any(self._preferred(group.prefill, over.goal, accept) for group, accept in groups):
            its = opened(weigh([c.view.incarnation == kept for c in group.prefill.members] for group, _ in groups))
            # Where nobody is placed well for it: another prefill worker if it has to be so, else another decode worker.
            places = its if any(its) or not rules.placement.required else places
        found: list[tuple[Group, Accept | None]] = []
        for (group, accept), accept_decode, mine, load in zip(groups, takes, places, loads, strict=True):
            if load.prefill + load.decode < inf:
                found.append((group, _in_places(_places(group), mine, accept, rules.placement.refusal)))
                continue
            # An end without anybody who could take it is no matter of placement.
            for end, accept_end in ((group.prefill, accept), (group.decode, accept_decode)):
                acceptable(end.members, accept_end, reasons)
        return found

    def _preferred(self, end: End, goal: PairGoal, accept: Accept | None) -> Candidate | None:
        if goal.prefer_prefill is None:
            return None
        for candidate in end.members:
            if candidate.view.incarnation == goal.prefer_prefill:
                return candidate if accept is None or accept(candidate.view) is None else None
        return None

    def _accept_decode(self, group: Group, over: _Over, *, beside: Incarnation | None = None) -> Accept | None:
        return sparing(self._accept_end(group.decode, over, over.goal.exclude, beside=beside), over.spared_decode)

    def _accept_end(
        self, end: End, over: _Over, exclude: frozenset[Incarnation], *, beside: Incarnation | None = None
    ) -> Accept | None:
        """The filters of one end of a pair; `beside` is the other end once it is chosen."""
        goal, transport = over.goal, over.transport
        common = leg_filter(self._breakers, exclude, over.now_s, goal.pools)
        blocked = self._breakers.blocked(over.now_s) if self._breakers and beside is not None else frozenset()
        if common is None and not blocked and end.all_can(goal.prompt_tokens, transport):
            return None
        prompt_tokens = goal.prompt_tokens

        def accept(view: WorkerView) -> str | None:
            refusal = transfer_refusal(view, prompt_tokens=prompt_tokens, transport=transport)
            if refusal is None and beside is not None and PairKey(beside, view.incarnation, transport) in blocked:
                return PAIR_BREAKER_OPEN
            return refusal or (common(view) if common is not None else None)

        return overridden(accept) if over.override else accept


def _places(group: Group) -> Places:
    assert group.places is not None, "the table is made with the placement that is asked for"
    return group.places


def _mask(end: End, accept: Accept | None) -> list[bool] | None:
    return None if accept is None else acceptable(end.members, accept, Counter())


def _in_places(places: Places, opened: Collection[int], accept: Accept | None, refusal: str) -> Accept | None:
    of = places.of

    def in_place(view: WorkerView) -> str | None:
        reason = None if accept is None else accept(view)
        return reason or (None if of[view.incarnation] in opened else refusal)

    return in_place
