"""The gateway actor: a Ray shell around `GatewayProcess`. Stateless, so Ray restarts it; it watches membership by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.config import AUTO_HOST, Settings
from coordinator.gateway.membership import MembershipSnapshot
from coordinator.gateway.tokenizer import import_without_torch
from coordinator.pools import admin
from coordinator.pools.gateway_process import GatewayProcess
from coordinator.pools.process import log_to
from coordinator.pools.ray_calls import gcs_call
from coordinator.pools.ray_cluster import HEAD, NAMESPACE
from coordinator.pools.ray_find import Finder
from coordinator.pools.ray_placement import this_node
from coordinator.pools.reports import GatewayReport
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import admin_pb2

log = logging.getLogger(__name__)

GATEWAY_PREFIX = "gateway/"
_WATCH_S = 1.0
_CALL_TIMEOUT_S = 5.0
_finder = Finder()
T = TypeVar("T")


class GatewayActor:
    """Starts by itself; `report` waits until it serves."""

    def __init__(self, gateway_id: str, index: int, settings: Settings, log_dir: Path) -> None:
        log_to(log_dir / f"gateway-{index}.log", settings.log_format)
        import_without_torch()  # most of what a start takes; nothing can be asked of a gateway before
        hosts = [getattr(settings.gateway, f"{name}_host") for name in settings.gateway_doors]
        own: dict[str, str] = {}
        if settings.coordinator.placement.gateways == "spread" or AUTO_HOST in hosts:
            node = this_node(ray.get_runtime_context().get_node_id())
            own = {"node_id": node.node_id, "node_ip": node.address}
        self._process = GatewayProcess(gateway_id, index, settings, poll_membership, CoordinatorBackend(), **own)
        self._start = asyncio.get_running_loop().create_task(self._process.start())

    async def report(self) -> GatewayReport:
        """Raises what `GatewayProcess.start` raised."""
        await asyncio.shield(self._start)
        return self._process.report()

    async def drain(self, timeout_s: float) -> bool:
        return await self._process.drain(timeout_s)

    async def stop(self) -> None:
        await self._process.stop()


async def poll_membership(epoch: str, version: int) -> MembershipSnapshot:
    """One long poll of the coordinator. Raises whatever Ray raises; the caller keeps its last known good."""
    handle = await _finder.find(_CALL_TIMEOUT_S)
    reference: Any = handle.watch_membership.remote(epoch, version, _WATCH_S)
    async with asyncio.timeout(_WATCH_S + _CALL_TIMEOUT_S):
        new_epoch, new_version, views = await reference
    return MembershipSnapshot(epoch=new_epoch, version=new_version, workers=views)


class CoordinatorBackend:
    """`AdminBackend` by calls of the coordinator actor."""

    async def status(self) -> admin_pb2.GetStatusResponse:
        return await _ask(lambda c: c.status.remote())

    async def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse:
        return await _ask(lambda c: c.scale.remote(request))

    async def apply_pools(self, request: admin_pb2.ApplyPoolsRequest) -> admin_pb2.ApplyPoolsResponse:
        return await _ask(lambda c: c.apply_pools.remote(request))

    async def set_autoscaler(self, request: admin_pb2.SetAutoscalerRequest) -> admin_pb2.SetAutoscalerResponse:
        return await _ask(lambda c: c.set_autoscaler.remote(request))

    async def remove_autoscaler(self, pool: str) -> None:
        await _ask(lambda c: c.remove_autoscaler.remote(pool))

    async def drain(self, worker_id: str, timeout_s: float) -> admin_pb2.WorkerStatus:
        return await _ask(lambda c: c.drain.remote(worker_id, timeout_s), None)

    async def restart(self, request: admin_pb2.RestartRequest) -> admin_pb2.RestartResponse:
        return await _ask(lambda c: c.restart.remote(request))

    async def cordon(self, worker_id: str, cordoned: bool) -> admin_pb2.WorkerStatus:
        return await _ask(lambda c: c.cordon.remote(worker_id, cordoned))

    async def manifest(self) -> str:
        return await _ask(lambda c: c.manifest.remote(), 30.0)

    async def reset_prefix_caches(self, pools: Sequence[str]) -> int:
        return await _ask(lambda c: c.reset_prefix_caches.remote(pools), 30.0)


async def _ask(call: Any, timeout_s: float | None = _CALL_TIMEOUT_S) -> Any:
    """Raises `SplitpointError`: the coordinator's own, or that it does not answer."""
    try:
        handle = await _finder.find(_CALL_TIMEOUT_S)
        async with asyncio.timeout(timeout_s):
            return await call(handle)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SplitpointError):
            raise cause from None
        fault = SplitpointError(Code.INTERNAL, f"the coordinator failed: {type(cause).__name__}")
        log.exception("admin call failed, error_id=%s", fault.error_id)
        raise fault from error
    except (RayError, ValueError, TimeoutError) as error:
        raise admin.unavailable(type(error).__name__) from error


def create_gateway(gateway_id: str, index: int, settings: Settings, log_dir: Path, where: Callable[[], str]) -> Any:
    """The gateway's actor, made if it is not there: on the node that `where` names by id, or on the head if it names none.

    It stays on its node, where clients know it: with the node it dies, and is made anew on another one.
    """
    with contextlib.suppress(ValueError):
        return ray.get_actor(gateway_id, namespace=NAMESPACE)
    options: dict[str, Any] = {
        "name": gateway_id,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "get_if_exists": True,
    }
    if node_id := where():
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    else:
        options["resources"] = {HEAD: 0.001}
    return ray.remote(GatewayActor).options(**options).remote(gateway_id, index, settings, log_dir)


def end_gateway(gateway_id: str, *, again: bool) -> None:
    """End its process. `again`: Ray makes another on the same node; for one that lives and cannot start, which is well to Ray."""
    with contextlib.suppress(RayError, ValueError):
        ray.kill(ray.get_actor(gateway_id, namespace=NAMESPACE), no_restart=not again)


async def drain_gateways(gateway_ids: Sequence[str], timeout_s: float) -> None:
    """Wait, at most `timeout_s`, until nothing is in flight at any gateway. A gateway that is away has nothing in flight."""

    async def drain(gateway_id: str) -> None:
        try:
            handle = await gcs_call(ray.get_actor, gateway_id, NAMESPACE)
            async with asyncio.timeout(timeout_s + _CALL_TIMEOUT_S):
                done: bool = await handle.drain.remote(timeout_s)
        except (RayError, ValueError, TimeoutError) as error:
            log.warning("draining %s: %s: %s", gateway_id, type(error).__name__, error)
            return
        if not done:
            log.warning("%s still had requests in flight after %g s; they are ended", gateway_id, timeout_s)

    pending: list[Awaitable[None]] = [drain(gateway_id) for gateway_id in gateway_ids]
    await asyncio.gather(*pending)


def end_gateways() -> None:
    """Close every gateway's ports, then its process. For the launcher, from outside an event loop."""
    for name in ray.util.list_named_actors():
        if not name.startswith(GATEWAY_PREFIX):
            continue
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
            ray.get(handle.stop.remote(), timeout=_CALL_TIMEOUT_S)
        except (RayError, ValueError) as error:
            log.warning("stopping %s: %s", name, type(error).__name__)
        else:
            ray.kill(handle, no_restart=True)
