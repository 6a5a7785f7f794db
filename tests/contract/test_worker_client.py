"""One stream to one worker: events to their legs, exactly one last event each, reconnection, no task left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from coordinator.gateway.client_config import WorkerClientSettings
from coordinator.gateway.worker_client import WorkerClient
from coordinator.routing.views import Role
from protos.errors import Code, SplitpointError
from protos.ids import AttemptId, TransferId
from protos.splitpoint.v1 import worker_pb2
from tests.support.scripted_worker import ScriptedWorker

SETTINGS = WorkerClientSettings(
    connect_timeout_s=1.0, backoff_initial_s=0.01, backoff_max_s=0.05, max_waiting_frames=4, close_grace_s=0.5
)


class Sink:
    """Keeps a leg's events."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[worker_pb2.LegEvent] = asyncio.Queue()
        self.arrived_s: list[float] = []

    def __call__(self, event: worker_pb2.LegEvent, arrived_s: float) -> None:
        self.arrived_s.append(arrived_s)
        self.events.put_nowait(event)

    async def next(self) -> worker_pb2.LegEvent:
        async with asyncio.timeout(10):
            return await self.events.get()

    async def error(self) -> SplitpointError:
        event = await self.next()
        assert event.WhichOneof("event") == "failed", event
        return SplitpointError.from_proto(event.failed)


@contextlib.asynccontextmanager
async def client_of(worker: ScriptedWorker, **settings) -> AsyncIterator[WorkerClient]:
    before = set(asyncio.all_tasks())
    reachable = asyncio.Event()
    lost = asyncio.Event()

    def on_reachable(_incarnation: str, up: bool) -> None:
        (reachable if up else lost).set()
        (lost if up else reachable).clear()

    client = WorkerClient(
        worker_id=worker.view.worker_id,
        incarnation=worker.view.incarnation,
        address=worker.view.address,
        settings=SETTINGS.model_copy(update=settings),
        clock=time.monotonic,
        on_reachable=on_reachable,
    )
    client.start()
    client.reachable, client.lost = reachable, lost  # type: ignore[attr-defined]
    try:
        yield client
    finally:
        await client.close()
        mine = [t for t in asyncio.all_tasks() - before if t.get_name().startswith("worker-")]
        assert not mine, "a task was left behind"


async def up(client: WorkerClient) -> None:
    async with asyncio.timeout(10):
        await client.reachable.wait()  # type: ignore[attr-defined]


def colocated(attempt: str) -> worker_pb2.StreamRequest:
    header = worker_pb2.LegHeader(request_id="r", attempt_id=attempt, remaining_s=5.0)
    return worker_pb2.StreamRequest(colocated=worker_pb2.ColocatedLeg(header=header, prompt_token_ids=[1]))


def open_leg(client: WorkerClient, attempt: str) -> Sink:
    sink = Sink()
    client.open(AttemptId(attempt), colocated(attempt), sink)
    return sink


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    made = ScriptedWorker("w", Role.COLOCATED)
    await made.start()
    yield made
    await made.stop()


async def test_events_reach_their_own_leg_in_order(worker: ScriptedWorker) -> None:
    async with client_of(worker) as client:
        one, two = open_leg(client, "one"), open_leg(client, "two")
        first, second = await worker.leg("colocated", 1), await worker.leg("colocated", 2)
        worker.tokens(first, 1)
        worker.tokens(second, 2)
        worker.finished(first, 3)
        assert (await one.next()).tokens.token_ids == [1]
        assert (await one.next()).finished.last.token_ids == [3]
        assert (await two.next()).tokens.token_ids == [2]
        assert client.open_legs == 1
        assert one.arrived_s == sorted(one.arrived_s)


async def test_events_of_ended_and_unknown_attempts_are_counted(worker: ScriptedWorker) -> None:
    async with client_of(worker) as client:
        sink = open_leg(client, "one")
        leg = await worker.leg("colocated")
        worker.finished(leg)
        worker.tokens(leg, 9)
        probe = open_leg(client, "probe")
        worker.finished(await worker.leg("colocated", 2))
        await probe.next()
        assert (await sink.next()).WhichOneof("event") == "finished"
        assert sink.events.empty()
        assert client.counts["unknown_leg_event"] == 1


