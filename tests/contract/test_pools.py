"""Pools that change while requests run: simulated workers and a gateway in this process, no Ray. No request may notice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from coordinator.config import load
from coordinator.pools.desired import Strategy
from coordinator.routing.views import Role, WorkerState
from protos.errors import Code, SplitpointError
from protos.ids import WorkerId
from tests.support.cores import CoreUnderTest, Reader, core_over
from tests.support.small_cluster import SmallCluster, followed, pool_settings

pytestmark = pytest.mark.timeout(120)

PROMPTS = [[(length * 31 + i) % 900 + 3 for i in range(length)] for length in (1, 9, 33, 60)]
OPTIONS = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SPLIT = pool_settings(prefill={"role": "prefill"}, decode={"role": "decode", "replicas": 2})
MORE_PREFILL = pool_settings(prefill={"role": "prefill", "replicas": 2}, decode={"role": "decode"})
COLOCATED = pool_settings(both={"role": "colocated", "replicas": 3})
OTHER_DECODE = pool_settings(prefill={"role": "prefill"}, decode={"role": "decode", "replicas": 4, "engine": {"max_num_seqs": 5}})
OTHER_ENGINE = pool_settings(both={"role": "colocated", "replicas": 2, "engine": {"max_num_seqs": 5}})


class Rig:
    """A settled cluster of one prefill and two decode workers, and a gateway that follows it."""

    def __init__(self, cluster: SmallCluster, under_test: CoreUnderTest) -> None:
        self.cluster = cluster
        self.under_test = under_test
        self.expected: list[list[int]] = []
        self.news = asyncio.Event()

    async def alone(self) -> None:
        """What each prompt's answer is when nothing else happens."""
        for prompt in PROMPTS:
            self.expected.append((await self.answer(prompt)).tokens)

    async def answer(self, prompt: Sequence[int]) -> Reader:
        reader = self.under_test.run(prompt=prompt, **OPTIONS)
        await reader.end()
        assert reader.error is None, reader.error
        return reader

    def incarnations(self) -> dict[str, str]:
        return {worker_id: process.incarnation for worker_id, process in self.cluster.processes.items()}

    def members(self) -> dict[str, tuple[str, str]]:
        """Pool and role by worker."""
        return {w: (m.record.pool, m.record.role.value) for w, m in self.cluster.fleet.members.items()}

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[list[Reader]]:
        """Eight clients that ask one thing after another; every answer is the one it would be alone. Yields what was answered."""
        over, answered = asyncio.Event(), list[Reader]()

        async def client(number: int) -> None:
            while not over.is_set():
                which = (number + len(answered)) % len(PROMPTS)
                reader = await self.answer(PROMPTS[which])
                assert reader.tokens == self.expected[which]
                answered.append(reader)
                self.news.set()

        clients = [asyncio.create_task(client(n)) for n in range(8)]
        try:
            yield answered
        finally:
            over.set()
            await asyncio.gather(*clients)

    @contextlib.asynccontextmanager
    async def watched(self, pool: str) -> AsyncIterator[list[tuple[int, int]]]:
        """After each change of the membership until the block ends: how many workers of `pool` are offered requests, and how
        many workers there are in all."""
        seen = []

        async def watch() -> None:
            while True:
                await self.cluster.fleet.next_change(1.0)
                records = self.cluster.fleet.records()
                seen.append((sum(r.pool == pool and r.state is WorkerState.READY for r in records), len(records)))

        watching = asyncio.create_task(watch())
        try:
            yield seen
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def next_answers(self, answered: Sequence[Reader]) -> list[Reader]:
        """The first few of `answered` that were asked from now on."""
        now_s = time.monotonic()
        async with asyncio.timeout(20):
            while True:
                later = [reader for reader in answered if reader.choice.submission.received_s > now_s]
                if len(later) >= 16:
                    return later
                self.news.clear()
                await self.news.wait()

    async def held(self) -> list[tuple[int, int, int]]:
        """What each worker still holds of requests: legs, leases, sessions, staging; asked of the workers themselves."""
        found = []
        for worker_id in self.cluster.processes.keys() & self.cluster.fleet.members.keys():
            server = self.cluster.processes[worker_id].server
            async with asyncio.timeout(20):
                await server.drained()
            ranks = await server.rank_status(5.0)
            staged = [r.send.used_bytes + r.receive.used_bytes for r in ranks]
            found.append((len(server.attempts), sum(r.leases + r.sessions for r in ranks), sum(staged)))
        return found


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    settings = load(
        sets=[
            "engine.kind=simulated",
            f"engine.model_path={tmp_path}",
            "engine.max_model_len=512",
            "engine.simulated.step_base_s=0.002",
            "engine.simulated.num_kv_blocks=512",
            "coordinator.heartbeat_interval_s=0.1",
            "coordinator.missed_heartbeats=100",
            "kvtransfer.transports=['grpc']",
            "kvtransfer.default_transport=grpc",
            "kvtransfer.send_staging_bytes=4MiB",
            "kvtransfer.receive_staging_bytes=4MiB",
        ],
        environment={},
    ).with_pools(SPLIT)
    async with (
        SmallCluster(settings, tmp_path) as cluster,
        core_over([], transports=("grpc",)) as under_test,
        followed(cluster, under_test.core),
    ):
        await cluster.settled(under_test.core)
        made = Rig(cluster, under_test)
        await made.alone()
        yield made


