"""A thousand random schedules: no wrong block, no leak, no hang. Nodes, transports, faults are real; time and network are not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from coordinator.compare.proof.virtual_time import run_virtual
from kvtransfer.transports.faulty import Fault, FaultyTransport, seeded
from protos.errors import SplitpointError
from protos.ids import new_capability, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import BLOCK_BYTES, fresh, prompt_bytes, small_settings
from tests.support.virtual_nodes import Network, VirtualNode, explained

SCHEDULES = 1000
GROUP = 100
LONGEST_S = 120.0
"""Of a schedule, in its own time: every deadline and grace in it is far shorter."""


class Schedule:
    """One pair, a few prompts, and everything that can happen to them, drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.scheme = rng.choice(("grpc", "inproc"))
        settings = small_settings(
            send_staging_bytes=24 * BLOCK_BYTES,
            receive_staging_bytes=24 * BLOCK_BYTES,
            transports=("grpc",),
            progress_timeout_s=rng.choice((0.3, 5.0)),
            lease_grace_s=rng.choice((0.05, 0.5)),
            peer_heartbeat_s=0.2,
            fetch_wait_s=rng.choice((0.2, 5.0)),
        )
        rate = rng.choice((0.0, 0.002, 0.02))
        self.faults = [FaultyTransport(fresh(self.scheme), seeded(seed + side, dict.fromkeys(Fault, rate))) for side in (0, 1)]
        self.network = Network(rng, latency_s=rng.choice((0.0, 0.01, 0.2)), loss=rng.choice((0.0, 0.1)))
        self.sender, self.receiver = (VirtualNode(name, settings, t) for name, t in zip("PD", self.faults, strict=True))
        for node in (self.sender, self.receiver):
            self.network.nodes[node.name] = node
            node.rt.peers = self.network.connect(node)  # type: ignore[assignment]
        self.outcomes: Counter[str] = Counter()
        """Ends of prompts, and the faults that were made."""

    async def run(self) -> Counter[str]:
        rng = self.rng
        prompts = [asyncio.create_task(self.prompt()) for _ in range(rng.randint(1, 5))]
        upsets = [asyncio.create_task(upset()) for upset in (self.stop, self.kill) if rng.random() < 0.15]
        answers = await asyncio.gather(*prompts, *upsets, return_exceptions=True)
        for answer in answers:
            explained(answer)
        await self.quiet()
        for transport in self.faults:
            self.outcomes.update({str(fault): count for fault, count in transport.injected.items()})
        return self.outcomes

    async def prompt(self) -> None:
        """Its life on both sides, each with its own idea of when to give up."""
        rng, rt = self.rng, self.receiver.rt
        tokens = [rng.randrange(30000) for _ in range(rng.choice((1, 17, 64, 100, 200)))]
        grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
        data = prompt_bytes(tokens)
        remaining_s = rng.choice((0.05, 0.3, 2.0, 10.0))
        await asyncio.sleep(rng.uniform(0, 0.3))
        sides = [self.prefill(grant, tokens, data, remaining_s), self.decode(grant, tokens, remaining_s)]
        if rng.random() < 0.2:
            sides.append(self.give_up(grant, rng.choice((self.sender, self.receiver))))
        answers = await asyncio.gather(*sides, return_exceptions=True)
        for answer in answers:
            explained(answer)
        pulled = not isinstance(answers[1], BaseException)
        self.outcomes["delivered" if pulled else "refused"] += 1
        await asyncio.sleep(rng.choice((0.0, 0.05, 1.0)))
        if self.receiver.dead:
            return
        view = self.receiver.node.receive_view(grant.transfer_id)
        if view is not None:
            assert pulled, "an engine was given what no pull had answered for"
            await asyncio.sleep(rng.choice((0.0, 0.1)))  # the engine reads while others come and go
            assert np.array_equal(view, data), "a wrong block"
            self.outcomes["scattered"] += 1
        if not self.receiver.dead:
            self.receiver.node.scattered(grant.transfer_id)
        assert rt.receive.used_bytes >= 0

    async def prefill(self, grant: pb.TransferGrant, tokens: list[int], data: np.ndarray, remaining_s: float) -> None:
        rng, node = self.rng, self.sender.node
        await asyncio.sleep(rng.uniform(0, 0.1))
        request = pb.ReserveRequest(
            grant=grant, prompt_tokens=len(tokens), token_hash=token_hash(tokens), remaining_s=remaining_s, staging_wait_s=1.0
        )
        await self.sender.ask("Reserve", request)
        first, pace_s = 0, rng.choice((0.0, 0.02, 0.4))
        while first < len(data):
            await asyncio.sleep(rng.uniform(0, pace_s))
            if self.sender.dead:
                return
            count = min(rng.randint(1, 4), len(data) - first)
            view = node.send_view(grant.transfer_id, first, count)
            if view is None:
                self.outcomes["lease_over_before_gather"] += 1
                return
            ready = self.later(view, data[first : first + count]) if rng.random() < 0.3 else None
            if ready is None:
                view[:] = data[first : first + count]
            node.commit_chunk(grant.transfer_id, first, count, last=first + count == len(data), ready=ready)
            first += count

    def later(self, view: np.ndarray, blocks: np.ndarray) -> Any:
        """A gather that a device does after the commit."""
        done_at = asyncio.get_running_loop().time() + self.rng.uniform(0, 0.1)

        def ready() -> bool:
            if asyncio.get_event_loop().time() < done_at:
                return False
            view[:] = blocks
            return True

        return ready

    async def decode(self, grant: pb.TransferGrant, tokens: list[int], remaining_s: float) -> pb.PullResponse:
        await asyncio.sleep(self.rng.uniform(0, 0.1))
        request = pb.PullRequest(
            grant=grant,
            sender=self.sender.rt.endpoint,
            prompt_tokens=len(tokens),
            token_hash=token_hash(tokens),
            transport=self.scheme,
            remaining_s=remaining_s,
            staging_wait_s=1.0,
        )
        response: pb.PullResponse = await self.receiver.ask("Pull", request)
        return response

    async def give_up(self, grant: pb.TransferGrant, node: VirtualNode) -> None:
        """The gateway loses interest at any moment; the other side hears of it or not."""
        await asyncio.sleep(self.rng.uniform(0, 0.6))
        for side in {node, *([self.sender, self.receiver] if self.rng.random() < 0.7 else [])}:
            if not side.dead:
                await side.ask("Release", pb.ReleaseRequest(transfer_id=grant.transfer_id, reason="client_left"))

    async def stop(self) -> None:
        """SIGSTOP and SIGCONT, as the other side sees it."""
        node = self.rng.choice((self.sender, self.receiver))
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        node.running.clear()
        await asyncio.sleep(self.rng.choice((0.1, 2.0)))
        node.running.set()

    async def kill(self) -> None:
        """SIGKILL; the survivor is told some time later."""
        node = self.rng.choice((self.sender, self.receiver))
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        await node.die()
        await asyncio.sleep(self.rng.uniform(0, 1.0))
        survivor = self.receiver if node is self.sender else self.sender
        for transport in survivor.rt.transports.values():
            transport.peer_died(node.name)

    async def quiet(self) -> None:
        """Everybody alive comes to rest by itself: no byte held, no lease, no session, no task."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LONGEST_S
        alive = [node for node in (self.sender, self.receiver) if not node.dead]
        while not all(self.idle(node) for node in alive):
            assert loop.time() < until_s, "a leak: " + "; ".join(str(node.rt.status()) for node in alive)
            await asyncio.sleep(0.25)
        for node in alive:
            node.rt.send.check()
            node.rt.receive.check()
            node.check_untouched()
            assert "background_failed" not in node.rt.counters(), node.rt.recent_errors
            assert not node.sweep.done()
            await node.die()

    def idle(self, node: VirtualNode) -> bool:
        rt = node.rt
        held = not (rt.send.idle and rt.receive.idle and rt.pack.idle)
        waiting = len(rt.send_room) + len(rt.receive_room) + rt.pending_fetches + len(rt.pulls) + len(rt.fetches)
        watched = len(rt.watch._senders) + len(rt.watch._receivers) + len(rt.watch._pings)
        tables = len(rt.leases) + rt.leases.ending + len(rt.sessions) + rt.sessions.ending
        return not held and waiting + watched + tables + len(rt.tasks) == 0


async def run_schedule(seed: int) -> Counter[str]:
    schedule = Schedule(seed)
    try:
        return await asyncio.wait_for(schedule.run(), 10 * LONGEST_S)
    except SplitpointError as error:
        raise AssertionError(f"unexplained: {error}") from error


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("group", range(SCHEDULES // GROUP))
def test_random_schedules(group: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(group * GROUP, (group + 1) * GROUP):
        try:
            outcomes += run_virtual(run_schedule(seed))
        except BaseException as exc:
            exc.add_note(f"seed {seed}")
            raise
    # The schedules are worth something only if they reach every kind of end.
    assert outcomes["scattered"] > GROUP / 4, outcomes
    assert outcomes["refused"] > GROUP / 4, outcomes
    assert outcomes["lease_over_before_gather"] > 0, outcomes
    assert sum(outcomes[str(fault)] > 0 for fault in Fault) >= len(Fault) - 2, outcomes
