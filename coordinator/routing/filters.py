"""Which workers may be offered a leg. Pure; each filter has a name that appears in refusals and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.routing.breaker import Breakers
from coordinator.routing.placement import Places
from coordinator.routing.policy import Accept, Candidate
from coordinator.routing.views import Placement, Role, WorkerState, WorkerView
from protos.ids import Incarnation

EXCLUDED = "excluded"
"""It failed this request before."""
OTHER_POOL = "other_pool"
"""The request names pools, and its own is not among them."""
BREAKER_OPEN = "breaker_open"
PAIR_BREAKER_OPEN = "pair_breaker_open"
PROMPT_EXCEEDS_TRANSFER = "prompt_exceeds_transfer"
TRANSPORT_MISSING = "transport_missing"
INCOMPATIBLE = "incompatible"
LAST_RESORT = "last_resort"
"""Its stream is down, or it answers the coordinator nothing: spared as long as somebody else can take the leg."""


@dataclass(frozen=True, slots=True)
class End:
    """The workers that can be one end of a group's transfers, and what all of them can do: a prompt and a transport within
    that need no check worker by worker."""

    members: tuple[Candidate, ...]
    least_transfer_tokens: int
    common_transports: frozenset[str]

    def all_can(self, prompt_tokens: int, transport: str) -> bool:
        return prompt_tokens <= self.least_transfer_tokens and transport in self.common_transports


@dataclass(frozen=True, slots=True)
class Group:
    """Ready workers that can exchange KV: any prefill of a group can hand over to any decode of it. `places` where a placement of
    pairs is asked for."""

    prefill: End
    decode: End
    places: Places | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The workers of one membership version, sorted once so that a decision copies nothing.

    `by_incarnation` holds every worker that is not dead, draining and cordoned ones and spares included; the rest
    holds alone those that are to be offered something.
    """

    by_incarnation: dict[Incarnation, WorkerView]
    by_role: dict[Role, tuple[Candidate, ...]]
    groups: tuple[Group, ...]
    lonely_prefill: int
    """Ready prefill workers whose fingerprint no ready decode worker has."""


def build_table(candidates: Iterable[Candidate], placement: Placement = Placement.ANY) -> Table:
    """Index the members, for pairs placed so. Called once per membership version."""
    alive = [c for c in candidates if c.view.state is not WorkerState.DEAD]
    ready = [c for c in alive if c.view.state is WorkerState.READY and not (c.view.cordoned or c.view.spare)]
    by_role = {role: tuple(c for c in ready if c.view.role is role) for role in Role}
    prefill_of = _by_fingerprint(by_role[Role.PREFILL])
    decode_of = _by_fingerprint(by_role[Role.DECODE])
    groups = tuple(_group(p, decode_of[f], placement) for f, p in prefill_of.items() if f in decode_of)
    lonely = sum(len(p) for f, p in prefill_of.items() if f not in decode_of)
    return Table({c.view.incarnation: c.view for c in alive}, by_role, groups, lonely)


def transfer_refusal(view: WorkerView, *, prompt_tokens: int, transport: str) -> str | None:
    """Why this worker cannot be either end of such a transfer, or None."""
    if prompt_tokens > view.max_transfer_tokens:
        return PROMPT_EXCEEDS_TRANSFER
    if transport not in view.transports:
        return TRANSPORT_MISSING
    return None


def rounds(breakers: Breakers) -> tuple[bool, ...]:
    """Whether breakers of workers are overridden, round by round.

    With no other worker left anywhere a suspected one is better than none, or one poisonous prompt takes the pool down. A pair
    that fails together stays out: there is another way to serve the request.
    """
    return (False, True) if breakers else (False,)


def leg_filter(breakers: Breakers, exclude: frozenset[Incarnation], now_s: float, pools: frozenset[str]) -> Accept | None:
    """The filters of every leg, or None when they would let everybody pass."""
    blocked = breakers.blocked(now_s) if breakers else frozenset()
    if not exclude and not blocked and not pools:
        return None

    def accept(view: WorkerView) -> str | None:
        if pools and view.pool not in pools:
            return OTHER_POOL
        if view.incarnation in exclude:
            return EXCLUDED
        return BREAKER_OPEN if view.incarnation in blocked else None

    return accept


def sparing(accept: Accept | None, spared: frozenset[str]) -> Accept | None:
    """The filter, and without the workers of `spared`."""
    if not spared:
        return accept

    def accept_others(view: WorkerView) -> str | None:
        if view.incarnation in spared:
            return LAST_RESORT
        return None if accept is None else accept(view)

    return accept_others


def overridden(accept: Accept | None) -> Accept | None:
    """The filter without the breakers of workers."""
    if accept is None:
        return None

    def without_breakers(view: WorkerView) -> str | None:
        reason = accept(view)
        return None if reason == BREAKER_OPEN else reason

    return without_breakers


def _by_fingerprint(candidates: Iterable[Candidate]) -> dict[bytes, list[Candidate]]:
    found: dict[bytes, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(candidate.view.fingerprint, []).append(candidate)
    return found


def _group(prefill: list[Candidate], decode: list[Candidate], placement: Placement) -> Group:
    places = None if placement is Placement.ANY else Places(prefill, decode, placement)
    return Group(_end(prefill), _end(decode), places)


def _end(members: list[Candidate]) -> End:
    return End(
        members=tuple(members),
        least_transfer_tokens=min(c.view.max_transfer_tokens for c in members),
        common_transports=frozenset.intersection(*(frozenset(c.view.transports) for c in members)),
    )
