"""What a rank says of its cache is how its slot really lies: gathered rows are read back by the axes alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtransfer.connector.blocks import EngineBlocks
from kvtransfer.connector.place import CachePlace, first_kv_head, layer_range, row_axes
from kvtransfer.layout import holding
from kvtransfer.plan import plan_share
from kvtransfer.rank_map import map_ranks
from kvtransfer.rearrange import clear_beyond, cut_blocks, fit_blocks
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.shapes import Shape

BLOCKS, HEADS, TOKENS, DIM = 5, 2, 8, 3


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.int32).view(*shape)


# A layer as vLLM shows it, and the axes of its rows. `[block, head, token, keys and values]` unless it says otherwise.
CACHES = {
    "heads outside": (numbered(BLOCKS, HEADS, TOKENS, 2 * DIM), "head,token"),
    "tokens outside": (numbered(BLOCKS, TOKENS, HEADS, 2 * DIM).permute(0, 2, 1, 3), "token,head"),
    "heads outside blocks": (numbered(HEADS, BLOCKS, TOKENS, 2 * DIM).permute(1, 0, 2, 3), "head,token"),
    "keys and values apart": (numbered(2, BLOCKS, TOKENS, HEADS, DIM), "kv,token,head"),
    "keys and values in a block": (numbered(BLOCKS, 2, TOKENS, HEADS, DIM), "kv,token,head"),
    "kernel blocks": (numbered(2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM), "sub,head,token"),
    "kernel blocks, tokens outside": (numbered(2 * BLOCKS, TOKENS // 2, HEADS, 2 * DIM).permute(0, 2, 1, 3), "sub,token,head"),
    "layers between blocks": (numbered(BLOCKS, 3, HEADS, TOKENS, 2 * DIM)[:, 1], "head,token"),
}


def element(layer: torch.Tensor, block: int, head: int, token: int, kv: int) -> list[int]:
    """Keys or values of one token, out of the cache as vLLM's kernels address it."""
    if layer.dim() == 5:
        at = layer[kv, block] if layer.shape[0] == 2 else layer[block, kv]
        return at[token, head].tolist()
    subs = layer.shape[0] // BLOCKS
    kernel = TOKENS // subs
    return layer[block * subs + token // kernel, head, token % kernel, kv * DIM : (kv + 1) * DIM].tolist()


@pytest.mark.parametrize("name", CACHES)
def test_the_axes_say_how_a_gathered_row_lies(name: str) -> None:
    layer, axes = CACHES[name]
    said = row_axes(layer.shape, layer.stride(), BLOCKS, num_kv_heads=HEADS, block_tokens=TOKENS, packed=False)
    assert said is not None
    assert said[0] == axes
    cache = EngineBlocks({"model.layers.0.attn": layer}, BLOCKS)
    rows = np.zeros((1, cache.block_bytes), dtype=np.uint8)
    cache.gather([3], rows)
    sizes = {"kv": 2, "sub": TOKENS // said[1], "head": HEADS, "token": said[1]}
    order = [*axes.split(","), *(["kv"] if "kv" not in axes else [])]
    values = rows.view(np.int32).reshape(*(sizes[axis] for axis in order), DIM)
    for head in range(HEADS):
        for token in range(TOKENS):
            for kv in (0, 1):
                at = {"kv": kv, "sub": token // said[1], "head": head, "token": token % said[1]}
                assert values[tuple(at[axis] for axis in order)].tolist() == element(layer, 3, head, token, kv)


def test_packed_heads_are_an_axis_and_their_tokens_none() -> None:
    layer, _ = CACHES["heads outside"]
    assert row_axes(layer.shape, layer.stride(), BLOCKS, num_kv_heads=HEADS, block_tokens=TOKENS, packed=True) == ("head", TOKENS)
    layer, _ = CACHES["tokens outside"]
    assert row_axes(layer.shape, layer.stride(), BLOCKS, num_kv_heads=HEADS, block_tokens=TOKENS, packed=True) is None


def test_one_head_of_a_rank_may_lie_anywhere() -> None:
    layer = numbered(BLOCKS, 1, TOKENS, 2 * DIM)
    said = row_axes(layer.shape, layer.stride(), BLOCKS, num_kv_heads=1, block_tokens=TOKENS, packed=False)
    assert said is not None
    assert sorted(said[0].split(",")) == ["head", "token"]


def test_a_cache_of_another_shape_is_not_described() -> None:
    for layer in (numbered(BLOCKS, TOKENS, 2 * DIM, HEADS), numbered(HEADS, TOKENS, DIM, 7), numbered(BLOCKS, 6)):
        assert row_axes(layer.shape, layer.stride(), BLOCKS, num_kv_heads=HEADS, block_tokens=TOKENS, packed=False) is None


def test_layers_are_known_by_their_names() -> None:
    assert layer_range([f"model.layers.{i}.self_attn.attn" for i in (4, 5, 6)]) == (4, 3)
    assert layer_range(["model.layers.4.attn", "model.layers.6.attn"]) is None
    assert layer_range(["model.layers.1.attn", "model.layers.0.attn"]) is None
    assert layer_range(["attn"]) is None


def test_heads_are_dealt_in_order_and_replicated_by_neighbours() -> None:
    assert [first_kv_head(rank, 2, 4) for rank in range(2)] == [0, 2]
    assert [first_kv_head(rank, 4, 4) for rank in range(8)] == [0, 1, 2, 3] * 2
    assert [first_kv_head(rank, 8, 2) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_place_is_said_field_by_field() -> None:
    message = pb.KvCompatibility()
    place = CachePlace(
        total_kv_heads=4, first_kv_head=2, total_layers=8, first_layer=4, axes="head", kernel_block_tokens=16, packing="p"
    )
    place.fill(message)
    assert (message.total_kv_heads, message.first_kv_head, message.total_layers, message.first_layer) == (4, 2, 8, 4)
    assert (message.axes, message.kernel_block_tokens, message.packing) == ("head", 16, "p")


@pytest.mark.parametrize(("block_tokens", "axes"), [(4, "token,head"), (16, "kv,token,head")])
def test_shares_are_cut_and_fitted_on_tensors_as_on_arrays(block_tokens: int, axes: str) -> None:
    """Staging on a device is torch memory: the same views, the same bytes."""
    p, d = Shape(tp=1, axes=axes, block_tokens=block_tokens), Shape(tp=2, block_tokens=8)
    senders = [holding(p.compatibility(0))]
    receivers = [holding(d.compatibility(rank)) for rank in range(2)]
    found = map_ranks([one for one in senders if one], [one for one in receivers if one])
    for share in found.shares:
        mine = d.compatibility(share.receiver_rank)
        plan = plan_share(mine, p.compatibility(0), share, 2)
        source = p.slot(0, 21).reshape(-1)
        wire = np.zeros(plan.transfer(21).total_bytes, dtype=np.uint8)
        rows = np.full(3 * d.block_bytes(share.receiver_rank), 7, dtype=np.uint8)
        twin_wire, twin_rows = torch.from_numpy(wire.copy()), torch.from_numpy(rows.copy())
        cut_blocks(plan.cut, source, wire)
        cut_blocks(plan.cut, torch.from_numpy(source), twin_wire)
        fit_blocks(plan.fit, wire, 0, rows)
        fit_blocks(plan.fit, twin_wire, 0, twin_rows)
        for memory in (rows, twin_rows):
            clear_beyond(plan.fit, plan.transfer(21).num_blocks, memory)
        assert np.array_equal(twin_wire.numpy(), wire)
        assert np.array_equal(twin_rows.numpy(), rows)
