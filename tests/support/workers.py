"""Simulated workers behind their real servers, a gateway's end of the stream, and a clock whose steps a test can hold."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc

import decode.service
import prefill.service
from decode.config import DecodeSettings
from engine.config import EngineSettings, KvEngineConfig, SimulatedSettings
from engine.protocol import Engine
from engine.sampling import SamplingParams
from engine.simulated import SimulatedEngine
from engine.worker.config import WorkerSettings
from engine.worker.legs import LegHandlers, WorkerContext
from engine.worker.server import WorkerIdentity, WorkerServer
from kvtransfer.config import KvTransferSettings
from kvtransfer.control import RankControl
from prefill.config import PrefillSettings
from protos.errors import SplitpointError
from protos.ids import WorkerId, new_attempt_id, new_capability, new_incarnation, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2, worker_pb2_grpc
from tests.support.fabric import Fabric

TOKEN = "control-token"
BLOCK_BYTES = 1024


class StepClock:
    """Real time, but `hold` stops the engine inside its next step until `let_go`."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self._gate.set()
        self._single = False
        self.inside = asyncio.Event()
        self.steps = 0

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        self.steps += 1
        if not self._gate.is_set():
            self.inside.set()
        await self._gate.wait()
        if self._single:
            self._single = False
            self._gate.clear()
        await asyncio.sleep(0)

    def hold(self) -> asyncio.Event:
        """Returns the event that is set once a step is being held."""
        self._gate.clear()
        self.inside.clear()
        return self.inside

    def one_step(self) -> asyncio.Event:
        """End the held step and hold the next one; returns the event that is set when that is reached."""
        self.inside.clear()
        self._single = True
        self._gate.set()
        return self.inside

    def let_go(self) -> None:
        self._single = False
        self._gate.set()


def engine_settings(**changes: Any) -> EngineSettings:
    simulated: dict[str, Any] = {"num_kv_blocks": 128, "block_bytes": BLOCK_BYTES, "vocab_size": 997, "eos_token_id": 2}
    simulated.update(changes.pop("simulated", {}))
    values: dict[str, Any] = {
        "kind": "simulated",
        "max_model_len": 512,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "block_tokens": 8,
        "simulated": SimulatedSettings(**simulated),
    }
    return EngineSettings(**{**values, **changes})


@dataclass(eq=False)
class SimWorker:
    """One worker under test."""

    server: WorkerServer
    clock: StepClock
    address: str = ""
    channel: grpc.aio.Channel | None = None
    streams: list[Gateway] = field(default_factory=list)

    @property
    def engine(self) -> SimulatedEngine:
        assert isinstance(self.server.engine, SimulatedEngine)
        return self.server.engine

    @property
    def ranks(self) -> tuple[kv_transfer_pb2.RankEndpoint, ...]:
        assert self.server.facts is not None
        return self.server.facts.endpoints

    def events(self) -> dict[str, int]:
        return dict(self.server.metrics.events)

    async def gateway(self) -> Gateway:
        """A new connection and stream to this worker."""
        gateway = Gateway(self.address)
        self.streams.append(gateway)
        return gateway

    async def close(self) -> None:
        for gateway in self.streams:
            await gateway.close()
        await self.server.stop(grace_s=0)


async def start_worker(
    fabric: Fabric | None,
    name: str = "w",
    *,
    wire: bool = False,
    transport: Literal["grpc", "ucx"] = "grpc",
    staging_blocks: int = 64,
    engine: EngineSettings | None = None,
    prefill_settings: PrefillSettings | None = None,
    decode_settings: DecodeSettings | None = None,
    worker_settings: WorkerSettings | None = None,
    clock: StepClock | None = None,
    kvtransfer: Mapping[str, Any] | None = None,
) -> SimWorker:
    """A serving worker. KV goes through `fabric`'s memory, or with `wire` through real nodes over gRPC; with neither its engine
    has no KV transfer. `kvtransfer` overrides single settings."""
    settings = engine or engine_settings()
    incarnation = new_incarnation()
    clock = clock or StepClock()

    def make_engine(address: str) -> Engine:
        if fabric is None and not wire:
            return SimulatedEngine(settings, clock=clock)
        staging_bytes = staging_blocks * settings.simulated.block_bytes
        config = KvEngineConfig(
            settings=KvTransferSettings(
                transports=(transport,),
                default_transport=transport,
                send_staging_bytes=staging_bytes,
                receive_staging_bytes=staging_bytes,
                **(kvtransfer or {}),
            ),
            incarnation=incarnation,
            control_token=TOKEN,
            register_address=address,
            model_hash="m",
            tokenizer_hash="t",
        )
        if fabric is None:
            return SimulatedEngine(settings, kv=config, clock=clock)
        factory = fabric.factory(config, settings.simulated.block_bytes, staging_blocks)
        return SimulatedEngine(settings, kv=config, clock=clock, node_factory=factory)

    def make_handlers(context: WorkerContext) -> LegHandlers:
        return LegHandlers.join(
            prefill.service.handlers(context, prefill_settings or PrefillSettings()),
            decode.service.handlers(context, decode_settings or DecodeSettings()),
        )

    control = functools.partial(RankControl, tls=worker_settings.tls if worker_settings is not None else None)
    server = WorkerServer(
        engine=make_engine,
        identity=WorkerIdentity(worker_id=WorkerId(name), incarnation=incarnation, model="sim", control_token=TOKEN),
        handlers=make_handlers,
        settings=worker_settings,
        rank_control=fabric.control if fabric is not None else control if wire else None,
    )
    worker = SimWorker(server, clock)
    try:
        worker.address = await server.start()
    except BaseException:
        await server.stop(grace_s=0)
        raise
    return worker


