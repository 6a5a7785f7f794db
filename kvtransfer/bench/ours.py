"""Our own transports: two transfer nodes as engines use them. Options: `transport`, and fields of `KvTransferSettings`.

Sender: reserve, gather in steps, commit. Receiver: pull, scatter. All of it by the calls that a worker makes: control over gRPC,
capability, seal, checksum of every chunk.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import numpy as np

from kvtransfer.bench.shape import LAYOUTS, MIB, Case, Layout, as_layout, cache, verify
from kvtransfer.config import KvTransferSettings
from kvtransfer.connector.host_blocks import HostBlocks
from kvtransfer.control import RankControl
from kvtransfer.layout import PROTOCOL_VERSION
from kvtransfer.node import KvNode
from protos.ids import new_incarnation
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

TOKEN = "bench"
REMAINING_S = 60.0
STAGING_BYTES = 288 * MIB


class _Half:
    """A node per layout, and the cache that its engine would have."""

    side = ""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = dict(options)
        self._transport = self._options.pop("transport")
        self._runner = asyncio.Runner()
        self._nodes: dict[tuple[str, bool], KvNode] = {}
        self._controls: dict[tuple[str, bool], RankControl] = {}
        self._theirs: dict[tuple[str, bool], pb.RankEndpoint] = {}

    def setup(self) -> dict[Any, Any]:
        self._cache = cache(self.side)
        self._blocks = {name: make_blocks(self._cache, layout) for name, layout in LAYOUTS.items()}
        facts = {}
        for name, layout in LAYOUTS.items():
            for check in (True, False):
                node = make_node(self.side, self._transport, layout, check=check, options=self._options)
                facts[name, check] = node.start().SerializeToString()
                self._nodes[name, check] = node
        return facts

    def connect(self, facts: dict[Any, bytes]) -> None:
        self._theirs = {key: pb.RankEndpoint.FromString(value) for key, value in facts.items()}
        self._runner.run(self._dial())

    async def _dial(self) -> None:
        self._controls = {key: RankControl([node.endpoint], TOKEN) for key, node in self._nodes.items()}

    def run(self, case: Case) -> float | None:
        return self._runner.run(self._run(case))

    async def _run(self, case: Case) -> float | None:
        raise NotImplementedError

    def verify(self, case: Case) -> None:
        verify(self._cache, case)

    def close(self) -> None:
        async def hang_up() -> None:
            for control in self._controls.values():
                await control.close()

        self._runner.run(hang_up())
        for node in self._nodes.values():
            node.stop()
        self._runner.close()


def make_node(side: str, transport: str, layout: Layout, *, check: bool, options: dict[str, Any]) -> KvNode:
    """A node that sends or receives this layout's blocks, not started. `options`: fields of `KvTransferSettings`.

    It reserves address space only: pages come at first touch.
    """
    settings = KvTransferSettings(
        transports=(transport,),
        default_transport=transport,
        send_staging_bytes=STAGING_BYTES if side == "sender" else MIB,
        receive_staging_bytes=STAGING_BYTES if side == "receiver" else MIB,
        checksum="crc32c" if check else "off",
        **options,
    )
    compatibility = pb.KvCompatibility(
        protocol_version=PROTOCOL_VERSION,
        model="bench",
        layout="flat",
        block_tokens=layout.block_tokens,
        num_layers=layout.layers,
        num_kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        engine="bench",
        block_bytes_per_layer=layout.piece_bytes,
    )
    return KvNode(
        settings,
        rank=0,
        incarnation=new_incarnation(),
        compatibility=compatibility,
        block_bytes=layout.block_bytes,
        control_token=TOKEN,
    )


def make_blocks(layers: list[np.ndarray], layout: Layout) -> HostBlocks:
    """A half's cache as its engine would gather and scatter it."""
    return HostBlocks([(i * layout.piece_bytes, a) for i, a in enumerate(as_layout(layers, layout))])


def grants(case: Case, serial: int) -> list[pb.TransferGrant]:
    """The same on both sides, different in every run."""
    made = []
    for number in range(case.transfers):
        digest = hashlib.sha256(f"{case} {serial} {number}".encode()).digest()
        made.append(pb.TransferGrant(transfer_id=digest[:16], capability=digest[16:]))
    return made


class Sender(_Half):
    side = "sender"
    _serial = 0

    async def _run(self, case: Case) -> float | None:
        self._serial += 1
        node = self._nodes[case.layout, case.check]
        control = self._controls[case.layout, case.check]
        ids = case.block_ids("sender")
        for grant in grants(case, self._serial):
            await control.reserve(
                grant,
                prompt_tokens=case.num_blocks * LAYOUTS[case.layout].block_tokens,
                token_hash=grant.transfer_id * 2,
                remaining_s=REMAINING_S,
            )
            self._gather(node, grant.transfer_id, ids, case)
        return None

    def _gather(self, node: KvNode, transfer_id: bytes, ids: list[int], case: Case) -> None:
        layout = LAYOUTS[case.layout]
        chunk_bytes = self._options.get("chunk_bytes", KvTransferSettings().chunk_bytes)
        step = max(1, chunk_bytes // layout.block_bytes)
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            rows = node.send_view(transfer_id, first, len(part))
            if rows is None:
                raise RuntimeError("the transfer ended while it was gathered")
            crcs = self._blocks[case.layout].gather(part, rows, check=case.check)
            node.commit_chunk(transfer_id, first, len(part), last=first + len(part) == len(ids), crcs=crcs)


class Receiver(_Half):
    side = "receiver"
    _serial = 0

    async def _run(self, case: Case) -> float | None:
        self._serial += 1
        node = self._nodes[case.layout, case.check]
        control = self._controls[case.layout, case.check]
        ids = case.block_ids("receiver")
        room = asyncio.Semaphore(case.depth)
        begun = time.perf_counter()

        async def one(grant: pb.TransferGrant) -> None:
            async with room:
                await control.pull(
                    grant,
                    attempt_id="bench",
                    senders=[self._theirs[case.layout, case.check]],
                    prompt_tokens=case.num_blocks * LAYOUTS[case.layout].block_tokens,
                    token_hash=grant.transfer_id * 2,
                    transport=self._transport,
                    remaining_s=REMAINING_S,
                )
                if not case.staged:
                    rows = node.receive_view(grant.transfer_id)
                    if rows is None:
                        raise RuntimeError("nothing is staged after a pull that succeeded")
                    self._blocks[case.layout].scatter(np.asarray(rows), ids)
                if not node.scattered(grant.transfer_id):
                    raise RuntimeError("the sender used its slot again")

        await asyncio.gather(*(one(grant) for grant in grants(case, self._serial)))
        return time.perf_counter() - begun


def sender(options: dict[str, Any]) -> Sender:
    return Sender(options)


def receiver(options: dict[str, Any]) -> Receiver:
    return Receiver(options)
