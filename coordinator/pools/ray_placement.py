"""The cluster's nodes as Ray knows them, and where `placement` has put workers that Ray may not report yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence

import ray

from coordinator.pools.config import PlacementSettings
from coordinator.pools.placement import Node, Placed, choose
from coordinator.pools.reports import Beat, WorkerSpec
from protos.ids import WorkerId

log = logging.getLogger(__name__)

_NODE_ID = "ray.io/node-id"


def living_nodes() -> list[Node]:
    """Asks the GCS, and waits as long as it is away."""
    free = ray._private.state.available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            labels=node.get("Labels", {}),
            free=free.get(node["NodeID"], {}),
            total=node.get("Resources", {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def this_node(node_id: str) -> Node:
    """Its address and labels as the cluster knows them. An address guessed from routes may be one that peers cannot reach."""
    return next(node for node in living_nodes() if node.node_id == node_id)


class Placement:
    """Chooses nodes, one worker after the other: two at once would both take the last free place. For threads."""

    def __init__(self, rules: PlacementSettings) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._chosen: dict[WorkerId, Placed] = {}

    def selector(
        self, spec: WorkerSpec, bundle: Mapping[str, float], ranks: int, beats: Sequence[Beat], silent: Collection[str]
    ) -> dict[str, str]:
        """Labels that each of the worker's bundles asks of its node; none where Ray shall choose.

        `beats` are those of the workers that exist; one that has none stays counted where it was put. `silent` nodes, by id,
        get nothing.
        """
        rules = self._rules
        wanted = dict(rules.pool_labels.get(spec.pool, {}))
        if rules.strategy == "pack" and not silent:
            return wanted
        needs = {name: amount * ranks for name, amount in bundle.items()}
        with self._lock:
            heard = {b.view.worker_id: Placed(
                worker_id=b.view.worker_id, pool=b.view.pool, role=b.view.role, node_id=b.node_id,
                needs={name: amount * b.ranks for name, amount in bundle.items()},
            ) for b in beats}  # fmt: skip
            placed = list({**self._chosen, **heard}.values())
            choice = choose(spec.pool, spec.role, needs, living_nodes(), placed, rules, silent=silent)
            if choice.note:
                log.warning("placing %s: %s", spec.worker_id, choice.note)
            if choice.node is None:
                return wanted
            log.info("placing %s on %s", spec.worker_id, choice.node.address)
            self._chosen[spec.worker_id] = Placed(
                worker_id=spec.worker_id, pool=spec.pool, role=spec.role, node_id=choice.node.node_id, needs=needs
            )
        return {_NODE_ID: choice.node.node_id}

    def forget(self, worker_id: WorkerId) -> None:
        """It is gone. Idempotent."""
        self._chosen.pop(worker_id, None)
