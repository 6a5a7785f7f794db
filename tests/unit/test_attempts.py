"""Running legs: exactly one end, whatever happens, and clean-up that nothing can interrupt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.protocol import EngineDeadError
from engine.worker.attempts import Attempts
from engine.worker.legs import LegCall
from engine.worker.metrics import WorkerMetrics
from engine.worker.mux import EventQueue
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import worker_pb2

Handler = Callable[[LegCall, Any], Awaitable[None]]


class Desk:
    """Attempts with a queue whose events are kept."""

    def __init__(self, cleanup_timeout_s: float = 5.0) -> None:
        self.deaths: list[EngineDeadError] = []
        self.metrics = WorkerMetrics()
        self.attempts = Attempts(self.metrics, cleanup_timeout_s, time.monotonic, self.deaths.append)
        self.queue = EventQueue(100)
        self.events: list[worker_pb2.LegEvent] = []
        self.writer = asyncio.create_task(self.queue.drain(self._write))

    async def _write(self, frame: worker_pb2.StreamResponse) -> None:
        self.events.extend(frame.events)

    def start(self, handler: Handler, attempt_id: str = "a", remaining_s: float = 30.0) -> None:
        header = worker_pb2.LegHeader(request_id="r", attempt_id=attempt_id, remaining_s=remaining_s)
        self.attempts.start("colocated", handler, worker_pb2.ColocatedLeg(header=header), self.queue)

    async def ends(self) -> list[str]:
        """Kinds of all events, once nothing runs."""
        async with asyncio.timeout(10):
            await self.attempts.wait_idle()
            self.queue.finish()
            await self.writer
        assert len(self.attempts) == self.attempts.busy == 0
        return [e.failed.code or str(e.WhichOneof("event")) for e in self.events]


async def finishing(call: LegCall, leg: Any) -> None:
    call.finished(worker_pb2.FinishedEvent(finish_reason="length"))


async def hanging(call: LegCall, leg: Any) -> None:
    await asyncio.Event().wait()


async def test_a_leg_ends_once() -> None:
    desk = Desk()
    desk.start(finishing)
    assert await desk.ends() == ["finished"]
    assert not desk.attempts.abort("a", "late")
    assert desk.metrics.events == {"abort_late": 1}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SplitpointError(Code.STAGING_FULL, "x"), "staging_full"),
        (EngineDeadError("x"), "worker_lost"),
        (KeyError("x"), "internal"),
        (TimeoutError("somebody else's"), "internal"),
    ],
)
async def test_what_a_handler_raises_is_answered(error: Exception, code: str) -> None:
    desk = Desk()

    async def raising(call: LegCall, leg: Any) -> None:
        raise error

    desk.start(raising)
    assert await desk.ends() == [code]
    assert (len(desk.deaths) == 1) is isinstance(error, EngineDeadError)
    if code == "internal":
        assert desk.events[0].failed.error_id
        assert desk.metrics.events["leg_fault"] == 1


async def test_a_handler_that_forgets_to_end_or_ends_twice_is_a_fault() -> None:
    desk = Desk()

    async def forgetting(call: LegCall, leg: Any) -> None: ...

    async def twice(call: LegCall, leg: Any) -> None:
        await finishing(call, leg)
        await finishing(call, leg)

    desk.start(forgetting, "a")
    desk.start(twice, "b")
    assert sorted(await desk.ends()) == ["finished", "internal"]
    assert desk.metrics.events["leg_fault"] == 2


async def test_an_abort_before_the_first_step_still_ends_the_attempt() -> None:
    desk = Desk()
    desk.start(hanging)
    assert desk.attempts.abort("a", "client_left")
    assert desk.attempts.abort("a", "client_left")
    assert await desk.ends() == ["cancelled"]


async def test_the_gateways_deadline_and_the_workers_stop_have_their_own_codes() -> None:
    desk = Desk()
    for attempt, reason in (("a", "deadline"), ("b", "worker_stops"), ("c", "superseded")):
        desk.start(hanging, attempt)
        desk.attempts.abort(attempt, reason)
    assert await desk.ends() == ["deadline_exceeded", "worker_lost", "cancelled"]


@pytest.mark.parametrize("remaining_s", [0.0, -5.0, float("nan")])
async def test_no_time_left_never_runs_the_handler(remaining_s: float) -> None:
    desk = Desk()
    called: list[str] = []

    async def noting(call: LegCall, leg: Any) -> None:
        called.append(call.attempt_id)

    desk.start(noting, remaining_s=remaining_s)
    assert await desk.ends() == ["deadline_exceeded"]
    assert called == []


async def test_clean_up_runs_last_first_after_every_end_and_cannot_be_aborted() -> None:
    desk = Desk()
    order: list[str] = []
    gate, quick_ran = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        order.append("slow begins")
        await gate.wait()
        order.append("slow ends")

    async def quick() -> None:
        order.append("quick")
        quick_ran.set()

    async def handler(call: LegCall, leg: Any) -> None:
        call.defer(quick)
        call.defer(slow)
        await asyncio.Event().wait()

    desk.start(handler, remaining_s=0.05)
    await quick_ran.wait()
    assert order == ["slow begins", "quick"]
    assert len(desk.attempts) == 0
    assert desk.attempts.busy >= 1
    desk.attempts.abort("a", "too late")
    desk.attempts.abort_all("too late")
    gate.set()
    assert await desk.ends() == ["deadline_exceeded"]
    assert order[-1] == "slow ends"


async def test_clean_up_is_bounded_and_its_faults_are_counted() -> None:
    desk = Desk(cleanup_timeout_s=0.05)

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def breaks() -> None:
        raise KeyError("x")

    async def refused() -> None:
        raise SplitpointError(Code.WORKER_LOST, "x")

    async def handler(call: LegCall, leg: Any) -> None:
        for cleanup in (hangs, breaks, refused):
            call.defer(cleanup)
        await finishing(call, leg)

    desk.start(handler)
    assert await desk.ends() == ["finished"]
    assert desk.metrics.events == {"cleanup_timeout": 1, "cleanup_failed": 2}


async def test_only_one_streams_legs_are_aborted_with_it() -> None:
    desk = Desk()
    other = EventQueue(10)
    desk.start(hanging, "mine")
    header = worker_pb2.LegHeader(attempt_id="theirs", remaining_s=30)
    desk.attempts.start("colocated", hanging, worker_pb2.ColocatedLeg(header=header), other)
    assert desk.attempts.abort_stream(other, "stream_broken") == 1
    await desk.attempts.stream_idle(other)
    assert len(desk.attempts) == 1
    desk.attempts.abort("mine", "client_left")
    assert await desk.ends() == ["cancelled"]
