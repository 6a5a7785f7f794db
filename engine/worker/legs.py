"""What a leg handler gets and what it owes: the seam between the worker's server and the phases' services.

A handler is called once per attempt, in a task of its own. It emits any number of tokens and exactly one last event, or raises.
What must be undone whatever happens it hands to `defer` before it can become necessary; deferred calls run after the leg has
ended in any way, outside the reach of its deadline and of an abort.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from engine.protocol import Engine, EngineInfo, EngineOutput, EngineRequest, Logprob
from engine.sampling import SamplingParams
from engine.worker.metrics import WorkerMetrics
from engine.worker.mux import EventQueue
from engine.worker.ranks import RankControl, RankFacts
from protos.errors import Code, SplitpointError, invalid
from protos.ids import AttemptId, TransferId
from protos.splitpoint.v1 import common_pb2, kv_transfer_pb2, worker_pb2

Cleanup = Callable[[], Awaitable[object]]
Spawn = Callable[[Awaitable[object]], None]
Monotonic = Callable[[], float]

TRANSFER_ID_BYTES = 16


class LegCall:
    """One attempt, seen from its handler. Times are by the worker's monotonic clock."""

    def __init__(self, header: worker_pb2.LegHeader, queue: EventQueue, spawn: Spawn, now: Monotonic) -> None:
        self.request_id = header.request_id
        self.attempt_id = AttemptId(header.attempt_id)
        self.accepted_s = now()
        self._remaining_s = header.remaining_s
        self._queue = queue
        self._spawn = spawn
        self._now = now
        self._cleanups: list[Cleanup] = []
        self.ended = False
        self.was_sealed = False

    def elapsed_s(self) -> float:
        """Since the leg was accepted."""
        return self._now() - self.accepted_s

    def remaining_s(self) -> float:
        """Until the request's deadline; at least 0."""
        return max(0.0, self._remaining_s - self.elapsed_s())

    def defer(self, cleanup: Cleanup) -> None:
        """Run `cleanup` after the leg's end, however it ends: side by side with the others, last deferred, first begun."""
        self._cleanups.append(cleanup)

    def take_cleanups(self) -> list[Cleanup]:
        """For the server: what to run now, in order."""
        cleanups, self._cleanups = self._cleanups[::-1], []
        return cleanups

    def spawn(self, work: Awaitable[object]) -> None:
        """Do something beside the leg; a drain waits for it, the leg does not."""
        self._spawn(work)

    async def tokens(self, tokens: worker_pb2.TokensEvent) -> None:
        """Emit tokens; waits while the gateway reads too slowly."""
        await self._queue.put(worker_pb2.LegEvent(attempt_id=self.attempt_id, tokens=tokens))

    def sealed(self, event: worker_pb2.SealedEvent) -> None:
        self._end(worker_pb2.LegEvent(attempt_id=self.attempt_id, sealed=event))
        self.was_sealed = True

    def staged(self, event: worker_pb2.StagedEvent) -> None:
        self._end(worker_pb2.LegEvent(attempt_id=self.attempt_id, staged=event))

    def finished(self, event: worker_pb2.FinishedEvent) -> None:
        self._end(worker_pb2.LegEvent(attempt_id=self.attempt_id, finished=event))

    def failed(self, error: SplitpointError) -> None:
        self._end(worker_pb2.LegEvent(attempt_id=self.attempt_id, failed=error.to_proto()))

    def _end(self, event: worker_pb2.LegEvent) -> None:
        if self.ended:
            raise RuntimeError(f"attempt {self.attempt_id} has ended already")
        self.ended = True
        self._queue.put_last(event)


LegHandler = Callable[[LegCall, Any], Awaitable[None]]
"""Takes the attempt and its message (`PrefillLeg`, `PrepareLeg`, ...). Raises `SplitpointError` to fail the leg."""


class TransferOwner(Protocol):
    """A service that keeps state about transfers."""

    async def release(self, transfer_id: TransferId, reason: str) -> bool:
        """End a transfer here. Idempotent; False when it was not known."""

    def open_transfers(self) -> int:
        """Transfers that are not over yet."""

    def transfers(self) -> Iterable[TransferId]:
        """All that it knows, those among them that have failed and wait for their decode leg."""

    async def close(self) -> None:
        """The worker stops: end them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What handlers may use; made by the server when the engine has started."""

    engine: Engine
    info: EngineInfo
    incarnation: str
    ranks: RankControl | None
    """None: the engine runs without KV transfer; legs that need it are refused."""
    facts: RankFacts | None
    metrics: WorkerMetrics
    spawn: Spawn
    """Does something bounded beside the legs; a drain waits for it."""
    now: Monotonic = time.monotonic

    def transfer(self) -> tuple[RankControl, RankFacts]:
        """Raises `SplitpointError(TRANSFER_REFUSED)` on a worker without KV transfer."""
        if self.ranks is None or self.facts is None:
            raise SplitpointError(Code.TRANSFER_REFUSED, "this worker's engine runs without KV transfer")
        return self.ranks, self.facts


@dataclass(frozen=True, slots=True, kw_only=True)
class LegHandlers:
    """The services of one worker. `legs` maps the field names of `StreamRequest.leg` to their handlers."""

    legs: Mapping[str, LegHandler]
    owners: tuple[TransferOwner, ...] = field(default=())

    @staticmethod
    def join(*parts: LegHandlers) -> LegHandlers:
        """All of them together. Raises `ValueError` when two serve the same leg."""
        legs: dict[str, LegHandler] = {}
        for part in parts:
            twice = legs.keys() & part.legs.keys()
            if twice:
                raise ValueError(f"two handlers for {sorted(twice)}")
            legs.update(part.legs)
        return LegHandlers(legs=legs, owners=tuple(owner for part in parts for owner in part.owners))


