"""The running legs of one worker: start, deadline, abort, end, clean up. Every attempt ends exactly once.

A leg has three phases: its handler runs (its deadline and an abort can cancel it), its last event goes out, its deferred
cleanups run in a task of their own that nothing cancels but their time-out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.protocol import EngineDeadError
from engine.worker.legs import LegCall, LegHandler, Monotonic
from engine.worker.metrics import WorkerMetrics
from engine.worker.mux import EventQueue
from kvtransfer.machine import Tombstones
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import worker_pb2

_log = logging.getLogger(__name__)

_REMEMBERED = 8192
"""Ended attempts, so that a late message is told from one about an attempt that never was."""


@dataclass(slots=True, eq=False)
class _Leg:
    name: str
    call: LegCall
    queue: EventQueue
    deadline: float
    """On the event loop's clock."""
    transfer_id: bytes = b""
    """Empty: it belongs to none."""
    task: asyncio.Task[None] | None = None
    started: bool = False
    abort_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A leg that runs, or a transfer whose leg is still to come. `key` is the transfer's id in hex, which all legs of a request
    on one worker have in common, or the attempt's where there is no transfer."""

    leg: str
    key: str


@dataclass(slots=True)
class Attempts:
    """All running legs, by attempt id. Belongs to one event loop."""

    metrics: WorkerMetrics
    cleanup_timeout_s: float
    now: Monotonic
    on_engine_death: Callable[[EngineDeadError], None]
    _legs: dict[str, _Leg] = field(default_factory=dict)
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _leg_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: Tombstones = field(default_factory=partial(Tombstones, _REMEMBERED))

    def __post_init__(self) -> None:
        self._idle.set()

    def __len__(self) -> int:
        """Legs whose last event has not gone out."""
        return len(self._legs)

    def running(self) -> list[Work]:
        """The legs whose last event has not gone out."""
        return [Work(leg.name, leg.transfer_id.hex() or attempt_id) for attempt_id, leg in self._legs.items()]

    @property
    def busy(self) -> int:
        """Legs and the cleanups after them."""
        return len(self._legs) + len(self._background)

    async def wait_idle(self) -> None:
        """Until no leg runs and nothing is being cleaned up."""
        await self._idle.wait()

    def start(self, name: str, handler: LegHandler, message: Any, queue: EventQueue, transfer_id: bytes = b"") -> None:
        """Run one leg, of a transfer if that is not empty.

        A second leg under an attempt's id, running or over, is counted and dropped (rule 4).
        """
        header: worker_pb2.LegHeader = message.header
        known = header.attempt_id in self._legs or self._ended.get(header.attempt_id.encode()) is not None
        if not header.attempt_id or known:
            self.metrics.event("attempt_duplicate" if header.attempt_id else "attempt_without_id")
            _log.warning("leg dropped leg=%s attempt_id=%r request_id=%s", name, header.attempt_id, header.request_id)
            return
        call = LegCall(header, queue, self.spawn, self.now)
        deadline = asyncio.get_running_loop().time() + header.remaining_s
        leg = _Leg(name, call, queue, deadline, transfer_id)
        self._legs[header.attempt_id] = leg
        self._idle.clear()
        leg.task = asyncio.create_task(self._run(leg, handler, message), name=f"{name}-{header.attempt_id}")

    def refuse(self, name: str, header: worker_pb2.LegHeader, error: SplitpointError, queue: EventQueue) -> None:
        """Answer a leg that is not started."""
        self.metrics.leg_ended(name, error.code.value, 0.0)
        queue.put_last(worker_pb2.LegEvent(attempt_id=header.attempt_id, failed=error.to_proto()))

    def abort(self, attempt_id: str, reason: str) -> bool:
        """End an attempt. Idempotent; False, and counted, when it is not running (over, or never seen)."""
        leg = self._legs.get(attempt_id)
        if leg is None:
            over = self._ended.get(attempt_id.encode()) is not None
            self.metrics.event("abort_late" if over else "abort_unknown")
            return False
        if leg.abort_reason is None:
            leg.abort_reason = reason or "aborted"
            # A task that is cancelled before its first step never runs its body; `_run` looks at the reason itself.
            if leg.started and leg.task is not None:
                leg.task.cancel()
        return True

    def abort_stream(self, queue: EventQueue, reason: str) -> int:
        """End every attempt that reports to this queue. Returns how many."""
        attempts = [attempt_id for attempt_id, leg in self._legs.items() if leg.queue is queue]
        for attempt_id in attempts:
            self.abort(attempt_id, reason)
        return len(attempts)

    def abort_all(self, reason: str) -> None:
        for attempt_id in list(self._legs):
            self.abort(attempt_id, reason)

    async def stream_idle(self, queue: EventQueue) -> None:
        """Until no running leg reports to this queue."""
        while any(leg.queue is queue for leg in self._legs.values()):
            await self._leg_ended.wait()

    def spawn(self, work: Awaitable[object]) -> None:
        """Run something bounded beside the legs; `wait_idle` waits for it. A failure is logged and counted."""
        self._idle.clear()
        task = asyncio.create_task(self._bounded(work))
        self._background.add(task)
        task.add_done_callback(self._background_done)

    async def _bounded(self, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self.cleanup_timeout_s):
                await work
        except TimeoutError:
            self.metrics.event("cleanup_timeout")
            _log.error("a cleanup did not end in %g s", self.cleanup_timeout_s)
        except SplitpointError as error:
            self.metrics.event("cleanup_failed")
            _log.warning("a cleanup failed: %s", error)
        except Exception:
            # The leg is over and nobody is left to tell; the count and the log are the report.
            self.metrics.event("cleanup_failed")
            _log.exception("a cleanup failed")

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        self._settle()

    def _settle(self) -> None:
        if not self.busy:
            self._idle.set()

    async def _run(self, leg: _Leg, handler: LegHandler, message: Any) -> None:
        outcome = await self._outcome(leg, handler, message)
        call = leg.call
        if outcome is not None and not call.ended:
            call.failed(outcome)
        del self._legs[call.attempt_id]
        self._ended.add(call.attempt_id.encode(), "ok" if outcome is None else outcome.code.value)
        self._leg_ended.set()
        self._leg_ended = asyncio.Event()
        self.metrics.leg_ended(leg.name, "ok" if outcome is None else outcome.code.value, call.elapsed_s())
        for cleanup in call.take_cleanups():
            self.spawn(cleanup())
        self._settle()

    async def _outcome(self, leg: _Leg, handler: LegHandler, message: Any) -> SplitpointError | None:
        """Run the handler; None when it ended the attempt by itself, else how it failed."""
        leg.started = True
        if leg.abort_reason is not None:
            return _aborted(leg.abort_reason)
        deadline = SplitpointError(Code.DEADLINE_EXCEEDED, f"the deadline passed on the {leg.name} leg")
        if not message.header.remaining_s > 0:  # NaN too
            return deadline
        try:
            async with asyncio.timeout_at(leg.deadline) as scope:
                await handler(leg.call, message)
        except asyncio.CancelledError:
            if leg.abort_reason is None:
                self.metrics.event("leg_cancelled_from_outside")
            return _aborted(leg.abort_reason or WORKER_STOPS)
        except SplitpointError as error:
            return error
        except EngineDeadError as error:
            self.on_engine_death(error)
            return SplitpointError(Code.WORKER_LOST, f"engine: {error}")
        except TimeoutError as error:
            if scope.expired():
                return deadline
            return self._fault(leg, error)
        except Exception as error:
            return self._fault(leg, error)
        if not leg.call.ended:
            return self._fault(leg, RuntimeError("the handler returned without an end"))
        return None

    def _fault(self, leg: _Leg, error: Exception) -> SplitpointError:
        fault = SplitpointError(Code.INTERNAL, f"{leg.name} leg failed: {type(error).__name__}")
        self.metrics.event("leg_fault")
        _log.error(
            "fault error_id=%s leg=%s attempt_id=%s request_id=%s",
            fault.error_id,
            leg.name,
            leg.call.attempt_id,
            leg.call.request_id,
            exc_info=error,
        )
        return fault


WORKER_STOPS = "worker_stops"

_ABORT_CODES = {"deadline": Code.DEADLINE_EXCEEDED, WORKER_STOPS: Code.WORKER_LOST}


def _aborted(reason: str) -> SplitpointError:
    return SplitpointError(_ABORT_CODES.get(reason, Code.CANCELLED), f"aborted: {reason}")
