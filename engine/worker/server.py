"""A worker's gRPC server and its life.

    server = WorkerServer(
        engine=lambda register_address: SimulatedEngine(settings, kv=KvEngineConfig(register_address=register_address, ...)),
        identity=WorkerIdentity(worker_id=..., incarnation=..., model=..., control_token=...),
        handlers=lambda context: LegHandlers.join(prefill.service.handlers(context, ...), decode.service.handlers(context, ...)),
        settings=WorkerSettings(),
        rank_control=RankControl,           # None: no KV transfer
    )
    address = await server.start()          # listening, engine started, every rank registered, serving
    await server.drain(timeout_s)           # new legs are refused; True when no request and no lease is left
    await server.stop()                     # aborts what runs, stops the engine, closes the port

Everything belongs to one event loop. `start` may fail; `stop` is then still needed and safe. The engine is made by a factory
because it must know the address where its ranks register, and that exists only once the server listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from engine.protocol import Engine, EngineDeadError, EngineInfo
from engine.worker.attempts import WORKER_STOPS, Attempts, Work
from engine.worker.config import WorkerSettings
from engine.worker.legs import HandlersFactory, LegHandler, LegHandlers, Monotonic, WorkerContext
from engine.worker.metrics import WorkerMetrics
from engine.worker.ranks import RankControl, RankControlFactory, RankFacts, RankRegistry
from engine.worker.servicer import WorkerServicer
from engine.worker.transfers import TransferRoster
from kvtransfer.rpc import host_port
from kvtransfer.tls import bind
from protos.errors import Code, SplitpointError
from protos.ids import Incarnation, TransferId, WorkerId
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

SERVICE = "splitpoint.v1.WorkerService"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who this worker is. `control_token` guards `RegisterRank` and the ranks' control service."""

    worker_id: WorkerId
    incarnation: Incarnation
    model: str
    control_token: str = field(repr=False)


