"""Every byte that a receiver needs is taken exactly once, from a rank that holds it, and nothing else: for workers of any two
shapes, byte orders and block sizes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout import exchange_refusal, family, fingerprint, holding, row_layout
from kvtransfer.plan import PlanError, plan_share
from kvtransfer.rank_map import Holding, RankMap, Span, map_ranks
from kvtransfer.rearrange import clear_beyond, cut_blocks, fit_blocks
from tests.support.shapes import Shape

HEADS = (1, 2, 4, 8)
TPS = (1, 2, 4, 8)
AXES = ("head,token", "token,head", "kv,head,token", "kv,token,head", "head,token,kv", "token,head,kv", "token,kv,head")


def holdings(shape: Shape) -> list[Holding]:
    found = [holding(shape.compatibility(rank)) for rank in range(shape.ranks)]
    assert None not in found
    return [one for one in found if one is not None]


def check_map(senders: list[Holding], receivers: list[Holding], found: RankMap) -> None:
    for rank, wanted in enumerate(receivers):
        taken: Counter[tuple[int, int]] = Counter()
        for share in found.of_receiver(rank):
            held = senders[share.sender_rank]
            assert held.overlap(share.part) == share.part, "from a rank that holds it"
            taken.update(product(range(*astuple(share.part.layers)), range(*astuple(share.part.heads))))
        needed = set(product(range(*astuple(wanted.layers)), range(*astuple(wanted.heads))))
        assert taken == Counter(needed), "every cell once, and nothing else"
    pairs = [(share.sender_rank, share.receiver_rank) for share in found.shares]
    assert len(set(pairs)) == len(pairs), "one share for a pair of ranks"
    assert [found.receivers_of(rank) for rank in range(len(senders))] == [
        sum(sender == rank for sender, _ in pairs) for rank in range(len(senders))
    ]
    assert set(found.unneeded) == set(range(len(senders))) - {sender for sender, _ in pairs}


def astuple(span: Span) -> tuple[int, int]:
    return span.first, span.end


@pytest.mark.parametrize("total_heads", HEADS)
def test_every_pair_of_tensor_parallel_sizes(total_heads: int) -> None:
    for sending, receiving in product(TPS, TPS):
        p = holdings(Shape(tp=sending, total_heads=total_heads))
        d = holdings(Shape(tp=receiving, total_heads=total_heads))
        found = map_ranks(p, d)
        check_map(p, d, found)
        if sending == receiving:
            assert [(s.sender_rank, s.receiver_rank) for s in found.shares] == [(rank, rank) for rank in range(sending)]


@st.composite
def stages(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    return tuple(end - first for first, end in zip([0, *cuts], [*cuts, layers], strict=True))


@given(st.data(), st.integers(1, 12), st.sampled_from(HEADS), st.sampled_from(TPS), st.sampled_from(TPS))
def test_every_split_into_pipeline_stages(data: st.DataObject, layers: int, heads: int, sending: int, receiving: int) -> None:
    p = holdings(Shape(tp=sending, stages=data.draw(stages(layers)), total_heads=heads))
    d = holdings(Shape(tp=receiving, stages=data.draw(stages(layers)), total_heads=heads))
    check_map(p, d, map_ranks(p, d))


def test_what_nobody_holds_is_refused_and_so_are_rectangles_that_cross() -> None:
    two, three = Span(0, 2), Span(0, 3)
    with pytest.raises(PlanError, match="held by no sender"):
        map_ranks([Holding(two, two)], [Holding(three, two)])
    with pytest.raises(PlanError, match="not the same ones"):
        map_ranks([Holding(two, two), Holding(Span(1, 3), two)], [Holding(three, two)])
    assert map_ranks([Holding(two, two), Holding(two, two)], [Holding(two, two)]).unneeded == (1,)


@st.composite
def layouts(draw: st.DrawFn, heads: int, layers: int) -> Shape:
    kernel = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    subs = draw(st.sampled_from([1, 1, 2, 3]))
    axes = draw(st.sampled_from(AXES)).split(",")
    if subs > 1:
        axes.insert(draw(st.integers(0, axes.index("token"))), "sub")
    return Shape(
        tp=draw(st.sampled_from([1, 2, 4])),
        stages=draw(stages(layers)),
        total_heads=heads,
        block_tokens=kernel * subs,
        kernel_tokens=kernel if subs > 1 else 0,
        axes=",".join(axes),
    )


def moved(p: Shape, d: Shape, tokens: int, chunk_blocks: int) -> list[np.ndarray]:
    """All receivers' slots after all shares, in chunks; what lay there before is 0xAA."""
    found = map_ranks(holdings(p), holdings(d))
    slots = [p.slot(rank, tokens) for rank in range(p.ranks)]
    results = []
    for rank in range(d.ranks):
        mine = d.compatibility(rank)
        rows = np.full((-(-tokens // d.block_tokens), d.block_bytes(rank)), 0xAA, dtype=np.uint8)
        for share in found.of_receiver(rank):
            theirs = p.compatibility(share.sender_rank)
            plan = plan_share(mine, theirs, share, found.receivers_of(share.sender_rank))
            transfer = plan.transfer(tokens)
            source = slots[share.sender_rank]
            assert transfer.slot_bytes == source.size
            for first in range(0, transfer.num_blocks, chunk_blocks):
                count = min(chunk_blocks, transfer.num_blocks - first)
                wire = np.zeros(count * transfer.block_bytes, dtype=np.uint8)
                cut_blocks(plan.cut, source[first : first + count].reshape(-1), wire)
                if plan.cut.whole:
                    assert np.array_equal(wire, source[first : first + count].reshape(-1))
                if plan.fit.direct:
                    rows.reshape(-1)[first * transfer.block_bytes : (first + count) * transfer.block_bytes] = wire
                fit_blocks(plan.fit, wire, first, rows.reshape(-1))
            clear_beyond(plan.fit, transfer.num_blocks, rows.reshape(-1))
        results.append(rows)
    return results


def check_slots(d: Shape, tokens: int, slots: list[np.ndarray]) -> None:
    for rank, rows in enumerate(slots):
        right = d.slot(rank, tokens)
        inside = d.slot(rank, tokens, beyond=0) == d.slot(rank, tokens, beyond=1)
        assert np.array_equal(rows[inside], right[inside]), "the prompt's bytes, each in its place"
        assert not np.any(rows[~inside] == 0xAA), "nothing of an earlier owner behind them"


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 30), st.integers(1, 4))
def test_every_byte_arrives_in_its_place(data: st.DataObject, heads: int, layers: int, tokens: int, chunk: int) -> None:
    p, d = data.draw(layouts(heads, layers), "prefill"), data.draw(layouts(heads, layers), "decode")
    assert {family(c) for c in (p.compatibility(0), d.compatibility(0), d.compatibility(d.ranks - 1))} == {
        family(p.compatibility(0))
    }
    check_slots(d, tokens, moved(p, d, tokens, chunk))


OPAQUE = {"axes": "head", "packing": "cpu_attn:vec"}


@pytest.mark.parametrize(("sending", "receiving"), [(1, 2), (2, 1), (4, 8), (8, 4), (2, 2), (1, 1)])
def test_packed_heads_pass_whole_between_any_tensor_parallel_sizes(sending: int, receiving: int) -> None:
    """What cannot be cut along tokens still is along heads: the packing of vLLM's CPU attention."""
    p = Shape(tp=sending, total_heads=4, **OPAQUE)  # type: ignore[arg-type]
    d = Shape(tp=receiving, total_heads=4, **OPAQUE)  # type: ignore[arg-type]
    assert family(p.compatibility(0)) == family(d.compatibility(0))
    check_slots(d, 11, moved(p, d, 11, 2))


@pytest.mark.parametrize(("sending", "receiving"), [(1, 2), (4, 1), (2, 2)])
def test_latent_attention_has_one_head_that_every_rank_holds(sending: int, receiving: int) -> None:
    p = Shape(tp=sending, stages=(1, 2), total_heads=1, axes="token", block_tokens=6)
    d = Shape(tp=receiving, stages=(3,), total_heads=1, axes="token", block_tokens=4)
    assert family(p.compatibility(0)) == family(d.compatibility(0))
    found = map_ranks(holdings(p), holdings(d))
    check_map(holdings(p), holdings(d), found)
    check_slots(d, 17, moved(p, d, 17, 2))


def test_runs_are_few() -> None:
    """Copies for a chunk, whatever its length: one where block sizes agree, otherwise the least common multiple in pieces."""
    for source, target, copies in ((16, 16, 1), (16, 128, 8), (128, 16, 8), (48, 32, 6)):
        p, d = Shape(block_tokens=source, axes="token,head"), Shape(block_tokens=target)
        (share,) = map_ranks(holdings(p), holdings(d)).shares
        plan = plan_share(d.compatibility(0), p.compatibility(0), share, 1)
        assert len(list(plan.fit.runs(0, 1000, 1000 * source // target))) == copies


def refusal(p: Shape, d: Shape) -> str:
    return exchange_refusal(d.compatibility(0), p.compatibility(0))


def test_what_cannot_be_converted_is_refused_by_name() -> None:
    plain = Shape()
    packed = Shape(**OPAQUE)  # type: ignore[arg-type]
    assert refusal(plain, Shape(block_tokens=8, axes="token,head")) == ""
    assert refusal(packed, Shape(block_tokens=8, **OPAQUE)).startswith("block_tokens: 8 here, 4 there; packing 'cpu_attn:vec'")  # type: ignore[arg-type]
    assert refusal(packed, Shape(axes="head", packing="cpu_attn:amx")).startswith("packing: ")
    assert refusal(plain, packed).startswith("packing: ")
    assert refusal(Shape(axes="head"), plain).startswith("axes: ")
    assert refusal(plain, Shape(total_heads=4)).startswith("total_kv_heads: ")
    assert refusal(plain, Shape(stages=(3,))).startswith("total_layers: ")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_family_is_who_can_exchange(data: st.DataObject) -> None:
    def any_shape() -> Shape:
        heads, layers = data.draw(st.sampled_from([2, 4])), data.draw(st.integers(1, 2))
        shape = data.draw(layouts(heads, layers))
        if data.draw(st.booleans()):
            return Shape(tp=shape.tp, stages=shape.stages, total_heads=heads, block_tokens=shape.block_tokens, **OPAQUE)  # type: ignore[arg-type]
        return shape

    p, d = any_shape().compatibility(0), any_shape().compatibility(0)
    assert (family(p) == family(d)) == (exchange_refusal(p, d) == "")
    assert exchange_refusal(p, d) == "" or exchange_refusal(d, p)
    if fingerprint(p) == fingerprint(d):
        assert exchange_refusal(p, d) == ""


def test_a_rank_that_says_nothing_meets_its_equal_alone() -> None:
    silent = Shape().compatibility(0)
    silent.total_kv_heads = 0
    other = Shape(tp=2).compatibility(0)
    other.total_kv_heads = 0
    assert row_layout(silent) is None
    assert holding(silent) is None
    assert exchange_refusal(silent, silent) == ""
    assert exchange_refusal(silent, Shape().compatibility(0)).startswith("total_kv_heads: ")
    assert exchange_refusal(silent, other).startswith("layout: ")
    assert family(silent) != family(other)


@pytest.mark.parametrize(
    "broken",
    [
        {"axes": "head,head"},
        {"axes": "colour"},
        {"axes": "token"},
        {"axes": "sub,head,token"},
        {"kernel_block_tokens": 3},
        {"kernel_block_tokens": 2},
        {"block_bytes_per_layer": 63},
    ],
)
def test_a_statement_that_cannot_be_is_refused_by_its_name(broken: dict[str, object]) -> None:
    message = Shape().compatibility(0)
    for name, value in broken.items():
        setattr(message, name, value)
    with pytest.raises(PlanError) as caught:
        row_layout(message)
    assert exchange_refusal(Shape().compatibility(0), message) == str(caught.value)
