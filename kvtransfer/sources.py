"""From whom one rank pulls what, and where in its slot each share lands. What is fixed between two workers is computed once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtransfer.layout import fingerprint, holding
from kvtransfer.plan import SharePlan, TransferPlan, blocks_for, plan_share, plan_transfer
from kvtransfer.rank_map import Holding, PlanError, map_ranks
from kvtransfer.session import Expected
from kvtransfer.transports.base import Lends, ReceiveChannel
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

if TYPE_CHECKING:
    from kvtransfer.runtime import NodeRuntime

MAX_PEERINGS = 256
PIECES = 2
"""Chunks of one share that lie behind the slot's content at a time: one lands while the other is put in its place."""
PIECE_BYTES = 4 * 1024 * 1024
ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Peering:
    """What this rank takes from one worker, whatever the prompt: the frozen plan of a pair."""

    plans: tuple[SharePlan, ...]
    fingerprints: tuple[bytes, ...]
    """Of the sender of each plan."""
    unneeded: tuple[int, ...]
    """Ranks of the sender that no rank of this worker takes anything from."""


class PlanCache:
    """Peerings by the peer's processes and by what all ranks of this worker hold."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, ...], Peering] = OrderedDict()
        self.computed = 0

    def get(
        self,
        mine: pb.KvCompatibility,
        rank: int,
        senders: Sequence[tuple[pb.RankEndpoint, pb.KvCompatibility]],
        receivers: Sequence[pb.KvHolding],
    ) -> Peering:
        """Raises `PlanError` when this rank cannot get its KV from them."""
        ends = [f"{endpoint.address} {endpoint.incarnation}".encode() for endpoint, _ in senders]
        key = (*ends, *(receiver.SerializeToString(deterministic=True) for receiver in receivers))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _peering(mine, rank, [theirs for _, theirs in senders], receivers)
            self.computed += 1
            while len(self._known) > MAX_PEERINGS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known


def _peering(
    mine: pb.KvCompatibility, rank: int, senders: Sequence[pb.KvCompatibility], receivers: Sequence[pb.KvHolding]
) -> Peering:
    held, wanted = [holding(theirs) for theirs in senders], [Holding.from_proto(receiver) for receiver in receivers]
    if rank >= len(wanted) or wanted[rank] != holding(mine):
        raise PlanError("holding", f"holding: rank {rank} of {len(wanted)} is not what this rank holds")
    known = [one for one in held if one is not None]
    if len(known) != len(held):
        raise PlanError("holding", "holding: a rank of the sender does not say what it holds")
    found = map_ranks(known, wanted)
    plans = tuple(
        plan_share(mine, senders[share.sender_rank], share, found.receivers_of(share.sender_rank))
        for share in found.of_receiver(rank)
    )
    return Peering(plans, tuple(fingerprint(senders[plan.share.sender_rank]) for plan in plans), found.unneeded)


@dataclass(slots=True)
class Source:
    """One sender of one pull. `plan` None: whole blocks, byte for byte, at the beginning of the slot."""

    index: int
    stub: Any
    endpoint: pb.RankEndpoint
    transfer: TransferPlan
    fingerprint: bytes
    plan: SharePlan | None = None
    lands_at: int = 0
    piece_bytes: int = 0
    """0: every chunk lands at its own place. Otherwise chunks land in turn in pieces of this size, the first at `lands_at`."""
    channel: ReceiveChannel | None = None
    lends: Lends | None = None
    """The same, where it may leave the bytes with their sender."""
    asked: bool = False
    """The sender may have heard of this pull."""
    call: Any = None
    tell: Callable[[pb.CompleteRequest], Awaitable[bool]] | None = None
    """Says the last word beside gRPC, where all came beside gRPC; False: it could not."""
    outcome: str = "cancelled"

    @property
    def receiver_rank(self) -> int:
        """As the sender counts its receivers; 0 where it has one."""
        return 0 if self.plan is None else self.plan.share.receiver_rank

    def place(self, index: int, start: int, end: int) -> tuple[int, int]:
        """Where in the slot chunk `index` lands, which is bytes `start` to `end` of the share."""
        if not self.piece_bytes:
            return start, end
        place = self.lands_at + index % PIECES * self.piece_bytes
        return place, place + end - start

    def expected(self, request: pb.PullRequest, checksum: str) -> Expected:
        """What is known before the first byte."""
        return Expected(
            transfer_id=request.grant.transfer_id,
            plan=self.transfer,
            token_hash=request.token_hash,
            fingerprint=self.fingerprint,
            incarnation=self.endpoint.incarnation,
            checksum=checksum,
            **({"max_chunk_bytes": self.piece_bytes} if self.piece_bytes else {}),
        )

    def ask(self, fetch: pb.FetchRequest) -> None:
        """Say in a request which share is meant."""
        if self.plan is None:
            return
        fetch.receiver_rank = self.plan.share.receiver_rank
        fetch.receivers = self.plan.receivers
        fetch.share.CopyFrom(self.plan.share.part.to_proto())
        fetch.max_chunk_bytes = self.piece_bytes
        fetch.cut = not self.plan.cut.whole


@dataclass(frozen=True, slots=True)
class Sources:
    """All senders of one pull and what the slot needs. `unneeded` are told that nobody will come."""

    each: tuple[Source, ...]
    content_bytes: int
    slot_bytes: int
    unneeded: tuple[pb.RankEndpoint, ...]


async def find_sources(rt: NodeRuntime, request: pb.PullRequest, stack: AsyncExitStack) -> Sources:
    """Agree with the senders that matter; they stay agreed with until `stack` is left.

    Equal workers pair rank by rank, with one handshake. Between others every rank of the sender is asked how its KV lies.

    Raises:
        SplitpointError: INCOMPATIBLE_PEER naming the field; TRANSFER_REFUSED for a prompt of no tokens; WORKER_LOST or
            DEADLINE_EXCEEDED when one does not answer.
    """
    senders = list(request.senders) or [request.sender]
    alike = len(senders) == max(1, len(request.receivers))
    try:
        if alike:
            counterpart = senders[rt.rank] if rt.rank < len(senders) else request.sender
            stub, endpoint, theirs = await stack.enter_async_context(rt.peers.agreed(counterpart))
            if theirs is None:
                return _whole(rt, request, stub, endpoint)
        # One after the other: it happens once for each pair of processes.
        agreed = [await stack.enter_async_context(rt.peers.agreed(sender)) for sender in senders]
        known = [(endpoint, theirs or rt.compatibility) for _, endpoint, theirs in agreed]
        peering = rt.maps.get(rt.compatibility, rt.rank, known, request.receivers)
        return _shares(rt, request, agreed, peering)
    except PlanError as exc:
        raise rt.refused("plan", str(exc), Code.INCOMPATIBLE_PEER) from exc
    except ValueError as exc:
        raise SplitpointError(Code.TRANSFER_REFUSED, str(exc)) from exc


def _whole(rt: NodeRuntime, request: pb.PullRequest, stub: Any, endpoint: pb.RankEndpoint) -> Sources:
    # The fingerprints agree, so the peer's compatibility is ours.
    transfer = plan_transfer(
        rt.compatibility,
        rt.compatibility,
        rank=rt.rank,
        peer_rank=endpoint.rank,
        prompt_tokens=request.prompt_tokens,
        block_bytes=rt.block_bytes,
    )
    source = Source(0, stub, endpoint, transfer, rt.fingerprint)
    return Sources((source,), transfer.total_bytes, transfer.total_bytes, ())


def _shares(rt: NodeRuntime, request: pb.PullRequest, agreed: Sequence[Any], peering: Peering) -> Sources:
    content_bytes = blocks_for(request.prompt_tokens, rt.compatibility.block_tokens) * rt.block_bytes
    sources = []
    for index, (plan, of_sender) in enumerate(zip(peering.plans, peering.fingerprints, strict=True)):
        stub, endpoint, _ = agreed[plan.share.sender_rank]
        sources.append(Source(index, stub, endpoint, plan.transfer(request.prompt_tokens), of_sender, plan))
    unneeded = tuple(agreed[rank][1] for rank in peering.unneeded)
    if len(sources) == 1 and peering.plans[0].fit.direct:
        return Sources(tuple(sources), content_bytes, content_bytes, unneeded)
    slot_bytes = _lay_out(sources, content_bytes, min(rt.settings.chunk_bytes, PIECE_BYTES))
    if not rt.receive.fits(slot_bytes):
        slot_bytes = _lay_out(sources, content_bytes, 0)
    return Sources(tuple(sources), content_bytes, slot_bytes, unneeded)


def _lay_out(sources: Sequence[Source], content_bytes: int, piece_bytes: int) -> int:
    """Give each share its pieces behind the content, of about `piece_bytes`, one block at least; the bytes of the slot."""
    end = _aligned(content_bytes)
    for source in sources:
        block = source.transfer.block_bytes
        source.piece_bytes = max(1, min(piece_bytes, source.transfer.total_bytes) // block) * block
        source.lands_at = end
        end += _aligned(PIECES * source.piece_bytes)
    return end


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
