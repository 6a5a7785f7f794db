"""Two simulated workers behind their real servers and mux, over loopback: what a gateway sees, and that nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

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

pytestmark = pytest.mark.timeout(60)


class Pair:
    """A prefill worker, a decode worker and a gateway connected to both."""

    def __init__(self, fabric: Fabric | None, p: SimWorker, d: SimWorker, to_p: Gateway, to_d: Gateway) -> None:
        self.fabric, self.p, self.d, self.to_p, self.to_d = fabric, p, d, to_p, to_d

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

    async def empty(self) -> None:
        """Waits until both workers are idle, then checks that nothing is held."""
        async with asyncio.timeout(10):
            for worker in (self.p, self.d):
                await worker.server.drained()
        for worker in (self.p, self.d):
            load = worker.engine.load()
            assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
            assert worker.server.attempts.busy == 0
            for rank in await worker.server.rank_status(5):
                assert (rank.send.used_bytes, rank.receive.used_bytes) == (0, 0)
                assert (rank.send.quarantined_bytes, rank.receive.quarantined_bytes) == (0, 0)
        if self.fabric is not None:
            assert self.fabric.slots() == 0


@asynccontextmanager
async def pair_of(*, wire: bool = False, **options: Any) -> AsyncIterator[Pair]:
    fabric = None if wire else Fabric()
    p = await start_worker(fabric, "p", wire=wire, **options)
    d = await start_worker(fabric, "d", wire=wire, **options)
    try:
        yield Pair(fabric, p, d, await p.gateway(), await d.gateway())
    finally:
        await p.close()
        await d.close()


GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.mark.parametrize("wire", [False, True], ids=["memory", "grpc"])
async def test_split_equals_colocated_for_many_seeds(wire: bool) -> None:
    async with pair_of(wire=wire) as pair:
        for seed in range(40):
            rng = random.Random(seed)
            prompt = [rng.randrange(3, 997) for _ in range(rng.choice([1, 7, 8, 9, 16, 31, 33, 64, 100]))]
            sampling = SamplingParams(
                max_tokens=rng.choice([1, 2, 3, 20]),
                temperature=rng.choice([0, 0.8]),
                seed=seed,
                stop_token_ids=tuple(rng.sample(range(997), 100)),
                ignore_eos=rng.random() < 0.5,
            )
            split = await pair.split(prompt, sampling, forward=rng.random() < 0.7)
            assert split == await pair.colocated(prompt, sampling), f"seed {seed}"
        await pair.empty()
