"""One gateway's stream to one worker incarnation: every leg of every request, multiplexed by attempt id.

No task exists per leg: the client's reader hands each `LegEvent` straight to the sink that its leg was opened with, on the
event loop. A sink must not block and must not raise. Every opened leg gets exactly one last event: the worker's, or a
`failed` with `worker_lost` made here when the stream ends, cannot be opened in time, or the client is closed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import grpc.aio
import structlog

from coordinator.gateway.client_config import WorkerClientSettings
from kvtransfer.tls import channel as open_channel
from protos.errors import Code, SplitpointError
from protos.ids import AttemptId, Incarnation, TransferId, WorkerId
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc

LegSink = Callable[[worker_pb2.LegEvent, float], None]
"""Takes one event and the gateway clock's time at which its frame was read."""

ENDINGS = frozenset({"sealed", "staged", "finished", "failed"})
REMEMBERED_ABORTS = 1024
log = structlog.get_logger(__name__)


class WorkerClient:
    """Belongs to one event loop. `start` before use, `close` at the end; neither blocks on the worker.

    `on_reachable(incarnation, bool)` is called whenever the stream comes up or goes down, `on_event(name)` for everything that
    must not stay silent: "worker_stream_lost", "worker_stream_fault", "late_leg_event" (of an attempt aborted here),
    "unknown_leg_event", "worker_frame_dropped", "leg_sink_failed". `counts` holds the same names.
    """

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        address: str,
        settings: WorkerClientSettings,
        clock: Callable[[], float],
        on_reachable: Callable[[Incarnation, bool], None] = lambda incarnation, up: None,
        on_event: Callable[[str], None] = lambda name: None,
        rng: random.Random | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.address = address
        self.counts: Counter[str] = Counter()
        self.connected = False
        self._settings = settings
        self._clock = clock
        self._on_reachable = on_reachable
        self._on_event = on_event
        self._rng = rng or random.Random()
        self._sinks: dict[str, LegSink] = {}
        # The last aborted attempts, to tell their late events from unknown ones.
        self._aborted: deque[str] = deque(maxlen=REMEMBERED_ABORTS)
        # Keyed so that an abort can take back a leg that was never written.
        self._waiting: dict[str, worker_pb2.StreamRequest] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._frame_number = 0
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._log = log.bind(worker_id=worker_id, incarnation=incarnation, address=address)

    @property
    def open_legs(self) -> int:
        """Attempts that have not had their last event."""
        return len(self._sinks)

    def start(self) -> None:
        """Begin to connect, and go on for ever, with backoff."""
        self._task = asyncio.create_task(self._run(), name=f"worker-client-{self.worker_id}")

    async def close(self) -> None:
        """End the stream. Open legs get `worker_lost`; waiting aborts and releases are written if that takes no longer than
        the grace. Idempotent."""
        self._closing = True
        self._lose("the gateway closed its stream")
        task, self._task = self._task, None
        if task is None:
            return
        if self.connected and self._waiting:
            try:
                async with asyncio.timeout(self._settings.close_grace_s):
                    await self._idle.wait()
            except TimeoutError:
                self._log.warning("worker_stream_closed_with_frames", frames=len(self._waiting))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    # Legs -----------------------------------------------------------------------------------------------------------------

    def open(self, attempt_id: AttemptId, request: worker_pb2.StreamRequest, sink: LegSink) -> None:
        """Send a leg; its events go to `sink`, the last of them always.

        Raises:
            SplitpointError: `WORKER_LOST` when closed, `QUEUE_FULL` when the worker does not read; nothing was opened.
        """
        if self._closing:
            raise SplitpointError(Code.WORKER_LOST, f"worker {self.worker_id} is gone")
        if len(self._waiting) >= self._settings.max_waiting_frames:
            raise SplitpointError(Code.QUEUE_FULL, f"worker {self.worker_id} does not read its stream")
        self._sinks[attempt_id] = sink
        self._put(attempt_id, request)

    def abort(self, attempt_id: AttemptId, reason: str) -> None:
        """End an attempt. Its sink hears nothing more. A leg that was not yet written is taken back instead."""
        if self._sinks.pop(attempt_id, None) is None:
            return
        if self._waiting.pop(attempt_id, None) is not None:
            self._settle()
            return
        self._aborted.append(attempt_id)
        self._put_control(worker_pb2.StreamRequest(abort=worker_pb2.AbortLeg(attempt_id=attempt_id, reason=reason)))

    def release(self, transfer_id: TransferId, reason: str) -> None:
        """End a transfer on this worker. Kept over a reconnection: the incarnation, and so the slot, is the same."""
        self._put_control(worker_pb2.StreamRequest(release=worker_pb2.ReleaseLeg(transfer_id=transfer_id, reason=reason)))

    def _put_control(self, request: worker_pb2.StreamRequest) -> None:
        if self._closing and not self.connected:
            self._count("worker_frame_dropped")
            return
        if len(self._waiting) >= 2 * self._settings.max_waiting_frames:
            # The worker has not read for thousands of frames: keepalive or its lease's end will free what it holds.
            self._count("worker_frame_dropped")
            self._log.warning("worker_frame_dropped", frame=request.WhichOneof("leg"))
            return
        self._frame_number += 1
        self._put(f"#{self._frame_number}", request)

    def _put(self, key: str, request: worker_pb2.StreamRequest) -> None:
        self._waiting[key] = request
        self._idle.clear()
        self._wake.set()

    def _settle(self) -> None:
        if not self._waiting:
            self._idle.set()

    # The stream -----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = self._settings.backoff_initial_s
        while True:
            began_s = self._clock()
            detail: str | None = None
            """For the log alone: it may hold addresses, and `reason` reaches clients."""
            try:
                await self._one_stream()
            except grpc.aio.AioRpcError as error:
                reason, detail = error.code().name, error.details()
            except TimeoutError:
                reason = f"not connected within {self._settings.connect_timeout_s} s"
            except SplitpointError as error:
                reason = error.message
            except Exception as error:
                # A bug here must not leave the legs without their last event, or the worker without a stream.
                self._count("worker_stream_fault")
                self._log.exception("worker_stream_fault")
                reason = type(error).__name__
            self._set_connected(False)
            self._count("worker_stream_lost")
            self._log.warning("worker_stream_lost", reason=reason, detail=detail, legs=len(self._sinks))
            self._lose(reason)
            if self._clock() - began_s > self._settings.backoff_max_s:
                backoff_s = self._settings.backoff_initial_s
            # Jitter keeps many gateways from knocking at a restarted worker in step.
            await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, self._settings.backoff_max_s)

    async def _one_stream(self) -> None:
        """Connect, check who answers, pump both directions. Ends by raising why the stream ended."""
        async with open_channel(self.address, self._settings.tls, _channel_options(self._settings)) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await channel.channel_ready()
                who = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest())
            if who.incarnation != self.incarnation:
                # A port can be taken over by another process: its KV and its attempts are not this incarnation's.
                raise SplitpointError(Code.WORKER_LOST, f"incarnation {who.incarnation} answers at this address")
            call = stub.Stream()
            self._set_connected(True)
            pumps = [
                asyncio.create_task(self._read(call), name=f"worker-reader-{self.worker_id}"),
                asyncio.create_task(self._write(call), name=f"worker-writer-{self.worker_id}"),
            ]
            try:
                # One direction without the other would leave legs unsent, or unheard, until their deadlines.
                await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for pump in pumps:
                    pump.cancel()
                reasons = await asyncio.gather(*pumps, return_exceptions=True)
                call.cancel()
            raise next(r for r in reasons if isinstance(r, Exception))

    async def _read(self, call: Any) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                raise SplitpointError(Code.WORKER_LOST, "the worker ended the stream")
            arrived_s = self._clock()
            for event in response.events:
                self._dispatch(event, arrived_s)

    def _dispatch(self, event: worker_pb2.LegEvent, arrived_s: float) -> None:
        attempt_id = event.attempt_id
        over = event.WhichOneof("event") in ENDINGS
        sink = self._sinks.pop(attempt_id, None) if over else self._sinks.get(attempt_id)
        if sink is None:
            self._count("late_leg_event" if attempt_id in self._aborted else "unknown_leg_event")
            return
        self._hand(sink, event, arrived_s)

    def _hand(self, sink: LegSink, event: worker_pb2.LegEvent, arrived_s: float) -> None:
        try:
            sink(event, arrived_s)
        except Exception:
            # One request's fault must not end the stream that all of them share.
            self._count("leg_sink_failed")
            self._log.exception("leg_sink_failed", attempt_id=event.attempt_id)

    async def _write(self, call: Any) -> None:
        while True:
            while self._waiting:
                key = next(iter(self._waiting))
                request = self._waiting.pop(key)
                try:
                    await call.write(request)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
                    # A release waits for the next stream.
                    if request.HasField("release"):
                        self._waiting[key] = request
                    if isinstance(error, asyncio.CancelledError):
                        raise
                    return  # the reader sees the same end, and knows why
            self._settle()
            self._wake.clear()
            await self._wake.wait()

    def _lose(self, reason: str) -> None:
        """The last event of every open leg, and nothing of them stays behind; releases wait for the next stream."""
        sinks, self._sinks = self._sinks, {}
        # A stream's end aborts its attempts at the worker, so aborts need saying only while the stream still lives.
        kept = ("abort", "release") if self.connected else ("release",)
        self._waiting = {key: r for key, r in self._waiting.items() if r.WhichOneof("leg") in kept}
        self._settle()
        detail = SplitpointError(Code.WORKER_LOST, f"worker {self.worker_id} was lost: {reason}").to_proto()
        now_s = self._clock()
        for attempt_id, sink in sinks.items():
            self._hand(sink, worker_pb2.LegEvent(attempt_id=attempt_id, failed=detail), now_s)

    def _count(self, name: str) -> None:
        self.counts[name] += 1
        self._on_event(name)

    def _set_connected(self, connected: bool) -> None:
        if connected != self.connected:
            self.connected = connected
            self._log.info("worker_stream_up" if connected else "worker_stream_down")
            self._on_reachable(self.incarnation, connected)


def _channel_options(settings: WorkerClientSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        # The one above is for what no longer reaches the peer; a peer that takes bytes and does not answer has this long.
        ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A channel of its own: a shared subchannel's reconnection backoff would stretch ours.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", int(settings.backoff_initial_s * 1000)),
        # Not a pause, whatever its name: how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", int(settings.connect_timeout_s * 1000)),
        ("grpc.enable_retries", 0),
        # A proxy in the environment is for the outside; workers are inside.
        ("grpc.enable_http_proxy", 0),
    ]
