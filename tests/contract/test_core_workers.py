"""The gateway core over the workers' real servers with the simulated engine: both paths say the same, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from coordinator.routing.views import RankView, Role, WorkerState, WorkerView
from protos.errors import Code
from tests.support.cores import CoreUnderTest, Reader, core_over
from tests.support.fabric import Fabric
from tests.support.workers import SimWorker, start_worker


def view_of(worker: SimWorker, role: Role) -> WorkerView:
    """What the coordinator would publish of it."""
    facts = worker.server.facts
    assert facts is not None
    identity = worker.server.identity
    return WorkerView(
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        pool=role.value,
        role=role,
        state=WorkerState.READY,
        address=worker.address,
        pid=1,
        fingerprint=b"same",
        ranks=tuple(
            RankView(rank=r.rank, address=r.address, host_id=r.host_id, ucx_worker_address=r.ucx_worker_address)
            for r in facts.endpoints
        ),
        max_transfer_tokens=facts.max_transfer_tokens,
        transports=("grpc",),
    )


class Rig:
    """Core and workers. `idle` waits until the workers hold nothing of any request."""

    def __init__(self, under_test: CoreUnderTest, workers: Sequence[SimWorker], views: Sequence[WorkerView]) -> None:
        self.under_test = under_test
        self.workers = list(workers)
        self.views = list(views)

    def run(self, **options: Any) -> Reader:
        return self.under_test.run(transport=None, **options)

    async def answer(self, **options: Any) -> Reader:
        reader = self.run(**options)
        await reader.end()
        assert reader.error is None, reader.error
        return reader

    async def idle(self) -> None:
        self.under_test.assert_idle()
        async with asyncio.timeout(10):
            for worker in self.workers:
                await worker.server.drained()
        for worker in self.workers:
            load = worker.engine.load()
            assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


@contextlib.asynccontextmanager
async def rig(
    prefill: int = 1, decode: int = 1, *, fabric: Fabric | None = None, wire: bool = False, **settings: Any
) -> AsyncIterator[Rig]:
    """KV goes through memory, or with `wire` through real nodes over gRPC."""
    fabric = None if wire else fabric or Fabric()
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    workers: list[SimWorker] = []
    try:
        for number, role in enumerate(roles):
            workers.append(await start_worker(fabric, f"{role.value}{number}", wire=wire))
        views = [view_of(w, r) for w, r in zip(workers, roles, strict=True)]
        async with core_over(views, transports=("grpc",), **settings) as under_test:
            made = Rig(under_test, workers, views)
            yield made
            await made.idle()
    finally:
        for worker in workers:
            await worker.close()


PROMPTS = [1, 7, 8, 9, 16, 33, 100]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"seed": 5, "temperature": 1.0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"temperature": 0.0, "min_tokens": 4, "ignore_eos": False},
        {"max_tokens": 1},
        {"max_tokens": 2},
    ],
    ids=lambda s: "-".join(s) or "greedy",
)
async def test_both_paths_give_the_same_answer(sampling: dict[str, Any]) -> None:
    options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
    async with rig() as made:
        for length in PROMPTS:
            prompt = [(length * 31 + i) % 900 + 3 for i in range(length)]
            split = await made.answer(prompt=prompt, path="split", **options)
            solo = await made.answer(prompt=prompt, path="colocated", **options)
            assert split.tokens == solo.tokens
            assert len(split.tokens) == options["max_tokens"] or not options["ignore_eos"]
            assert split.finished == solo.finished
            assert split.ledger.path == "split"
            assert not split.ledger.recomputed
            assert split.ledger.decode_worker != split.ledger.prefill_worker
            if options["max_tokens"] > 1:
                assert split.ledger.transport == "grpc"
                assert split.ledger.transfer_bytes > 0
            await made.idle()


async def test_the_same_answer_over_real_transfer_nodes() -> None:
    options = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    async with rig(wire=True) as made:
        for length in (1, 8, 33):
            prompt = [(length * 31 + i) % 900 + 3 for i in range(length)]
            split = await made.answer(prompt=prompt, path="split", **options)
            solo = await made.answer(prompt=prompt, path="colocated", **options)
            assert split.tokens == solo.tokens
            assert not split.ledger.recomputed
            assert split.ledger.transfer_bytes > 0


async def test_many_at_once_give_the_same_answers_as_one_at_a_time() -> None:
    async with rig(2, 2) as made:
        prompts = [[n + 3] * (n % 40 + 1) for n in range(30)]
        options = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        alone = [(await made.answer(prompt=p, path="colocated", **options)).tokens for p in prompts]
        together = [made.run(prompt=p, path="split", **options) for p in prompts]
        for reader, tokens in zip(together, alone, strict=True):
            await reader.end()
            assert reader.error is None, reader.error
            assert reader.tokens == tokens


async def test_leaving_at_random_moments_leaves_nothing_anywhere() -> None:
    rng = random.Random(3)
    async with rig() as made:
        readers = [made.run(prompt=[n + 3] * rng.randrange(1, 60), max_tokens=40, ignore_eos=True) for n in range(60)]
        for reader in readers:
            wanted = rng.choice([0, 0, 1, 2, 5])
            if wanted:
                await reader.has(wanted)
            await reader.leave()
        await made.idle()
        after = await made.answer(prompt=[3, 4, 5], max_tokens=3, ignore_eos=True)
        assert len(after.tokens) == 3


async def test_prefill_stopped_while_it_computes_is_recomputed_on_decode() -> None:
    async with rig() as made:
        prefill = made.workers[0]
        options = {"prompt": [4] * 50, "max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
        expected = (await made.answer(path="colocated", **options)).tokens
        inside = prefill.clock.hold()
        reader = made.run(path="split", **options)
        async with asyncio.timeout(10):
            await inside.wait()
        prefill.clock.let_go()
        await prefill.close()
        made.workers.remove(prefill)
        await reader.end()
        assert reader.error is None, reader.error
        assert reader.tokens == expected
        assert reader.ledger.recomputed or reader.ledger.transfer_bytes > 0


async def test_decode_stopped_in_the_middle_is_resumed_with_the_same_tokens() -> None:
    async with rig() as made:
        decode = made.workers[1]
        options = {"prompt": [4] * 50, "max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
        expected = (await made.answer(path="colocated", **options)).tokens
        reader = made.run(path="split", **options)
        await reader.has(1)
        inside = decode.clock.hold()
        async with asyncio.timeout(10):
            await inside.wait()
        sent = len(reader.tokens)
        closing = asyncio.create_task(decode.close())
        decode.clock.let_go()
        await closing
        made.workers.remove(decode)
        await reader.end()
        assert reader.error is None, reader.error
        assert sent < 30
        assert reader.tokens == expected


async def test_corrupt_kv_is_never_decoded() -> None:
    fabric = Fabric()
    fabric.corrupt = True
    async with rig(fabric=fabric) as made:
        options = {"prompt": [4] * 50, "max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
        expected = (await made.answer(path="colocated", **options)).tokens
        reader = await made.answer(path="split", **options)
        assert reader.tokens == expected
        assert reader.ledger.recomputed


async def test_strict_mode_says_so_instead() -> None:
    fabric = Fabric()
    fabric.corrupt = True
    async with rig(fabric=fabric, allow_recompute=False) as made:
        reader = made.run(prompt=[4] * 50, max_tokens=5, path="split", ignore_eos=True)
        await reader.end()
        assert reader.error is not None
        assert reader.error.code in (Code.TRANSFER_FAILED, Code.STREAM_BROKEN)


async def test_a_drained_worker_sends_its_requests_elsewhere() -> None:
    async with rig(2, 1) as made:
        made.workers[0].server.begin_drain()
        for n in range(6):
            reader = await made.answer(prompt=[n + 3] * 9, max_tokens=2, ignore_eos=True)
            assert reader.ledger.prefill_worker == "prefill1"