@contextlib.asynccontextmanager
async def running(*workers: SimWorker) -> AsyncIterator[None]:
    """Stops the workers at the end, whatever happened."""
    try:
        yield
    finally:
        for worker in workers:
            await worker.close()


class Gateway:
    """A gateway's end of one stream: sends legs, sorts events by attempt."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.call = self.stub.Stream()
        self.frames: list[int] = []
        self._writing = asyncio.Lock()
        self._events: dict[str, asyncio.Queue[worker_pb2.LegEvent]] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (frame := await self.call.read()) is not grpc.aio.EOF:
                self.frames.append(len(frame.events))
                for event in frame.events:
                    self.queue(event.attempt_id).put_nowait(event)

    def queue(self, attempt_id: str) -> asyncio.Queue[worker_pb2.LegEvent]:
        return self._events.setdefault(attempt_id, asyncio.Queue())

    async def send(self, **leg: Any) -> str:
        """Write one leg; returns its attempt id ("" for abort and release)."""
        async with self._writing:
            await self.call.write(worker_pb2.StreamRequest(**leg))
        message = next(iter(leg.values()))
        return message.header.attempt_id if hasattr(message, "header") else ""

    async def event(self, attempt_id: str) -> worker_pb2.LegEvent:
        async with asyncio.timeout(20):
            return await self.queue(attempt_id).get()

    async def last(self, attempt_id: str) -> tuple[list[worker_pb2.LegEvent], worker_pb2.LegEvent]:
        """The token events of an attempt, and its end."""
        events: list[worker_pb2.LegEvent] = []
        while True:
            event = await self.event(attempt_id)
            if event.WhichOneof("event") != "tokens":
                return events, event
            events.append(event)

    async def settled(self) -> None:
        """Returns when the worker has taken up every leg sent before: legs are read in order, and this one is refused at once."""
        refused = await self.send(colocated=worker_pb2.ColocatedLeg(header=header()))
        assert (await self.event(refused)).WhichOneof("event") == "failed"

    async def abort(self, attempt_id: str, reason: str = "client_left") -> None:
        await self.send(abort=worker_pb2.AbortLeg(attempt_id=attempt_id, reason=reason))

    async def release(self, transfer_id: bytes, reason: str = "over") -> None:
        await self.send(release=worker_pb2.ReleaseLeg(transfer_id=transfer_id, reason=reason))

    async def close(self) -> None:
        """Break the stream, as a gateway that dies."""
        self.call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.channel.close()


def header(remaining_s: float = 30.0) -> worker_pb2.LegHeader:
    attempt = new_attempt_id()
    return worker_pb2.LegHeader(request_id=f"req-{attempt}", attempt_id=attempt, remaining_s=remaining_s)


def new_grant() -> kv_transfer_pb2.TransferGrant:
    return kv_transfer_pb2.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())


def prefill_leg(
    prompt: list[int], sampling: SamplingParams, grant: kv_transfer_pb2.TransferGrant | None, remaining_s: float = 30.0
) -> worker_pb2.PrefillLeg:
    return worker_pb2.PrefillLeg(
        header=header(remaining_s), prompt_token_ids=prompt, sampling_params=sampling.to_proto(), grant=grant
    )


def prepare_leg(
    prompt: list[int], sender: SimWorker, grant: kv_transfer_pb2.TransferGrant, remaining_s: float = 30.0
) -> worker_pb2.PrepareLeg:
    return worker_pb2.PrepareLeg(
        header=header(remaining_s),
        grant=grant,
        prefill_ranks=sender.ranks,
        prefill_incarnation=sender.server.identity.incarnation,
        prompt_tokens=len(prompt),
        transport=sender.server.facts.transports[0] if sender.server.facts is not None else "",
        token_hash=token_hash(prompt),
    )


def decode_leg(
    prompt: list[int],
    outputs: list[int],
    sampling: SamplingParams,
    seal: kv_transfer_pb2.Seal,
    *,
    allow_recompute: bool = False,
    remaining_s: float = 30.0,
) -> worker_pb2.DecodeLeg:
    return worker_pb2.DecodeLeg(
        header=header(remaining_s),
        transfer_id=seal.transfer_id,
        seal=seal,
        prompt_token_ids=prompt,
        output_token_ids=outputs,
        sampling_params=sampling.to_proto(),
        allow_recompute=allow_recompute,
    )


def colocated_leg(prompt: list[int], sampling: SamplingParams, remaining_s: float = 30.0) -> worker_pb2.ColocatedLeg:
    return worker_pb2.ColocatedLeg(header=header(remaining_s), prompt_token_ids=prompt, sampling_params=sampling.to_proto())


def failure(event: worker_pb2.LegEvent) -> SplitpointError:
    """The error that ended an attempt."""
    assert event.WhichOneof("event") == "failed", event
    return SplitpointError.from_proto(event.failed)
