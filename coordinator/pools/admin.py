"""Operators' API: `AdminService` over a backend, and the messages that describe pools and workers. No Ray here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import grpc.aio
from pydantic import ValidationError

from coordinator.config import PoolSettings
from coordinator.pools.desired import Strategy
from coordinator.pools.plan import Step
from coordinator.pools.records import PoolTarget
from coordinator.pools.reports import Beat, GatewayReport, ProcessRef, Resources
from coordinator.routing.views import WorkerState, WorkerView
from protos.errors import Code, SplitpointError, invalid
from protos.grpc_errors import abort
from protos.ids import WorkerId
from protos.splitpoint.v1 import admin_pb2, admin_pb2_grpc, kv_transfer_pb2

MAX_REPLICAS = 4096


class AdminBackend(Protocol):
    """What the service forwards to. Every method raises `SplitpointError`; `NO_WORKER` when the coordinator is away."""

    async def status(self) -> admin_pb2.GetStatusResponse: ...

    async def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse: ...

    async def apply_pools(self, request: admin_pb2.ApplyPoolsRequest) -> admin_pb2.ApplyPoolsResponse: ...

    async def set_autoscaler(self, request: admin_pb2.SetAutoscalerRequest) -> admin_pb2.SetAutoscalerResponse: ...

    async def remove_autoscaler(self, pool: str) -> None: ...

    async def drain(self, worker_id: str, timeout_s: float) -> admin_pb2.WorkerStatus: ...

    async def restart(self, request: admin_pb2.RestartRequest) -> admin_pb2.RestartResponse: ...

    async def cordon(self, worker_id: str, cordoned: bool) -> admin_pb2.WorkerStatus: ...

    async def manifest(self) -> str: ...

    async def reset_prefix_caches(self, pools: Sequence[str]) -> int: ...


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Validates, forwards, and turns `SplitpointError` into its status."""

    def __init__(
        self,
        backend: AdminBackend,
        requests: Callable[[], list[admin_pb2.RequestStatus]],
        decisions: Callable[[admin_pb2.ListDecisionsRequest], admin_pb2.ListDecisionsResponse],
    ) -> None:
        """`requests` are those in flight at this gateway, the oldest first; `decisions` what its path `auto` chose."""
        self._backend = backend
        self._requests = requests
        self._decisions = decisions

    async def GetStatus(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            return await self._backend.status()
        except SplitpointError as error:
            await abort(context, error)

    async def ScalePool(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            if not request.pool:
                raise invalid("pool", "pool is missing: name one")
            if request.replicas > MAX_REPLICAS:
                raise invalid("replicas", f"replicas must be 0 to {MAX_REPLICAS}, got {request.replicas}")
            return await self._backend.scale(request)
        except SplitpointError as error:
            await abort(context, error)

    async def ApplyPools(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            pools_of(request.pools)
            return await self._backend.apply_pools(request)
        except SplitpointError as error:
            await abort(context, error)

    async def DrainWorker(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            if not request.worker_id:
                raise invalid("worker_id", "worker_id is missing: name one")
            if not 0 <= request.timeout_s < float("inf"):
                raise invalid("timeout_s", f"timeout_s must be finite and not negative, got {request.timeout_s}")
            return admin_pb2.DrainWorkerResponse(worker=await self._backend.drain(request.worker_id, request.timeout_s))
        except SplitpointError as error:
            await abort(context, error)

    async def Restart(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            if not request.pools and not request.gateways:
                raise invalid("pools", "name a pool, or gateways")
            return await self._backend.restart(request)
        except SplitpointError as error:
            await abort(context, error)

    async def CordonWorker(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            if not request.worker_id:
                raise invalid("worker_id", "worker_id is missing: name one")
            return admin_pb2.CordonWorkerResponse(worker=await self._backend.cordon(request.worker_id, request.cordoned))
        except SplitpointError as error:
            await abort(context, error)

    async def SetAutoscaler(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            if not request.pool:
                raise invalid("pool", "pool is missing: name one")
            return await self._backend.set_autoscaler(request)
        except SplitpointError as error:
            await abort(context, error)

    async def RemoveAutoscaler(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            if not request.pool:
                raise invalid("pool", "pool is missing: name one")
            await self._backend.remove_autoscaler(request.pool)
        except SplitpointError as error:
            await abort(context, error)
        return admin_pb2.RemoveAutoscalerResponse()

    async def ListRequests(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        return admin_pb2.ListRequestsResponse(requests=self._requests())

    async def ListDecisions(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        return self._decisions(request)

    async def GetManifest(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            return admin_pb2.GetManifestResponse(manifest_json=await self._backend.manifest())
        except SplitpointError as error:
            await abort(context, error)

    async def ResetPrefixCaches(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        try:
            return admin_pb2.ResetPrefixCachesResponse(workers=await self._backend.reset_prefix_caches(list(request.pools)))
        except SplitpointError as error:
            await abort(context, error)


def worker_status(view: WorkerView, beat: Beat | None) -> admin_pb2.WorkerStatus:
    """One worker as operators see it; `beat` is its last heartbeat."""
    return admin_pb2.WorkerStatus(
        worker_id=view.worker_id,
        pool=view.pool,
        role=view.role.value,
        state=view.state.value,
        incarnation=view.incarnation,
        address=view.address,
        running=view.running,
        waiting=view.waiting,
        leases=view.leases,
        kv_usage=view.kv_usage,
        heartbeat_age_s=view.heartbeat_age_s,
        pid=view.pid,
        detail=view.detail,
        transports=view.transports,
        metrics_address=beat.metrics_address if beat is not None else "",
        cordoned=view.cordoned,
        spare=view.spare,
        silent=view.silent,
        former_legs=beat.former_legs if beat is not None else 0,
        node_id=view.node_id,
        rack=view.rack,
        resources=_resources(beat.resources, beat.processes) if beat is not None and beat.resources is not None else None,
    )


def _resources(held: Resources, processes: Sequence[ProcessRef]) -> admin_pb2.WorkerResources:
    return admin_pb2.WorkerResources(
        kv_blocks_held=held.kv_blocks_held,
        legs=held.legs,
        leases=held.leases,
        sessions=held.sessions,
        lease_states=held.lease_states,
        session_states=held.session_states,
        send_staging=kv_transfer_pb2.StagingStatus(**asdict(held.send_staging)),
        receive_staging=kv_transfer_pb2.StagingStatus(**asdict(held.receive_staging)),
        tasks=held.tasks,
        open_files=held.open_files,
        memory_bytes=held.memory_bytes,
        device_memory_bytes=held.device_memory_bytes,
        pids=[process.pid for process in processes],
    )


def pools_of(specs: Iterable[admin_pb2.PoolSpec]) -> dict[str, PoolSettings]:
    """A desired set as it was sent.

    Raises:
        SplitpointError: `INVALID_VALUE` names what is wrong.
    """
    pools: dict[str, PoolSettings] = {}
    for spec in specs:
        if spec.name in pools:
            raise invalid("pools", f"pool {spec.name!r} is there twice")
        if spec.replicas > MAX_REPLICAS:
            raise invalid("pools", f"pools.{spec.name}.replicas must be 0 to {MAX_REPLICAS}, got {spec.replicas}")
        try:
            engine = json.loads(spec.engine_json) if spec.engine_json else {}
            fields = {"role": spec.role, "replicas": spec.replicas, "engine": engine, "spares": spec.spares}
            kind = {"spare_kind": spec.spare_kind} if spec.spare_kind else {}
            pools[spec.name] = PoolSettings.model_validate({**fields, **kind})
        except json.JSONDecodeError as error:
            raise invalid("pools", f"pools.{spec.name}.engine is not JSON: {error}") from error
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in ("pools", spec.name, *fault["loc"]))
            raise invalid("pools", f"{where}: {fault['msg']}, got {fault['input']!r}") from error
    if not pools:
        raise invalid("pools", "pools is empty: name at least one")
    return pools


def strategy_of(request: admin_pb2.ApplyPoolsRequest) -> Strategy | None:
    """How the change is to replace workers; None: the request does not say.

    Raises:
        SplitpointError: `INVALID_VALUE` names what is wrong.
    """
    share = request.max_unavailable if request.HasField("max_unavailable") else None
    if share is not None and not 0.0 <= share <= 1.0:
        raise invalid("max_unavailable", f"max_unavailable must be 0 to 1, a share of a pool, got {share:g}")
    if share and request.surge:
        raise invalid("max_unavailable", "max_unavailable must be 0 or unset with surge: then nobody is away")
    return Strategy(max_unavailable=share, surge=request.surge) if share is not None or request.surge else None


def pool_specs(pools: Mapping[str, PoolSettings]) -> list[admin_pb2.PoolSpec]:
    """The other direction of `pools_of`."""
    return [
        admin_pb2.PoolSpec(
            name=name,
            role=pool.role.value,
            replicas=pool.replicas,
            engine_json=_engine_json(pool.engine),
            spares=pool.spares,
            spare_kind=pool.spare_kind.value,
        )
        for name, pool in pools.items()
    ]


def plan(steps: Iterable[Step]) -> list[admin_pb2.WorkerPlan]:
    """For the wire."""
    return [admin_pb2.WorkerPlan(**asdict(step)) for step in steps]


def _engine_json(engine: Mapping[str, Any]) -> str:
    return json.dumps(engine, sort_keys=True) if engine else ""


def pool_status(
    target: PoolTarget, engine: Mapping[str, Any], views: Sequence[WorkerView], failures: int, detail: str, *, updated: int = 0
) -> admin_pb2.PoolStatus:
    """One pool's target beside what it has; `engine` are its own arguments, `failures` starts failed in a row, the last for
    the reason `detail`; `updated` workers have these arguments."""
    mine = [view for view in views if view.pool == target.name]
    states = [view.state for view in mine if not view.spare or view.state is WorkerState.DRAINING]
    return admin_pb2.PoolStatus(
        name=target.name,
        role=target.role.value,
        target=target.replicas,
        ready=states.count(WorkerState.READY),
        starting=states.count(WorkerState.STARTING),
        draining=states.count(WorkerState.DRAINING),
        failures=failures,
        detail=detail if failures else "",
        engine_json=_engine_json(engine),
        spares=target.workers - target.replicas,
        spares_ready=sum(view.spare and _stands_by(view) for view in mine),
        spare_kind=target.spare_kind.value,
        updated=updated,
    )


def _stands_by(view: WorkerView) -> bool:
    return view.state is WorkerState.READY or (view.state is WorkerState.PLACED and bool(view.node_id))


def status(
    pools: Sequence[admin_pb2.PoolStatus],
    views: Sequence[WorkerView],
    beats: Mapping[WorkerId, Beat],
    gateways: Sequence[GatewayReport],
    model: str,
) -> admin_pb2.GetStatusResponse:
    """Everything at one moment."""
    return admin_pb2.GetStatusResponse(
        pools=pools,
        workers=[worker_status(view, beats.get(view.worker_id)) for view in views],
        gateways=[
            admin_pb2.GatewayStatus(
                gateway_id=g.gateway_id,
                http_address=g.http_address,
                grpc_address=g.grpc_address,
                admin_address=g.admin_address,
                admin_http_address=g.admin_http_address,
                in_flight=g.in_flight,
                pid=g.pid,
                tasks=g.tasks,
                open_files=g.open_files,
                open_circuits=g.open_circuits,
                node_id=g.node_id,
                detail=g.detail,
            )
            for g in gateways
        ],
        model=model,
    )


def ready_of(pools: Sequence[str], targets: Sequence[PoolTarget], views: Sequence[WorkerView]) -> list[WorkerId]:
    """The ready workers of `pools`; of all pools when it is empty.

    Raises:
        SplitpointError: `NOT_FOUND` names the first unknown pool.
    """
    known = [target.name for target in targets]
    for pool in pools:
        if pool not in known:
            raise SplitpointError(Code.NOT_FOUND, f"no pool {pool!r}; pools: {', '.join(known)}", param="pools")
    return [v.worker_id for v in views if v.state is WorkerState.READY and (not pools or v.pool in pools)]


def unavailable(why: str) -> SplitpointError:
    """The coordinator does not answer; traffic goes on without it."""
    return SplitpointError(
        Code.NO_WORKER, f"the coordinator does not answer ({why}); requests are still served", retry_after_s=2.0
    )
