"""Killing processes by pid on the node they run on, through Ray, and confirming that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.pools.ray_calls import gcs_call
from coordinator.pools.reports import ProcessRef
from coordinator.pools.shared_memory import python_segments_of, unlink_orphans

log = logging.getLogger(__name__)

_TRACKER_S = 3.0


class NodeLostError(TimeoutError):
    """Ray has given the node up: nothing can be done there. Its processes live on if it is only cut off."""


def process_tree() -> tuple[ProcessRef, ...]:
    """This process and everything it started, this one first."""
    me = psutil.Process()
    refs = []
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            refs.append(ProcessRef(process.pid, process.create_time(), python_segments_of(process.pid)))
    return tuple(refs)


def kill_here(refs: Sequence[ProcessRef], timeout_s: float) -> list[int]:
    """SIGKILL each process (and its children) on this machine; wait for the deaths. Returns pids still there afterwards.

    A zombie counts as dead: it runs nothing and its memory is gone. Shared memory that only they had is removed.
    """
    doomed: dict[int, psutil.Process] = {}
    for ref in refs:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(ref.pid)
            # Creation times come from the boot clock with a resolution of 10 ms.
            if abs(process.create_time() - ref.started_s) < 0.05:
                for child in process.children(recursive=True):
                    doomed[child.pid] = child
                doomed[process.pid] = process
    # Python's resource trackers end by themselves when their users are gone, and unlink the shared memory those left.
    trackers = [p for p in doomed.values() if _is_resource_tracker(p)]
    others = [p for p in doomed.values() if p not in trackers]
    _, alive = _kill(others, timeout_s)
    _, lingering = psutil.wait_procs(trackers, timeout=_TRACKER_S)
    alive += _kill(lingering, timeout_s)[1]
    unlink_orphans(segment for ref in refs for segment in ref.segments)
    return [p.pid for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _kill(processes: list[psutil.Process], timeout_s: float) -> tuple[list[psutil.Process], list[psutil.Process]]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return psutil.wait_procs(processes, timeout=timeout_s)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


async def kill_on_node(node_id: str, refs: Sequence[ProcessRef], timeout_s: float) -> list[int]:
    """`kill_here` on the node of `node_id`.

    Raises:
        TimeoutError: the node, or the GCS, did not answer: the death is not confirmed. `NodeLostError`: nor will it be by Ray.
    """
    if not refs:
        return []
    if node_id == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(kill_here, refs, timeout_s)
    nodes = await gcs_call(ray.nodes)
    if not any(node["NodeID"] == node_id and node["Alive"] for node in nodes):
        raise NodeLostError(f"Ray has given up node {node_id}; pids {[ref.pid for ref in refs]} may live on there")
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task = ray.remote(kill_here).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    # The first call of a task tells the GCS what it is.
    answer = await gcs_call(task.remote, list(refs), timeout_s)
    async with asyncio.timeout(timeout_s + 5.0):
        return await answer
