"""The connector's worker half: one rank's engine blocks and its transfer node.

vLLM's model runner calls it on the thread that runs the model. Nothing here waits for a peer: the node has its own thread,
and the engine's only meets it to look up memory.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from kvtransfer.config import KvTransferSettings
from kvtransfer.connector.blocks import BlockArray, EngineBlocks
from kvtransfer.connector.place import CachePlace
from kvtransfer.connector.scheduler import Gather, Scatter, StepPlan
from kvtransfer.layout import PROTOCOL_VERSION
from kvtransfer.memory import device_memory, host_memory, pinned_memory
from kvtransfer.metrics import Observation
from kvtransfer.transports.base import Memory
from protos.ids import Incarnation, TransferId
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

LAYERS_LEFT = 2
"""A prompt whose last layers are being computed is nearly there: of 32 layers and 2,048 tokens of an 8B model two take 3 ms."""
PROBE_VARIABLE = "SPLITPOINT_KV_PROBE"
"""Test hook: a file to which every gather and scatter appends one JSON line with the hashes of the engine blocks."""


class Node(Protocol):
    """What the engine's thread needs of a transfer node (kvtransfer/node.py)."""

    def send_view(self, transfer_id: TransferId, first_block: int, num_blocks: int) -> BlockArray | None: ...

    def commit_chunk(
        self,
        transfer_id: TransferId,
        first_block: int,
        num_blocks: int,
        *,
        last: bool,
        ready: Callable[[], bool] | None = None,
        crcs: Any = None,
    ) -> None: ...

    def receive_view(self, transfer_id: TransferId) -> BlockArray | None: ...

    def scattered(self, transfer_id: TransferId, *, ready: Callable[[], bool] | None = None) -> bool: ...

    def take_observations(self) -> list[Observation]: ...

    def stop(self) -> None: ...


Probe = Callable[[str, TransferId, int, list[str]], None]
"""Called with "gather" or "scatter", the transfer, the first block's place in the prompt, and a hash of each engine block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What the engine adapter tells every rank, through `KVTransferConfig.kv_connector_extra_config`."""

    settings: KvTransferSettings
    incarnation: Incarnation
    control_token: str = field(repr=False)
    register_address: str
    model: str
    model_hash: str
    tokenizer_hash: str

    def to_extra_config(self) -> dict[str, Any]:
        """Plain values only: vLLM copies and pickles them."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "settings"}
        return {"splitpoint": {**plain, "settings": self.settings.model_dump(mode="json")}}

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> RankSettings:
        """The inverse. Raises `KeyError` or `ValueError` when it was written by something else."""
        plain = dict(extra["splitpoint"])
        return cls(settings=KvTransferSettings(**plain.pop("settings")), **plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """One rank's cache, as its engine describes it."""

    num_blocks: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    cache_dtype: str
    layout: str
    rank: int
    world_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    place: CachePlace | None = None
    """None: it cannot be told, and this rank exchanges KV with its equal alone."""


