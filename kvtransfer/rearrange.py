"""Carries out a `Cut` and a `Fit` on bytes: a few strided copies of many blocks at once, on numpy or torch memory.

Runs on a thread of the node's pool, never on the engine's. Both return when the bytes have landed.
"""

from __future__ import annotations

import sys
from typing import Any

from kvtransfer.layout import RowLayout
from kvtransfer.plan import Cut, Fit
from kvtransfer.transports.base import Memory


def cut_blocks(cut: Cut, rows: Memory, out: Memory) -> None:
    """Copy the share out of `rows` (whole blocks, one-dimensional) into `out`, which has exactly its bytes."""
    source = rows.reshape(-1, cut.num_layers, *cut.layout.sizes, cut.layout.unit_bytes)
    target = out.reshape(-1, cut.layers.count, *cut.layout.with_heads(cut.heads.count).sizes, cut.layout.unit_bytes)
    places = [cut.heads.to_slice() if axis == "head" else slice(None) for axis in cut.layout.axes]
    target[...] = source[(slice(None), cut.layers.to_slice(), *places)]
    _settle(out)


def fit_blocks(fit: Fit, landed: Memory, first_block: int, rows: Memory) -> None:
    """Copy a chunk that `landed` (whole blocks of the share, the first of them `first_block`) to its places in the receiver's
    slot `rows`; both one-dimensional."""
    source = _Blocks(landed, fit.source, fit.source_layers, fit)
    target = _Blocks(rows, fit.target, fit.target_layers, fit)
    order, layers, heads = target.names, fit.layers.to_slice(), fit.heads.to_slice()
    for run in fit.runs(first_block, source.count, target.count):
        taken = source.pick(run.source, run.source_step, run.count, run.whole, slice(None), slice(None), order)
        place = target.pick(run.target, run.target_step, run.count, run.whole, layers, heads, order)
        place[...] = taken
    _settle(rows)


def clear_beyond(fit: Fit, source_blocks: int, rows: Memory) -> None:
    """Zero what of the receiver's last block lies behind the sender's: bytes of an earlier owner are no KV of this prompt."""
    if fit.same_blocks:
        return
    target = _Blocks(rows, fit.target, fit.target_layers, fit)
    layers, heads = fit.layers.to_slice(), fit.heads.to_slice()
    for piece in fit.beyond(source_blocks, target.count):
        target.pick(fit.target_place(piece), 1, 1, False, layers, heads, target.names)[...] = 0
    _settle(rows)


class _Blocks:
    """Blocks as an array with a dimension for each axis; tokens as pieces of `fit.piece_tokens`."""

    def __init__(self, memory: Memory, layout: RowLayout, num_layers: int, fit: Fit) -> None:
        names, sizes = ["layer"], [num_layers]
        for axis, size in zip(layout.axes, layout.sizes, strict=True):
            if axis == "token":
                names += ["piece", "token"]
                sizes += [size // fit.piece_tokens, fit.piece_tokens]
            else:
                names.append(axis)
                sizes.append(size)
        self.names = tuple(names)
        self._array = memory.reshape(-1, *sizes, layout.unit_bytes)
        self.count = len(self._array)

    def pick(
        self,
        first: tuple[int, int, int],
        step: int,
        count: int,
        whole: bool,
        layers: slice,
        heads: slice,
        order: tuple[str, ...],
    ) -> Any:
        """A view of every `step`-th block, its dimensions in `order`, less those that `first` pins down."""
        block, sub, piece = first
        places: dict[str, Any] = {"layer": layers, "head": heads}
        if not whole:
            places |= {"sub": sub, "piece": piece}
        index = tuple(places.get(name, slice(None)) for name in self.names)
        view = self._array[(slice(block, block + (count - 1) * step + 1, step), *index)]
        left = [name for name in self.names if not isinstance(places.get(name), int)]
        permutation = [0, *(1 + left.index(name) for name in order if name in left), 1 + len(left)]
        return view.permute(permutation) if hasattr(view, "permute") else view.transpose(permutation)


def _settle(memory: Memory) -> None:
    """A device copies behind our back; the transport and the engine read on other streams."""
    if getattr(memory, "is_cuda", False):
        sys.modules["torch"].cuda.current_stream(memory.device).synchronize()
