"""A gateway core over scripted workers, and a front end that only collects."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from coordinator.gateway.api import Finished, Submission, Tokens
from coordinator.gateway.client_config import WorkerClientSettings
from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.core import GatewayCore
from coordinator.gateway.generation import RunningChoice
from coordinator.gateway.membership import MembershipSnapshot
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.routing.auto import StepTimes
from coordinator.routing.views import WorkerView
from engine.sampling import SamplingParams
from protos.errors import SplitpointError
from protos.ids import new_request_id
from protos.splitpoint.v1 import common_pb2, worker_pb2
from tests.support.scripted_worker import ScriptedWorker

CLIENT = WorkerClientSettings(connect_timeout_s=1.0, backoff_initial_s=0.01, backoff_max_s=0.05)
PROMPT = [5, 6, 7, 8, 9]


def submission(
    prompt: Sequence[int] = PROMPT,
    *,
    path: str | None = None,
    transport: str | None = None,
    deadline_s: float = 20.0,
    **sampling: Any,
) -> Submission:
    sampling.setdefault("max_tokens", 4)
    return Submission(
        request_id=new_request_id(),
        client_request_id="client",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**sampling),
        received_s=time.monotonic(),
        deadline_s=deadline_s,
        path=path,
        transport=transport,
    )


class Reader:
    """Iterates one choice in a task, as a front end would, and keeps what came."""

    def __init__(self, choice: RunningChoice) -> None:
        self.choice = choice
        self.tokens: list[int] = []
        self.events: list[Tokens] = []
        self.finished: Finished | None = None
        self.error: SplitpointError | None = None
        self._changed = asyncio.Condition()
        self._heard: dict[str, asyncio.Event] = {}
        on_leg_event = choice._on_leg_event

        def heard(event: worker_pb2.LegEvent, arrived_s: float) -> None:
            on_leg_event(event, arrived_s)
            self._hearing(event.WhichOneof("event")).set()

        choice._on_leg_event = heard  # type: ignore[method-assign]
        self.task = asyncio.create_task(self._read(), name="reader")

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self.choice.__aiter__()) as events:  # type: ignore[type-var]
                async for event in events:
                    async with self._changed:
                        if isinstance(event, Tokens):
                            self.events.append(event)
                            self.tokens += event.token_ids
                        else:
                            self.finished = event
                        self._changed.notify_all()
        except SplitpointError as error:
            self.error = error

    def _hearing(self, kind: str | None) -> asyncio.Event:
        return self._heard.setdefault(kind or "", asyncio.Event())

    async def hears(self, kind: str) -> None:
        """Until a worker's event of this kind has been taken by the choice."""
        async with asyncio.timeout(10):
            await self._hearing(kind).wait()

    async def has(self, count: int) -> None:
        """Until at least `count` tokens have come."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: len(self.tokens) >= count)

    async def end(self) -> None:
        async with asyncio.timeout(20):
            await self.task

    async def leave(self) -> None:
        """The client goes away."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def ledger(self) -> common_pb2.StageLedger:
        return self.choice.ledger()


class CoreUnderTest:
    """Core, its metrics, and helpers."""

    def __init__(self, core: GatewayCore) -> None:
        self.core = core
        self.version = 0

    def run(self, **options: Any) -> Reader:
        return Reader(self.core.submit(submission(**options)))

    def members(self, views: Sequence[WorkerView]) -> None:
        self.version += 1
        self.core.membership.apply(MembershipSnapshot(version=self.version, workers=tuple(views)))

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 when it does not exist yet."""
        value = self.core.metrics.registry.get_sample_value(f"splitpoint_{name}", {"model_name": "m", **labels})
        return value or 0.0

    def assert_idle(self) -> None:
        """Nothing of any request is left."""
        core = self.core
        assert core.in_flight == 0
        assert core.router.load.total_in_flight_tokens() == 0
        assert core.paths.phases.idle
        for view in core.membership.views:
            client = core.membership.client(view.incarnation)
            assert client is None or client.open_legs == 0
        assert core.metrics.recording_faults == 0


@contextlib.asynccontextmanager
async def core_over(
    views: Sequence[WorkerView],
    *,
    transports: Sequence[str] = ("ucx", "grpc"),
    step_times: Mapping[str, StepTimes] | None = None,
    **settings: Any,
) -> AsyncIterator[CoreUnderTest]:
    """A core that knows `views` and, at the end, is idle and leaves no task. With `step_times` it has path `auto`."""
    before = set(asyncio.all_tasks())
    made = GatewaySettings(worker_client=CLIENT, **settings)
    core = GatewayCore(made, GatewayMetrics("m"), transports=transports, rng=random.Random(1), step_times=step_times)
    under_test = CoreUnderTest(core)
    under_test.members(views)
    try:
        yield under_test
        under_test.assert_idle()
    finally:
        await core.close()
    left = [t for t in asyncio.all_tasks() - before if t.get_name().startswith(("worker-", "reader"))]
    assert not left, left


@contextlib.asynccontextmanager
async def scripted(*workers: ScriptedWorker, **settings: Any) -> AsyncIterator[CoreUnderTest]:
    """`core_over` scripted workers that listen and are connected."""
    views = [await worker.start() for worker in workers]
    try:
        async with core_over(views, **settings) as core:
            async with asyncio.timeout(10):
                for worker in workers:
                    await worker.connected.wait()
            yield core
    finally:
        for worker in workers:
            await worker.stop()
