"""A prefill worker, a decode worker and a gateway connected to both; checks that nothing is left in either."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from decode.intake import Intake
from decode.service import DecodeService
from engine.config import EngineSettings
from engine.handover import decode_params, prefill_params
from engine.sampling import SamplingParams
from tests.support.fabric import Fabric
from tests.support.workers import (
    Gateway,
    SimWorker,
    colocated_leg,
    decode_leg,
    new_grant,
    prefill_leg,
    prepare_leg,
    start_worker,
)


class Pair:
    """A prefill worker, a decode worker and a gateway connected to both."""

    def __init__(self, fabric: Fabric | None, p: SimWorker, d: SimWorker, to_p: Gateway, to_d: Gateway) -> None:
        self.fabric, self.p, self.d, self.to_p, self.to_d = fabric, p, d, to_p, to_d
        self.after: list[Callable[[], Awaitable[None]]] = []
        """What a stage has to undo itself once its test is over."""

    async def split(self, prompt: list[int], sampling: SamplingParams, *, forward: bool = True) -> tuple[list[int], str]:
        """One request over the split path. Returns its tokens and the finish reason."""
        grant = new_grant()
        prepare = await self.to_d.send(prepare=prepare_leg(prompt, self.p, grant))
        attempt = await self.to_p.send(prefill=prefill_leg(prompt, prefill_params(sampling), grant))
        event = await self.to_p.event(attempt)
        if event.WhichOneof("event") == "finished":
            await self.to_d.release(grant.transfer_id)
            return list(event.finished.last.token_ids), event.finished.finish_reason
        first = list(event.sealed.first.token_ids)
        if sampling.max_tokens == 1:
            await self.to_p.release(grant.transfer_id)
            await self.to_d.release(grant.transfer_id)
            return first, "length"
        outputs = first if forward else []
        rest = decode_params(sampling, forwarded_tokens=len(outputs))
        decode = await self.to_d.send(decode=decode_leg(prompt, outputs, rest, event.sealed.seal))
        assert (await self.to_d.event(prepare)).WhichOneof("event") == "staged"
        events, last = await self.to_d.last(decode)
        assert last.WhichOneof("event") == "finished", last
        assert not last.finished.recomputed
        tokens = [t for e in events for t in e.tokens.token_ids]
        return [*outputs, *tokens, *last.finished.last.token_ids], last.finished.finish_reason

    async def colocated(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
        attempt = await self.to_d.send(colocated=colocated_leg(prompt, sampling))
        events, last = await self.to_d.last(attempt)
        assert last.WhichOneof("event") == "finished", last
        tokens = [t for e in events for t in e.tokens.token_ids]
        return [*tokens, *last.finished.last.token_ids], last.finished.finish_reason

    def d_intake(self) -> Intake:
        """The decode worker's transfers."""
        assert self.d.server.handlers is not None
        (owner,) = self.d.server.handlers.owners
        assert isinstance(owner, DecodeService)
        return owner.intake

    async def let_go(self) -> None:
        """Let held engines run, and end what the stage held on purpose, where its stream still lives."""
        self.p.clock.let_go()
        self.d.clock.let_go()
        for undo in self.after:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError, asyncio.CancelledError):
                await undo()

    async def empty(self) -> None:
        """Waits until both workers are idle, then checks that nothing is held."""
        await self._empty(self.p, self.d)

    async def d_empty(self) -> None:
        """The same for the decode worker alone: the other one is gone."""
        await self._empty(self.d)

    async def _empty(self, *workers: SimWorker) -> None:
        async with asyncio.timeout(10):
            for worker in workers:
                await worker.server.drained()
        for worker in workers:
            load = worker.engine.load()
            assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
            assert worker.server.attempts.busy == 0
            for rank in await worker.server.rank_status(5):
                assert (rank.send.used_bytes, rank.receive.used_bytes) == (0, 0)
                assert (rank.send.quarantined_bytes, rank.receive.quarantined_bytes) == (0, 0)
            assert worker.server.open_transfers() == 0
        if self.fabric is not None:
            assert self.fabric.slots() == 0


@asynccontextmanager
async def pair_of(*, wire: bool = False, decode_engine: EngineSettings | None = None, **options: Any) -> AsyncIterator[Pair]:
    """Two equal workers; with `decode_engine` the decode worker's engine is another."""
    fabric = None if wire else Fabric()
    p = await start_worker(fabric, "p", wire=wire, **options)
    d = await start_worker(fabric, "d", wire=wire, **{**options, **({"engine": decode_engine} if decode_engine else {})})
    try:
        yield Pair(fabric, p, d, await p.gateway(), await d.gateway())
    finally:
        await p.close()
        await d.close()
