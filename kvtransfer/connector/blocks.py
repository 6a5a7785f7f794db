"""Engine blocks as plain bytes: gather them into a slot, scatter a slot into them.

A slot's row is one block: the bytes of layer 0, then of layer 1, and so on. A layer's tensor may have any strides (layers
interleaved, heads outside tokens, key and value apart): a layer is cut into the fewest *segments* that are contiguous
inside a block, and only whole blocks are ever copied, so that no order inside a block needs to be understood here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtransfer.connector.host_blocks import HostBlocks
from kvtransfer.memory import as_host

if TYPE_CHECKING:
    from kvtransfer.connector.cuda_blocks import DeviceCopy

BlockArray = Any
"""Rows of blocks, uint8: a NumPy array, or a torch tensor where staging is device memory."""


def block_segments(layer: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Views `[num_blocks, bytes]` (uint8) that together are every byte of `layer`, each contiguous inside a block.

    The block dimension is the first whose size is `num_blocks`, or a multiple of it when the attention kernel splits the
    scheduler's block.

    Raises:
        ValueError: no dimension counts blocks, elements have gaps between them, or a split block is not contiguous.
    """
    sizes, strides = list(layer.shape), list(layer.stride())
    block_dim = next((d for d, size in enumerate(sizes) if size == num_blocks), None)
    split = 1
    if block_dim is None:
        block_dim = next((d for d, size in enumerate(sizes) if size % num_blocks == 0), None)
        if block_dim is None:
            raise ValueError(f"no dimension of a cache of shape {tuple(sizes)} counts {num_blocks} blocks")
        split = sizes[block_dim] // num_blocks
    block_stride = strides[block_dim]
    inner = sorted(((strides[d], sizes[d]) for d in range(len(sizes)) if d != block_dim and sizes[d] > 1), reverse=True)
    if inner and inner[-1][0] != 1:
        raise ValueError(f"a cache of strides {tuple(strides)} has gaps between elements")
    outer: list[tuple[int, int]] = []
    # Peel the outermost dimensions off until what is left has no gaps.
    while inner and inner[0][0] * inner[0][1] != _elements(inner):
        outer.append(inner.pop(0))
    elements = _elements(inner)
    if split > 1:
        if block_stride != elements:
            raise ValueError(f"kernel blocks of a cache of strides {tuple(strides)} are not adjacent")
        elements *= split
        block_stride *= split
    item = layer.element_size()
    storage = torch.empty(0, dtype=torch.uint8, device=layer.device).set_(layer.untyped_storage())
    return [
        storage.as_strided(
            (num_blocks, elements * item),
            (block_stride * item, 1),
            (layer.storage_offset() + sum(i * stride for i, (stride, _) in zip(index, outer, strict=True))) * item,
        )
        for index in product(*(range(size) for _, size in outer))
    ]


def _elements(dims: Sequence[tuple[int, int]]) -> int:
    count = 1
    for _, size in dims:
        count *= size
    return count


class EngineBlocks:
    """All layers of one rank's KV cache, addressed by engine block id. Belongs to the engine's thread.

    Layers that share one tensor are moved once. `block_bytes` is the length of a slot's row.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        distinct = {(t.data_ptr(), t.stride(), t.shape): t for t in layers.values()}
        per_layer = [block_segments(layer, num_blocks) for layer in distinct.values()]
        layer_bytes = [sum(s.shape[1] for s in segments) for segments in per_layer]
        if not layer_bytes:
            raise ValueError("the engine has no KV cache")
        if len(set(layer_bytes)) != 1:
            raise ValueError(f"layers differ in bytes per block: {sorted(set(layer_bytes))}")
        self.layers = tuple(layers)
        """Their names, in the model's order."""
        self.num_layers = len(per_layer)
        self.layer_block_bytes = layer_bytes[0]
        self.block_bytes = sum(layer_bytes)
        self.device = next(iter(distinct.values())).device
        self._segments: list[tuple[int, torch.Tensor]] = []
        offset = 0
        for segment in (s for segments in per_layer for s in segments):
            self._segments.append((offset, segment))
            offset += segment.shape[1]
        on_host = self.device.type == "cpu"
        self._cuda: Any = None
        if not on_host:
            # Needs Triton, which only GPU builds of torch bring.
            from kvtransfer.connector.cuda_blocks import CudaBlocks

            self._cuda = CudaBlocks(self._segments, self.block_bytes, self.device)
        self._host = HostBlocks([(start, segment.numpy()) for start, segment in self._segments]) if on_host else None

    def mark(self) -> Any:
        """A place in the engine's work on its device, as `gather` takes it; None on the host."""
        return None if self._cuda is None else self._cuda.mark()

    def gather(self, block_ids: Sequence[int], rows: BlockArray, nearly: Any = None) -> DeviceCopy | None:
        """Copy engine blocks into `rows` `[len(block_ids), block_bytes]`. `nearly`: a `mark` that is passed shortly before.

        Returns None when the bytes are there already, or the copy that will bring them. The blocks may be written again by
        anything that comes later on the current stream.
        """
        if self._host is None:
            copy: DeviceCopy = self._cuda.gather(block_ids, _as_tensor(rows), nearly)
            return copy
        self._host.gather(block_ids, as_host(rows))
        return None

    def gather_checked(self, block_ids: Sequence[int], rows: BlockArray, nearly: Any = None) -> tuple[DeviceCopy | None, Any]:
        """`gather`, and the checksums of what it staged: on a device of each piece (kvtransfer/pieces.py), valid when the copy is
        done, or None where pieces do not end with blocks or staging is not there; on the host the CRC32C of each row."""
        if self._host is None:
            copy = self.gather(block_ids, rows, nearly)
            return copy, None if copy is None else copy.crcs
        return None, self._host.gather(block_ids, as_host(rows), check=True)

    def scatter(self, rows: BlockArray, block_ids: Sequence[int]) -> DeviceCopy | None:
        """Copy `rows` into engine blocks. Returns None when that is done, or the copy that still reads `rows`; the blocks are
        complete for whatever comes later on the current stream."""
        if self._host is None:
            copy: DeviceCopy = self._cuda.scatter(_as_tensor(rows), block_ids)
            return copy
        self._host.scatter(as_host(rows), block_ids)
        return None

    def digests(self, block_ids: Sequence[int]) -> list[str]:
        """A hash of each engine block's bytes over all layers, for tests. Waits for the device."""
        found = []
        for block in block_ids:
            digest = blake2b(digest_size=16)
            for _, segment in self._segments:
                digest.update(np.ascontiguousarray(segment[block].cpu().numpy()).data)
            found.append(digest.hexdigest())
        return found


def _as_tensor(rows: BlockArray) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)
