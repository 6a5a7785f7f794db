"""Which rank takes which layers and KV heads from whom, for two workers of any shape. Pure, and the same on every rank.

A rank holds a rectangle of the model's KV: a range of layers (its pipeline stage) times a range of heads (its share of tensor
parallelism). Ranks that replicate a head hold equal rectangles. A map takes every cell that a receiver holds exactly once,
from one of the senders that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos.splitpoint.v1 import kv_transfer_pb2 as pb


class PlanError(ValueError):
    """The two sides cannot exchange KV; `field` names what is in the way."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Span:
    """Indices `first <= i < end`."""

    first: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.first

    def overlap(self, other: Span) -> Span | None:
        """What both contain; None when that is nothing."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        return Span(first, end) if first < end else None

    def within(self, outer: Span) -> Span:
        """This range counted from the beginning of `outer`, which contains it."""
        return Span(self.first - outer.first, self.end - outer.first)

    def to_slice(self) -> slice:
        """As an index of an array."""
        return slice(self.first, self.end)


@dataclass(frozen=True, slots=True)
class Holding:
    """A rectangle of the model's KV: what one rank holds, or what one takes from another."""

    layers: Span
    heads: Span

    @property
    def cells(self) -> int:
        """Pairs of a layer and a head."""
        return self.layers.count * self.heads.count

    def overlap(self, other: Holding) -> Holding | None:
        """What both contain; None when that is nothing."""
        layers, heads = self.layers.overlap(other.layers), self.heads.overlap(other.heads)
        return None if layers is None or heads is None else Holding(layers, heads)

    def to_proto(self) -> pb.KvHolding:
        return pb.KvHolding(
            first_layer=self.layers.first,
            num_layers=self.layers.count,
            first_head=self.heads.first,
            num_heads=self.heads.count,
        )

    @classmethod
    def from_proto(cls, message: pb.KvHolding) -> Holding:
        """Raises `PlanError` for a rectangle without cells."""
        layers = Span(message.first_layer, message.first_layer + message.num_layers)
        heads = Span(message.first_head, message.first_head + message.num_heads)
        if layers.count == 0 or heads.count == 0:
            raise PlanError("holding", f"holding: {layers.count} layers of {heads.count} heads are nothing")
        return cls(layers, heads)


@dataclass(frozen=True, slots=True)
class Share:
    """What `receiver_rank` takes from `sender_rank`."""

    sender_rank: int
    receiver_rank: int
    part: Holding


@dataclass(frozen=True, slots=True)
class RankMap:
    """Who takes what from whom. At most one share for each pair of ranks."""

    shares: tuple[Share, ...]
    num_senders: int

    def of_receiver(self, rank: int) -> tuple[Share, ...]:
        """What this receiver takes, by sender rank."""
        return tuple(share for share in self.shares if share.receiver_rank == rank)

    def receivers_of(self, rank: int) -> int:
        """How many receivers take something from this sender."""
        return sum(share.sender_rank == rank for share in self.shares)

    @property
    def unneeded(self) -> tuple[int, ...]:
        """Senders that nobody takes anything from: others hold the same heads."""
        needed = {share.sender_rank for share in self.shares}
        return tuple(rank for rank in range(self.num_senders) if rank not in needed)


def map_ranks(senders: Sequence[Holding], receivers: Sequence[Holding]) -> RankMap:
    """The map between two workers, each given by what its ranks hold, in rank order.

    Of replicas each receiver takes the one that its own number picks, so that they share the work and equal workers pair rank
    by rank.

    Raises:
        PlanError: some cell that a receiver holds is held by no sender, or by senders whose rectangles differ.
    """
    replicas: dict[Holding, list[int]] = {}
    for rank, held in enumerate(senders):
        replicas.setdefault(held, []).append(rank)
    shares: list[Share] = []
    for receiver, wanted in enumerate(receivers):
        found = []
        for held, ranks in replicas.items():
            part = held.overlap(wanted)
            if part is not None:
                found.append(Share(ranks[receiver % len(ranks)], receiver, part))
        _check_tiles(wanted, receiver, found)
        shares.extend(sorted(found, key=lambda share: share.sender_rank))
    return RankMap(tuple(shares), len(senders))


def _check_tiles(wanted: Holding, receiver: int, found: Sequence[Share]) -> None:
    for index, one in enumerate(found):
        for other in found[:index]:
            if one.part.overlap(other.part) is not None:
                text = f"ranks {other.sender_rank} and {one.sender_rank} hold some layers and heads both, and not the same ones"
                raise PlanError("holding", f"holding: {text}")
    missing = wanted.cells - sum(share.part.cells for share in found)
    if missing:
        raise PlanError("holding", f"holding: {missing} of the {wanted.cells} cells of rank {receiver} are held by no sender")
