"""KV transfer in one process's memory: nodes and rank control by the real contract, no wire, doors that tests can hold shut."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from engine.config import KvEngineConfig
from kvtransfer.layout import fingerprint
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as kv
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc


@dataclass(eq=False)
class Slot:
    grant: kv.TransferGrant
    seal: kv.Seal
    memory: np.ndarray
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class Fabric:
    """All nodes of one test, by address. `hold` shuts an operation's door ("reserve", "pull", "status") until `let_go`."""

    def __init__(self) -> None:
        self.nodes: dict[str, MemoryNode] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.corrupt = False

    def hold(self, operation: str) -> asyncio.Event:
        """Shut a door; returns the event that is set when somebody stands before it."""
        self.gates[operation] = asyncio.Event()
        self.reached[operation] = asyncio.Event()
        return self.reached[operation]

    def let_go(self, operation: str) -> None:
        self.gates.pop(operation).set()

    async def door(self, operation: str) -> None:
        gate = self.gates.get(operation)
        if gate is not None:
            self.reached[operation].set()
            await gate.wait()

    def slots(self) -> int:
        return sum(len(n.send) + len(n.receive) for n in self.nodes.values())

    def factory(
        self, config: KvEngineConfig, block_bytes: int, staging_blocks: int
    ) -> Callable[[int, kv.KvCompatibility], MemoryNode]:
        return lambda rank, compat: MemoryNode(self, config, rank, compat, block_bytes, staging_blocks)

    def control(self, endpoints: Sequence[kv.RankEndpoint], token: str) -> MemoryControl:
        return MemoryControl(self, endpoints)


class MemoryNode:
    def __init__(
        self, fabric: Fabric, config: KvEngineConfig, rank: int, compat: kv.KvCompatibility, block_bytes: int, staging_blocks: int
    ) -> None:
        self.fabric, self.config, self.compat = fabric, config, compat
        self.block_bytes, self.capacity = block_bytes, staging_blocks
        self.address = f"memory-{config.incarnation}-{rank}:1"
        self.endpoint = kv.RankEndpoint(rank=rank, address=self.address, host_id="test", incarnation=config.incarnation)
        self.send: dict[bytes, Slot] = {}
        self.receive: dict[bytes, Slot] = {}
        self.freed = asyncio.Event()
        self.alive = True
        self.events: Counter[str] = Counter()

    def start(self) -> kv.RankEndpoint:
        self.fabric.nodes[self.address] = self
        return self.endpoint

    def register(self, address: str, world_size: int) -> None:
        with grpc.insecure_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            stub.RegisterRank(
                worker_pb2.RegisterRankRequest(
                    endpoint=self.endpoint,
                    compatibility=self.compat,
                    world_size=world_size,
                    send_staging_bytes=self.capacity * self.block_bytes,
                    receive_staging_bytes=self.capacity * self.block_bytes,
                    bytes_per_block=self.block_bytes,
                    transports=["grpc"],
                ),
                metadata=(("x-splitpoint-control-token", self.config.control_token),),
                timeout=10,
            )

    def stop(self) -> None:
        self.alive = False
        for slot in [*self.send.values(), *self.receive.values()]:
            slot.lost.set()
        self.fabric.nodes.pop(self.address, None)

    def send_view(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Any | None:
        slot = self.send.get(transfer_id)
        if slot is None or first_block + num_blocks > len(slot.memory):
            return None
        return slot.memory[first_block : first_block + num_blocks]

    def commit_chunk(
        self, transfer_id: bytes, first_block: int, num_blocks: int, *, last: bool, ready: Any = None, crcs: Any = None
    ) -> None:
        slot = self.send.get(transfer_id)
        if slot is not None and last:
            slot.complete.set()

    def staged(self, transfer_id: bytes) -> bool:
        return self.receive_view(transfer_id) is not None

    def receive_view(self, transfer_id: bytes) -> Any | None:
        slot = self.receive.get(transfer_id)
        return slot.memory if slot is not None and slot.complete.is_set() else None

    def scattered(self, transfer_id: bytes, *, ready: Any = None) -> bool:
        self.events["scattered"] += 1
        self.free(self.receive, transfer_id)
        return True

    def counters(self) -> dict[str, int]:
        return dict(self.events)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.compat.block_tokens)

    async def take_within(
        self, wait_s: float | None, pool: dict[bytes, Slot], grant: kv.TransferGrant, tokens: int, token_hash: bytes
    ) -> Slot:
        try:
            async with asyncio.timeout(wait_s):
                return await self.take(pool, grant, tokens, token_hash)
        except TimeoutError:
            raise SplitpointError(Code.STAGING_FULL, "no staging") from None

    async def take(self, pool: dict[bytes, Slot], grant: kv.TransferGrant, tokens: int, token_hash: bytes) -> Slot:
        need = self.blocks(tokens)
        while sum(len(s.memory) for s in pool.values()) + need > self.capacity:
            self.freed.clear()
            await self.freed.wait()
        seal = kv.Seal(
            transfer_id=grant.transfer_id,
            prompt_tokens=tokens,
            token_hash=token_hash,
            fingerprint=fingerprint(self.compat),
            incarnation=self.config.incarnation,
            num_chunks=1,
            bytes=need * self.block_bytes,
        )
        slot = Slot(grant, seal, np.zeros((need, self.block_bytes), dtype=np.uint8))
        pool[grant.transfer_id] = slot
        return slot

    def free(self, pool: dict[bytes, Slot], transfer_id: bytes) -> bool:
        slot = pool.pop(transfer_id, None)
        if slot is None:
            return False
        slot.lost.set()
        self.freed.set()
        return True


