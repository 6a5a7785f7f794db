"""What decode scatters are the bytes that prefill's engine held in the step that computed them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling import SamplingParams
from kvtransfer.connector.blocks import EngineBlocks, block_segments
from tests.engine.test_parity import GREEDY, prompt_of
from tests.support.stepped_engine import BLOCK_TOKENS, BUDGET_TOKENS, SteppedEngine

K = BLOCK_TOKENS


@pytest.mark.vllm
@pytest.mark.parametrize("length", [1, K, K + 1, 700, 1500])
def test_scattered_blocks_equal_gathered_ones(engine: SteppedEngine, length: int) -> None:
    split = engine.split(prompt_of(length, seed=9), GREEDY, before_decode=engine.forget_prefixes)
    seen: dict[str, dict[int, str]] = {"gather": {}, "scatter": {}}
    for probed in engine.probed:
        assert probed.transfer_id == split.transfer_id
        for place, digest in enumerate(probed.digests, probed.first_block):
            assert place not in seen[probed.event], "every block moves once"
            seen[probed.event][place] = digest
    assert seen["gather"] == seen["scatter"]
    assert sorted(seen["gather"]) == list(range(-(-length // K)))
    assert len(set(seen["gather"].values())) == len(seen["gather"]), "different tokens, different bytes"
    # One gather per step that completed a block.
    assert sum(probed.event == "gather" for probed in engine.probed) == -(-length // BUDGET_TOKENS)


@pytest.mark.vllm
def test_blocks_are_free_when_prefill_has_answered(engine: SteppedEngine) -> None:
    """Staging alone holds the KV between the legs: nothing of the engine's is kept for a peer."""
    _, grant = engine.stage(prompt_of(900), SamplingParams(max_tokens=5, temperature=0.0))
    try:
        # The peer's `Complete`, which frees the send slot, is on its way when the pull has answered.
        assert engine.leftovers_become({"receive used", "sessions"}) == {"receive used", "sessions"}
    finally:
        engine.release(grant)


def test_segments_cover_every_layout_exactly_once() -> None:
    blocks, heads, tokens, dim = 5, 2, 4, 3
    base = torch.arange(blocks * heads * tokens * 2 * dim, dtype=torch.int16)
    layouts = {
        "blocks outermost": (base.view(blocks, heads, tokens, 2 * dim), 1),
        "tokens outside heads": (base.view(blocks, tokens, heads, 2 * dim).permute(0, 2, 1, 3), 1),
        "keys and values apart": (base.view(2, blocks, tokens, heads, dim), 2),
        "blocks innermost but one": (base.view(2, heads, blocks, tokens, dim), 4),
    }
    for name, (layer, expected) in layouts.items():
        segments = block_segments(layer, blocks)
        assert len(segments) == expected, name
        found = sorted(torch.cat([s.contiguous().view(torch.int16).flatten() for s in segments]).tolist())
        assert found == base.tolist(), name
        block_dim = list(layer.shape).index(blocks)
        for block in range(blocks):
            mine = torch.cat([s[block].contiguous().view(torch.int16) for s in segments])
            assert sorted(mine.tolist()) == sorted(layer.select(block_dim, block).flatten().tolist()), name


def test_layers_that_interleave_in_one_allocation_are_addressed_by_stride() -> None:
    pool = torch.arange(4 * 3 * 16, dtype=torch.int16).view(4, 3, 16)
    layers = {f"layer{i}": pool[:, i] for i in range(3)}
    cache = EngineBlocks(layers, 4)
    assert (cache.num_layers, cache.block_bytes, cache.layer_block_bytes) == (3, 96, 32)
    rows = np.zeros((2, 96), dtype=np.uint8)
    cache.gather([3, 1], rows)
    assert rows.view(np.int16).tolist() == [pool[3].flatten().tolist(), pool[1].flatten().tolist()]
    before = pool.clone()
    cache.scatter(rows, [0, 2])
    assert torch.equal(pool[0], before[3])
    assert torch.equal(pool[2], before[1])
    assert torch.equal(pool[[1, 3]], before[[1, 3]])
    assert cache.digests([0, 2]) == cache.digests([3, 1])


def test_a_shared_layer_moves_once_and_kernel_blocks_are_joined() -> None:
    layer = torch.arange(8 * 6, dtype=torch.int16).view(8, 6)
    cache = EngineBlocks({"a": layer, "b": layer}, 4)
    assert (cache.num_layers, cache.block_bytes) == (1, 24)


def test_caches_that_cannot_move_by_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="counts 7 blocks"):
        block_segments(torch.zeros(5, 3), 7)
    with pytest.raises(ValueError, match="gaps"):
        block_segments(torch.zeros(4, 3, 10)[:, :, ::2], 4)
    with pytest.raises(ValueError, match="differ in bytes"):
        EngineBlocks({"a": torch.zeros(4, 3), "b": torch.zeros(4, 5)}, 4)
    with pytest.raises(ValueError, match="no KV cache"):
        EngineBlocks({}, 4)
