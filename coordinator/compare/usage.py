"""What each worker held while a probe ran: KV, queues, staging, memory; asked of the admin API about once a second.

The figures are the workers' own heartbeats, so looking costs one call a second, whatever the load is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import grpc
import grpc.aio

from protos.splitpoint.v1 import admin_pb2, admin_pb2_grpc

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
SAME_BEAT_S = 0.05
"""Two answers that place a heartbeat this close together speak of one heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One heartbeat of one worker, `t_s` seconds after its probe began.

    `probe` is the probe's place in the record. `kv_usage` is the share of KV blocks that live requests hold. `memory_bytes` is
    resident memory of the worker's processes, pages that several share counted in each; `device_memory_bytes` is what its ranks
    have reserved on their GPUs. `staging_bytes` is used or quarantined, both directions.
    """

    arm: str
    probe: int
    t_s: float
    worker: str
    kv_usage: float
    running: int
    waiting: int
    memory_bytes: int
    device_memory_bytes: int
    staging_bytes: int = 0


@dataclass(slots=True)
class _Open:
    """The probe that runs now. `seen` holds when each worker's last kept heartbeat was, seconds after the begin."""

    arm: str
    probe: int
    pools: frozenset[str]
    began: float
    seen: dict[str, float]


class UsageSampler:
    """Keeps `samples` while a probe is open.

        async with UsageSampler(admin_address) as sampler:
            with sampler.probe("split", 0, pools=["prefill", "decode"]):
                await run_probe(...)

    An admin API that does not answer costs samples, never the probe: `missed` counts the polls that failed, of `polls`.
    """

    def __init__(
        self, admin_address: str, *, interval_s: float = INTERVAL_S, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._address = admin_address
        self._interval_s = interval_s
        self._now = now
        self._open: _Open | None = None
        self._changed = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self.samples: list[Usage] = []
        self.polls = 0
        self.missed = 0

    async def __aenter__(self) -> UsageSampler:
        self._channel = grpc.aio.insecure_channel(self._address, options=[("grpc.enable_http_proxy", 0)])
        self._task = asyncio.create_task(self._run(admin_pb2_grpc.AdminServiceStub(self._channel)))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        assert self._channel is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._channel.close()

    @contextlib.contextmanager
    def probe(self, arm: str, probe: int, pools: Collection[str] = ()) -> Iterator[None]:
        """What workers of `pools` (of all, where none is named) say until this ends belongs to the probe."""
        self._open = _Open(arm, probe, frozenset(pools), self._now(), {})
        self._changed.set()
        try:
            yield
        finally:
            self._open = None
            self._changed.set()

    def notes(self) -> list[str]:
        """What a record should say beside the samples."""
        return [f"memory and KV use: {self.missed} of {self.polls} looks were not answered"] if self.missed else []

    async def _run(self, stub: admin_pb2_grpc.AdminServiceStub) -> None:
        while True:
            self._changed.clear()
            probe = self._open
            if probe is None:
                await self._changed.wait()
                continue
            await self._poll(stub, probe)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()

    async def _poll(self, stub: admin_pb2_grpc.AdminServiceStub, probe: _Open) -> None:
        self.polls += 1
        try:
            status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=max(2.0, 2 * self._interval_s))
        except grpc.aio.AioRpcError as error:
            self.missed += 1
            if self.missed == 1:
                log.warning("usage is not sampled: %s: %s", error.code().name, error.details())
            return
        if self._open is probe:  # It may have ended, or the next begun, while the answer was on its way.
            self._keep(probe, status.workers, self._now())

    def _keep(self, probe: _Open, workers: Collection[admin_pb2.WorkerStatus], now: float) -> None:
        for worker in workers:
            t_s = now - probe.began - worker.heartbeat_age_s
            known = probe.seen.get(worker.worker_id, -SAME_BEAT_S)
            if not worker.HasField("resources") or (probe.pools and worker.pool not in probe.pools):
                continue
            if t_s < 0 or t_s - known < SAME_BEAT_S:
                continue
            probe.seen[worker.worker_id] = t_s
            held = worker.resources
            stagings = (held.send_staging, held.receive_staging)
            self.samples.append(
                Usage(
                    arm=probe.arm,
                    probe=probe.probe,
                    t_s=t_s,
                    worker=worker.worker_id,
                    kv_usage=worker.kv_usage,
                    running=worker.running,
                    waiting=worker.waiting,
                    memory_bytes=held.memory_bytes,
                    device_memory_bytes=held.device_memory_bytes,
                    staging_bytes=sum(staging.used_bytes + staging.quarantined_bytes for staging in stagings),
                )
            )