async def test_an_abort_goes_out_at_once_and_the_leg_hears_no_more(worker: ScriptedWorker) -> None:
    async with client_of(worker) as client:
        sink = open_leg(client, "one")
        leg = await worker.leg("colocated")
        client.abort(AttemptId("one"), "client_left")
        abort = await worker.leg("abort")
        assert (abort.attempt_id, abort.reason) == ("one", "client_left")
        worker.failed(leg, Code.CANCELLED)
        probe = open_leg(client, "probe")
        worker.finished(await worker.leg("colocated", 2))
        await probe.next()
        assert sink.events.empty()
        assert (client.counts["late_leg_event"], client.counts["unknown_leg_event"]) == (1, 0)
        client.abort(AttemptId("one"), "client_left")
        assert len(worker.of("abort")) == 1, "idempotent"


async def test_a_leg_that_was_never_written_is_taken_back() -> None:
    worker = ScriptedWorker("w", Role.COLOCATED)
    async with client_of(worker) as client:  # nobody listens
        open_leg(client, "one")
        client.abort(AttemptId("one"), "client_left")
        assert client.open_legs == 0
    assert worker.received == []


async def test_a_dying_worker_fails_every_leg_and_the_client_comes_back(worker: ScriptedWorker) -> None:
    async with client_of(worker) as client:
        sinks = [open_leg(client, f"a{i}") for i in range(3)]
        await worker.leg("colocated", 3)
        await worker.lose()
        for sink in sinks:
            error = await sink.error()
            assert error.code is Code.WORKER_LOST
            assert "w" in error.message
        assert client.open_legs == 0
        assert not client.connected
        await worker.start()
        await up(client)
        again = open_leg(client, "again")
        worker.finished(await worker.leg("colocated", 4), 5)
        assert (await again.next()).WhichOneof("event") == "finished"


