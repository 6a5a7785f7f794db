"""How one share of one prompt's KV travels: computed once per pair of ranks, then asked for numbers only. Pure.

What goes over the wire is always the sender's blocks in the sender's order, cut to the share: the whole row of a block between
equal ranks, a part of its layers and heads between others. Only the receiver rearranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm

from kvtransfer.layout import RowLayout, exchange_refusal, holding, row_layout
from kvtransfer.rank_map import Holding, PlanError, Share, Span
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

__all__ = [
    "BlockRange",
    "Cut",
    "Fit",
    "PlanError",
    "Run",
    "SharePlan",
    "TransferPlan",
    "blocks_for",
    "cut_of",
    "next_chunk",
    "plan_share",
    "plan_transfer",
]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One rank's share of one prompt's KV, in the sender's blocks. The last block moves whole, however few of its tokens are
    the prompt's. `block_bytes` are what of one block is taken; `sender_block_bytes` what it has (0: the same)."""

    sender_rank: int
    receiver_rank: int
    prompt_tokens: int
    num_blocks: int
    block_bytes: int
    sender_block_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the transfer."""
        return self.num_blocks * self.block_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the sender's slot, which its seal names."""
        return self.num_blocks * (self.sender_block_bytes or self.block_bytes)


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
    """The plan of `rank` (receiver) with `peer_rank` (sender) where both are equal: whole blocks, byte for byte.

    Raises:
        PlanError: TP, PP or block size differ, or the ranks are not each other's counterparts.
    """
    for field in ("tensor_parallel_size", "pipeline_parallel_size", "block_tokens"):
        ours, other = getattr(mine, field), getattr(theirs, field)
        if ours != other:
            raise PlanError(field, f"{field}: {ours} here, {other} there; whole blocks pass only between equal values")
    if rank != peer_rank:
        raise PlanError("rank", f"rank: {rank} here, {peer_rank} there; whole blocks pass only between equal ranks")
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


@dataclass(frozen=True, slots=True)
class Cut:
    """A share inside the rows of the rank that holds it: `[blocks, layers, *sizes, unit]` indexed by `layers` and `heads`."""

    layout: RowLayout
    num_layers: int
    layers: Span
    heads: Span

    @property
    def block_bytes(self) -> int:
        """Of the share, in one block."""
        return self.layers.count * self.layout.num_bytes // self.layout.size("head") * self.heads.count

    @property
    def whole(self) -> bool:
        """The share is the whole row."""
        return self.block_bytes == self.num_layers * self.layout.num_bytes


def cut_of(compatibility: pb.KvCompatibility, part: Holding) -> Cut:
    """`part` inside the rows of the rank that `compatibility` describes.

    Raises:
        PlanError: the rank does not hold it, or its heads cannot be told apart.
    """
    layout, held = row_layout(compatibility), holding(compatibility)
    if layout is None or held is None:
        raise PlanError("axes", "axes: this rank does not say how its bytes lie")
    if held.overlap(part) != part:
        raise PlanError("share", f"share: {part} where {held} is held")
    heads = part.heads.within(held.heads)
    return Cut(layout, held.layers.count, part.layers.within(held.layers), heads)


