"""SIGKILL of either worker's process at every stage of a request, on both transports: gateway core and workers as they are,
simulated engines. Each request ends right or with an error that says so, and the survivor holds nothing for the dead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from coordinator.routing.views import Role
from engine.sampling import SamplingParams
from engine.sim_tokens import History, Sampler
from protos.errors import Code
from protos.splitpoint.v1 import kv_transfer_pb2
from tests.support.cores import CoreUnderTest, Reader, core_over
from tests.support.worker_child import BLOCK_TOKENS, ENGINE, WorkerChild, worker_children

pytestmark = [pytest.mark.timeout(240), pytest.mark.fault, pytest.mark.slow]

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 20
DEADLINE_S = 60.0


class Rig:
    """A core over a prefill and a decode worker, each a process."""

    def __init__(self, under_test: CoreUnderTest, p: WorkerChild, d: WorkerChild, transport: str) -> None:
        self.under_test, self.p, self.d, self.transport = under_test, p, d, transport
        self.readers: list[Reader] = []
        self.prompts: list[list[int]] = []

    def run(self, prompt_tokens: int = PROMPT_TOKENS) -> Reader:
        """One more request on the split path."""
        prompt = [(31 * len(self.readers) + 7 * i) % 900 + 3 for i in range(prompt_tokens)]
        reader = self.under_test.run(
            prompt=prompt, path="split", transport=self.transport, deadline_s=DEADLINE_S,
            max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True,
        )  # fmt: skip
        self.readers.append(reader)
        self.prompts.append(prompt)
        return reader

    async def check_ends(self) -> int:
        """Every request ended before its deadline, right or with an error that says so. Returns how many were right."""
        right = 0
        for reader, prompt in zip(self.readers, self.prompts, strict=True):
            async with asyncio.timeout(DEADLINE_S + 5):
                await reader.task
            expected = answer(prompt)
            assert reader.tokens == expected[: len(reader.tokens)]
            if reader.error is None:
                assert reader.tokens == expected
                assert reader.finished is not None
                right += 1
            else:
                assert reader.error.code in (Code.WORKER_LOST, Code.NO_WORKER, Code.STREAM_BROKEN, Code.TRANSFER_FAILED)
                assert reader.error.tokens_sent == len(reader.tokens)
        return right


def answer(prompt: list[int]) -> list[int]:
    """What the simulated model says to it."""
    simulated = ENGINE.simulated
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    sampler = Sampler(
        sampling, vocab_size=simulated.vocab_size, eos_token_id=simulated.eos_token_id, model_seed=ENGINE.seed, nonce=""
    )
    history = History(prompt, BLOCK_TOKENS)
    tokens: list[int] = []
    for number in range(OUTPUT_TOKENS):
        tokens.append(sampler.sample(history, number)[0])
        history.extend(tokens[-1:])
    return tokens


@contextlib.asynccontextmanager
async def rig(transport: str, **kvtransfer: object) -> AsyncIterator[Rig]:
    async with (
        worker_children(transport, Role.PREFILL, Role.DECODE, **kvtransfer) as (p, d),
        core_over([p.view, d.view], transports=(transport,)) as under_test,
    ):
        await poll(lambda: _connected(under_test, p, d))
        yield Rig(under_test, p, d, transport)


async def _connected(under_test: CoreUnderTest, *children: WorkerChild) -> bool:
    return all(under_test.core.membership.connected(child.view.incarnation) for child in children)


async def poll(check: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """Until `check`; other processes tell nobody when their state changes."""
    async with asyncio.timeout(timeout_s):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def p_is(made: Rig, *wanted: str) -> None:
    """Until prefill's leases are in these states, one each."""
    await poll(lambda: _has_leases(made.p, sorted(wanted)))


async def _has_leases(child: WorkerChild, wanted: list[str]) -> bool:
    states = (await child.status()).lease_states
    return sorted(state for state, count in states.items() for _ in range(count)) == wanted


async def _receiving(child: WorkerChild) -> bool:
    return (await child.status()).session_states.get("receiving", 0) > 0


def empty(status: kv_transfer_pb2.GetNodeStatusResponse) -> bool:
    staging = (status.send, status.receive)
    return status.leases + status.sessions + sum(s.used_bytes + s.quarantined_bytes for s in staging) == 0


# Moments: each starts requests and returns while they are in the named state.