class WorkerServer:
    """One engine, its ranks' control and one gRPC server. See the top of this file."""

    def __init__(
        self,
        *,
        engine: Callable[[str], Engine],
        identity: WorkerIdentity,
        handlers: HandlersFactory,
        settings: WorkerSettings | None = None,
        rank_control: RankControlFactory | None = None,
        now: Monotonic = time.monotonic,
    ) -> None:
        self.identity = identity
        self.settings = settings or WorkerSettings()
        self.metrics = WorkerMetrics()
        self.registry = RankRegistry(identity.incarnation, identity.control_token)
        self.address = ""
        self.metrics_address = ""
        """Where Prometheus finds this worker; empty without `metrics_port`."""
        self.draining = False
        self.engine: Engine | None = None
        self.info: EngineInfo | None = None
        self.facts: RankFacts | None = None
        self.ranks: RankControl | None = None
        self.handlers: LegHandlers | None = None
        self.engine_death: EngineDeadError | None = None
        self.attempts = Attempts(self.metrics, self.settings.cleanup_timeout_s, now, self._engine_died)
        self.transfers = TransferRoster(self.settings.lease_memory_s, now)
        self._make_engine = engine
        self._make_handlers = handlers
        self._make_ranks = rank_control
        self._now = now
        self._server: grpc.aio.Server | None = None
        self._health = HealthServicer()
        self._servicer = WorkerServicer(self)
        self._stopped = False

    async def start(self) -> str:
        """Returns host:port as gateways dial it, once the worker serves.

        Raises:
            RuntimeError: the port cannot be bound, or other ranks than the engine's have registered.
            TimeoutError: a rank did not register in time.
            EngineDeadError, ValueError: from the engine's start.
        """
        await self._listen()
        self.engine = self._make_engine(self.address)
        self.info = await self.engine.start()
        if self._make_ranks is not None:
            self.facts = await self.registry.wait(self.settings.rank_timeout_s)
            if len(self.facts.endpoints) != self.info.world_size:
                raise RuntimeError(f"{len(self.facts.endpoints)} ranks registered, the engine has {self.info.world_size}")
            made = self._make_ranks(self.facts.endpoints, self.identity.control_token)
            self.ranks = await made if inspect.isawaitable(made) else made
            self.metrics.ranks(self.ranks.metrics)
            if self.facts.max_transfer_tokens < self.info.max_model_len:
                # Longer prompts take the colocated path, whatever an operator expects.
                self.metrics.event("staging_below_max_model_len")
                limits = self.facts.max_transfer_tokens, self.info.max_model_len
                _log.warning("staging is smaller than the longest prompt: max_transfer_tokens=%d max_model_len=%d", *limits)
        context = WorkerContext(
            engine=self.engine,
            info=self.info,
            incarnation=self.identity.incarnation,
            ranks=self.ranks,
            facts=self.facts,
            metrics=self.metrics,
            spawn=self.attempts.spawn,
            now=self._now,
        )
        self.handlers = self._make_handlers(context)
        engine = self.engine
        self.metrics.gauge("legs_running", "Legs that have not ended.", lambda: len(self.attempts))
        self.metrics.gauge("engine_running", "Requests in the engine's batch.", lambda: engine.load().running)
        self.metrics.gauge("engine_waiting", "Requests in the engine's queue.", lambda: engine.load().waiting)
        self.metrics.gauge("kv_usage", "Share of KV blocks that live requests hold.", lambda: engine.load().kv_usage)
        if self.settings.metrics_port is not None:
            port = self.metrics.serve(self.settings.bind_host, self.settings.metrics_port)
            self.metrics_address = host_port(self.settings.advertise_host, port)
        await self._serving(True)
        transports = ",".join(self.facts.transports) if self.facts is not None else "none"
        _log.info("worker serves worker_id=%s incarnation=%s address=%s transports=%s", *self._names(), transports)
        return self.address

    @property
    def serving(self) -> bool:
        """New legs are accepted."""
        return self.handlers is not None and not self.draining and self.engine_death is None and not self._stopped

    def handler(self, leg: str) -> LegHandler:
        """The handler of a new leg. A drain refuses all but `decode`: that leg belongs to a request that has been under way
        here since its prepare leg.

        Raises:
            SplitpointError: WORKER_LOST, DRAINING or NO_WORKER (starting, or it has no handler for such legs).
        """
        name = self.identity.worker_id
        if self._stopped or self.engine_death is not None:
            raise SplitpointError(Code.WORKER_LOST, f"worker {name} is gone")
        if self.handlers is None:
            raise SplitpointError(Code.NO_WORKER, f"worker {name} is starting")
        if self.draining and leg != "decode":
            raise SplitpointError(Code.DRAINING, f"worker {name} drains")
        handler = self.handlers.legs.get(leg)
        if handler is None:
            raise SplitpointError(Code.NO_WORKER, f"worker {name} serves no {leg} legs")
        return handler

    def begin_drain(self) -> None:
        """Refuse new legs from now on; what runs finishes. Idempotent."""
        if not self.draining:
            self.draining = True
            self.attempts.spawn(self._serving(False))
            _log.info("worker drains worker_id=%s incarnation=%s address=%s", *self._names())

    async def drained(self) -> None:
        """Until no leg runs and no rank holds a lease or a session (rule 10). Bound it with a time-out."""
        while True:
            await self.attempts.wait_idle()
            if self.open_transfers() == 0 and await self._no_leases() and self.attempts.busy == 0:
                return
            # Leases end on the ranks, in other processes; nobody calls back.
            await asyncio.sleep(self.settings.drain_poll_s)

    async def drain(self, timeout_s: float) -> bool:
        """`begin_drain` and wait. False when something was still running or leased at the time-out."""
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self.drained()
        except TimeoutError:
            self.metrics.event("drain_timeout")
            return False
        return True

    def end_drain(self) -> None:
        """Accept legs again, for a worker whose label was changed. Idempotent."""
        if self.draining:
            self.draining = False
            self.attempts.spawn(self._serving(self.serving))

    def open_transfers(self) -> int:
        """Transfers that this worker's services know as not over."""
        return sum(owner.open_transfers() for owner in self.handlers.owners) if self.handlers is not None else 0

    def work(self) -> list[Work]:
        """The legs that run, and the decode legs that are still to come of what was prepared here."""
        owners = self.handlers.owners if self.handlers is not None else ()
        return [*self.attempts.running(), *(Work("decode", transfer.hex()) for owner in owners for transfer in owner.transfers())]

    async def release(self, transfer_id: TransferId, reason: str) -> bool:
        """End a transfer on this worker, whichever side it is. Idempotent; False when nobody knew it."""
        self.transfers.forget(transfer_id)
        known = False
        for owner in self.handlers.owners if self.handlers is not None else ():
            known = await owner.release(transfer_id, reason) or known
        if not known and self.ranks is not None:
            # The prefill side keeps nothing of a sealed transfer but the lease on its ranks.
            known = await self.ranks.release(transfer_id, reason)
        return known

    async def stop(self, grace_s: float = 1.0) -> None:
        """Abort every leg, wait for the cleanups within their bound, stop the engine and close the port. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        async with contextlib.AsyncExitStack() as ends:
            # In the order of their lines from below; each runs although another failed, the engine's above all.
            if self.engine is not None:
                ends.push_async_callback(self.engine.stop)
            if self.ranks is not None:
                ends.push_async_callback(self.ranks.close)
            ends.callback(self.metrics.close)
            for owner in self.handlers.owners if self.handlers is not None else ():
                ends.push_async_callback(owner.close)
            await self._end_streams(grace_s)

    async def _end_streams(self, grace_s: float) -> None:
        await self._serving(False)
        self.attempts.abort_all(WORKER_STOPS)
        await self._wait_idle()
        if self._server is not None:
            self._servicer.finish_streams()
            await self._server.stop(grace_s)
        # Streams that ended have released their transfers; afterwards the services end what no stream has brought up.
        await self._wait_idle()

    def describe(self) -> worker_pb2.DescribeWorkerResponse:
        """Facts for gateways and the coordinator. Raises `SplitpointError(NO_WORKER)` before the start is done."""
        if self.info is None or self.handlers is None:
            raise SplitpointError(Code.NO_WORKER, f"worker {self.identity.worker_id} is starting")
        facts = self.facts
        return worker_pb2.DescribeWorkerResponse(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            model=self.identity.model,
            compatibility=facts.compatibility if facts is not None else None,
            ranks=facts.endpoints if facts is not None else (),
            max_model_len=self.info.max_model_len,
            max_transfer_tokens=facts.max_transfer_tokens if facts is not None else 0,
            transports=facts.transports if facts is not None else (),
        )

    async def rank_status(self, timeout_s: float) -> list[kv_transfer_pb2.GetNodeStatusResponse]:
        """Every rank's staging and leases; empty without KV transfer. Raises `TimeoutError`, `SplitpointError`."""
        if self.ranks is None:
            return []
        async with asyncio.timeout(timeout_s):
            return list(await self.ranks.status())

    # -- parts ----------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        settings = self.settings
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                ("grpc.keepalive_time_ms", int(settings.keepalive_time_s * 1000)),
                ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
                # The one above is for what no longer reaches the peer; a peer that takes bytes and does not answer has this long.
                ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            )
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = bind(server, host_port(settings.bind_host, settings.port), settings.tls)
        self._server = server
        await self._set_health("", health_pb2.HealthCheckResponse.SERVING)
        await self._set_health(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        self.address = host_port(settings.advertise_host, port)

    async def _wait_idle(self) -> None:
        try:
            async with asyncio.timeout(2 * self.settings.cleanup_timeout_s):
                await self.attempts.wait_idle()
        except TimeoutError:
            self.metrics.event("stop_timeout")
            _log.error("legs still run at stop worker_id=%s incarnation=%s address=%s", *self._names())

    async def _serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._set_health(SERVICE, status.SERVING if serving else status.NOT_SERVING)

    async def _set_health(self, service: str, status: Any) -> None:
        await self._health.set(service, status)

    async def _no_leases(self) -> bool:
        try:
            status = await self.rank_status(self.settings.cleanup_timeout_s)
        except (TimeoutError, SplitpointError) as error:
            self.metrics.event("status_failed")
            _log.warning("a rank does not answer during a drain: %s", error)
            return False
        return all(rank.leases == 0 and rank.sessions == 0 for rank in status)

    def _engine_died(self, error: EngineDeadError) -> None:
        if self.engine_death is None:
            self.engine_death = error
            self.metrics.event("engine_died")
            _log.error("engine died worker_id=%s: %s", self.identity.worker_id, error)
            self.attempts.spawn(self._serving(False))

    def _names(self) -> tuple[str, str, str]:
        return self.identity.worker_id, self.identity.incarnation, self.address
