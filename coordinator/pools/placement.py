"""Which node the next worker goes to. Pure: nodes and workers in, a choice out; `ray_placement` asks Ray and tells it.

Strategies are preferences among nodes with room: a pair that finds no common host or rack is placed apart, and the choice says
so. Labels of a pool are conditions: without a node that has them and room, nothing is chosen, and the worker waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.pools.config import PlacementSettings
from coordinator.routing.views import Role
from protos.ids import WorkerId

_PARTNER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One living node. `free` is what Ray has left of each resource, `total` what it has; `labels` are Ray's."""

    node_id: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A worker that has a node, or is on its way to one. `needs` is what it takes there of each resource."""

    worker_id: WorkerId
    pool: str
    role: Role
    node_id: str
    needs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """`node` None: no node will do at present, Ray shall wait for one. `note`: what was wanted and could not be had, or ""."""

    node: Node | None
    note: str = ""


def choose(
    pool: str,
    role: Role,
    needs: Mapping[str, float],
    nodes: Sequence[Node],
    placed: Sequence[Placed],
    rules: PlacementSettings,
    *,
    silent: Collection[str] = (),
) -> Choice:
    """The node for a worker of `pool` that takes `needs`. Nodes of `silent`, by id, do not answer and get nothing."""
    wanted = rules.pool_labels.get(pool, {})
    fitting = [n for n in nodes if n.node_id not in silent and all(n.labels.get(k) == v for k, v in wanted.items())]
    roomy = [n for n in fitting if _has_room(n, needs, placed)]
    if not roomy:
        return Choice(None, f"no node has room for {dict(needs)}" + (f" and the labels {dict(wanted)}" if wanted else ""))
    partner = _PARTNER.get(role)
    if rules.strategy in ("same_host", "same_rack") and partner is not None:
        return _beside(partner, role, nodes, roomy, placed, rules)
    return Choice(min(roomy, key=lambda n: _crowd(n, pool, placed)))


def choose_gateway(nodes: Sequence[Node], taken: Sequence[str], *, silent: Collection[str], here: str) -> Node | None:
    """The node for another gateway: the one with the fewest, `here` before others. `taken`: the node of each gateway there is, by
    id; nodes of `silent` get none. None: there is no node."""
    able = [node for node in nodes if node.node_id not in silent]
    return min(able, key=lambda n: (taken.count(n.node_id), n.node_id != here, n.node_id), default=None)


def _beside(
    partner: Role, role: Role, nodes: Sequence[Node], roomy: Sequence[Node], placed: Sequence[Placed], rules: PlacementSettings
) -> Choice:
    """Where a partner lacks one of `role`; the least crowded such node."""

    def place(node: Node) -> str:
        return node.node_id if rules.strategy == "same_host" else node.labels.get(rules.rack_label, node.node_id)

    # A worker on a node that has died since is beside nobody.
    place_of = {node.node_id: place(node) for node in nodes}
    for worker in placed:
        place_of.setdefault(worker.node_id, worker.node_id)
    lonely: dict[str, int] = {}
    for worker in placed:
        sign = 1 if worker.role is partner else -1 if worker.role is role else 0
        lonely[place_of[worker.node_id]] = lonely.get(place_of[worker.node_id], 0) + sign
    best = min(roomy, key=lambda n: (-max(0, lonely.get(place(n), 0)), _crowd(n, "", placed)))
    waits = any(count > 0 for count in lonely.values())
    note = f"no room beside a {partner} worker ({rules.strategy})" if waits and lonely.get(place(best), 0) <= 0 else ""
    return Choice(best, note)


def _has_room(node: Node, needs: Mapping[str, float], placed: Sequence[Placed]) -> bool:
    """What Ray reports as free is some tenths of a second old, so what was placed there counts too."""
    here = [worker.needs for worker in placed if worker.node_id == node.node_id]
    for name, amount in needs.items():
        left = node.total.get(name, 0.0) - sum(taken.get(name, 0.0) for taken in here)
        if min(left, node.free.get(name, 0.0)) < amount - 1e-6:
            return False
    return True


def _crowd(node: Node, pool: str, placed: Sequence[Placed]) -> tuple[int, int, str]:
    here = [worker for worker in placed if worker.node_id == node.node_id]
    return sum(worker.pool == pool for worker in here), len(here), node.node_id
