"""Prefill and decode with different tensor parallelism, on real engines: token-exact, with every rank's KV in its place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine import handover
from engine.protocol import KvReceive, KvSend
from engine.sampling import SamplingParams
from kvtransfer.layout import exchange_refusal, family
from protos.ids import TransferId, new_capability, new_transfer_id
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.tp_engine import BLOCK_TOKENS, VOCABULARY, TpEngine, random_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
K = BLOCK_TOKENS
LENGTHS = [1, K, K + 1, 3 * K - 1, 200]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, TpEngine]]:
    """One engine of one rank and one of two, on the same weights."""
    pytest.importorskip("vllm")
    checkpoint: Path = tmp_path_factory.mktemp("llama")
    random_llama(checkpoint)
    made: dict[int, TpEngine] = {}
    with contextlib.ExitStack() as ends:
        for tp in (1, 2):
            made[tp] = TpEngine(checkpoint, tp)
            ends.callback(made[tp].close)
        yield made


def prompt_of(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(1, VOCABULARY, length)]


def test_engines_of_both_shapes_say_that_they_can_exchange(engines: dict[int, TpEngine]) -> None:
    (one,) = [request.compatibility for request in engines[1].registered]
    two = [request.compatibility for request in engines[2].registered]
    assert [(c.total_kv_heads, c.first_kv_head, c.num_kv_heads) for c in (one, *two)] == [(4, 0, 4), (4, 0, 2), (4, 2, 2)]
    assert one.axes == "head", "the CPU kernels' packing is never cut along tokens"
    assert {family(c) for c in (one, *two)} == {family(one)}
    assert all(exchange_refusal(one, other) == "" for other in two)


@pytest.mark.parametrize(("sending", "receiving"), [(1, 2), (2, 1), (2, 2)])
def test_a_handed_over_request_is_token_exact(engines: dict[int, TpEngine], sending: int, receiving: int) -> None:
    p, d = engines[sending], engines[receiving]
    for length in LENGTHS:
        prompt = prompt_of(length)
        d.forget_prefixes()
        p.forget_prefixes()
        right = d.run(prompt, GREEDY).token_ids
        assert len(set(right)) > 4, "an answer that tells one KV from another"
        d.forget_prefixes()
        grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
        pull = d.pull(grant, prompt, p)
        p.reserve(grant, prompt)
        first = p.run(prompt, handover.prefill_params(GREEDY), KvSend(TransferId(grant.transfer_id))).token_ids
        answers = pull.result(60)
        assert {seal.rank for answer in answers for seal in answer.seals} == set(range(sending))
        rest = d.run(
            [*prompt, *first],
            handover.decode_params(GREEDY, forwarded_tokens=len(first)),
            KvReceive(TransferId(grant.transfer_id), len(prompt)),
        )
        assert rest.cached_tokens == len(prompt), "the prompt's KV was loaded, not computed again"
        assert [*first, *rest.token_ids] == right
    wait_until_idle(p, d)


def wait_until_idle(*engines: TpEngine) -> None:
    pause = threading.Event()
    for _ in range(500):
        held = [engine.held() for engine in engines]
        if not any(any(of_rank) for of_rank in held):
            return
        pause.wait(0.02)
    raise AssertionError(f"still held: {held}")
