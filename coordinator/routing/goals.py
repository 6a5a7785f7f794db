"""What a request asks of routing, what it gets, and which goals follow which failure. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.routing.views import Role, WorkerView
from protos.errors import Code, SplitpointError
from protos.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class PairGoal:
    """Two workers between which KV can travel. `transport` is the client's wish, None: the configured order.

    `prefer_prefill` is taken whenever it passes the filters: its prefix cache holds the prompt already. `pools`, where not empty,
    are the only ones whose workers may serve it.
    """

    prompt_tokens: int
    transport: str | None = None
    exclude: frozenset[Incarnation] = frozenset()
    pools: frozenset[str] = frozenset()
    prefer_prefill: Incarnation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGoal:
    """This very worker computes the prompt itself."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloGoal:
    """One worker for the whole request, of `pools` where that is not empty, and with this `role` where one is named."""

    exclude: frozenset[Incarnation] = frozenset()
    pools: frozenset[str] = frozenset()
    role: Role | None = None


Goal = PairGoal | LocalGoal | SoloGoal


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRoute:
    """Prefill on one worker, decode on the other. `notes` name what is not as asked; each becomes a counter and an event.

    `expected_cached_tokens` of the prompt should be in the prefill worker's cache.
    """

    prefill: WorkerView
    decode: WorkerView
    transport: str
    notes: tuple[str, ...] = ()
    expected_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloRoute:
    """The whole request on one worker. `local`: it was to be the decode worker of a pair and now computes the prompt itself.

    `expected_cached_tokens` of the prompt should be in its cache.
    """

    worker: WorkerView
    local: bool = False
    notes: tuple[str, ...] = ()
    expected_cached_tokens: int = 0


Route = PairRoute | SoloRoute


def workers_of(route: Route) -> tuple[WorkerView, ...]:
    """The workers a route uses, prefill first."""
    return (route.prefill, route.decode) if isinstance(route, PairRoute) else (route.worker,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No worker meets any goal. `reasons` counts, per reason, the workers or pairs that were passed over."""

    message: str
    reasons: Mapping[str, int] = field(default_factory=dict)

    def to_error(self) -> SplitpointError:
        """The refusal as the client sees it."""
        return SplitpointError(Code.NO_WORKER, self.message)


PAIR_FAULTS = frozenset({Code.TRANSFER_FAILED, Code.TRANSFER_REFUSED, Code.INCOMPATIBLE_PEER})
"""Faults of two workers together: neither alone is to blame."""

WORKER_FAULTS = frozenset({Code.INTERNAL})
"""Faults of one worker that trip its breaker. Overload and drain are no faults, and a lost worker is known by its stream:
its breaker would keep it out after it has come back."""


def first_goals(
    path: str,
    *,
    prompt_tokens: int,
    transport: str | None,
    strict: bool,
    pools: frozenset[str] = frozenset(),
    solo_role: Role | None = None,
) -> tuple[Goal, ...]:
    """What a new request asks for. A strict split request takes a pair or nothing; one for a single worker first looks among
    those of `solo_role`."""
    solo = SoloGoal(pools=pools)
    if path == "colocated":
        return (solo,) if solo_role is None else (replace(solo, role=solo_role), solo)
    pair = PairGoal(prompt_tokens=prompt_tokens, transport=transport, pools=pools)
    return (pair,) if strict else (pair, solo)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRoute:
    """What a request knows when a leg failed before its first token.

    `on_decode` says which side of a pair reported the failure; `exclude` is every worker that failed this request so far,
    the present one included.
    """

    route: Route
    code: Code
    on_decode: bool
    exclude: frozenset[Incarnation]


def goals_after_failure(
    failed: FailedRoute, *, prompt_tokens: int, transport: str | None, strict: bool, pools: frozenset[str] = frozenset()
) -> tuple[Goal, ...]:
    """The order of docs/architecture.md: another pair, the same decode worker by itself, one worker for everything."""
    if isinstance(failed.route, SoloRoute):
        return () if strict and failed.route.local else (SoloGoal(exclude=failed.exclude, pools=pools),)
    prefill_is_good = failed.on_decode and failed.code not in PAIR_FAULTS
    pair = PairGoal(
        prompt_tokens=prompt_tokens,
        transport=transport,
        exclude=failed.exclude,
        pools=pools,
        prefer_prefill=failed.route.prefill.incarnation if prefill_is_good else None,
    )
    if strict:
        return (pair,)
    goals: list[Goal] = [pair]
    # Full staging keeps KV out and not work: that engine can compute the prompt, and has no queue of prompts before it.
    kept_out = failed.on_decode and failed.code is Code.STAGING_FULL
    if kept_out or failed.route.decode.incarnation not in failed.exclude:
        goals.append(LocalGoal(incarnation=failed.route.decode.incarnation))
    goals.append(SoloGoal(exclude=failed.exclude, pools=pools))
    return tuple(goals)


def with_last_resort(goals: tuple[Goal, ...], lost: frozenset[Incarnation]) -> tuple[Goal, ...]:
    """`goals`, and after them the same ones with the workers of `lost`, whose streams broke.

    A broken stream says nothing of the worker, which may answer again before the connection's time-out; only the membership
    knows the dead. Where there is nobody else, waiting for it is better than an error.
    """
    again = (replace(g, exclude=g.exclude - lost) for g in goals if not isinstance(g, LocalGoal) and g.exclude & lost)
    return (*goals, *again)


def failed_worker(route: Route, code: Code, *, on_decode: bool) -> Incarnation:
    """Which worker of `route` this request will not use again, or as the last resort alone.

    A fault of the pair is laid on the prefill side: the decode worker is the one that can still compute the prompt itself.
    """
    if isinstance(route, SoloRoute):
        return route.worker.incarnation
    if on_decode and code not in PAIR_FAULTS:
        return route.decode.incarnation
    return route.prefill.incarnation
