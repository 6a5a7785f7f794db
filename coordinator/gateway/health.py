"""grpc.health.v1 for a gateway: "" is liveness, the public service's name is readiness."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.splitpoint.v1 import generation_pb2

GENERATION_SERVICE: str = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class ReadinessHealthServicer(health_pb2_grpc.HealthServicer):
    """Answers from the core itself, so a check is never stale; a watch looks again every `poll_s` and reports each change.

    Watches are independent of each other. `ready` must not block. Once `draining` is set, readiness is NOT_SERVING, and each
    watch says so and ends: an open watch would hold up the server's stop for its whole grace.
    """

    def __init__(self, ready: Callable[[], bool], *, poll_s: float, draining: asyncio.Event) -> None:
        self._ready = ready
        self._poll_s = poll_s
        self._draining = draining

    def status(self, service: str) -> int:
        """The `ServingStatus` of one service."""
        if service == "":
            return SERVING
        if service == GENERATION_SERVICE:
            return SERVING if self._ready() and not self._draining.is_set() else NOT_SERVING
        return SERVICE_UNKNOWN

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self.status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last: int | None = None
        while True:
            status = self.status(request.service)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            if self._draining.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._draining.wait()

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        services = ("", GENERATION_SERVICE)
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=self.status(name)) for name in services}
        )
