"""Runs submissions: composes routing, membership, metrics and the running choices of one gateway."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from coordinator.gateway.api import Submission
from coordinator.gateway.auto_path import AutoPaths
from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.generation import RunningChoice
from coordinator.gateway.membership import Membership
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.pool_loads import PoolLoad, PoolLoads
from coordinator.routing.auto import StepTimes
from coordinator.routing.breaker import PairKey
from coordinator.routing.retry_budget import RetryBudget
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerView
from protos.ids import Incarnation

log = structlog.get_logger(__name__)


class GatewayCore:
    """Implements `coordinator.gateway.api.Core`. Belongs to one event loop; feed `membership`, then `submit`.

    `transports` are in order of preference, for requests that do not say; with `follow_workers` the order that all workers
    advertise goes before it. `clock` is monotonic seconds, the one that
    `Submission.received_s` is taken from. `step_times` are what path `auto` predicts from; None: there is no such path.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        *,
        transports: Sequence[str] = ("ucx", "grpc"),
        follow_workers: bool = False,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        step_times: Mapping[str, StepTimes] | None = None,
    ) -> None:
        """Raises `ValueError` where the settings have path `auto` and there are no `step_times`."""
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.router = Router(settings.routing, rng or random.Random(), transports=transports, follow_workers=follow_workers)
        self.paths = AutoPaths(settings, self.router, metrics, step_times)
        self.membership = Membership(self.router, settings.worker_client, clock=clock, on_event=metrics.event)
        self.retries = RetryBudget(share=settings.retry_share, reserve=settings.retry_reserve)
        self.pool_loads = PoolLoads()
        self.running: set[RunningChoice] = set()
        """Choices that have started and not ended."""
        metrics.before_exposition = self.refresh_gauges
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, submission: Submission) -> RunningChoice:
        """One choice; starts at the first iteration."""
        return RunningChoice(self, submission)

    def ready(self) -> bool:
        """Some path can serve a request that leaves the path open: a connected worker of a role that is offered whole requests,
        or one in each phase of a pair."""
        connected = self.membership.connected
        workers = {role for role in Role if any(connected(v.incarnation) for v in self.router.ready_workers(role))}
        whole = {role for tier in self.settings.routing.colocated_roles for role in tier}
        return bool(workers & whole) or (self.router.has_pair() and {Role.PREFILL, Role.DECODE} <= workers)

    @property
    def in_flight(self) -> int:
        """Choices that have started and not ended."""
        return len(self.running)

    def loads(self) -> dict[str, PoolLoad]:
        """This gateway's part of every pool's load, by pool."""
        waiting = [c for c in self.running if c.prompt_pool and not c.has_tokens]
        return self.pool_loads.snapshot((c.prompt_pool, len(c.submission.prompt_token_ids)) for c in waiting)

    def blame(self, workers: tuple[WorkerView, ...], code: str, transport: str) -> None:
        """A fault of one worker, or of a pair over a transport."""
        if self.router.breakers.failed(_breaker_key(workers, transport), self.clock()):
            self.metrics.breaker_opened(code)
            log.warning("breaker_opened", workers=[v.worker_id for v in workers], transport=transport, code=code)

    def credit(self, workers: tuple[WorkerView, ...], transport: str) -> None:
        """They did their part."""
        breakers = self.router.breakers
        if breakers and breakers.succeeded(_breaker_key(workers, transport)):
            self.metrics.event("breaker_closed")
            log.info("breaker_closed", workers=[v.worker_id for v in workers], transport=transport)

    def open_circuits(self) -> list[str]:
        """What may not be chosen at the moment: a worker, or two and the transport between them."""
        names = {view.incarnation: view.worker_id for view in self.membership.views}
        shown = []
        for key in self.router.breakers.blocked(self.clock()):
            if isinstance(key, PairKey):
                ends = (names.get(key.prefill, key.prefill), names.get(key.decode, key.decode))
                shown.append(f"{ends[0]} to {ends[1]} over {key.transport}")
            else:
                shown.append(str(names.get(key, key)))  # type: ignore[call-overload]
        return sorted(shown)

    def refresh_gauges(self) -> None:
        """Bring the gauges that nobody pushes up to date; called before an exposition."""
        self.metrics.in_flight(self.in_flight)
        self.paths.refresh(frozenset(view.incarnation for view in self.membership.views))
        now_s, applied_s = self.clock(), self.membership.applied_s
        self.metrics.fleet(
            membership_age_s=math.inf if applied_s is None else now_s - applied_s,
            open_breakers=len(self.router.breakers.blocked(now_s)),
            connected_workers=sum(self.membership.connected(v.incarnation) for v in self.membership.views),
        )

    def began(self, choice: RunningChoice) -> None:
        """Called by a choice when it starts."""
        self.running.add(choice)
        self.retries.began()
        self._idle.clear()
        self.metrics.in_flight(len(self.running))

    def ended(self, choice: RunningChoice) -> None:
        """Called by a choice when it has ended, whether or not it had started."""
        self.running.discard(choice)
        self.metrics.in_flight(len(self.running))
        if not self.running:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight. False when the time is over first; nothing is ended here."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Fail every choice and end every stream. Aborts and releases are written first. Idempotent."""
        for choice in list(self.running):
            choice.cut_off()
        await self.membership.close()


def _breaker_key(workers: Sequence[WorkerView], transport: str) -> Incarnation | PairKey:
    if len(workers) == 1:
        return workers[0].incarnation
    prefill, decode = workers
    return PairKey(prefill.incarnation, decode.incarnation, transport)
