"""The simulated engine's side of KV transfer: one real transfer node per rank, with bytes that prove themselves.

The model keeps no KV memory. What a head of a layer holds of a block is a function of the block's token prefix
(`sim_tokens.kv_block`); it is written into send staging in the step that computes it, and compared in receive staging before the
request counts it as computed. Ranks share the heads and layers as vLLM's do, so engines of different shape exchange KV.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.config import EngineSettings, KvEngineConfig
from engine.protocol import EngineDeadError
from engine.sim_tokens import kv_block
from kvtransfer.connector.place import first_kv_head
from kvtransfer.layout import PROTOCOL_VERSION
from protos.ids import TransferId
from protos.splitpoint.v1 import kv_transfer_pb2

_log = logging.getLogger(__name__)


class RankNode(Protocol):
    """The part of `kvtransfer.node.KvNode` that an engine uses."""

    def start(self) -> kv_transfer_pb2.RankEndpoint: ...
    def register(self, address: str, world_size: int) -> None: ...
    def stop(self) -> None: ...
    def send_view(self, transfer_id: TransferId, first_block: int, num_blocks: int) -> Any | None: ...
    def commit_chunk(
        self, transfer_id: TransferId, first_block: int, num_blocks: int, *, last: bool, ready: Callable[[], bool] | None = None
    ) -> None: ...
    def staged(self, transfer_id: TransferId) -> bool: ...
    def receive_view(self, transfer_id: TransferId) -> Any | None: ...
    def scattered(self, transfer_id: TransferId) -> bool: ...
    def counters(self) -> dict[str, int]: ...


NodeFactory = Callable[[int, kv_transfer_pb2.KvCompatibility], RankNode]
"""Makes the node of one rank; it is not started."""


class KvCorruptionError(EngineDeadError):
    """A staged block does not hold the KV of its prompt. A real engine would now answer from wrong KV; this one dies."""


@dataclass(slots=True)
class SendProgress:
    """How far one request's prompt has been gathered."""

    transfer_id: TransferId
    digests: list[bytes]
    prompt_tokens: int
    gathered_blocks: int = 0
    refused: bool = False


HEADS = 4
"""KV heads of the simulated model; 1 where `block_bytes`, which all heads of a layer share, is no multiple of it."""


def heads_of(settings: EngineSettings) -> int:
    """KV heads of the model."""
    return HEADS if settings.simulated.block_bytes % HEADS == 0 else 1