async def test_relabel_under_load_fails_no_request_and_restarts_no_engine(rig: Rig) -> None:
    before = rig.incarnations()
    paths: list[set[str]] = []
    async with rig.load() as answered:
        for pools in (COLOCATED, MORE_PREFILL, SPLIT):
            rig.cluster.pools.apply(pools)
            await rig.cluster.settled(rig.under_test.core)
            paths.append({reader.ledger.path for reader in await rig.next_answers(answered)})
    assert paths == [{"colocated"}, {"split"}, {"split"}]
    assert not any(reader.ledger.recomputed for reader in answered)
    assert rig.incarnations() == before, "no engine was started"
    assert sorted(rig.members().values()) == [("decode", "decode")] * 2 + [("prefill", "prefill")]
    assert await rig.held() == [(0, 0, 0)] * 3
    assert sum(p.server.metrics.events["relabelled"] for p in rig.cluster.processes.values()) >= 6


async def test_a_request_that_is_on_its_way_to_decode_when_labels_change_is_waited_for(rig: Rig) -> None:
    """Its decode leg starts long after the new label: nothing of it runs on the decode worker when that was said."""
    reader = rig.under_test.run(prompt=list(range(3, 203)), **{**OPTIONS, "max_tokens": 250})
    request = asyncio.create_task(reader.end())
    workers = rig.cluster.processes.values()
    async with asyncio.timeout(20):
        while not any(item.leg == "prepare" for process in workers for item in process.server.work()):  # noqa: ASYNC110
            await asyncio.sleep(0)
    rig.cluster.pools.apply(COLOCATED)
    for process in workers:
        process.relabel("both", Role.COLOCATED)
    assert not any(item.leg == "decode" for process in workers for item in process.server.attempts.running())
    await rig.cluster.settled(rig.under_test.core)
    assert request.done(), "settled while a request of the former set ran"
    assert (reader.error, len(reader.tokens), reader.ledger.path) == (None, 250, "split")


async def test_every_worker_is_restarted_in_its_turn_and_no_request_notices(rig: Rig) -> None:
    """The coordinator is lost between two turns, and goes on."""
    before = rig.incarnations()
    async with rig.load() as answered:
        asked = rig.cluster.pools.restart(["prefill", "decode"], surge=False)
        assert sorted(asked) == ["decode-1", "decode-2", "prefill-1"]
        await rig.cluster.restart_coordinator()
        await rig.cluster.settled(rig.under_test.core)
        rig.cluster.pools.restart(["prefill"], surge=True)
        await rig.cluster.settled(rig.under_test.core)
    assert answered
    assert sorted(rig.members()) == ["decode-3", "decode-4", "prefill-3"]
    after = {rig.incarnations()[worker_id] for worker_id in rig.members()}
    assert not after & set(before.values())
    assert await rig.held() == [(0, 0, 0)] * 3