HandlersFactory = Callable[[WorkerContext], LegHandlers]


def checked_grant(grant: kv_transfer_pb2.TransferGrant) -> TransferId:
    """The grant's transfer id. Raises `SplitpointError(INVALID_VALUE)` when an id has the wrong size."""
    for name in ("transfer_id", "capability"):
        if len(getattr(grant, name)) != TRANSFER_ID_BYTES:
            raise invalid(f"grant.{name}", f"must be {TRANSFER_ID_BYTES} bytes")
    return TransferId(grant.transfer_id)


def check_prompt(prompt: list[int], max_model_len: int) -> None:
    """Raises `SplitpointError`: INVALID_VALUE for an empty prompt, PROMPT_TOO_LONG when no output fits behind it."""
    if not prompt:
        raise invalid("prompt_token_ids", "empty")
    if len(prompt) >= max_model_len:
        raise SplitpointError(
            Code.PROMPT_TOO_LONG,
            f"{len(prompt)} prompt tokens leave no room for an output in max_model_len {max_model_len}",
            param="prompt_token_ids",
        )


def sampling_of(message: common_pb2.SamplingParams) -> SamplingParams:
    """The engine's sampling parameters. Raises `SplitpointError(INVALID_VALUE)`."""
    try:
        return SamplingParams.from_proto(message)
    except ValueError as error:
        raise invalid("sampling_params", str(error)) from error


async def run_engine(
    context: WorkerContext, request: EngineRequest, on_output: Callable[[EngineOutput], Awaitable[None]]
) -> EngineOutput:
    """Run one engine request; `on_output` gets every output, the last one included, which is also returned.

    The engine's request is over when this returns or raises.

    Raises:
        SplitpointError: INVALID_VALUE (the engine refuses the request), INTERNAL (it ended it by itself).
        EngineDeadError: the engine is gone.
    """
    outputs = context.engine.generate(request)
    begun = False
    try:
        async with contextlib.aclosing(outputs) as stream:  # type: ignore[type-var]
            async for output in stream:
                begun = True
                if output.finish_reason not in (None, "stop", "length"):
                    raise SplitpointError(Code.INTERNAL, f"the engine ended the request with {output.finish_reason!r}")
                await on_output(output)
                if output.finish_reason is not None:
                    return output
    except ValueError as error:
        if begun:
            raise
        raise invalid(_refused_field(str(error)), str(error)) from error
    raise SplitpointError(Code.INTERNAL, "the engine's output ended without a reason")


_FIELDS = {item.name for item in fields(SamplingParams)} | {"prompt_token_ids"}


def _refused_field(text: str) -> str:
    """The field an engine's refusal begins with; "" when it names none of ours."""
    word = text.replace(":", " ").partition(" ")[0]
    return word if word in _FIELDS else ""


def tokens_event(output: EngineOutput) -> worker_pb2.TokensEvent:
    """One engine output on the wire."""
    event = worker_pb2.TokensEvent(token_ids=output.token_ids, cached_tokens=output.cached_tokens)
    if output.logprobs is not None:
        event.logprobs.extend(_position(row) for row in output.logprobs)
    if output.prompt_logprobs is not None:
        event.prompt_logprobs.extend(_position(row) for row in output.prompt_logprobs)
    return event


def _position(row: list[Logprob]) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        entries=[common_pb2.TokenLogprob(token_id=e.token_id, logprob=e.logprob, rank=e.rank) for e in row]
    )


@dataclass(slots=True)
class EngineTimes:
    """Collects `LegTimes` from an engine's outputs.

    `before_engine_s` is what the leg spent before the engine saw the request and is part of `queued_s`, except the part that
    `transfer_wait_s` names.
    """

    before_engine_s: float = 0.0
    transfer_wait_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    queued_s: float = 0.0
    computing_s: float = 0.0
    decoding_s: float = 0.0
    returning_s: float = 0.0
    last_read_s: float = 0.0
    seen_first: bool = False

    def note(self, output: EngineOutput, elapsed_s: float) -> None:
        """Take the times of one output, read `elapsed_s` after the leg was accepted: the first one's queue and compute, the
        last one's decoding and return."""
        if not self.seen_first:
            self.seen_first = True
            self.queued_s = max(0.0, self.before_engine_s - self.transfer_wait_s) + output.queued_s
            self.computing_s = output.computing_s
        if output.finish_reason is not None:
            self.decoding_s = output.decoding_s
            self.returning_s = output.returning_s
            self.last_read_s = elapsed_s

    def to_proto(self, elapsed_s: float) -> worker_pb2.LegTimes:
        """The report of a leg that ends now, `elapsed_s` after it was accepted and with the last output noted."""
        return worker_pb2.LegTimes(
            queued_s=self.queued_s,
            computing_s=self.computing_s,
            decoding_s=self.decoding_s,
            transfer_wait_s=self.transfer_wait_s,
            transfer_s=self.transfer_s,
            transfer_bytes=self.transfer_bytes,
            returning_s=self.returning_s + elapsed_s - self.last_read_s,
            elapsed_s=elapsed_s,
        )