class MemoryControl:
    """`RankControl` over the fabric."""

    def __init__(self, fabric: Fabric, endpoints: Sequence[kv.RankEndpoint]) -> None:
        self.fabric, self.endpoints = fabric, list(endpoints)

    def _nodes(self) -> list[MemoryNode]:
        return [self.fabric.nodes[e.address] for e in self.endpoints if e.address in self.fabric.nodes]

    async def reserve(
        self,
        grant: kv.TransferGrant,
        *,
        prompt_tokens: int,
        token_hash: bytes,
        remaining_s: float,
        staging_wait_s: float | None = None,
    ) -> list[kv.ReserveResponse]:
        await self.fabric.door("reserve")
        for node in self._nodes():
            await node.take_within(staging_wait_s, node.send, grant, prompt_tokens, token_hash)
        return [kv.ReserveResponse(generation=1) for _ in self.endpoints]

    async def pull(
        self,
        grant: kv.TransferGrant,
        *,
        attempt_id: str,
        senders: Sequence[kv.RankEndpoint],
        prompt_tokens: int,
        token_hash: bytes,
        transport: str,
        remaining_s: float,
        staging_wait_s: float | None = None,
    ) -> list[kv.PullResponse]:
        return [
            await self._pull_one(node, sender, grant, prompt_tokens, token_hash, staging_wait_s)
            for node, sender in zip(self._nodes(), senders, strict=True)
        ]

    async def _pull_one(
        self,
        node: MemoryNode,
        sender: kv.RankEndpoint,
        grant: kv.TransferGrant,
        tokens: int,
        token_hash: bytes,
        staging_wait_s: float | None,
    ) -> kv.PullResponse:
        target = await node.take_within(staging_wait_s, node.receive, grant, tokens, token_hash)
        peer = self.fabric.nodes.get(sender.address)
        source = None if peer is None else peer.send.get(grant.transfer_id)
        while peer is not None and source is None and peer.alive:
            await asyncio.sleep(0)
            source = peer.send.get(grant.transfer_id)
        if peer is None or source is None:
            raise SplitpointError(Code.TRANSFER_FAILED, "peer_lost: the sender is gone")
        await self.fabric.door("pull")
        await first_of(source.complete, source.lost, target.lost)
        if not source.complete.is_set() or source.lost.is_set() or target.lost.is_set():
            raise SplitpointError(Code.TRANSFER_FAILED, "peer_lost: the transfer was cut off")
        target.memory[...] = source.memory
        if self.fabric.corrupt:
            target.memory[0, 0] ^= 0xFF
        peer.free(peer.send, grant.transfer_id)
        target.complete.set()
        return kv.PullResponse(seal=source.seal, bytes=target.memory.nbytes, seconds=0.001, transport="grpc")

    async def release(self, transfer_id: bytes, reason: str) -> bool:
        known = [node.free(pool, transfer_id) for node in self._nodes() for pool in (node.send, node.receive)]
        return any(known)

    async def status(self) -> list[kv.GetNodeStatusResponse]:
        await self.fabric.door("status")
        return [kv.GetNodeStatusResponse(leases=len(n.send), sessions=len(n.receive)) for n in self._nodes()]

    async def metrics(self) -> list[bytes | None]:
        return [None for _ in self._nodes()]

    async def close(self) -> None: ...


async def first_of(*events: asyncio.Event) -> None:
    """Returns when any of the events is set."""
    tasks = [asyncio.create_task(e.wait()) for e in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
