"""Real transfer nodes of two workers of different shapes, in one process, with KV that tells where it belongs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtransfer.config import KvTransferSettings
from kvtransfer.control import RankControl
from kvtransfer.node import KvNode
from kvtransfer.transports.base import Transport
from protos.ids import new_capability, new_incarnation, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import TOKEN, small_settings, until
from tests.support.shapes import Shape

Transports = Callable[[], Sequence[Transport]]


class ShapeTransfer:
    """One prompt on its way."""

    def __init__(self, pair: ShapePair, num_tokens: int, transport: str, prompt: int) -> None:
        self.pair, self.num_tokens, self.transport, self.prompt = pair, num_tokens, transport, prompt
        self.hash = token_hash(list(range(prompt, prompt + num_tokens)))
        self.grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())

    @property
    def id(self) -> bytes:
        return self.grant.transfer_id

    async def reserve(self, remaining_s: float = 20.0, **more: Any) -> None:
        await self.pair.send_control.reserve(
            self.grant, prompt_tokens=self.num_tokens, token_hash=self.hash, remaining_s=remaining_s, **more
        )

    async def pull(self, remaining_s: float = 20.0, **more: Any) -> list[pb.PullResponse]:
        return await self.pair.receive_control.pull(
            self.grant,
            attempt_id="att-test",
            senders=[node.endpoint for node in self.pair.senders],
            prompt_tokens=self.num_tokens,
            token_hash=self.hash,
            transport=self.transport,
            remaining_s=remaining_s,
            **more,
        )

    def gather(self, rank: int, first: int = 0, end: int | None = None) -> None:
        """Write and commit blocks of one rank, as its engine would."""
        rows = self.pair.p.slot(rank, self.num_tokens, self.prompt)
        end = len(rows) if end is None else end
        view = self.pair.senders[rank].send_view(self.id, first, end - first)
        assert view is not None
        view[:] = rows[first:end]
        self.pair.senders[rank].commit_chunk(self.id, first, end - first, last=end == len(rows))

    def gather_all(self) -> None:
        for rank in range(self.pair.p.ranks):
            self.gather(rank)

    def assert_scattered(self) -> None:
        """Every rank's engine finds each byte of its KV in its place, and gives its slot back."""
        d = self.pair.d
        for rank, node in enumerate(self.pair.receivers):
            view = node.receive_view(self.id)
            assert view is not None, f"rank {rank} has nothing"
            right = d.slot(rank, self.num_tokens, self.prompt)
            inside = d.slot(rank, self.num_tokens, beyond=0) == d.slot(rank, self.num_tokens, beyond=1)
            for block in range(len(right)):
                mine = inside[block]
                assert np.array_equal(view[block][mine], right[block][mine]), f"rank {rank} block {block}"
            node.scattered(self.id)


class ShapePair:
    """Started senders of shape `p` and receivers of shape `d`. `async with` it; leaving it stops everything."""

    def __init__(self, p: Shape, d: Shape, *, make_transports: Transports | None = None, **settings: Any) -> None:
        self.p, self.d = p, d
        known = small_settings(**{"progress_timeout_s": 10.0, "send_staging_bytes": 1 << 20, **_ROOM, **settings})
        self.senders = _nodes(p, known, make_transports)
        self.receivers = _nodes(d, known, make_transports)

    async def __aenter__(self) -> ShapePair:
        for node in self.nodes:
            await asyncio.to_thread(node.start)
        self.send_control = RankControl([node.endpoint for node in self.senders], TOKEN)
        self.receive_control = RankControl([node.endpoint for node in self.receivers], TOKEN)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.send_control.close()
        await self.receive_control.close()
        await asyncio.gather(*(asyncio.to_thread(node.stop) for node in self.nodes))

    @property
    def nodes(self) -> list[KvNode]:
        return [*self.senders, *self.receivers]

    def transfer(self, num_tokens: int, transport: str = "grpc", prompt: int = 0) -> ShapeTransfer:
        return ShapeTransfer(self, num_tokens, transport, prompt)

    async def settled(self, timeout_s: float = 10.0) -> None:
        """Until no node holds anything. Raises `TimeoutError` with every node's status."""
        try:
            await until(lambda: all(_idle(node.status()) for node in self.nodes), timeout_s)
        except TimeoutError:
            raise TimeoutError("\n".join(str(node.status()) for node in self.nodes)) from None


_ROOM = {"receive_staging_bytes": 1 << 20, "pack_staging_bytes": 1 << 20, "chunk_bytes": 1024, "grpc_message_bytes": 700}


def _nodes(shape: Shape, settings: KvTransferSettings, make_transports: Transports | None) -> list[KvNode]:
    incarnation = new_incarnation()
    return [
        KvNode(
            settings,
            rank=rank,
            incarnation=incarnation,
            compatibility=shape.compatibility(rank),
            block_bytes=shape.block_bytes(rank),
            control_token=TOKEN,
            transports=None if make_transports is None else make_transports(),
        )
        for rank in range(shape.ranks)
    ]


def _idle(status: pb.GetNodeStatusResponse) -> bool:
    held = [pool.used_bytes + pool.quarantined_bytes for pool in (status.send, status.receive, status.pack)]
    return not any(held) and status.leases == 0 and status.sessions == 0
