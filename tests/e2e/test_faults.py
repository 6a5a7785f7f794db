"""Clients that leave and processes that die, on the real engines: what must come back comes back, what must end ends.

Measured on two cores: about 2 minutes to start and ask for references, 2 for the clients, 1.7 for each of four dead engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from coordinator.compare.quality.parity import CLEAR_GAP
from coordinator.pools.shared_memory import python_segments_of
from protos.splitpoint.v1 import admin_pb2, generation_pb2_grpc
from tests.e2e.held import Idle, held
from tests.e2e.streams import References, Stream, generate_request
from tests.e2e.system import Served, until

pytestmark = [pytest.mark.vllm, pytest.mark.fault, pytest.mark.timeout(700)]

log = logging.getLogger(__name__)

WAYS = [("split", "ucx"), ("split", "grpc"), ("colocated", None)]
REQUESTS = 200
AT_ONCE = 8
MAX_TOKENS = 16
SETTLE_S = 2.0
DEADLINE_S = 90.0


def no_blocks_held(served: Served) -> bool:
    """Ask the engines themselves: they forget cached prefixes only when nobody refers to a block."""
    try:
        return bool(served.admin_call("ResetPrefixCaches", admin_pb2.ResetPrefixCachesRequest()).workers == 2)
    except grpc.RpcError:
        return False


@pytest.fixture
def system(real: Served) -> Iterator[Served]:
    """The real system, ready before, holding nothing after."""
    real.wait_ready(300, prefill=1, decode=1)
    yield real
    real.wait_ready(300, prefill=1, decode=1)
    until("nothing is held", lambda: not held(real.status()), 30)
    until("no block is referred to", lambda: no_blocks_held(real), 10)


# -- clients that leave ---------------------------------------------------------------------------------------------------


@dataclass
class Leaver:
    """One request and its plan: over which front and way, and when its client goes."""

    served: Served
    number: int
    seed: int
    outcome: str = ""
    tokens: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed * 1000 + self.number)
        self.front = self.rng.choice(["http", "grpc"])
        self.path, self.transport = self.rng.choice(WAYS)
        self.prompt = [self.rng.randrange(1000, 40000) for _ in range(self.rng.randrange(50, 801))]
        self.leaves = self.rng.choices(["time", "tokens", "never"], [45, 40, 15])[0]
        self.after_s = self.rng.uniform(0.0, 3.0)
        self.after_tokens = self.rng.randrange(1, MAX_TOKENS)
        self.headers = {"x-splitpoint-path": self.path} | ({"x-splitpoint-transport": self.transport} if self.transport else {})

    async def run(self) -> None:
        """Sets `outcome`: "left", or "whole" for an answer that was read to its end."""
        try:
            async with asyncio.timeout(self.after_s if self.leaves == "time" else 120):
                self.outcome = await (self.over_http() if self.front == "http" else self.over_grpc())
        except TimeoutError:
            assert self.leaves == "time", f"request {self.number} took over 120 s"
            self.outcome = "left"

    async def over_http(self) -> str:
        body = {"model": self.served.model, "prompt": self.prompt, "max_tokens": MAX_TOKENS, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        usage = None
        async with (
            httpx.AsyncClient(base_url=f"http://{self.served.http}", timeout=120, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body, headers=self.headers) as reply,
        ):
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                assert not line.startswith("event: error"), line
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                self.tokens += bool(chunk["choices"])
                if self.leaves == "tokens" and self.tokens >= self.after_tokens:
                    return "left"
        assert usage is not None
        assert usage["completion_tokens"] == MAX_TOKENS
        return "whole"

    async def over_grpc(self) -> str:
        async with grpc.aio.insecure_channel(self.served.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            request = generate_request(self.served, self.prompt, MAX_TOKENS)
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=list(self.headers.items()))
            # Half of them cancel the call, half take the connection down with it.
            polite = self.rng.random() < 0.5
            try:
                async for reply in call:
                    self.tokens += len(reply.chunk.token_ids)
                    if self.leaves == "tokens" and self.tokens >= self.after_tokens:
                        return "left"
                    if reply.HasField("complete"):
                        assert reply.complete.completion_tokens == MAX_TOKENS
                        return "whole"
            finally:
                if polite:
                    call.cancel()
        raise AssertionError(f"request {self.number}: the stream ended without an end")


def looks_at(served: Served, count: int) -> list[admin_pb2.GetStatusResponse]:
    """Snapshots over some ten heartbeats."""
    looks: list[admin_pb2.GetStatusResponse] = []

    def look() -> bool:
        looks.append(served.status())
        return len(looks) >= count

    until(f"{count} looks", look, 60, 0.15)
    return looks


def test_clients_that_leave_at_any_stage_leave_nothing(system: Served) -> None:
    for path, transport in WAYS * 2:
        system.chat("Warm up. " * 20, path=path, transport=transport, max_tokens=4)
        system.generate(list(range(2000, 2200)), path=path, transport=transport, max_tokens=4)
    until("nothing is held", lambda: not held(system.status()), 20)
    idle = Idle.of(looks_at(system, 20))

    async def everybody() -> list[Leaver]:
        gate = asyncio.Semaphore(AT_ONCE)
        leavers = [Leaver(system, number, seed=11) for number in range(REQUESTS)]

        async def one(leaver: Leaver) -> None:
            async with gate:
                await leaver.run()

        await asyncio.gather(*(one(leaver) for leaver in leavers))
        return leavers

    began_s = time.monotonic()
    leavers = asyncio.run(everybody())
    ended_s = stepped_s = time.monotonic()

    def settled() -> bool:
        nonlocal stepped_s
        status = system.status()
        if any(w.running + w.waiting for w in status.workers):
            stepped_s = time.monotonic()
        return not held(status) and not idle.exceeded(status)

    try:
        until("everything is back", settled, 60)
    except AssertionError as error:
        raise AssertionError(f"{error}: {held(system.status())} {idle.exceeded(system.status())}") from None
    took_s = time.monotonic() - stepped_s
    assert took_s < SETTLE_S, f"{took_s:.1f} s after the last engine step"
    until("no block is referred to", lambda: no_blocks_held(system), SETTLE_S)

    outcomes = [leaver.outcome for leaver in leavers]
    assert outcomes.count("whole") >= REQUESTS // 10
    assert outcomes.count("left") == REQUESTS - outcomes.count("whole")
    left = [leaver for leaver in leavers if leaver.outcome == "left"]
    # Both before the first token and after it, on every way and front.
    for way in WAYS:
        for front in ("http", "grpc"):
            mine = [leaver.tokens > 0 for leaver in left if (leaver.path, leaver.transport) == way and leaver.front == front]
            assert {True, False} == set(mine)
    log.info(
        "%d requests in %.0f s, %d left (%d before a token); settled %.2f s after the last client, %.2f s after the last step",
        REQUESTS, ended_s - began_s, len(left), sum(not leaver.tokens for leaver in left),
        time.monotonic() - ended_s, took_s,
    )  # fmt: skip


# -- processes that die ---------------------------------------------------------------------------------------------------


OUTPUT_TOKENS = 128
LENGTHS = [2000, 1400, 1200, 900, 700, 600]


def repeating_prompt(number: int, length: int) -> list[int]:
    """A pattern again and again: the model goes on with it, and is sure of it."""
    rng = random.Random(number)
    pattern = [rng.randrange(1000, 40000) for _ in range(24)]
    return [pattern[i % len(pattern)] for i in range(length)]


@pytest.fixture(scope="module")
def references(real: Served) -> References:
    """What each of the prompts is answered with, asked alone."""
    real.wait_ready(300, prefill=1, decode=1)
    found = References.ask(real, [repeating_prompt(n, length) for n, length in enumerate(LENGTHS)], OUTPUT_TOKENS)
    assert found.floor < CLEAR_GAP
    log.info("batched and resumed, colocated against itself: near-ties below %.3f", found.floor)
    return found


def states(worker: admin_pb2.WorkerStatus) -> str:
    resources = worker.resources
    return (
        f"{worker.worker_id}: running {worker.running}, waiting {worker.waiting}, "
        f"leases {dict(resources.lease_states)}, sessions {dict(resources.session_states)}"
    )


def in_every_stage(p: admin_pb2.WorkerStatus, d: admin_pb2.WorkerStatus, streams: list[Stream]) -> bool:
    """Prefill computes one, queues another, has staged KV of one, which is on its way; a further one decodes."""
    moving = p.resources.lease_states.get("fetching", 0) + p.resources.lease_states.get("sending", 0)
    pulled = d.resources.receive_staging.used_bytes > 0
    return p.running >= 1 and p.waiting >= 1 and moving >= 1 and pulled and any(s.tokens for s in streams)


def before_the_first_token(p: admin_pb2.WorkerStatus, d: admin_pb2.WorkerStatus, streams: list[Stream]) -> bool:
    """Decode pulls, prefill still computes, no client has anything."""
    assert not any(s.tokens for s in streams), "the moment has passed"
    return d.resources.sessions >= 1 and p.running >= 1


def after_the_first_token(p: admin_pb2.WorkerStatus, d: admin_pb2.WorkerStatus, streams: list[Stream]) -> bool:
    """Decode generates, a client has part of its answer."""
    return d.running >= 1 and any(1 < len(s.tokens) < s.max_tokens - 16 for s in streams)


Moment = Callable[[admin_pb2.WorkerStatus, admin_pb2.WorkerStatus, list[Stream]], bool]


@pytest.mark.parametrize(
    ("pool", "process", "moment"),
    [
        ("prefill", "actor", in_every_stage),
        ("prefill", "engine", in_every_stage),
        ("decode", "actor", before_the_first_token),
        ("decode", "actor", after_the_first_token),
    ],
    ids=lambda value: value.__name__ if callable(value) else value,
)
def test_a_killed_worker_costs_no_request_its_end(
    system: Served, references: References, pool: str, process: str, moment: Moment
) -> None:
    """Every request ends right or with an explicit error before its deadline; the pool heals under a new incarnation; the
    survivor holds nothing for the dead one's sake, and nothing is left of it."""
    until("no block is referred to, no prefix cached", lambda: no_blocks_held(system), 20)
    status = system.status()
    gateway_pid = status.gateways[0].pid
    victim = next(w for w in status.workers if w.pool == pool)
    survivor = next(w for w in status.workers if w.pool != pool)
    # The status lists processes as of some heartbeats ago; a worker that has just healed may have more.
    actor = psutil.Process(victim.pid)
    family = [actor, *actor.children(recursive=True)]
    segments = {segment for member in family for segment in python_segments_of(member.pid)}
    target = victim.pid
    if process == "engine":
        target = next(p.pid for p in family if "EngineCore" in " ".join(p.cmdline()))

    transports = [None, "ucx", "grpc"]
    streams = [
        Stream(system, repeating_prompt(n, length), OUTPUT_TOKENS, transport=transports[n % 3], deadline_s=DEADLINE_S)
        for n, length in enumerate(LENGTHS)
    ]
    for stream in streams:
        stream.start()

    def reached() -> list[admin_pb2.WorkerStatus] | None:
        workers = list(system.status().workers)
        p, d = (next(w for w in workers if w.pool == name) for name in ("prefill", "decode"))
        return [p, d] if moment(p, d, streams) else None

    seen = until(f"requests are {moment.__name__}", reached, 60, 0.02)
    os.kill(target, signal.SIGKILL)
    killed_s = time.monotonic()
    had = [len(stream.tokens) for stream in streams]

    right = [stream.check_end(references, index) for index, stream in enumerate(streams)]
    requests_s = time.monotonic() - killed_s
    # The other worker serves whole requests, and continues greedy ones from their tokens: nobody has to be told of the death.
    assert all(right), [str(stream.error) for stream in streams if stream.error]

    now = {w.worker_id: w for w in system.workers(state="").values()}
    assert now[survivor.worker_id].incarnation == survivor.incarnation
    until("the survivor holds nothing", lambda: not _held_by(system, survivor.worker_id), 30)
    healed = system.wait_replaced(victim.worker_id, 300)
    heal_s = time.monotonic() - killed_s
    assert victim.incarnation not in {w.incarnation for w in healed.values()}
    assert healed[survivor.worker_id].incarnation == survivor.incarnation
    assert system.status().gateways[0].pid == gateway_pid
    until("the gateway reaches the new pair", lambda: not system.status().unsettled, 20)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert [segment for segment in segments if Path(segment).exists()] == []
    for transport in ("ucx", "grpc"):
        after = Stream(system, repeating_prompt(7, 300), 8, transport=transport, deadline_s=DEADLINE_S)
        after.start()
        after.join(DEADLINE_S)
        assert after.finish is not None, after.error
        assert after.finish.metrics.path == "split"
        assert not after.finish.metrics.recomputed
    log.info(
        "killed %s's %s at [%s], tokens sent then %s; requests over after %.1f s, %d of %d right; healed after %.0f s",
        victim.worker_id, process, "; ".join(map(states, seen)), had, requests_s, sum(right), len(right), heal_s,
    )  # fmt: skip


def _held_by(served: Served, worker_id: str) -> dict[str, int]:
    with contextlib.suppress(grpc.RpcError):
        return {name: value for name, value in held(served.status()).items() if name.startswith(worker_id)}
    return {"unknown": 1}
