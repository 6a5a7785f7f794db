"""The rig over the admin API: pools are put in place by the coordinator, caches emptied and workers sampled through it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import grpc
import grpc.aio

from coordinator.compare.rig import Pools, RigError
from coordinator.compare.usage import Usage, UsageSampler
from protos.errors import TABLE, Code
from protos.splitpoint.v1 import admin_pb2, admin_pb2_grpc

CALL_TIMEOUT_S = 30.0
READY_POLL_S = 0.5
RESET_POLL_S = 0.2


class AdminRig:
    """Implements `Rig`. Use it as an async context manager: it samples in the background."""

    def __init__(self, admin_address: str, *, ready_timeout_s: float = 600.0) -> None:
        self._address = admin_address
        self._ready_timeout_s = ready_timeout_s
        self._sampler = UsageSampler(admin_address)

    async def __aenter__(self) -> AdminRig:
        self._channel = grpc.aio.insecure_channel(self._address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        await self._sampler.__aenter__()
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self._sampler.__aexit__(*ended)
        await self._channel.close()

    async def apply(self, pools: Pools) -> None:
        """See `Rig`."""
        # Nobody is served between two arms, so all workers are replaced at once.
        request = admin_pb2.ApplyPoolsRequest(
            max_unavailable=1.0,
            pools=[
                admin_pb2.PoolSpec(
                    name=name,
                    role=str(pool.get("role", "")),
                    replicas=int(pool.get("replicas", 1)),
                    engine_json=json.dumps(engine) if (engine := pool.get("engine")) else "",
                )
                for name, pool in pools.items()
            ],
        )
        await self._call(self._stub.ApplyPools, request, "pools were not put in place")
        until = time.monotonic() + self._ready_timeout_s
        while True:
            status = await self._call(self._stub.GetStatus, admin_pb2.GetStatusRequest(), "the pools' state is unknown")
            if not status.unsettled:
                return
            if time.monotonic() > until:
                raise RigError(f"pools not in place after {self._ready_timeout_s:g} s: {'; '.join(status.unsettled)}")
            await asyncio.sleep(READY_POLL_S)

    async def reset_caches(self) -> None:
        """See `Rig`."""
        until = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                await self._stub.ResetPrefixCaches(admin_pb2.ResetPrefixCachesRequest(), timeout=CALL_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as error:
                # A worker may still hold blocks of what has just ended.
                if error.code() is not TABLE[Code.CONFLICT].grpc or time.monotonic() > until:
                    raise RigError(f"prefix caches were not emptied: {error.code().name}: {error.details()}") from error
            await asyncio.sleep(RESET_POLL_S)

    def watch(self, arm: str, probe: int, pools: Collection[str]) -> AbstractContextManager[None]:
        """See `Rig`."""
        return self._sampler.probe(arm, probe, pools)

    def usage(self) -> list[Usage]:
        return self._sampler.samples

    def notes(self) -> list[str]:
        return self._sampler.notes()

    async def _call(self, method: Any, request: Any, problem: str) -> Any:
        try:
            return await method(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise RigError(f"{problem}: {error.code().name}: {error.details()}") from error
