"""One gateway's life inside its actor: front ends over the core, admin port, membership. No Ray: the actor is a shell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import time
from typing import Any

import grpc.aio
import uvicorn
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from coordinator import path_model
from coordinator.config import AUTO_HOST, EVERY_NODE, Settings, gateway_port, served_model_name
from coordinator.gateway.core import GatewayCore
from coordinator.gateway.frontend import FrontEnd, ServedModel
from coordinator.gateway.grpc_front import build_grpc_server, server_options
from coordinator.gateway.http import build_http_app
from coordinator.gateway.in_flight import in_flight
from coordinator.gateway.membership import Poll
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.tokenizer import TextTokenizer
from coordinator.manifest import versions
from coordinator.pools.admin import AdminBackend, AdminServicer
from coordinator.pools.admin_http import build_admin_app
from coordinator.pools.process import open_files
from coordinator.pools.reports import GatewayReport
from coordinator.routing.views import WorkerState
from kvtransfer.rpc import host_port
from protos.splitpoint.v1 import admin_pb2, admin_pb2_grpc

log = logging.getLogger(__name__)

_LISTEN_BACKLOG = 1024
_CLOSE_GRACE_S = 2.0


class GatewayProcess:
    """`await start()`, `report()` as often as wanted, `await drain()`, `await stop()`. One event loop owns it."""

    def __init__(
        self,
        gateway_id: str,
        index: int,
        settings: Settings,
        poll: Poll,
        admin: AdminBackend,
        *,
        node_id: str = "",
        node_ip: str = "",
    ) -> None:
        """`node_ip` is the address of its node in the cluster: what host "auto" is, and what is advertised for a host that means
        every address. Without it there is no "auto", and addresses are advertised as they are bound."""
        self._node_id = node_id
        self._node_ip = node_ip
        self._id = gateway_id
        self._index = index
        self._settings = settings
        self._poll = poll
        self._admin = admin
        self._tasks: list[asyncio.Task[Any]] = []
        self._http_servers: dict[str, uvicorn.Server] = {}
        self._servers: dict[str, grpc.aio.Server] = {}
        self._addresses: dict[str, str] = {}
        self.core: GatewayCore | None = None
        self._frontend: FrontEnd | None = None

    async def start(self) -> None:
        """Listen on all its ports and follow the membership.

        Raises:
            OSError: an HTTP port is taken or not ours.
            RuntimeError: a gRPC port is.
            ValueError: the checkpoint has no fast tokenizer.
            PathModelError: this host has no such `gateway.auto.model_file`.
        """
        settings = self._settings.gateway
        tokenizer = await asyncio.to_thread(
            TextTokenizer.load, self._settings.engine.model_path, inline_chars=settings.tokenize_inline_chars
        )
        name = served_model_name(self._settings)
        installed = versions()
        metrics = GatewayMetrics(name)
        kv = self._settings.kvtransfer
        model_file = settings.auto.model_file
        self.core = GatewayCore(
            settings,
            metrics,
            transports=kv.transport_order,
            follow_workers=kv.default_transport == "auto",
            step_times=None if model_file is None else await asyncio.to_thread(path_model.read, model_file),
        )
        self._frontend = FrontEnd(
            settings=settings,
            tokenizer=tokenizer,
            model=served_model(self._settings, tokenizer),
            metrics=metrics,
            manifest=lambda: {"versions": installed},
            transports=self._settings.kvtransfer.transports,
        )
        self._spawn(self.core.membership.follow(self._poll), "membership")
        self._start_http(build_http_app(self.core, self._frontend), "http", settings.http_host, settings.http_port)
        await self._start_grpc(build_grpc_server(self.core, self._frontend), "grpc", settings.grpc_host, settings.grpc_port)
        admin_server = grpc.aio.server(options=server_options(settings))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self._admin, self._requests, self._decisions), admin_server
        )
        service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
        reflection.enable_server_reflection((service, reflection.SERVICE_NAME), admin_server)
        await self._start_grpc(admin_server, "admin", settings.admin_host, settings.admin_port)
        if settings.admin_http_port is not None:
            app = build_admin_app(self._admin, model=name, host=self._bound(settings.admin_http_host))
            self._start_http(app, "admin_http", settings.admin_http_host, settings.admin_http_port)
        log.info("gateway %s serves %s at %s", self._id, name, self._addresses)

    def report(self) -> GatewayReport:
        """As it is now; only after `start`."""
        assert self.core is not None
        membership = self.core.membership
        applied_s = membership.applied_s
        ready = [view for view in membership.views if view.state is WorkerState.READY]
        return GatewayReport(
            gateway_id=self._id,
            http_address=self._addresses["http"],
            grpc_address=self._addresses["grpc"],
            admin_address=self._addresses["admin"],
            admin_http_address=self._addresses.get("admin_http", ""),
            in_flight=self.core.in_flight,
            pid=os.getpid(),
            tasks=len(asyncio.all_tasks()),
            open_files=open_files([os.getpid()]),
            membership_age_s=time.monotonic() - applied_s if applied_s is not None else float("inf"),
            ready=self.core.ready(),
            epoch=membership.epoch,
            version=membership.version,
            unconnected=tuple(view.worker_id for view in ready if not membership.connected(view.incarnation)),
            open_circuits=tuple(self.core.open_circuits()),
            loads=self.core.loads(),
            lacking=dict(self.core.pool_loads.lacking),
            node_id=self._node_id,
        )

    def _requests(self) -> list[admin_pb2.RequestStatus]:
        return [] if self.core is None else in_flight(self.core)

    def _decisions(self, request: admin_pb2.ListDecisionsRequest) -> admin_pb2.ListDecisionsResponse:
        if self.core is None:
            return admin_pb2.ListDecisionsResponse()
        return self.core.paths.shown(lost_only=request.lost_only, limit=request.limit)

    async def drain(self, timeout_s: float) -> bool:
        """Say that it is not ready, for `drain_notice_s` still take requests, then close the public ports and wait for what is in
        flight. False when the time was over first. The admin port stays open. Idempotent."""
        if self.core is None or self._frontend is None:
            return True
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        self._frontend.draining.set()
        await asyncio.sleep(min(self._settings.gateway.drain_notice_s, timeout_s))
        left_s = max(0.0, end_s - loop.time())
        if (http := self._http_servers.get("http")) is not None:
            http.config.timeout_graceful_shutdown = math.ceil(left_s)
            http.should_exit = True
        public = [self._servers["grpc"].stop(left_s)] if "grpc" in self._servers else []
        answered = [task for task in self._tasks if task.get_name() == "http"]
        done, _, _ = await asyncio.gather(self.core.drain(left_s), asyncio.gather(*public), _ended(answered, left_s))
        return done

    async def stop(self) -> None:
        """End what is in flight, then every port. Idempotent."""
        if self.core is not None:
            await self.core.close()
        await asyncio.gather(*(server.stop(_CLOSE_GRACE_S) for server in self._servers.values()))
        for server in self._http_servers.values():
            server.should_exit = True
        for task in self._tasks:
            if task.get_name() not in ("http", "admin_http"):
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_http(self, app: ASGIApp, name: str, host: str, port: int) -> None:
        listener = _listen(self._bound(host), self._port(port))
        config = uvicorn.Config(
            app, loop="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=int(_CLOSE_GRACE_S)
        )
        server = uvicorn.Server(config)
        self._http_servers[name] = server
        self._spawn(_serve_http(server, listener), name)
        self._addresses[name] = host_port(self._advertised(host), listener.getsockname()[1])

    async def _start_grpc(self, server: grpc.aio.Server, name: str, host: str, port: int) -> None:
        bound = server.add_insecure_port(host_port(self._bound(host), self._port(port)))
        await server.start()
        self._servers[name] = server
        self._addresses[name] = host_port(self._advertised(host), bound)

    def _bound(self, host: str) -> str:
        if host == AUTO_HOST and not self._node_ip:
            raise ValueError(f"host {AUTO_HOST!r}: the address of this node is not known")
        return self._node_ip if host == AUTO_HOST else host

    def _advertised(self, host: str) -> str:
        return self._node_ip if self._node_ip and host in EVERY_NODE else host

    def _port(self, port: int) -> int:
        return gateway_port(port, self._index)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(_tell_fault)
        self._tasks.append(task)


def served_model(settings: Settings, tokenizer: TextTokenizer) -> ServedModel:
    """What clients may ask of the model: the tightest limits of all pools."""
    engine = settings.engine
    config = engine.model_path / "config.json"
    if engine.kind == "simulated":
        vocab_size = engine.simulated.vocab_size
    else:
        vocab_size = int(json.loads(config.read_text()).get("vocab_size", tokenizer.vocab_size))
    return ServedModel(
        id=served_model_name(settings),
        root=str(engine.model_path),
        max_model_len=min(settings.engine_of(pool).max_model_len for pool in settings.pools),
        vocab_size=vocab_size,
        created_s=int(time.time()),
    )


async def _serve_http(server: uvicorn.Server, listener: socket.socket) -> None:
    with contextlib.closing(listener):
        await server.serve(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Bound here so that a taken port is an error at start, not a log line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(_LISTEN_BACKLOG)
    return listener


async def _ended(tasks: list[asyncio.Task[Any]], timeout_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)


def _tell_fault(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("gateway task %s ended", task.get_name(), exc_info=task.exception())