@dataclass(frozen=True, slots=True)
class Run:
    """One vectorised copy: `count` pieces, `source_step` blocks apart on one side and `target_step` on the other.

    `source` and `target` are (block, kernel block, piece of the kernel block) of the first; `whole`: the piece is the block,
    with all its tokens in one order on both sides.
    """

    source: tuple[int, int, int]
    target: tuple[int, int, int]
    source_step: int
    target_step: int
    count: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """How blocks of a share, as their sender cuts them, go into the receiver's rows.

    `source` is the order inside one layer of the share's blocks, `target` of the receiver's; both have "kv" as an axis or
    neither. `piece_tokens` divides the kernel blocks of both sides.
    """

    source: RowLayout
    target: RowLayout
    source_layers: int
    target_layers: int
    layers: Span
    heads: Span
    piece_tokens: int
    source_pieces: int
    target_pieces: int
    same_blocks: bool

    @property
    def direct(self) -> bool:
        """Nothing to rearrange: the share's blocks are the receiver's rows."""
        return self.same_blocks and self.source == self.target and self.source_layers == self.target_layers

    def runs(self, first_block: int, num_blocks: int, target_blocks: int) -> Iterator[Run]:
        """The copies for source blocks `first_block` and the `num_blocks - 1` that follow, into a slot of `target_blocks`."""
        if self.same_blocks:
            yield Run((0, 0, 0), (first_block, 0, 0), 1, 1, num_blocks, True)
            return
        period = lcm(self.source_pieces, self.target_pieces)
        begin = first_block * self.source_pieces
        end = min(begin + num_blocks * self.source_pieces, target_blocks * self.target_pieces)
        for first in range(begin, min(begin + period, end)):
            source, target = self._place(first, self.source, self.source_pieces), self.target_place(first)
            yield Run(
                (source[0] - first_block, *source[1:]),
                target,
                period // self.source_pieces,
                period // self.target_pieces,
                -(-(end - first) // period),
                False,
            )

    def beyond(self, source_blocks: int, target_blocks: int) -> range:
        """Pieces of the receiver's slot that lie behind the sender's last block: no token of the prompt is in them."""
        return range(source_blocks * self.source_pieces, target_blocks * self.target_pieces)

    def target_place(self, piece: int) -> tuple[int, int, int]:
        """Block, kernel block and piece of it, in the receiver's slot."""
        return self._place(piece, self.target, self.target_pieces)

    def _place(self, piece: int, layout: RowLayout, per_block: int) -> tuple[int, int, int]:
        block, within = divmod(piece, per_block)
        return (block, *divmod(within, layout.size("token") // self.piece_tokens))


@dataclass(frozen=True, slots=True)
class SharePlan:
    """What one receiver takes from one sender, for prompts of any length. `cut` is what the sender does, `fit` the receiver."""

    share: Share
    receivers: int
    cut: Cut
    fit: Fit
    sender_block_tokens: int

    def transfer(self, prompt_tokens: int) -> TransferPlan:
        """For one prompt. Raises `ValueError` for none."""
        return TransferPlan(
            sender_rank=self.share.sender_rank,
            receiver_rank=self.share.receiver_rank,
            prompt_tokens=prompt_tokens,
            num_blocks=blocks_for(prompt_tokens, self.sender_block_tokens),
            block_bytes=self.cut.block_bytes,
            sender_block_bytes=self.cut.num_layers * self.cut.layout.num_bytes,
        )


def plan_share(mine: pb.KvCompatibility, theirs: pb.KvCompatibility, share: Share, receivers: int) -> SharePlan:
    """The plan of the rank `mine` (receiver) for its `share` of the rank `theirs` (sender), from whom `receivers` ranks fetch.

    Raises:
        PlanError: they cannot exchange KV, or the share is not both sides'.
    """
    refusal = exchange_refusal(mine, theirs)
    if refusal:
        raise PlanError(refusal.partition(":")[0], refusal)
    cut, place = cut_of(theirs, share.part), cut_of(mine, share.part)
    source, target = cut.layout.with_heads(share.part.heads.count), place.layout
    if ("kv" in source.axes) != ("kv" in target.axes):
        source, target = source.with_keys_and_values_apart(), target.with_keys_and_values_apart()
    same = _tokens(source) == _tokens(target)
    piece = gcd(source.size("token"), target.size("token"))
    fit = Fit(
        source=source,
        target=target,
        source_layers=share.part.layers.count,
        target_layers=place.num_layers,
        layers=place.layers,
        heads=place.heads,
        piece_tokens=piece,
        source_pieces=theirs.block_tokens // piece if "token" in source.axes else 1,
        target_pieces=mine.block_tokens // piece if "token" in target.axes else 1,
        same_blocks=same,
    )
    return SharePlan(share, receivers, cut, fit, theirs.block_tokens)


def _tokens(layout: RowLayout) -> tuple[int, int]:
    return layout.size("sub"), layout.size("token")
