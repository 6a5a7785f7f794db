"""Worker actors as Ray sees them: make one in its placement group, find the live ones, end one for certain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.config import Settings
from coordinator.pools.ray_cluster import NAMESPACE
from coordinator.pools.ray_nodes import kill_on_node
from coordinator.pools.ray_placement import Placement
from coordinator.pools.reports import Beat, WorkerSpec
from protos.ids import WorkerId

log = logging.getLogger(__name__)

WORKER_PREFIX = "worker/"
KILL_TIMEOUT_S = 5.0


def actor_name(worker_id: WorkerId) -> str:
    return f"{WORKER_PREFIX}{worker_id}"


def create_worker(
    actor_class: Any, spec: WorkerSpec, num_gpus: int, placement: Placement, beats: Sequence[Beat], silent: Collection[str]
) -> ActorHandle:
    """A detached, never restarted actor in a detached placement group of one bundle per rank; both outlive the coordinator.

    With one rank the actor itself takes the bundle's accelerator. With more, vLLM's Ray executor finds the group as the
    current one and puts its ranks into the bundles; the actor takes none. A group that was reserved for it is used.
    `beats` and `silent`: see `Placement.selector`.
    """
    rules, engine = spec.settings.coordinator, spec.settings.engine_of(spec.pool)
    gpus = _gpus(spec, num_gpus)
    group = _group(spec.worker_id) or _new_group(spec, num_gpus, placement, beats, silent)
    alone = engine.world_size == 1
    if gpus and not alone:
        spec = replace(spec, settings=_over_ray(spec.settings))
    options = {
        "name": actor_name(spec.worker_id),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_task_retries": 0,
        "num_cpus": rules.worker_cpus if alone else 0,
        "num_gpus": gpus if alone else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        ),
    }
    return actor_class.options(**options).remote(spec)


def reserve_place(
    spec: WorkerSpec, num_gpus: int, placement: Placement, beats: Sequence[Beat], silent: Collection[str]
) -> str | None:
    """The node, by Ray's id, on which the worker's placement group is reserved; None while no node has room for it. Makes the
    group if there is none."""
    group = _group(spec.worker_id) or _new_group(spec, num_gpus, placement, beats, silent)
    known = ray.util.placement_group_table(group)
    return known["bundles_to_node_id"][0] if known.get("state") == "CREATED" else None


def _gpus(spec: WorkerSpec, num_gpus: int) -> float:
    asked = spec.settings.coordinator.worker_gpus
    return asked if asked is not None else float(min(1, num_gpus))


def _new_group(
    spec: WorkerSpec, num_gpus: int, placement: Placement, beats: Sequence[Beat], silent: Collection[str]
) -> PlacementGroup:
    ranks, gpus = spec.settings.engine_of(spec.pool).world_size, _gpus(spec, num_gpus)
    bundle = {"CPU": spec.settings.coordinator.worker_cpus, **({"GPU": gpus} if gpus else {})}
    labels = placement.selector(spec, bundle, ranks, beats, silent)
    return ray.util.placement_group(
        [bundle] * ranks,
        strategy="PACK",
        name=actor_name(spec.worker_id),
        lifetime="detached",
        bundle_label_selector=[labels] * ranks if labels else None,
    )


def _over_ray(settings: Settings) -> Settings:
    """vLLM's own Ray executor spreads the ranks over the placement group, unless the operator chose another."""
    engine = settings.engine
    arguments = {"distributed_executor_backend": "ray", **engine.extra_arguments}
    return settings.model_copy(update={"engine": engine.model_copy(update={"extra_arguments": arguments})})


def live_workers() -> dict[WorkerId, ActorHandle]:
    """The worker actors of this namespace that Ray holds alive or pending."""
    found = {}
    for name in ray.util.list_named_actors():
        if name.startswith(WORKER_PREFIX):
            with contextlib.suppress(ValueError):  # died since it was listed
                found[WorkerId(name.removeprefix(WORKER_PREFIX))] = ray.get_actor(name, namespace=NAMESPACE)
    return found


async def wait_death(handle: ActorHandle) -> str:
    """Returns why the actor is gone, once Ray or the actor itself says so. A connection that merely breaks is retried."""
    while True:
        try:
            return await handle.wait_ended.remote()
        except ActorDiedError as error:
            return _reason(error)
        except RayError as error:
            log.info("watching a worker: %s; trying again", type(error).__name__)
            await asyncio.sleep(0.2)


async def kill_worker(worker_id: WorkerId, beat: Beat | None) -> None:
    """Kill the worker's processes on its node and confirm the deaths. `free_worker` follows.

    Killing by pid comes first because a stopped process hears nothing that Ray sends it. Idempotent.

    Raises:
        TimeoutError: a process is still there; try again.
    """
    if beat is not None:
        left = await kill_on_node(beat.node_id, beat.processes, KILL_TIMEOUT_S)
        if left:
            raise TimeoutError(f"pids {left} of worker {worker_id} are still there {KILL_TIMEOUT_S:g} s after SIGKILL")


def end_workers() -> list[WorkerId]:
    """Kill every worker actor that is left and free all places. Returns the workers. For ends that no coordinator sees to."""
    found = live_workers()
    for worker_id, handle in found.items():
        free_worker(worker_id, handle)
    free_places_but(())
    return list(found)


def free_places_but(workers: Collection[WorkerId]) -> list[str]:
    """Remove the placement groups of all workers but these; returns their names. A worker that died while no coordinator ran
    leaves its group, and with it an accelerator, to nobody."""
    kept = {actor_name(worker_id) for worker_id in workers}
    freed = []
    for group in ray.util.placement_group_table().values():
        name = group["name"]
        if name.startswith(WORKER_PREFIX) and name not in kept and group["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # of another namespace, or removed since it was listed
                ray.util.remove_placement_group(ray.util.get_placement_group(name))
                freed.append(name)
    return freed


def free_worker(worker_id: WorkerId, handle: ActorHandle | None) -> None:
    """Ask Ray to end its actor, and give back its name and its place. Waits for no death."""
    if handle is not None:
        ray.kill(handle, no_restart=True)
    group = _group(worker_id)
    if group is not None:
        ray.util.remove_placement_group(group)


def _group(worker_id: WorkerId) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(actor_name(worker_id))
    except ValueError:
        return None


def _reason(error: ActorDiedError) -> str:
    text = str(error)
    for line in text.splitlines():
        if "exit detail" in line or "The actor died because" in line or "OOM" in line:
            return f"its process died: {line.strip()[:200]}"
    return "its process died"