@pytest.mark.parametrize("status", [None, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
async def test_a_stream_that_the_worker_ends_is_a_loss_and_the_client_comes_back(
    worker: ScriptedWorker, status: grpc.StatusCode | None
) -> None:
    async with client_of(worker) as client:
        sink = open_leg(client, "one")
        await worker.leg("colocated")
        worker.end_streams(status)
        assert (await sink.error()).code is Code.WORKER_LOST
        again = open_leg(client, "again")
        worker.finished(await worker.leg("colocated", 2), 5)
        assert (await again.next()).WhichOneof("event") == "finished"


async def test_a_release_survives_a_reconnection() -> None:
    worker = ScriptedWorker("w", Role.PREFILL)
    await worker.start()
    address = worker.view.address
    await worker.stop()
    async with client_of(worker) as client:
        client.release(TransferId(b"t" * 16), "client_left")
        await worker.start()
        assert worker.view.address == address
        release = await worker.leg("release")
        assert release.transfer_id == b"t" * 16
    await worker.stop()


async def test_nobody_listening_fails_legs_within_the_connect_time_out() -> None:
    worker = ScriptedWorker("w", Role.COLOCATED)
    await worker.start()
    await worker.stop()
    async with client_of(worker, connect_timeout_s=0.3) as client:
        began = time.monotonic()
        error = await open_leg(client, "one").error()
        assert error.code is Code.WORKER_LOST
        assert time.monotonic() - began < 3.0


async def test_a_black_hole_fails_legs_within_the_connect_time_out() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1024):
                pass
        finally:
            writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    worker = ScriptedWorker("w", Role.COLOCATED, address=f"127.0.0.1:{port}")
    async with client_of(worker, connect_timeout_s=0.3) as client:
        error = await open_leg(client, "one").error()
        assert error.code is Code.WORKER_LOST
        assert not client.connected
    server.close()
    await server.wait_closed()


async def test_another_incarnation_at_the_address_gets_no_leg(worker: ScriptedWorker) -> None:
    worker.answers_as = "another"  # type: ignore[assignment]
    async with client_of(worker) as client:
        error = await open_leg(client, "one").error()
        assert error.code is Code.WORKER_LOST
        assert "another" in error.message
        assert worker.received == []


async def test_waiting_legs_are_bounded() -> None:
    worker = ScriptedWorker("w", Role.COLOCATED)
    async with client_of(worker) as client:  # nobody listens, so nothing is written
        for i in range(SETTINGS.max_waiting_frames):
            open_leg(client, f"a{i}")
        with pytest.raises(SplitpointError) as caught:
            open_leg(client, "too many")
        assert caught.value.code is Code.QUEUE_FULL
        for i in range(3 * SETTINGS.max_waiting_frames):
            client.release(TransferId(bytes([i]) * 16), "over")
        assert client.counts["worker_frame_dropped"] > 0


async def test_closing_fails_open_legs_and_still_writes_releases(worker: ScriptedWorker) -> None:
    async with client_of(worker) as client:
        await up(client)
        sink = open_leg(client, "one")
        await worker.leg("colocated")
        client.abort(AttemptId("one"), "shutdown")
        other = open_leg(client, "two")
        await worker.leg("colocated", 2)
        client.release(TransferId(b"r" * 16), "shutdown")
        await client.close()
        assert (await other.error()).code is Code.WORKER_LOST
        assert sink.events.empty()
        assert (await worker.leg("abort")).attempt_id == "one"
        assert (await worker.leg("release")).transfer_id == b"r" * 16
        with pytest.raises(SplitpointError) as caught:
            open_leg(client, "late")
        assert caught.value.code is Code.WORKER_LOST


async def test_a_failing_sink_hurts_no_other_leg(worker: ScriptedWorker) -> None:
    def broken(event: worker_pb2.LegEvent, arrived_s: float) -> None:
        raise RuntimeError("a bug of one request")

    async with client_of(worker) as client:
        client.open(AttemptId("bad"), colocated("bad"), broken)
        good = open_leg(client, "good")
        bad_leg, good_leg = await worker.leg("colocated", 1), await worker.leg("colocated", 2)
        worker.tokens(bad_leg, 1)
        worker.tokens(good_leg, 2)
        assert (await good.next()).tokens.token_ids == [2]
        assert client.counts["leg_sink_failed"] == 1
        assert client.connected


async def test_a_frame_that_cannot_be_written_costs_the_stream_and_no_more(worker: ScriptedWorker) -> None:
    async with client_of(worker, max_message_bytes=1024) as client:
        await up(client)
        sink, big = Sink(), colocated("big")
        big.colocated.prompt_token_ids.extend([300] * 1024)
        client.open(AttemptId("big"), big, sink)
        assert (await sink.error()).code is Code.WORKER_LOST
        good = open_leg(client, "good")
        worker.finished(await worker.leg("colocated"), 1)
        assert (await good.next()).WhichOneof("event") == "finished"


async def test_a_writer_that_fails_does_not_leave_a_stream_that_only_listens(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(worker) as client:
        await up(client)
        write, failed = client._write, asyncio.Event()

        async def fails_once(call: object) -> None:
            failed.set()
            monkeypatch.setattr(client, "_write", write)
            raise RuntimeError("a bug of the writer")

        monkeypatch.setattr(client, "_write", fails_once)
        async with asyncio.timeout(10):
            await worker.connected.wait()
            worker.end_streams()
            await failed.wait()
            await client.lost.wait()  # type: ignore[attr-defined]
        assert client.counts["worker_stream_fault"] == 1
        good = open_leg(client, "good")
        worker.finished(await worker.leg("colocated"), 1)
        assert (await good.next()).WhichOneof("event") == "finished"


async def test_what_clients_read_of_a_lost_worker_holds_no_address(worker: ScriptedWorker) -> None:
    async with client_of(worker) as client:
        sink = open_leg(client, "one")
        await worker.leg("colocated")
        await worker.lose()
        error = await sink.error()
        assert "127.0.0.1" not in error.message
        waiting = open_leg(client, "two")
        assert "127.0.0.1" not in (await waiting.error()).message