def compatibility(
    settings: EngineSettings, kv: KvEngineConfig, block_tokens: int, rank: int = 0
) -> kv_transfer_pb2.KvCompatibility:
    """What a rank says of its KV. One layer to a pipeline stage."""
    simulated = settings.simulated
    heads, tp = heads_of(settings), settings.tensor_parallel_size
    own_heads = max(1, heads // tp)
    identity = f"{settings.served_model_name}/{settings.seed}/{simulated.vocab_size}"
    return kv_transfer_pb2.KvCompatibility(
        protocol_version=PROTOCOL_VERSION,
        model=settings.served_model_name,
        model_revision=kv.model_hash or hashlib.sha256(identity.encode()).hexdigest()[:16],
        tokenizer_hash=kv.tokenizer_hash,
        cache_dtype="uint8",
        layout="simulated:prefix-digest",
        block_tokens=block_tokens,
        num_layers=1,
        num_kv_heads=own_heads,
        head_dim=1,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        engine="simulated",
        block_bytes_per_layer=simulated.block_bytes // heads * own_heads,
        total_kv_heads=heads,
        first_kv_head=first_kv_head(rank, tp, heads),
        total_layers=settings.pipeline_parallel_size,
        first_layer=rank // tp,
        axes="head",
        packing="simulated:prefix-digest",
    )


def kv_node_factory(kv: KvEngineConfig) -> NodeFactory:
    """The real thing: `kvtransfer.node.KvNode` over host memory."""

    def make(rank: int, compat: kv_transfer_pb2.KvCompatibility) -> RankNode:
        from kvtransfer.node import KvNode  # brings transports; a simulated engine without KV transfer needs none
        from kvtransfer.rpc import at_rank

        return KvNode(
            at_rank(kv.settings, kv.register_address),
            rank=rank,
            incarnation=kv.incarnation,
            compatibility=compat,
            block_bytes=compat.block_bytes_per_layer,
            control_token=kv.control_token,
        )

    return make


@dataclass(frozen=True, slots=True)
class _Rank:
    node: RankNode
    cells: tuple[int, ...]
    """Its heads, counted through all layers."""
    cell_bytes: int

    @property
    def block_bytes(self) -> int:
        return len(self.cells) * self.cell_bytes

    def block(self, digest: bytes) -> npt.NDArray[np.uint8]:
        """What a block of that prefix holds on this rank."""
        return np.concatenate([kv_block(digest, cell, self.cell_bytes) for cell in self.cells])


class SimKv:
    """All ranks' nodes of one simulated engine. `start` and `stop` belong to the event loop; the rest is called in steps."""

    def __init__(self, kv: KvEngineConfig, settings: EngineSettings, block_tokens: int, factory: NodeFactory) -> None:
        self._register_address = kv.register_address
        self._block_tokens = block_tokens
        heads = heads_of(settings)
        self._ranks: list[_Rank] = []
        for rank in range(settings.world_size):
            compat = compatibility(settings, kv, block_tokens, rank)
            first = compat.first_layer * heads + compat.first_kv_head
            cells = tuple(range(first, first + compat.num_kv_heads))
            self._ranks.append(_Rank(factory(rank, compat), cells, settings.simulated.block_bytes // heads))
        self._nodes = [rank.node for rank in self._ranks]
        self._started: list[RankNode] = []
        self.events: Counter[str] = Counter()

    async def start(self) -> None:
        """Start every rank's node and register it with the worker."""
        for node in self._nodes:
            self._started.append(node)
            await asyncio.to_thread(node.start)
            await asyncio.to_thread(node.register, self._register_address, len(self._nodes))

    async def stop(self) -> None:
        """Stop what was started. Idempotent."""
        while self._started:
            await asyncio.to_thread(self._started.pop().stop)

    def gather(self, progress: SendProgress, computed_tokens: int) -> None:
        """Write what this step completed into every rank's slot: whole blocks, and the partial one when the prompt is done."""
        last = computed_tokens >= progress.prompt_tokens
        ready = len(progress.digests) if last else computed_tokens // self._block_tokens
        first, count = progress.gathered_blocks, ready - progress.gathered_blocks
        if progress.refused or count <= 0:
            return
        for number, rank in enumerate(self._ranks):
            node = rank.node
            view = node.send_view(progress.transfer_id, first, count)
            if view is None:
                # The reservation is gone (released, expired): the prompt is still computed, but nobody will fetch it.
                progress.refused = True
                self.events["gather_without_slot"] += 1
                _log.warning("no send slot transfer_id=%s rank=%d first_block=%d", progress.transfer_id.hex(), number, first)
                return
            blocks = [rank.block(progress.digests[i]) for i in range(first, ready)]
            view[...] = np.concatenate(blocks).reshape(view.shape)
            node.commit_chunk(progress.transfer_id, first, count, last=last)
        progress.gathered_blocks = ready

    def staged(self, transfer_id: TransferId) -> bool:
        """Every rank holds this transfer, verified."""
        return all(node.staged(transfer_id) for node in self._nodes)

    def load(self, transfer_id: TransferId, digests: list[bytes]) -> None:
        """Take `len(digests)` blocks out of every rank's staging, comparing each byte.

        Raises:
            KvCorruptionError: a block holds something else, names the rank and the block.
        """
        for number, rank in enumerate(self._ranks):
            node = rank.node
            view = node.receive_view(transfer_id)
            if view is None:
                raise KvCorruptionError(f"transfer {transfer_id.hex()} vanished from rank {number} between planning and loading")
            rows = np.asarray(view).reshape(-1, rank.block_bytes)
            for index, digest in enumerate(digests):
                if index >= len(rows) or not np.array_equal(rows[index], rank.block(digest)):
                    raise KvCorruptionError(f"transfer {transfer_id.hex()}: rank {number} block {index} holds other KV")
            if not node.scattered(transfer_id):
                raise KvCorruptionError(f"transfer {transfer_id.hex()}: its sender used rank {number}'s bytes again meanwhile")
        self.events["blocks_loaded"] += len(digests) * len(self._nodes)

    def counters(self) -> dict[str, int]:
        """This side's events and the sum of the nodes' counters (prefixed `node_`)."""
        total: Counter[str] = Counter(self.events)
        for node in self._nodes:
            for name, value in node.counters().items():
                total[f"node_{name}"] += value
        return dict(total)
