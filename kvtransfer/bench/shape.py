"""What is moved: a KV cache as an engine has it, and which of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIB = 1024 * 1024
LAYER_BYTES = 68 * 98_304
"""Of one layer of each half's cache: with 30 layers more than the largest transfer, so that its blocks lie scattered."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`layers` tensors of blocks; one block of one layer is contiguous."""

    name: str
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2

    @property
    def piece_bytes(self) -> int:
        """One block of one layer: what a path without staging moves at a time."""
        return 2 * self.kv_heads * self.head_dim * self.block_tokens * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.piece_bytes

    @property
    def cache_blocks(self) -> int:
        return LAYER_BYTES // self.piece_bytes

    def blocks(self, size_bytes: int) -> int:
        """Whole blocks nearest to a size, at least one."""
        return max(1, round(size_bytes / self.block_bytes))


REAL = Layout("128-token blocks", 128, 30, 3, 64)
"""SmolLM2-135M on a CPU: 30 layers, 3 KV heads of 64, bf16, vLLM's block of 128 tokens."""
SYNTHETIC = Layout("16-token pieces", 16, 30, 3, 64)
"""The same cache cut as a GPU's attention kernels cut theirs."""
LAYOUTS = {layout.name: layout for layout in (REAL, SYNTHETIC)}


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time: `transfers` prompts of `size_bytes` (nominal) each, as many of them under way at once as `depth`.

    `staged`: from slot to slot only, for paths that stage; otherwise from cache blocks to cache blocks. `what`: which
    operation, for a path that has several.
    """

    layout: str
    size_bytes: int
    transfers: int
    depth: int = 2
    staged: bool = False
    check: bool = True
    what: str = ""

    @property
    def num_blocks(self) -> int:
        return LAYOUTS[self.layout].blocks(self.size_bytes)

    @property
    def total_bytes(self) -> int:
        """What really moves."""
        return self.transfers * self.num_blocks * LAYOUTS[self.layout].block_bytes

    def block_ids(self, side: str) -> list[int]:
        """Where the blocks lie in the sender's or receiver's cache: in no order, as in an engine that has served a while."""
        seed = {"sender": 1, "receiver": 2}[side]
        shuffled = np.random.default_rng(seed).permutation(LAYOUTS[self.layout].cache_blocks)
        return [int(block) for block in shuffled[: self.num_blocks]]


def cache(side: str) -> list[np.ndarray]:
    """One flat array per layer, for every layout: the sender's random, the receiver's zero."""
    from kvtransfer.memory import host_memory

    layers = [host_memory(LAYER_BYTES) for _ in range(REAL.layers)]
    for number, layer in enumerate(layers):
        if side == "sender":
            layer[:] = _pattern(number)
        else:
            layer[:] = 0  # touched: a transfer does not pay for the kernel's first page
    return layers


def _pattern(layer: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(layer).bytes(LAYER_BYTES), np.uint8)


def as_layout(layers: list[np.ndarray], layout: Layout) -> list[np.ndarray]:
    """The same bytes as `[blocks, piece_bytes]`."""
    return [layer.reshape(-1, layout.piece_bytes) for layer in layers]


def verify(layers: list[np.ndarray], case: Case) -> None:
    """Raise `AssertionError` unless the receiver's blocks hold what the sender's were made of."""
    layout = LAYOUTS[case.layout]
    for number in (0, layout.layers // 2, layout.layers - 1):
        sent = _pattern(number).reshape(-1, layout.piece_bytes)
        got = layers[number].reshape(-1, layout.piece_bytes)
        for source, target in zip(case.block_ids("sender"), case.block_ids("receiver"), strict=True):
            assert np.array_equal(sent[source], got[target]), f"layer {number}: block {target} is not the sender's {source}"
