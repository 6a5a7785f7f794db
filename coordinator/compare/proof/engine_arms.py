"""Arms of simulated engines in virtual time: two colocated ones, or prefill and decode with a modelled link between them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from coordinator.compare.load import ArmTarget, Piece, RequestFailedError
from coordinator.compare.workload import SALT_TOKENS, PlannedRequest
from engine.config import EngineSettings, KvEngineConfig, SimulatedSettings
from engine.protocol import EngineDeadError, EngineOutput, EngineRequest, KvReceive, KvSend
from engine.sampling import SamplingParams
from engine.simulated import Clock, SimulatedEngine
from kvtransfer.config import KvTransferSettings
from protos.ids import Incarnation, TransferId
from protos.splitpoint.v1 import kv_transfer_pb2

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 256
KV_BLOCKS = 1024
"""Of one engine: more than a probe's prompts, so that what a probe leaves in the prefix cache is there for the next."""
STEP_BASE_S = 0.03
PREFILL_TOKEN_S = 0.002
DECODE_SEQUENCE_S = 0.03
CONTEXT_TOKEN_S = 4e-6
"""Coarse on purpose: a token stands for many of a real prompt, and little has to be computed in Python."""
LINK_LATENCY_S = 0.005
LINK_BLOCK_S = 0.004
"""The link's time for one block of KV; transfers follow each other."""
JITTER = 0.05
"""Deviation of the log of one step's time."""


class Wander:
    """A slow, stationary process: Ornstein-Uhlenbeck of deviation `spread` and this correlation time, in steps of `STEP_S`."""

    STEP_S = 5.0

    def __init__(self, spread: float, keeps_s: float, seed: str) -> None:
        self._random = random.Random(seed)
        self._keep = math.exp(-self.STEP_S / keeps_s)
        self._shock = spread * math.sqrt(1 - self._keep**2)
        self._values = [self._random.gauss(0, spread)]

    def at(self, seconds: float) -> float:
        """The value at this time, not negative."""
        index = int(seconds / self.STEP_S)
        while len(self._values) <= index:
            self._values.append(self._keep * self._values[-1] + self._shock * self._random.gauss(0, 1))
        return self._values[index]


@dataclass(frozen=True, slots=True)
class Pace:
    """How slow the machine is at a time: the sum of what wanders and a steady drift, as a log factor on every duration."""

    wanders: tuple[Wander, ...]
    drift_per_s: float
    began_s: float

    def at(self, now_s: float) -> float:
        """The factor on durations."""
        passed_s = now_s - self.began_s
        return math.exp(self.drift_per_s * passed_s + sum(wander.at(passed_s) for wander in self.wanders))


@dataclass(frozen=True, slots=True)
class Stall:
    """The engine stands still for `lasts_s` every `every_s`."""

    lasts_s: float
    every_s: float
    phase_s: float

    def end(self, begin_s: float, lasts_s: float) -> float:
        """When work of `lasts_s` that begins at `begin_s` ends."""
        at, left_s = begin_s - self.phase_s, lasts_s
        while True:
            into = at % self.every_s
            if into < self.lasts_s:
                at += self.lasts_s - into
                into = self.lasts_s
            until_next_s = self.every_s - into
            if left_s < until_next_s:
                return at + left_s + self.phase_s
            at, left_s = at + until_next_s, left_s - until_next_s


