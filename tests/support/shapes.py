"""Workers of any shape: what each rank says of itself, and KV whose every byte tells where in the model it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from kvtransfer.layout import PROTOCOL_VERSION
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

UNIT_BYTES = 4
"""Of keys (or values) of one head and token."""


@dataclass(frozen=True)
class Shape:
    """One worker: tensor parallelism of `tp` over `total_heads`, pipeline stages of `stages` layers each."""

    tp: int = 1
    stages: tuple[int, ...] = (2,)
    total_heads: int = 2
    block_tokens: int = 4
    kernel_tokens: int = 0
    axes: str = "head,token"
    packing: str = "plain"

    @property
    def kernel(self) -> int:
        return self.kernel_tokens or self.block_tokens

    @property
    def heads(self) -> int:
        """Of one rank."""
        return max(1, self.total_heads // self.tp)

    @property
    def ranks(self) -> int:
        return self.tp * len(self.stages)

    def first_layer(self, rank: int) -> int:
        return sum(self.stages[: rank // self.tp])

    def layers(self, rank: int) -> int:
        return self.stages[rank // self.tp]

    def first_head(self, rank: int) -> int:
        """vLLM's rule: ranks beyond the number of heads replicate, neighbours the same head."""
        return rank % self.tp * self.total_heads // self.tp

    @property
    def row_bytes(self) -> int:
        """One layer of one block."""
        return self.heads * self.block_tokens * 2 * UNIT_BYTES

    def block_bytes(self, rank: int) -> int:
        return self.layers(rank) * self.row_bytes

    def compatibility(self, rank: int) -> pb.KvCompatibility:
        return pb.KvCompatibility(
            protocol_version=PROTOCOL_VERSION,
            model="test",
            model_revision="r1",
            tokenizer_hash="t1",
            cache_dtype="uint8",
            layout=f"test:{self.axes}:{self.heads}",
            block_tokens=self.block_tokens,
            num_layers=self.layers(rank),
            num_kv_heads=self.heads,
            head_dim=UNIT_BYTES,
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=len(self.stages),
            engine="test",
            block_bytes_per_layer=self.row_bytes,
            total_kv_heads=self.total_heads,
            first_kv_head=self.first_head(rank),
            total_layers=sum(self.stages),
            first_layer=self.first_layer(rank),
            axes=self.axes,
            kernel_block_tokens=self.kernel_tokens,
            packing=self.packing,
        )

    def slot(self, rank: int, num_tokens: int, prompt: int = 0, *, beyond: int = 0xEE) -> np.ndarray:
        """The slot of a prompt on this rank, `[blocks, block_bytes]`, written cell by cell. Behind the prompt every byte is
        `beyond`. Bytes that tokens do not address (an axis that is not named) are keyed by what is addressed."""
        blocks = -(-num_tokens // self.block_tokens)
        slot = np.full((blocks, self.block_bytes(rank)), beyond, dtype=np.uint8)
        for token, layer, head, kv in product(range(num_tokens), range(self.layers(rank)), range(self.heads), (0, 1)):
            where = layer * self.row_bytes + self._place(token % self.block_tokens, head, kv)
            value = cell(prompt, self.first_layer(rank) + layer, self.first_head(rank) + head, token, kv)
            slot[token // self.block_tokens, where : where + UNIT_BYTES] = value
        return slot

    def _place(self, token: int, head: int, kv: int) -> int:
        """Byte of a cell in its row. Axes that are not named come innermost, tokens and then keys and values."""
        named = self.axes.split(",") if self.axes else []
        order = [*named, *(axis for axis in ("token", "kv") if axis not in named)]
        kernel = self.kernel if "token" in named else self.block_tokens
        sizes: dict[str, int] = {"kv": 2, "sub": self.block_tokens // kernel, "head": self.heads, "token": kernel}
        at: dict[str, int] = {"kv": kv, "sub": token // kernel, "head": head, "token": token % kernel}
        place = 0
        for axis in order:
            place = place * sizes[axis] + at[axis]
        return place * UNIT_BYTES


def cell(prompt: int, layer: int, head: int, token: int, kv: int) -> np.ndarray:
    """Keys (kv 0) or values of one token in one head of one layer: four bytes that no other cell has, never all zero."""
    number = 1 + ((((prompt * 61 + layer) * 67 + head) * 1031 + token) * 2 + kv) * 2654435761 % (2**32 - 1)
    return np.frombuffer(number.to_bytes(4, "little"), dtype=np.uint8)


def shaped(shape: Shape, **fields: Any) -> list[pb.KvCompatibility]:
    """What each rank says, `fields` replaced."""
    made: Sequence[pb.KvCompatibility] = [shape.compatibility(rank) for rank in range(shape.ranks)]
    for one in made:
        one.MergeFrom(pb.KvCompatibility(**fields))
    return list(made)