async def queued(made: Rig) -> None:
    """Prefill computes one prompt; five wait for it in the engine's queue, their leases made and asked for."""
    for prompt_tokens in (PROMPT_TOKENS, *[100] * 5):
        made.run(prompt_tokens)
    await p_is(made, *["fetching"] * 6)
    assert not any(reader.tokens for reader in made.readers)


async def computing(made: Rig) -> None:
    """Part of the prompt is computed, and already on its way."""
    reader = made.run()
    await poll(lambda: _receiving(made.d))
    assert not reader.tokens


async def staged(made: Rig) -> None:
    """All of it lies staged at prefill, and decode, which is stopped, has not asked for it."""
    made.d.stop()
    made.run()
    await p_is(made, "sealed")


async def transferring(made: Rig) -> None:
    """Prefill is done and sends; decode was stopped in the middle of the transfer."""
    for _ in range(5):
        reader = made.run()
        await poll(lambda: _receiving(made.d))
        made.d.stop()
        await poll(lambda: _computed(made.p))
        # "sent" over UCX: it is told everything, and holds what the peer has not taken.
        if {"sending", "sent"} & set((await made.p.status()).lease_states):
            return
        # On a busy machine all of it may have been delivered before the stop.
        made.d.go_on()
        await reader.end()
    raise AssertionError("no transfer was caught in the middle")


async def _computed(child: WorkerChild) -> bool:
    return "fetching" not in (await child.status()).lease_states


async def first_token(made: Rig) -> None:
    """The client has the first token, which is prefill's."""
    await made.run().has(1)


async def decoding(made: Rig) -> None:
    """The client has tokens of decode's, and not all of them."""
    reader = made.run()
    await reader.has(4)
    assert len(reader.tokens) < OUTPUT_TOKENS


Moment = Callable[[Rig], Awaitable[None]]
# Where KV moves, over both transports.
MOMENTS = [
    *((moment, transport) for moment in (computing, staged, transferring) for transport in ("ucx", "grpc")),
    *((moment, "ucx") for moment in (queued, first_token, decoding)),
]


@pytest.mark.ucx
@pytest.mark.parametrize(("moment", "transport"), MOMENTS, ids=[f"{m.__name__}-{t}" for m, t in MOMENTS])
@pytest.mark.parametrize("victim", ["p", "d"])
async def test_a_killed_process_costs_no_request_its_end(victim: str, moment: Moment, transport: str) -> None:
    async with rig(transport) as made:
        await moment(made)
        dead: WorkerChild = getattr(made, victim)
        survivor = made.d if dead is made.p else made.p
        await dead.kill()
        survivor.go_on()
        right = await made.check_ends()
        assert right == len(made.readers), [reader.error for reader in made.readers]
        # What the coordinator does once it knows of the death.
        made.under_test.members([survivor.view])
        await survivor.control.fence(dead.incarnation)
        await poll(lambda: _empty(survivor))
        reader = made.run(prompt_tokens=20)
        await reader.end()
        assert reader.tokens == answer(made.prompts[-1])
        await poll(lambda: _empty(survivor))


async def _empty(child: WorkerChild) -> bool:
    return empty(await child.status())


@pytest.mark.ucx
@pytest.mark.parametrize("same_host", ["contained", "direct"])
async def test_staging_held_back_for_a_stopped_peer_comes_back_when_it_is_fenced(same_host: str) -> None:
    """A stopped receiver may still read its sender's slot, so nothing but its end gives the slot back (rule 13)."""
    async with rig("ucx", ucx_same_host=same_host) as made:
        await transferring(made)
        await made.readers[-1].leave()
        await poll(lambda: _quarantined(made.p))
        status = await made.p.status()
        assert status.send.used_bytes == 0
        # The others are not kept waiting by it.
        await made.p.control.release(b"n" * 16, "nothing of the kind")
        assert (await made.p.status()).send.quarantined_bytes == status.send.quarantined_bytes
        await made.d.kill()
        await made.p.control.fence(made.d.incarnation)
        await poll(lambda: _empty(made.p))
        made.under_test.members([made.p.view])
        again = made.run(prompt_tokens=20)
        await again.end()
        assert again.tokens == answer(made.prompts[-1])


async def _quarantined(child: WorkerChild) -> bool:
    return (await child.status()).send.quarantined_bytes > 0
