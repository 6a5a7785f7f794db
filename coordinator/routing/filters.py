"""Which workers may be offered a leg. Pure; each filter has a name that appears in refusals and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.routing.views import Role, WorkerState, WorkerView
from protos.ids import Incarnation


@dataclass(frozen=True, slots=True)
class Group:
    """Ready workers whose KV bytes mean the same: any prefill of a group can hand over to any decode of it."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The workers of one membership version, sorted once so that a decision copies nothing.

    `by_incarnation` holds every worker that is not dead, draining ones included; the rest holds ready ones alone.
    """

    by_incarnation: dict[Incarnation, WorkerView]
    by_role: dict[Role, tuple[WorkerView, ...]]
    groups: tuple[Group, ...]
    lonely_prefill: int
    """Ready prefill workers whose fingerprint no ready decode worker has."""


def build_table(views: Iterable[WorkerView]) -> Table:
    """Index `views`. Called once per membership version."""
    alive = {v.incarnation: v for v in views if v.state is not WorkerState.DEAD}
    ready = [v for v in alive.values() if v.state is WorkerState.READY]
    by_role = {role: tuple(v for v in ready if v.role is role) for role in Role}
    decode_of: dict[bytes, list[WorkerView]] = {}
    prefill_of: dict[bytes, list[WorkerView]] = {}
    for view in by_role[Role.DECODE]:
        decode_of.setdefault(view.fingerprint, []).append(view)
    for view in by_role[Role.PREFILL]:
        prefill_of.setdefault(view.fingerprint, []).append(view)
    groups = tuple(Group(tuple(p), tuple(decode_of[f])) for f, p in prefill_of.items() if f in decode_of)
    lonely = sum(len(p) for f, p in prefill_of.items() if f not in decode_of)
    return Table(alive, by_role, groups, lonely)


def pair_refusal(view: WorkerView, *, prompt_tokens: int, transport: str) -> str | None:
    """Why this worker cannot be either end of such a transfer, or None."""
    if prompt_tokens > view.max_transfer_tokens:
        return PROMPT_EXCEEDS_TRANSFER
    if transport not in view.transports:
        return TRANSPORT_MISSING
    return None


EXCLUDED = "excluded"
"""It failed this request before."""
BREAKER_OPEN = "breaker_open"
PROMPT_EXCEEDS_TRANSFER = "prompt_exceeds_transfer"
TRANSPORT_MISSING = "transport_missing"
INCOMPATIBLE = "incompatible"
