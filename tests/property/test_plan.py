"""Block arithmetic and the rank map."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.plan import PlanError, blocks_for, next_chunk, plan_transfer
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

BLOCKS = st.integers(1, 512)


@pytest.mark.parametrize("k", [1, 16, 128])
def test_edges_of_a_block(k: int) -> None:
    assert [blocks_for(tokens, k) for tokens in (1, k, k + 1, 2 * k, 2 * k + 1)] == [1, 1, 2, 2, 3]
    assert blocks_for(max(1, k - 1), k) == 1


@given(st.integers(1, 1 << 20), BLOCKS)
def test_blocks_cover_the_tokens_and_no_block_is_empty(tokens: int, block_tokens: int) -> None:
    blocks = blocks_for(tokens, block_tokens)
    assert (blocks - 1) * block_tokens < tokens <= blocks * block_tokens


@pytest.mark.parametrize(("tokens", "block_tokens"), [(0, 16), (-1, 16), (1, 0)])
def test_nothing_has_no_blocks(tokens: int, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        blocks_for(tokens, block_tokens)


def compatibility(**fields: int) -> pb.KvCompatibility:
    return pb.KvCompatibility(**{"block_tokens": 16, "tensor_parallel_size": 2, "pipeline_parallel_size": 1, **fields})


@given(st.integers(1, 100_000), st.integers(1, 1 << 22), st.integers(0, 15))
def test_a_plan_moves_whole_blocks_between_equal_ranks(tokens: int, block_bytes: int, rank: int) -> None:
    plan = plan_transfer(
        compatibility(), compatibility(), rank=rank, peer_rank=rank, prompt_tokens=tokens, block_bytes=block_bytes
    )
    assert (plan.sender_rank, plan.receiver_rank) == (rank, rank)
    assert plan.total_bytes == blocks_for(tokens, 16) * block_bytes
    assert plan.total_bytes % block_bytes == 0


@pytest.mark.parametrize("field", ["tensor_parallel_size", "pipeline_parallel_size", "block_tokens"])
def test_unequal_sides_are_refused_by_name(field: str) -> None:
    with pytest.raises(PlanError, match=field) as caught:
        plan_transfer(compatibility(), compatibility(**{field: 4}), rank=0, peer_rank=0, prompt_tokens=1, block_bytes=1)
    assert caught.value.field == field


def test_another_rank_is_refused() -> None:
    with pytest.raises(PlanError, match="rank: 0 here, 1 there"):
        plan_transfer(compatibility(), compatibility(), rank=0, peer_rank=1, prompt_tokens=1, block_bytes=1)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 5000), st.integers(1, 20_000))
def test_chunks_tile_what_is_staged(steps: list[int], block_bytes: int, chunk_bytes: int) -> None:
    """However staging proceeds, chunks follow each other without gap or overlap and never run ahead."""
    sent = staged = 0
    for step in steps:
        staged += step
        while (chunk := next_chunk(sent, staged, block_bytes, chunk_bytes)) is not None:
            assert chunk.first == sent
            assert sent < chunk.end <= staged
            assert chunk.count == 1 or chunk.count * block_bytes <= chunk_bytes
            sent = chunk.end
        assert sent == staged
