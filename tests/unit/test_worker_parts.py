"""Seals, registered ranks, and which stream brought up which transfer."""

from __future__ import annotations

import pytest

from engine.worker.ranks import RankRegistry
from engine.worker.seals import make_seal, seal_mismatch
from engine.worker.transfers import TransferRoster
from kvtransfer.layout import fingerprint
from protos.errors import Code, SplitpointError
from protos.ids import Incarnation, TransferId
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2

ME = Incarnation("me")
PROMPT = [5, 6, 7, 8, 9]
A, B = TransferId(b"a" * 16), TransferId(b"b" * 16)


def rank(number: int = 0, world_size: int = 1, **changes: object) -> worker_pb2.RegisterRankRequest:
    request = worker_pb2.RegisterRankRequest(
        endpoint=kv_transfer_pb2.RankEndpoint(rank=number, address=f"h:{number + 1}", incarnation=ME),
        compatibility=kv_transfer_pb2.KvCompatibility(block_tokens=4, model="m"),
        world_size=world_size,
        send_staging_bytes=1000,
        receive_staging_bytes=900,
        bytes_per_block=100,
        transports=["ucx", "grpc"],
    )
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def registry_of(*requests: worker_pb2.RegisterRankRequest) -> RankRegistry:
    registry = RankRegistry(ME, "secret")
    for request in requests:
        registry.register(request, "secret")
    return registry


async def test_facts_are_what_all_ranks_can_do() -> None:
    second = rank(1, 2, send_staging_bytes=500)
    del second.transports[:]
    second.transports.append("grpc")
    registry = registry_of(second, rank(0, 2))
    facts = await registry.wait(0.1)
    assert [e.rank for e in facts.endpoints] == [0, 1]
    assert facts.max_transfer_tokens == 5 * 4
    assert facts.transports == ("grpc",)
    assert facts.fingerprint == fingerprint(facts.compatibility)
    assert [facts.transfer_bytes(n) for n in (1, 4, 5)] == [100, 100, 200]


async def test_a_missing_rank_is_counted_in_the_time_out() -> None:
    with pytest.raises(TimeoutError, match="1 of 2 ranks"):
        await registry_of(rank(0, 2)).wait(0.01)


def test_registering_is_idempotent_and_refuses_by_name() -> None:
    registry = registry_of(rank(), rank())
    assert registry.complete
    foreign = rank()
    foreign.endpoint.incarnation = "other"
    moved = rank()
    moved.endpoint.address = "h:99"
    cases = [
        (foreign, "secret", Code.INVALID_VALUE),
        (rank(3), "secret", Code.INVALID_VALUE),
        (rank(bytes_per_block=0), "secret", Code.INVALID_VALUE),
        (moved, "secret", Code.CONFLICT),
        (rank(1, 2), "secret", Code.CONFLICT),
        (rank(), "", Code.UNAUTHENTICATED),
        (rank(), "sécret", Code.UNAUTHENTICATED),
    ]
    for request, token, code in cases:
        with pytest.raises(SplitpointError) as refused:
            registry.register(request, token)
        assert refused.value.code is code


def test_a_seal_fits_only_its_own_prompt_transfer_and_bytes() -> None:
    facts = registry_of(rank()).facts()
    seal = make_seal(A, PROMPT, facts, "p")
    of_rank = kv_transfer_pb2.Seal()
    of_rank.CopyFrom(seal)
    of_rank.num_chunks = 3  # the worker does not say how many
    assert seal_mismatch(seal, [of_rank], PROMPT, "p") == ""
    assert seal_mismatch(seal, [of_rank], [*PROMPT, 1], "p") == ""  # forwarded tokens follow the prompt
    assert "rank seals" in seal_mismatch(seal, [], PROMPT, "p")
    assert "prompt_tokens" in seal_mismatch(seal, [of_rank], PROMPT[:4], "p")
    assert "token_hash" in seal_mismatch(seal, [of_rank], [9, 9, 9, 9, 9], "p")
    assert "incarnation" in seal_mismatch(seal, [of_rank], PROMPT, "another")
    for name, value in {
        "transfer_id": B,
        "prompt_tokens": 4,
        "token_hash": b"x",
        "incarnation": "q",
        "fingerprint": b"f",
        "bytes": 1,
    }.items():
        wrong = kv_transfer_pb2.Seal()
        wrong.CopyFrom(of_rank)
        setattr(wrong, name, value)
        assert name in seal_mismatch(seal, [wrong], PROMPT, "p")
        assert name in seal_mismatch(seal, [of_rank, wrong], PROMPT, "p")


def test_every_rank_s_seal_is_compared_with_what_the_worker_says_of_it() -> None:
    """Ranks hold other layers and heads, so each has a fingerprint and a length of its own."""
    second = rank(1, 2, bytes_per_block=70)
    second.compatibility.num_layers = 3
    facts = registry_of(rank(0, 2), second).facts()
    seal = make_seal(A, PROMPT, facts, "p")
    assert [(said.rank, said.bytes) for said in seal.ranks] == [(0, 200), (1, 140)]
    assert seal.ranks[0].fingerprint == seal.fingerprint != seal.ranks[1].fingerprint
    seals = []
    for said in seal.ranks:
        of_rank = kv_transfer_pb2.Seal(rank=said.rank, fingerprint=said.fingerprint, bytes=said.bytes)
        for name in ("transfer_id", "prompt_tokens", "token_hash", "incarnation"):
            setattr(of_rank, name, getattr(seal, name))
        seals.append(of_rank)
    assert seal_mismatch(seal, seals, PROMPT, "p") == ""
    # A rank may be pulled from by several of ours, and one that replicates another by none.
    assert seal_mismatch(seal, [seals[1], seals[1]], PROMPT, "p") == ""
    seals[1].bytes = 200
    assert seal_mismatch(seal, seals, PROMPT, "p") == "bytes: rank 1 sealed 200, the worker 140"
    seals[1].rank = 2
    assert "rank: 2" in seal_mismatch(seal, seals, PROMPT, "p")


def test_the_roster_knows_each_streams_transfers_until_their_time_is_over() -> None:
    now = [0.0]
    roster = TransferRoster(10.0, lambda: now[0])
    roster.note(1, A, 5.0)
    roster.note(2, B, 5.0)
    assert roster.take(1) == [A]
    assert roster.take(1) == []
    roster.forget(B)
    roster.forget(B)
    assert roster.take(2) == []
    roster.note(1, A, 5.0)
    roster.note(1, B, 5.0)
    assert roster.take(1) == [B, A], "the newest first: the oldest are likely over, and the time for releases is bounded"
    roster.note(1, A, 5.0)
    now[0] = 16.0
    roster.note(1, B, 5.0)
    assert len(roster) == 1
    assert roster.take(1) == [B]
