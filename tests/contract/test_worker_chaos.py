"""Two hundred requests, most given up by their clients at a random stage in a random way: the rest are right, nothing is left."""

from __future__ import annotations

import asyncio
import random

import psutil
import pytest

from decode.config import DecodeSettings
from engine.handover import decode_params, prefill_params
from engine.sampling import SamplingParams
from engine.sim_tokens import History, Sampler
from prefill.config import PrefillSettings
from tests.support.pair import Pair, pair_of
from tests.support.workers import Gateway, colocated_leg, decode_leg, engine_settings, new_grant, prefill_leg, prepare_leg

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

REQUESTS = 200
AT_ONCE = 24
STAGES = ("prepare", "prefill", "sealed", "decode", "tokens", "never")
WAYS = ("abort", "release", "break")


class GivenUpError(Exception):
    """This client has left."""


class Client:
    """One request and its plan: where it gives up, and how."""

    def __init__(self, pair: Pair, number: int, rng: random.Random) -> None:
        self.pair, self.rng = pair, rng
        self.prompt = [rng.randrange(3, 997) for _ in range(rng.choice([1, 8, 30, 64, 150]))]
        self.sampling = SamplingParams(max_tokens=rng.choice([1, 2, 9, 30]), temperature=0, ignore_eos=True)
        self.stage = rng.choice(STAGES)
        self.way = rng.choice(WAYS)
        self.grant = new_grant()
        self.attempts: list[tuple[Gateway, str]] = []
        self.to_p, self.to_d = pair.to_p, pair.to_d

    async def run(self) -> list[int] | None:
        """The tokens, or None when this client left early. Either way it does what a gateway owes the workers."""
        if self.way == "break" and self.stage != "never":
            self.to_p, self.to_d = await self.pair.p.gateway(), await self.pair.d.gateway()
        try:
            return await (self.split() if self.rng.random() < 0.8 else self.colocated())
        except GivenUpError:
            return None
        finally:
            await self.leave()

    async def leave(self) -> None:
        if self.to_p is not self.pair.to_p:
            await self.to_p.close()
            await self.to_d.close()
            return
        if self.way == "abort":
            for gateway, attempt in self.attempts:
                await gateway.abort(attempt)
        await self.to_p.release(self.grant.transfer_id)
        await self.to_d.release(self.grant.transfer_id)
        if self.way == "release":
            for gateway, attempt in self.attempts:
                await gateway.abort(attempt, "superseded")

    async def maybe_leave(self, stage: str) -> None:
        if stage == self.stage:
            for _ in range(self.rng.randrange(30)):  # somewhere inside the stage, not at its edge
                await asyncio.sleep(0)
            raise GivenUpError

    async def split(self) -> list[int]:
        prepare = await self.to_d.send(prepare=prepare_leg(self.prompt, self.pair.p, self.grant))
        self.attempts.append((self.to_d, prepare))
        await self.maybe_leave("prepare")
        attempt = await self.to_p.send(prefill=prefill_leg(self.prompt, prefill_params(self.sampling), self.grant))
        self.attempts.append((self.to_p, attempt))
        await self.maybe_leave("prefill")
        sealed = (await self.to_p.event(attempt)).sealed
        await self.maybe_leave("sealed")
        first = list(sealed.first.token_ids)
        if self.sampling.max_tokens == 1:
            return first
        rest = decode_params(self.sampling, forwarded_tokens=1)
        decode = await self.to_d.send(decode=decode_leg(self.prompt, first, rest, sealed.seal))
        self.attempts.append((self.to_d, decode))
        await self.maybe_leave("decode")
        return [*first, *await self.stream(decode)]

    async def colocated(self) -> list[int]:
        attempt = await self.to_d.send(colocated=colocated_leg(self.prompt, self.sampling))
        self.attempts.append((self.to_d, attempt))
        return await self.stream(attempt)

    async def stream(self, attempt: str) -> list[int]:
        tokens: list[int] = []
        while True:
            event = await self.to_d.event(attempt)
            if event.HasField("finished"):
                return [*tokens, *event.finished.last.token_ids]
            tokens += event.tokens.token_ids
            await self.maybe_leave("tokens")

    def expected(self) -> list[int]:
        simulated = engine_settings().simulated
        sampler = Sampler(
            self.sampling, vocab_size=simulated.vocab_size, eos_token_id=simulated.eos_token_id, model_seed=0, nonce=""
        )
        history = History(self.prompt, 8)
        tokens: list[int] = []
        for number in range(self.sampling.max_tokens):
            tokens.append(sampler.sample(history, number)[0])
            history.extend(tokens[-1:])
        return tokens


@pytest.mark.parametrize("seed", [20, 21, 22])
async def test_clients_that_leave_at_any_stage_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    # Staging for a few at once, so that most also wait for it; nobody is refused for that.
    patient = {"prefill_settings": PrefillSettings(staging_wait_s=60), "decode_settings": DecodeSettings(staging_wait_s=60)}
    async with pair_of(wire=True, staging_blocks=80, **patient) as pair:
        await pair.split([5] * 20, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        await pair.empty()
        files = psutil.Process().num_fds()
        gate = asyncio.Semaphore(AT_ONCE)
        done: list[str] = []

        async def one(number: int) -> None:
            client = Client(pair, number, random.Random(rng.random()))
            async with gate:
                tokens = await client.run()
            if tokens is not None:
                assert tokens == client.expected(), f"request {number}"
                done.append("right")

        await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        await pair.empty()
        assert 20 < len(done) < REQUESTS - 20
        left = [t for t in asyncio.all_tasks() if t.get_name().startswith(("prefill-", "prepare-", "decode-", "colocated-"))]
        assert left == []
        for worker in (pair.p, pair.d):
            events = worker.events()
            assert events.get("leg_fault", 0) == events.get("cleanup_failed", 0) == events.get("cleanup_timeout", 0) == 0
        # Connections of clients that broke their streams are closed in the background.
        async with asyncio.timeout(5):
            while psutil.Process().num_fds() > files:  # noqa: ASYNC110 - the system tells nobody
                await asyncio.sleep(0.02)
        # The workers still work.
        sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        assert await pair.split([6] * 40, sampling) == await pair.colocated([6] * 40, sampling)
        await pair.empty()
