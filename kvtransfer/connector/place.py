"""Where one rank's cache lies in the model, and how one layer of one of its blocks is ordered: what a rank map needs. Pure.

What cannot be told for sure is not said: such a rank exchanges KV with its equal alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from protos.splitpoint.v1 import kv_transfer_pb2 as pb

# Dimensions of a layer's cache by their number, as vLLM's attention backends shape it. "block" is found by its size.
_FOUR = ("block", "head", "token", "element")
_FIVE = ("block", "token", "head", "element")  # with "kv" before or behind "block"
_THREE = ("block", "token", "element")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """The fields of `KvCompatibility` of the same names."""

    total_kv_heads: int
    first_kv_head: int
    total_layers: int
    first_layer: int
    axes: str
    kernel_block_tokens: int
    packing: str

    def fill(self, compatibility: pb.KvCompatibility) -> None:
        """Say it there."""
        for field in fields(self):
            setattr(compatibility, field.name, getattr(self, field.name))


def first_kv_head(rank: int, tensor_parallel_size: int, total_kv_heads: int) -> int:
    """vLLM's rule: consecutive ranks have consecutive heads, or replicate the same one where there are more ranks than heads."""
    return rank % tensor_parallel_size * total_kv_heads // tensor_parallel_size


def layer_range(names: Iterable[str]) -> tuple[int, int] | None:
    """First index and number of the layers that `names` ("model.layers.7.self_attn.attn") are, in order; None when they are not
    consecutive."""
    found = [re.search(r"\.(\d+)\.", f".{name}.") for name in names]
    indices = [int(match[1]) for match in found if match is not None]
    if not indices or len(indices) != len(found) or indices != list(range(indices[0], indices[0] + len(indices))):
        return None
    return indices[0], len(indices)


def row_axes(
    shape: Sequence[int], strides: Sequence[int], num_blocks: int, *, num_kv_heads: int, block_tokens: int, packed: bool
) -> tuple[str, int] | None:
    """The order of bytes in one layer of one block as a slot has it, outermost first, and the tokens of a kernel block.

    `packed`: what lies inside a head of a block has an order of its own. None: the cache has another shape than is known here.
    """
    block_dim = next((d for d, size in enumerate(shape) if size == num_blocks), None)
    if block_dim is None:
        block_dim = next((d for d, size in enumerate(shape) if size % num_blocks == 0), None)
    names = _names(shape, block_dim)
    if names is None or block_dim is None:
        return None
    kernel_blocks = shape[block_dim] // num_blocks
    known = {"kv": 2, "head": num_kv_heads, "token": block_tokens // kernel_blocks}
    if any(shape[names.index(name)] != size for name, size in known.items() if name in names):
        return None
    inner = sorted((d for d in range(len(shape)) if d != block_dim and shape[d] > 1), key=lambda d: -strides[d])
    # As a slot's row is cut: what has gaps comes first, then the kernel blocks, then what has none.
    outer = []
    while inner and strides[inner[0]] * shape[inner[0]] != _elements(shape, inner):
        outer.append(inner.pop(0))
    order = [names[d] for d in outer] + (["sub"] if kernel_blocks > 1 else []) + [names[d] for d in inner]
    order = [name for name in names if name not in (*order, "block")] + order  # of size 1: their place does not matter
    if packed:
        if "head" not in order or [name for name in order if name != "sub"][-2:] != ["token", "element"]:
            return None
        return ",".join(name for name in order if name in ("sub", "head")), block_tokens // kernel_blocks
    if order[-1] != "element" and shape[names.index("element")] > 1:
        return None
    return ",".join(name for name in order if name != "element"), block_tokens // kernel_blocks


def _names(shape: Sequence[int], block_dim: int | None) -> tuple[str, ...] | None:
    if len(shape) == 5 and block_dim in (0, 1):
        return ("kv", *_FIVE) if block_dim == 1 else (_FIVE[0], "kv", *_FIVE[1:])
    if block_dim != 0:
        return None
    return {3: _THREE, 4: _FOUR}.get(len(shape))


def _elements(shape: Sequence[int], dims: Iterable[int]) -> int:
    count = 1
    for d in dims:
        count *= shape[d]
    return count