async def test_other_engine_arguments_restart_workers_one_serving_until_a_successor_does(rig: Rig) -> None:
    old = set(rig.incarnations().values())
    async with rig.load() as answered:
        rig.cluster.pools.apply(OTHER_ENGINE)
        await rig.cluster.settled(rig.under_test.core)
    assert answered
    new = {w: rig.cluster.processes[w] for w in rig.cluster.fleet.members}
    assert set(rig.members().values()) == {("both", "colocated")}
    assert len(new) == 2
    assert not old & {p.incarnation for p in new.values()}
    assert {p.facts().start_arguments["max_num_seqs"] for p in new.values()} == {5}
    assert await rig.held() == [(0, 0, 0)] * 2


@pytest.mark.parametrize(("surge", "fewest", "most"), [(False, 3, 5), (True, 4, 6)])
async def test_a_pool_of_other_engine_arguments_is_replaced_in_batches(rig: Rig, surge: bool, fewest: int, most: int) -> None:
    """Four decode workers and one for prefill: one of the four may be away, or none where one more may be there."""
    pools = rig.cluster.pools
    pools.scale("decode", 4)
    await rig.cluster.settled(rig.under_test.core)
    before = rig.incarnations()
    async with rig.load() as answered, rig.watched("decode") as seen:
        pools.apply(OTHER_DECODE, strategy=Strategy(surge=surge))
        assert len([line for line in pools.unsettled([]) if "serves until its turn" in line]) >= fewest
        await rig.cluster.settled(rig.under_test.core)
    assert answered
    assert min(serving for serving, _ in seen) >= fewest
    assert max(total for _, total in seen) <= most
    alive = {worker_id: rig.cluster.processes[worker_id] for worker_id in rig.members()}
    changed = {worker_id: process.facts().start_arguments["max_num_seqs"] == 5 for worker_id, process in alive.items()}
    assert sorted(changed.values()) == [False] + [True] * 4
    kept = [worker_id for worker_id in alive if alive[worker_id].incarnation == before.get(worker_id)]
    assert kept == ["prefill-1"]
    assert await rig.held() == [(0, 0, 0)] * 5


async def test_an_apply_that_is_repeated_while_it_runs_keeps_who_serves_until_a_successor_does(rig: Rig) -> None:
    pools = rig.cluster.pools
    async with rig.load() as answered:
        for _ in range(3):
            pools.apply(OTHER_ENGINE)
        pools.scale("both", 1)
        pools.scale("both", 1)
        assert pools.present.budget_ranks == 3, "what the first set had may be held until the change is over"
        await rig.cluster.settled(rig.under_test.core)
    assert answered
    assert list(rig.members().values()) == [("both", "colocated")]
    pools.scale("both", 2)
    assert pools.present.budget_ranks == 2, "and not after it"


async def test_a_coordinator_that_is_lost_in_a_change_comes_back_to_it(rig: Rig) -> None:
    """No worker has heard of its new label when the coordinator is gone; who was cordoned stays so."""
    before = rig.incarnations()
    rig.cluster.pools.cordon("decode-1", True)
    async with rig.load() as answered:
        rig.cluster.pools.apply(COLOCATED)
        version = rig.cluster.pools.present.version
        await rig.cluster.restart_coordinator()
        assert rig.cluster.pools.present.version == version
        await rig.cluster.settled(rig.under_test.core)
        assert {reader.ledger.path for reader in await rig.next_answers(answered)} == {"colocated"}
        assert "decode-1" not in {reader.ledger.decode_worker for reader in await rig.next_answers(answered)}
        await rig.cluster.restart_coordinator()
        await rig.cluster.settled(rig.under_test.core)
    assert rig.incarnations() == before
    assert set(rig.members().values()) == {("both", "colocated")}


