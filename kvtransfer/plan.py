"""Which rank takes what from whom, computed once from both sides' compatibility. Equal TP, PP and block size only: rank i
of decode takes whole blocks from rank i of prefill."""

from __future__ import annotations

from dataclasses import dataclass

from protos.splitpoint.v1 import kv_transfer_pb2 as pb


class PlanError(ValueError):
    """The two sides cannot exchange KV; `field` names what differs."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One rank's share of one prompt's KV. The last block moves whole, however few of its tokens are the prompt's."""

    sender_rank: int
    receiver_rank: int
    prompt_tokens: int
    num_blocks: int
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the slot on either side, and of the transfer."""
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks `first <= b < end` in the prompt's block order."""

    first: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.first


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens. Raises `ValueError` when either is not positive."""
    if tokens <= 0 or block_tokens <= 0:
        raise ValueError(f"tokens and block_tokens must be positive, got {tokens} and {block_tokens}")
    return -(-tokens // block_tokens)


def plan_transfer(
    mine: pb.KvCompatibility, theirs: pb.KvCompatibility, *, rank: int, peer_rank: int, prompt_tokens: int, block_bytes: int
) -> TransferPlan:
    """The plan of `rank` (receiver) with `peer_rank` (sender).

    Raises:
        PlanError: TP, PP or block size differ, or the ranks are not each other's counterparts.
    """
    for field in ("tensor_parallel_size", "pipeline_parallel_size", "block_tokens"):
        ours, other = getattr(mine, field), getattr(theirs, field)
        if ours != other:
            raise PlanError(field, f"{field}: {ours} here, {other} there; only equal values can exchange KV")
    if rank != peer_rank:
        raise PlanError("rank", f"rank: {rank} here, {peer_rank} there; only equal ranks exchange KV")
    return TransferPlan(
        sender_rank=peer_rank,
        receiver_rank=rank,
        prompt_tokens=prompt_tokens,
        num_blocks=blocks_for(prompt_tokens, mine.block_tokens),
        block_bytes=block_bytes,
    )


def next_chunk(sent_blocks: int, staged_blocks: int, block_bytes: int, chunk_bytes: int) -> BlockRange | None:
    """The next whole blocks to send: as many of the staged ones as fit `chunk_bytes`, at least one; None when none is staged."""
    if sent_blocks >= staged_blocks:
        return None
    most = max(1, chunk_bytes // block_bytes)
    return BlockRange(sent_blocks, min(staged_blocks, sent_blocks + most))
