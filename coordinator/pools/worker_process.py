"""One worker's life inside its actor: engine, server, heartbeats, end. No Ray: the actor is a shell around it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.manifest import gpus, hardware, versions
from coordinator.pools.former import FormerWork
from coordinator.pools.process import open_files, resident_bytes
from coordinator.pools.reach import dial_all, interfaces
from coordinator.pools.reports import Beat, ProcessRef, Resources, Staging, WorkerFacts, WorkerSpec
from coordinator.routing.views import RankView, Role, WorkerState, WorkerView
from engine.config import EngineSettings, KvEngineConfig
from engine.protocol import Engine, EngineDeadError
from engine.worker.heartbeat import WorkerHeartbeat, heartbeat
from engine.worker.server import WorkerIdentity, WorkerServer
from kvtransfer.addresses import is_loopback
from kvtransfer.control import RankControl
from protos.ids import new_incarnation
from protos.splitpoint.v1 import kv_transfer_pb2

log = logging.getLogger(__name__)

LEAKED = "rank_ucx.leaked_attachments"
STUCK = "rank_ucx.queue_stuck"
STAGGER = 8
_STATUS_TIMEOUT_S = 2.0
_TREE_EVERY_S = 5.0
_LAST_WORDS_S = 5.0
"""How long an ended worker stays to say why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the shell knows of the node. `push` sends a heartbeat; False tells the worker to end. It may raise
    `ConnectionError` when the coordinator is away: the worker goes on serving."""

    node_id: str
    node_ip: str
    push: Callable[[Beat], Awaitable[bool]]
    processes: Callable[[], tuple[ProcessRef, ...]]
    rack: str = ""


class WorkerProcess:
    """Make one, await `run()`; it returns why the worker ended. Everything belongs to one event loop."""

    def __init__(self, spec: WorkerSpec, host: Host) -> None:
        self.spec = spec
        self.incarnation = new_incarnation()
        self._host = host
        self._settings = spec.settings
        self._engine_settings = spec.settings.engine_of(spec.pool)
        self._token = secrets.token_hex(16)
        self._refs = host.processes()
        self._born_s = self._refs_s = time.monotonic()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stop_reason: str | None = None
        self._stopping = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._missed = 0
        self._ranks_lost = 0
        self._rank_detail = ""
        self._former = FormerWork()
        self.server = self._make_server()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Start, serve and beat until told to stop, given up by the coordinator, or the engine dies. Returns why."""
        try:
            await self._push(WorkerState.STARTING)
            async with asyncio.timeout(self._engine_settings.start_timeout_s):
                await self.server.start()
            reason = await self._serve()
        except TimeoutError as error:
            limit = f"engine.start_timeout_s is {self._engine_settings.start_timeout_s:g}"
            reason = f"did not start: {error or 'timed out'} ({limit})"
        except Exception as error:
            # The boundary: whatever it is, it ends this worker, and the coordinator and the log hear of it.
            log.exception("worker %s fails", self.spec.worker_id)
            phase = "failed" if self.server.handlers is not None else "did not start"
            reason = f"{phase}: {type(error).__name__}: {error} (log {self.spec.log_dir / f'{self.spec.worker_id}.log'})"
        finally:
            await self._shut()
        log.info("worker %s ends: %s", self.spec.worker_id, reason)
        self._ended.set_result(reason)
        return reason

    async def wait_ended(self) -> str:
        """Why the worker ended, once it has."""
        return await asyncio.shield(self._ended)

    async def last_words(self) -> None:
        """After `run`: time for answers to leave this process. The coordinator kills it as soon as it has heard why it ended;
        without a coordinator it exits after this."""
        await asyncio.sleep(_LAST_WORDS_S)

    async def stop(self, reason: str) -> None:
        """End in order; returns when the engine has stopped."""
        self._stop_reason = self._stop_reason or reason
        self._stopping.set()
        self._beat_now.set()
        await asyncio.shield(self._ended)

    def drain(self) -> None:
        """Refuse new legs from now on; heartbeats confirm it and say when nothing is left. Idempotent."""
        self.server.begin_drain()
        self._beat_now.set()

    def relabel(self, pool: str, role: Role) -> None:
        """Carry another label from the next heartbeat on. Refuses nothing and ends nothing: every worker serves every leg, and
        those under way, this one's and its peers', belong to requests that were promised an answer. Idempotent."""
        if (self.spec.pool, self.spec.role) == (pool, role):
            return
        log.info("worker %s: %s (%s) becomes %s (%s)", self.spec.worker_id, self.spec.pool, self.spec.role, pool, role)
        self.spec = replace(self.spec, pool=pool, role=role)
        self._former.relabelled(self.server.work())
        self.server.metrics.event("relabelled")
        self._beat_now.set()

    async def peer_died(self, incarnation: str) -> None:
        """A peer's process is known dead: every rank gives free what it held back for its sake. A worker that stops holds
        nothing back.

        Raises:
            SplitpointError: a rank does not answer: say it again.
        """
        if isinstance(self.server.ranks, RankControl) and not self._stopping.is_set():
            await self.server.ranks.fence(incarnation)

    async def reach(self, addresses: Sequence[str]) -> dict[str, str]:
        """Dial addresses of peers from here; why not, for those that cannot be reached."""
        return await dial_all(addresses)

    async def reset_prefix_cache(self) -> bool:
        """False when blocks are in use and nothing was reset."""
        return self.server.engine is not None and await self.server.engine.reset_prefix_cache()

    def facts(self) -> WorkerFacts:
        """For the run manifest; only a worker that serves has them."""
        info, facts = self.server.info, self.server.facts
        return WorkerFacts(
            worker_id=self.spec.worker_id,
            incarnation=self.incarnation,
            pool=self.spec.pool,
            start_arguments=dict(info.start_arguments) if info is not None else {},
            versions=versions(),
            transports={
                "configured": list(self._settings.kvtransfer.transports),
                "usable": list(facts.transports) if facts is not None else [],
                "ucx": _ucx_transports(),
            },
            hardware={**hardware(), "gpus": gpus()},
        )

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> str:
        interval_s = self._settings.coordinator.heartbeat_interval_s
        while True:
            self._beat_now.clear()
            if not await self._push(WorkerState.READY):
                return "the coordinator gave this worker up"
            if self._stopping.is_set():
                return self._stop_reason or "stopped"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._beat_now.wait()
            if self._ranks_lost >= self._settings.coordinator.missed_heartbeats:
                # Without its transfer node a worker looks healthy and fails every split request.
                return f"its ranks are lost, {self._ranks_lost} heartbeats in a row: {self._rank_detail}"
            dead = await self._engine_death()
            if dead is not None:
                return f"its engine died: {dead}"

    async def _engine_death(self) -> Exception | None:
        if self.server.engine_death is not None:
            return self.server.engine_death
        assert self.server.engine is not None
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                await self.server.engine.check_health()
        except EngineDeadError as error:
            return error
        except TimeoutError:
            log.warning("worker %s: the engine's health check takes over %g s", self.spec.worker_id, _STATUS_TIMEOUT_S)
        return None

    async def _push(self, state: WorkerState) -> bool:
        beat = await self._beat(state)
        try:
            go_on = await self._host.push(beat)
        except ConnectionError as error:
            self._missed += 1
            if self._missed in (1, 10) or self._missed % 100 == 0:
                log.warning("heartbeat %d in a row did not reach the coordinator: %s", self._missed, error)
            return True
        self._missed = 0
        return go_on

    async def _beat(self, state: WorkerState) -> Beat:
        now_s = time.monotonic()
        if now_s - self._refs_s > _TREE_EVERY_S or (state is WorkerState.READY and len(self._refs) == 1):
            self._refs, self._refs_s = await asyncio.to_thread(self._host.processes), now_s
        view, resources = await self._state(state)
        return Beat(
            view=view,
            slot=self.spec.slot,
            node_id=self._host.node_id,
            processes=self._refs,
            refusing=self.server.draining,
            engine=self.spec.engine,
            ranks=self._engine_settings.world_size,
            start_timeout_s=self._engine_settings.start_timeout_s,
            former_legs=self._former.left(self.server.work(), self.spec.role),
            uptime_s=now_s - self._born_s,
            resources=resources,
            metrics_address=self.server.metrics_address,
            interfaces=interfaces([view.address, *(rank.address for rank in view.ranks)]) if view.ranks else {},
        )

    async def _state(self, state: WorkerState) -> tuple[WorkerView, Resources | None]:
        server, facts, detail = self.server, self.server.facts, ""
        resources = None
        running = waiting = leases = 0
        kv_usage = 0.0
        if state is WorkerState.READY and server.engine is not None:
            beat = await heartbeat(server, _STATUS_TIMEOUT_S)
            running, waiting, leases, kv_usage = beat.running, beat.waiting, beat.leases, beat.kv_usage
            detail = self._rank_detail = beat.detail
            self._ranks_lost = self._ranks_lost + 1 if beat.rank_lost else 0
            self._recycle_if_spent(beat)
            resources = self._resources(beat)
            if detail:
                log.warning("worker %s: %s", self.spec.worker_id, detail)
        view = WorkerView(
            worker_id=self.spec.worker_id,
            incarnation=self.incarnation,
            pool=self.spec.pool,
            role=self.spec.role,
            state=state,
            address=server.address,
            pid=self._refs[0].pid,
            fingerprint=facts.family if facts is not None else b"",
            ranks=tuple(
                RankView(rank=e.rank, address=e.address, host_id=e.host_id, ucx_worker_address=e.ucx_worker_address)
                for e in facts.endpoints
            )
            if facts is not None
            else (),
            max_transfer_tokens=facts.max_transfer_tokens if facts is not None else 0,
            transports=facts.transports if facts is not None else (),
            running=running,
            waiting=waiting,
            leases=leases,
            kv_usage=kv_usage,
            kv_capacity_tokens=server.info.num_kv_blocks * server.info.block_tokens if server.info is not None else 0,
            detail=detail,
            node_id=self._host.node_id,
            rack=self._host.rack,
        )
        return view, resources

    def _recycle_if_spent(self, beat: WorkerHeartbeat) -> None:
        """UCX never gives back what it attached of killed peers: past the budget this worker drains by itself, and the
        coordinator replaces it as it would any drained one. So too when a killed peer has spoilt the queue through which its
        host reaches it: requests in flight end over the next transport."""
        if beat.counters.get(STUCK, 0) and not self.server.draining:
            self.server.metrics.event("recycled")
            log.warning("worker %s drains: a killed peer has spoilt UCX's queue in shared memory", self.spec.worker_id)
            self.drain()
        leaked = beat.counters.get(LEAKED, 0)
        # A killed peer leaks in all of its peers at once: budgets differ, so that they are not replaced together.
        budget = self._settings.kvtransfer.leaked_attachments + STAGGER * self.spec.slot
        if leaked >= budget and not self.server.draining:
            self.server.metrics.event("recycled")
            log.warning(
                "worker %s drains: %d segments of killed peers are attached, budget %d", self.spec.worker_id, leaked, budget
            )
            self.drain()

    def _resources(self, beat: WorkerHeartbeat) -> Resources:
        return Resources(
            kv_blocks_held=beat.kv_blocks_held,
            legs=beat.legs,
            leases=beat.rank_leases,
            sessions=beat.rank_sessions,
            lease_states=beat.lease_states,
            session_states=beat.session_states,
            send_staging=_staging(beat.send_staging),
            receive_staging=_staging(beat.receive_staging),
            tasks=len(asyncio.all_tasks()) + beat.rank_tasks,
            open_files=open_files(ref.pid for ref in self._refs),
            memory_bytes=resident_bytes(ref.pid for ref in self._refs),
            device_memory_bytes=beat.device_memory_bytes,
        )

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _make_server(self) -> WorkerServer:
        import decode.service
        import prefill.service
        from engine.worker.legs import LegHandlers

        settings = self._settings
        host = self._host.node_ip
        worker_settings = _on_host(settings.worker, host)
        return WorkerServer(
            engine=lambda address: make_engine(self._engine_settings, self._kv_config(address)),
            identity=WorkerIdentity(
                worker_id=self.spec.worker_id,
                incarnation=self.incarnation,
                model=settings.engine.served_model_name,
                control_token=self._token,
            ),
            handlers=lambda context: LegHandlers.join(
                prefill.service.handlers(context, settings.prefill), decode.service.handlers(context, settings.decode)
            ),
            settings=worker_settings,
            rank_control=partial(RankControl, tls=settings.security),
        )

    def _kv_config(self, register_address: str) -> KvEngineConfig:
        model_hash, tokenizer_hash = checkpoint_hashes(self._engine_settings)
        kv = self._settings.kvtransfer
        return KvEngineConfig(
            # Ranks on other hosts find their own address; those that reach the actor by loopback live on this one.
            settings=_on_host(kv, self._host.node_ip) if is_loopback(register_address.rpartition(":")[0]) else kv,
            incarnation=self.incarnation,
            control_token=self._token,
            register_address=register_address,
            model_hash=model_hash,
            tokenizer_hash=tokenizer_hash,
        )

    async def _shut(self) -> None:
        try:
            async with asyncio.timeout(3 * _LAST_WORDS_S):
                await self.server.stop()
        except (TimeoutError, RuntimeError, OSError, EngineDeadError) as error:
            # The process exits next, and the coordinator kills what is left of its children.
            log.error("worker %s did not stop in order: %s: %s", self.spec.worker_id, type(error).__name__, error)