class ArmClock:
    """The time of one engine (`engine.simulated.Clock`): every step varies, with the machine and by itself."""

    def __init__(self, pace: Pace, seed: str, stall: Stall | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._pace, self._stall = pace, stall
        self._random = random.Random(seed)

    def now(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        now = self._loop.time()
        seconds *= self._pace.at(now) * math.exp(JITTER * self._random.gauss(0, 1))
        if self._stall is not None:
            seconds = self._stall.end(now, seconds) - now
        await asyncio.sleep(seconds)


def engine_settings(speed: float, chunk_tokens: int) -> EngineSettings:
    """An engine `speed` times as fast as the base, with this token budget a step."""
    return EngineSettings(
        kind="simulated",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=chunk_tokens,
        max_num_seqs=64,
        block_tokens=BLOCK_TOKENS,
        simulated=SimulatedSettings(
            step_base_s=STEP_BASE_S,
            prefill_token_s=PREFILL_TOKEN_S,
            decode_sequence_s=DECODE_SEQUENCE_S,
            context_token_s=CONTEXT_TOKEN_S,
            num_kv_blocks=KV_BLOCKS,
            block_bytes=4,
            eos_token_id=None,
            time_scale=1 / speed,
        ),
    )


class Colocated:
    """Engines that compute whole requests; each goes to the least loaded."""

    def __init__(self, clocks: Sequence[ArmClock], *, speed: float, chunk_tokens: int) -> None:
        self.engines = [SimulatedEngine(engine_settings(speed, chunk_tokens), clock=clock) for clock in clocks]

    async def ask(self, request_id: str, request: PlannedRequest) -> AsyncGenerator[Piece, None]:
        """The request's tokens as they come."""
        engine = min(self.engines, key=_load)
        wanted = EngineRequest(
            request_id=request_id, prompt_token_ids=list(request.prompt_token_ids), sampling=_sampling(request.output_tokens)
        )
        async with _outputs(engine, wanted) as outputs:
            async for output in outputs:
                yield Piece(len(output.token_ids), output.cached_tokens)


class Split:
    """One prefill engine and one decode engine: the first token comes from prefill, the KV crosses the link, decode goes on.

    `settings` are of both engines, where they are not those of the proof.
    """

    def __init__(
        self, clocks: Sequence[Clock], *, speed: float, chunk_tokens: int, settings: EngineSettings | None = None
    ) -> None:
        prefill_clock, decode_clock = clocks
        self.link = Link(speed)
        settings = settings or engine_settings(speed, chunk_tokens)
        kv = KvEngineConfig(
            settings=KvTransferSettings(),
            incarnation=Incarnation("proof"),
            control_token="",
            register_address="",
            model_hash="",
            tokenizer_hash="",
        )
        self.prefill, self.decode = self.engines = [
            SimulatedEngine(settings, kv=kv, clock=clock, node_factory=self.link.node) for clock in (prefill_clock, decode_clock)
        ]
        self._transfers = 0

    async def ask(self, request_id: str, request: PlannedRequest) -> AsyncGenerator[Piece, None]:
        """The request's tokens as they come; the first is handed over before its KV is."""
        self._transfers += 1
        transfer = TransferId(self._transfers.to_bytes(16, "little"))
        prompt = list(request.prompt_token_ids)
        arrived = self.link.open(transfer, -(-len(prompt) // BLOCK_TOKENS))
        try:
            wanted = EngineRequest(
                request_id=f"{request_id}/p", prompt_token_ids=prompt, sampling=_sampling(1), kv=KvSend(transfer)
            )
            first: list[int] = []
            async with _outputs(self.prefill, wanted) as outputs:
                async for output in outputs:
                    first = output.token_ids
                    yield Piece(len(first), output.cached_tokens)
            if request.output_tokens == 1:
                return
            await arrived.wait()
            wanted = EngineRequest(
                request_id=f"{request_id}/d",
                prompt_token_ids=[*prompt, *first],
                sampling=_sampling(request.output_tokens - 1),
                kv=KvReceive(transfer, len(prompt)),
            )
            async with _outputs(self.decode, wanted) as outputs:
                async for output in outputs:
                    yield Piece(len(output.token_ids))
        finally:
            self.link.close(transfer)


Pool = Colocated | Split


class Link:
    """Transfers over one wire, one after the other: a latency, and a time for each block."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._free_at_s = 0.0
        self._slots: dict[TransferId, _Slot] = {}

    def node(self, rank: int, compatibility: kv_transfer_pb2.KvCompatibility) -> LinkNode:
        """An engine's end (`engine.sim_kv.NodeFactory`)."""
        return LinkNode(self, rank, compatibility.block_bytes_per_layer)

    def open(self, transfer: TransferId, blocks: int) -> asyncio.Event:
        """Room for a transfer of so many blocks. The event: it has arrived whole."""
        slot = self._slots[transfer] = _Slot(blocks)
        return slot.arrived

    def close(self, transfer: TransferId) -> None:
        """Give up the room. Idempotent."""
        slot = self._slots.pop(transfer, None)
        if slot is not None and slot.timer is not None:
            slot.timer.cancel()

    def slot(self, transfer: TransferId) -> _Slot | None:
        return self._slots.get(transfer)

    def send(self, slot: _Slot) -> None:
        """All of it is computed: it is on its way."""
        loop = asyncio.get_running_loop()
        self._free_at_s = max(self._free_at_s, loop.time()) + slot.blocks * LINK_BLOCK_S / self._speed
        slot.timer = loop.call_at(self._free_at_s + LINK_LATENCY_S / self._speed, slot.arrived.set)


class _Slot:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.bytes: np.ndarray[Any, Any] | None = None
        self.arrived = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None


class LinkNode:
    """`engine.sim_kv.RankNode` without a wire of its own: what one engine writes, the other reads when it has arrived."""

    def __init__(self, link: Link, rank: int, block_bytes: int) -> None:
        self._link, self._rank, self._block_bytes = link, rank, block_bytes

    def start(self) -> kv_transfer_pb2.RankEndpoint:
        return kv_transfer_pb2.RankEndpoint(rank=self._rank)

    def register(self, address: str, world_size: int) -> None:
        """There is nobody to tell."""

    def stop(self) -> None:
        """Nothing is held."""

    def send_view(self, transfer_id: TransferId, first_block: int, num_blocks: int) -> Any | None:
        slot = self._link.slot(transfer_id)
        if slot is None:
            return None
        if slot.bytes is None:
            slot.bytes = np.zeros((slot.blocks, self._block_bytes), np.uint8)
        return slot.bytes[first_block : first_block + num_blocks]

    def commit_chunk(
        self, transfer_id: TransferId, first_block: int, num_blocks: int, *, last: bool, ready: Callable[[], bool] | None = None
    ) -> None:
        slot = self._link.slot(transfer_id)
        if last and slot is not None:
            self._link.send(slot)

    def staged(self, transfer_id: TransferId) -> bool:
        slot = self._link.slot(transfer_id)
        return slot is not None and slot.arrived.is_set()

    def receive_view(self, transfer_id: TransferId) -> Any | None:
        slot = self._link.slot(transfer_id)
        return None if slot is None else slot.bytes

    def scattered(self, transfer_id: TransferId) -> bool:
        """The room goes with the request."""
        return True

    def counters(self) -> dict[str, int]:
        return {}


class EngineClient:
    """`coordinator.compare.load.Client` over pools in this process, by name. Use it as an async context manager.

    `losses` is the share of the requests of `lossy` that break off while others are under way; `pause_s` how long the process
    stands still every `PAUSE_EVERY_S`, 0 for never. Where it is not `salted`, all probes of a workload send the same prompts.
    """

    PAUSE_EVERY_S = 2.0

    def __init__(
        self,
        pools: dict[str, Pool],
        *,
        seed: str,
        lossy: str = "",
        losses: float = 0.0,
        pause_s: float = 0.0,
        salted: bool = True,
    ) -> None:
        self._pools = pools
        self._arms: dict[str, Pool] = {}
        self._random = random.Random(seed)
        self._lossy, self._losses, self._pause_s, self._salted = lossy, losses, pause_s, salted
        self._asked = 0
        self._under_way = 0
        self._pausing: asyncio.Task[None] | None = None

    def know(self, name: str, target: ArmTarget) -> None:
        """From now on the arm's requests go to the target's one pool."""
        (pool,) = target.pools
        self._arms[name] = self._pools[pool]

    async def __aenter__(self) -> EngineClient:
        for pool in self._pools.values():
            for engine in pool.engines:
                await engine.start()
        if self._pause_s:
            self._pausing = asyncio.create_task(self._pauses())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pausing is not None:
            self._pausing.cancel()
            await asyncio.gather(self._pausing, return_exceptions=True)
        for pool in self._pools.values():
            for engine in pool.engines:
                await engine.stop()

    def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        """See `coordinator.compare.load.Client`."""
        self._asked += 1
        if not self._salted:
            ids = request.prompt_token_ids
            request = replace(request, prompt_token_ids=(*ids[SALT_TOKENS : 2 * SALT_TOKENS], *ids[SALT_TOKENS:]))
        lost = path == self._lossy and self._losses > 0 and self._random.random() < self._losses
        return self._replies(f"{self._asked}", request, self._arms[path], lost)

    async def _replies(self, request_id: str, request: PlannedRequest, pool: Pool, lost: bool) -> AsyncIterator[Piece]:
        self._under_way += 1
        try:
            async with aclosing(pool.ask(request_id, request)) as pieces:
                async for piece in pieces:
                    yield piece
                    if lost and self._under_way > 1:
                        raise RequestFailedError("UNAVAILABLE: the connection was reset")
        except EngineDeadError as error:
            raise RequestFailedError(str(error)) from error
        finally:
            self._under_way -= 1

    async def _pauses(self) -> None:
        loop: Any = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.PAUSE_EVERY_S)
            loop.stand_still(self._pause_s)


def _outputs(engine: SimulatedEngine, request: EngineRequest) -> aclosing[AsyncGenerator[EngineOutput, None]]:
    """Closed with the one who reads it: a request that is given up leaves the engine at once."""
    return aclosing(cast(AsyncGenerator[EngineOutput, None], engine.generate(request)))


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _load(engine: SimulatedEngine) -> int:
    load = engine.load()
    return load.running + load.waiting