class WorkerHalf:
    """Carries out each step's plan on one rank. Owns the node. Belongs to the thread that runs the model.

    `probe` is for tests; without one, `SPLITPOINT_KV_PROBE` names a file.
    """

    def __init__(self, settings: RankSettings, *, probe: Probe | None = None) -> None:
        self._settings = settings
        self._probe = probe or _file_probe()
        self._blocks: EngineBlocks | None = None
        self._node: Node | None = None
        self._failed_blocks: set[int] = set()
        self._late_layer = ""
        self._nearly: Any = None
        """A mark before this step's last layers."""
        self._ends_prompt = False
        """This step's forward pass ends a prompt that is sent."""

    def register(self, layers: Mapping[str, torch.Tensor], facts: CacheFacts) -> None:
        """The cache is allocated: start the transfer node and register it with the worker's actor. Called once; blocks until
        the actor has answered.

        Raises:
            ValueError: the cache cannot be moved by whole blocks.
            SplitpointError, OSError: the node cannot listen or the actor refuses; the engine's start fails.
        """
        from kvtransfer.node import KvNode
        from kvtransfer.rpc import at_rank

        blocks = EngineBlocks(layers, facts.num_blocks)
        node = KvNode(
            at_rank(self._settings.settings, self._settings.register_address),
            rank=facts.rank,
            incarnation=self._settings.incarnation,
            compatibility=self._compatibility(blocks, facts),
            block_bytes=blocks.block_bytes,
            control_token=self._settings.control_token,
            memory=staging_allocator(self._settings.settings.staging_memory, blocks.device),
        )
        self.attach(blocks, node)
        endpoint = node.start()
        try:
            node.register(self._settings.register_address, facts.world_size)
        except BaseException:
            self.shutdown()
            raise
        logger.info("rank %d: transfer node at %s, %d bytes per block", facts.rank, endpoint.address, blocks.block_bytes)

    def attach(self, blocks: EngineBlocks, node: Node) -> None:
        """Take over a cache and a node that exist already."""
        self._blocks = blocks
        self._node = node
        self._late_layer = blocks.layers[max(0, len(blocks.layers) - 1 - LAYERS_LEFT)]

    def load(self, plan: StepPlan) -> None:
        """Before the forward pass: staging into engine blocks, each receive slot given back at once."""
        for scatter in plan.scatters:
            self._scatter(scatter)
        for transfer_id in plan.releases:
            self._need_node().scattered(transfer_id)
        self._ends_prompt = any(gather.last for gather in plan.gathers)
        self._nearly = None

    def computed(self, layer: str) -> None:
        """A layer's attention has been launched. Not called where one graph holds them all."""
        if self._ends_prompt and layer == self._late_layer:
            self._nearly = self._need_blocks().mark()

    def save(self, plan: StepPlan) -> None:
        """After the forward pass: engine blocks into staging. When it returns, vLLM may free and reuse the blocks."""
        for gather in plan.gathers:
            self._gather(gather)
        self._nearly = None

    def take_failed_blocks(self) -> set[int]:
        """Engine blocks whose load failed since the last call; vLLM fails their requests and forgets their hashes."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_observations(self) -> list[Observation]:
        """Ends of this rank's transfers since the last call; none without a node."""
        return [] if self._node is None else self._node.take_observations()

    def shutdown(self) -> None:
        """Stop the node. Idempotent."""
        node, self._node = self._node, None
        if node is not None:
            node.stop()

    def _gather(self, gather: Gather) -> None:
        node, blocks = self._need_node(), self._need_blocks()
        count = len(gather.block_ids)
        rows = node.send_view(gather.transfer_id, gather.first_block, count)
        if rows is None:
            # Released while the engine computed (abort, deadline), or never reserved; the node has counted it. Prefill's answer
            # is then refused by the seal check, never served from half a slot.
            logger.debug("transfer %s: no send slot at block %d", gather.transfer_id.hex(), gather.first_block)
            return
        rows = rows.reshape(count, blocks.block_bytes)
        crcs = None
        if self._settings.settings.checksum == "off":
            copy = blocks.gather(gather.block_ids, rows, self._nearly)
        else:
            copy, crcs = blocks.gather_checked(gather.block_ids, rows, self._nearly)
        if self._probe is not None:
            self._probe("gather", gather.transfer_id, gather.first_block, blocks.digests(gather.block_ids))
        node.commit_chunk(gather.transfer_id, gather.first_block, count, last=gather.last, ready=copy, crcs=crcs)

    def _scatter(self, scatter: Scatter) -> None:
        node, blocks = self._need_node(), self._need_blocks()
        rows = node.receive_view(scatter.transfer_id)
        count = len(scatter.block_ids)
        if rows is not None:
            rows = rows.reshape(-1, blocks.block_bytes)
        if rows is None or len(rows) < scatter.first_block + count:
            # The slot was verified before the request was submitted and only this step may give it back. If it is gone all the
            # same, the blocks hold garbage that is already in the prefix cache: vLLM must fail every request that touches them.
            logger.error(
                "transfer %s: receive slot of request %s is gone (%s rows, %d needed); failing the request",
                scatter.transfer_id.hex(),
                scatter.request_id,
                "no" if rows is None else len(rows),
                scatter.first_block + count,
            )
            self._failed_blocks.update(scatter.block_ids)
            if rows is not None:
                node.scattered(scatter.transfer_id)
            return
        copy = blocks.scatter(rows[scatter.first_block : scatter.first_block + count], scatter.block_ids)
        if self._probe is not None:
            self._probe("scatter", scatter.transfer_id, scatter.first_block, blocks.digests(scatter.block_ids))
        if not node.scattered(scatter.transfer_id, ready=copy):
            logger.error(
                "transfer %s: its sender used the slot again while request %s was loaded; failing the request",
                scatter.transfer_id.hex(),
                scatter.request_id,
            )
            self._failed_blocks.update(scatter.block_ids)

    def _compatibility(self, blocks: EngineBlocks, facts: CacheFacts) -> pb.KvCompatibility:
        compatibility = pb.KvCompatibility(
            protocol_version=PROTOCOL_VERSION,
            model=self._settings.model,
            model_revision=self._settings.model_hash,
            tokenizer_hash=self._settings.tokenizer_hash,
            cache_dtype=facts.cache_dtype,
            layout=facts.layout,
            block_tokens=facts.block_tokens,
            num_layers=blocks.num_layers,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            tensor_parallel_size=facts.tensor_parallel_size,
            pipeline_parallel_size=facts.pipeline_parallel_size,
            engine="vllm",
            block_bytes_per_layer=blocks.layer_block_bytes,
        )
        if facts.place is not None:
            facts.place.fill(compatibility)
        return compatibility

    def _need_node(self) -> Node:
        if self._node is None:
            raise RuntimeError("the transfer node is not running")
        return self._node

    def _need_blocks(self) -> EngineBlocks:
        if self._blocks is None:
            raise RuntimeError("the engine's KV cache is not registered")
        return self._blocks


def staging_allocator(where: Literal["auto", "host", "device"], device: torch.device) -> Callable[[int], Memory]:
    """Makes this rank's staging: on the GPU of its cache, or on the host, page-locked where a GPU copies to it. "auto": where the
    cache is.

    Raises:
        ValueError: staging on a device is asked for and the engine has none.
    """
    if device.type == "cpu":
        if where == "device":
            raise ValueError('kvtransfer.staging_memory = "device", but this engine computes on the CPU')
        return host_memory
    return pinned_memory if where == "host" else device_memory(device)


def _file_probe() -> Probe | None:
    path = os.environ.get(PROBE_VARIABLE)
    if not path:
        return None

    def append(event: str, transfer_id: TransferId, first_block: int, digests: list[str]) -> None:
        line = {"event": event, "transfer": transfer_id.hex(), "first_block": first_block, "digests": digests}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return append