async def test_a_cordoned_worker_is_offered_nothing_until_it_is_uncordoned(rig: Rig) -> None:
    [out, stays] = [w for w, label in rig.members().items() if label[1] == "decode"]
    rig.cluster.pools.cordon(out, True)
    await rig.cluster.settled(rig.under_test.core)
    assert {(await rig.answer(prompt)).ledger.decode_worker for prompt in PROMPTS * 2} == {stays}
    rig.cluster.pools.cordon(stays, True)
    rig.cluster.pools.cordon(out, False)
    await rig.cluster.settled(rig.under_test.core)
    assert {(await rig.answer(prompt)).ledger.decode_worker for prompt in PROMPTS * 2} == {out}


async def test_a_dry_run_and_a_refusal_change_nothing(rig: Rig) -> None:
    pools, before = rig.cluster.pools, rig.cluster.pools.present
    steps = pools.apply(COLOCATED, dry_run=True)
    assert [(s.action, s.new_pool) for s in steps] == [("relabel", "both")] * 3
    assert [s.action for s in pools.scale("decode", 1, dry_run=True)[1]] == ["keep", "keep", "stop"]
    short = pool_settings(both={"role": "colocated", "engine": {"max_model_len": 256}})
    odd = pool_settings(both={"role": "colocated", "engine": {"max_num_seq": 1}})
    alone = pool_settings(prefill={"role": "prefill", "replicas": 0})
    refusals = [
        (COLOCATED, before.version + 1, Code.CONFLICT, "look again"),
        (short, None, Code.INVALID_VALUE, "below the 512 tokens"),
        (odd, None, Code.INVALID_VALUE, "pools.both.engine.max_num_seq: unknown key"),
        (alone, None, Code.INVALID_VALUE, "at least one pool needs a replica"),
    ]
    for wanted, expected, code, said in refusals:
        with pytest.raises(SplitpointError) as caught:
            pools.apply(wanted, expected=expected)
        assert caught.value.code == code
        assert said in caught.value.message
    assert pools.present == before
    with pytest.raises(SplitpointError) as caught:
        pools.worker(WorkerId("decode-99"))
    assert caught.value.code == Code.NOT_FOUND


@pytest.mark.parametrize("kind", ["warm", "placed"])
async def test_a_spare_takes_over_from_a_worker_that_drains_and_no_request_notices(rig: Rig, kind: str) -> None:
    """The coordinator is lost in between, and knows its spares again."""
    reserve = {"role": "decode", "replicas": 2, "spares": 1, "spare_kind": kind}
    pools, cluster = rig.cluster.pools, rig.cluster
    pools.apply(pool_settings(prefill={"role": "prefill"}, decode=reserve))
    await cluster.settled(rig.under_test.core)
    [spare] = [w for w, m in cluster.fleet.members.items() if m.record.spare]
    assert (spare in cluster.processes) is (kind == "warm")
    async with rig.load() as answered:
        assert spare not in {reader.ledger.decode_worker for reader in await rig.next_answers(answered)}
        await cluster.restart_coordinator()
        assert cluster.fleet.members[spare].record.spare
        cluster.pools.drain(WorkerId("decode-1"), 20.0, time.monotonic(), "asked for")
        await cluster.settled(rig.under_test.core)
        async with asyncio.timeout(20):
            while spare not in {reader.ledger.decode_worker for reader in await rig.next_answers(answered)}:
                pass
    members = cluster.fleet.members
    serving = {w for w, m in members.items() if m.record.pool == "decode" and not m.record.spare}
    assert serving == {"decode-2", spare}
    [successor] = [w for w, m in members.items() if m.record.spare]
    assert successor not in {reader.ledger.decode_worker for reader in answered}
    assert await rig.held() == [(0, 0, 0)] * (4 if kind == "warm" else 3)
