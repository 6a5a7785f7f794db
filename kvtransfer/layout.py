"""What must be equal on both sides for KV bytes to mean the same, what a rank map converts, and the refusal of the rest by name.

A slot is block-major: `slot[block, layer, bytes_of_one_layer_of_one_block]`, uint8. The order inside one layer of one block is
named by `KvCompatibility.axes`, as far as it may be cut.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from kvtransfer.rank_map import Holding, PlanError, Span
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

# Version 1: two-phase handshake, block-major slots, chunk headers in order on `Fetch`, CRC32C per chunk.
# Version 2: a rank takes its share from one or several ranks of another shape; a seal names its rank.
PROTOCOL_VERSION = 2

_DOMAIN = "splitpoint kv compatibility"
_AXES = ("kv", "sub", "head", "token")
# Equal or refused, whatever else can be converted; in the order in which a refusal names them.
_IDENTITY = ("protocol_version", "model", "model_revision", "tokenizer_hash", "cache_dtype", "head_dim", "engine")
_SHAPE = ("total_kv_heads", "total_layers", "packing")


def canonical(compatibility: pb.KvCompatibility) -> bytes:
    """Every field by name, defaults included, in one order. Protobuf's own bytes are not promised to be canonical."""
    return _canonical(compatibility, (field.name for field in pb.KvCompatibility.DESCRIPTOR.fields))


def fingerprint(compatibility: pb.KvCompatibility) -> bytes:
    """SHA-256 of the canonical form: equal where a slot's bytes mean the same. A handshake's first phase and every seal carry
    it."""
    return hashlib.sha256(canonical(compatibility)).digest()


def family(compatibility: pb.KvCompatibility) -> bytes:
    """Equal for workers that can exchange KV, as it is or through a rank map: what routing groups workers by.

    It follows `exchange_refusal`: two ranks of one family are never refused, but by a broken statement of their own.
    """
    layout = row_layout(compatibility)
    if layout is None:
        return fingerprint(compatibility)
    names = [*_IDENTITY, *_SHAPE]
    if "token" not in layout.axes:
        names += ["block_tokens", "kernel_block_tokens"]
    parts = ["family", ",".join(sorted(set(layout.axes) - {"kv", "sub"})), str(layout.cell_bytes)]
    return hashlib.sha256(_canonical(compatibility, names, *parts)).digest()


def first_difference(mine: pb.KvCompatibility, theirs: pb.KvCompatibility) -> str:
    """The first field that differs, in field order, with both values; "" when all are equal."""
    return _difference(mine, theirs, (field.name for field in pb.KvCompatibility.DESCRIPTOR.fields))


def exchange_refusal(mine: pb.KvCompatibility, theirs: pb.KvCompatibility) -> str:
    """The first thing that keeps these two ranks from exchanging KV, named, with both values; "" when nothing does."""
    difference = _difference(mine, theirs, _IDENTITY)
    if difference:
        return difference
    try:
        ours, other = row_layout(mine), row_layout(theirs)
    except PlanError as error:
        return str(error)
    if ours is None or other is None:
        return first_difference(mine, theirs)
    difference = _difference(mine, theirs, _SHAPE)
    if difference:
        return difference
    if "token" not in ours.axes or "token" not in other.axes:
        difference = _difference(mine, theirs, ("block_tokens", "kernel_block_tokens"))
        if difference:
            return f"{difference}; packing {mine.packing!r} cannot be cut along tokens"
    if set(ours.axes) - {"kv", "sub"} != set(other.axes) - {"kv", "sub"}:
        return f"axes: {mine.axes!r} here, {theirs.axes!r} there"
    if ours.cell_bytes != other.cell_bytes:
        return f"block_bytes_per_layer: {ours.cell_bytes} bytes to a head and token here, {other.cell_bytes} there"
    return ""


def _canonical(compatibility: pb.KvCompatibility, names: Iterable[str], *more: str) -> bytes:
    fields = {name: getattr(compatibility, name) for name in names}
    return json.dumps([_DOMAIN, fields, *more], sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _difference(mine: pb.KvCompatibility, theirs: pb.KvCompatibility, names: Iterable[str]) -> str:
    for name in names:
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other:
            return f"{name}: {ours!r} here, {other!r} there"
    return ""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The order of bytes in one layer of one block: `axes`, outermost first, of `sizes`, then `unit_bytes` that stay together."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    unit_bytes: int

    def size(self, axis: str) -> int:
        """1 for an axis that is not there."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    @property
    def num_bytes(self) -> int:
        """Of one layer of one block."""
        return prod(self.sizes) * self.unit_bytes

    @property
    def cell_bytes(self) -> int:
        """Of one head, and one token where tokens are an axis, keys and values together."""
        return self.unit_bytes * self.size("kv")

    def with_keys_and_values_apart(self) -> RowLayout:
        """The same bytes with "kv" as an axis: keys and values of a unit lie side by side where it is none."""
        if "kv" in self.axes or self.unit_bytes % 2:
            return self
        return RowLayout((*self.axes, "kv"), (*self.sizes, 2), self.unit_bytes // 2)

    def with_heads(self, count: int) -> RowLayout:
        """The same order for another number of heads."""
        sizes = tuple(count if axis == "head" else size for axis, size in zip(self.axes, self.sizes, strict=True))
        return RowLayout(self.axes, sizes, self.unit_bytes)


def row_layout(compatibility: pb.KvCompatibility) -> RowLayout | None:
    """What a rank says about the order of its bytes; None when it says nothing, and only its equal can read them.

    Raises:
        PlanError: what it says cannot be.
    """
    if compatibility.total_kv_heads == 0:
        return None
    axes = tuple(axis for axis in compatibility.axes.split(",") if axis)
    kernel_tokens = compatibility.kernel_block_tokens or compatibility.block_tokens
    if len(set(axes)) != len(axes) or not set(axes) <= set(_AXES):
        raise PlanError("axes", f"axes: {compatibility.axes!r} are not distinct ones of {', '.join(_AXES)}")
    if kernel_tokens == 0 or compatibility.block_tokens % kernel_tokens:
        raise PlanError(
            "kernel_block_tokens", f"kernel_block_tokens: {kernel_tokens} in blocks of {compatibility.block_tokens} tokens"
        )
    subs = compatibility.block_tokens // kernel_tokens
    if "token" in axes and (subs > 1) != ("sub" in axes):
        raise PlanError("axes", f"axes: {compatibility.axes!r} with {subs} kernel blocks in a block")
    if "head" not in axes and compatibility.num_kv_heads != 1:
        raise PlanError("axes", f"axes: {compatibility.axes!r} do not say where the {compatibility.num_kv_heads} heads lie")
    known = {"kv": 2, "sub": subs, "head": compatibility.num_kv_heads, "token": kernel_tokens}
    sizes = tuple(known[axis] for axis in axes)
    units, row = prod(sizes), compatibility.block_bytes_per_layer
    if units == 0 or row == 0 or row % units:
        raise PlanError("block_bytes_per_layer", f"block_bytes_per_layer: {row} bytes are not {units} equal units")
    return RowLayout(axes, sizes, row // units)


def holding(compatibility: pb.KvCompatibility) -> Holding | None:
    """Which layers and heads this rank holds; None when it does not say."""
    if compatibility.total_kv_heads == 0:
        return None
    layers = Span(compatibility.first_layer, compatibility.first_layer + compatibility.num_layers)
    return Holding(layers, Span(compatibility.first_kv_head, compatibility.first_kv_head + compatibility.num_kv_heads))