def make_engine(settings: EngineSettings, kv: KvEngineConfig | None) -> Engine:
    """The engine that the settings name; its libraries are loaded here."""
    if settings.kind == "simulated":
        from engine.simulated import SimulatedEngine

        return SimulatedEngine(settings, kv=kv)
    from engine.vllm import VllmEngine

    return VllmEngine(settings, kv=kv)


def checkpoint_hashes(settings: EngineSettings) -> tuple[str, str]:
    """What must be equal on both sides of a transfer: the weights and the tokenizer of this node's checkpoint."""
    path = settings.model_path
    tokenizer = path / "tokenizer.json"
    tokenizer_hash = _sha256([tokenizer]) if tokenizer.is_file() else ""
    if settings.kind == "simulated":
        return f"simulated seed {settings.seed}", tokenizer_hash
    if settings.load_format == "dummy":
        return f"dummy {_sha256([path / 'config.json'])} seed {settings.seed}", tokenizer_hash
    return _sha256([path / "config.json", *sorted(path.glob("*.safetensors"))]), tokenizer_hash


def _sha256(files: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _staging(status: kv_transfer_pb2.StagingStatus) -> Staging:
    return Staging(capacity_bytes=status.capacity_bytes, used_bytes=status.used_bytes, quarantined_bytes=status.quarantined_bytes)


def _on_host(settings: Any, node_ip: str) -> Any:
    """`advertise_host = "auto"` becomes this node's address in the cluster, and then the server binds it too."""
    if settings.advertise_host != "auto":
        return settings
    return settings.model_copy(update={"advertise_host": node_ip, "bind_host": node_ip})


def _ucx_transports() -> dict[str, Any]:
    """What UCX is told by its environment; the ranks print what they really use."""
    import os

    return {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
