"""Both phases grow and shrink under load with the real model: two engines, four, the first two again, roles swapped."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from coordinator.compare.quality.parity import CLEAR_GAP
from protos.splitpoint.v1 import admin_pb2
from tests.e2e.held import held
from tests.e2e.streams import References, Stream
from tests.e2e.system import Served, until
from tests.e2e.test_pools import apply, done

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

log = logging.getLogger(__name__)

CLIENTS, TOKENS, DEADLINE_S = 2, 16, 120.0
LENGTHS = [40, 129, 200, 300]
TRANSPORTS = (None, "ucx", "grpc")
OTHER = {"prefill": "decode", "decode": "prefill"}
SWAPPED = """
[pools.prefill]
role = "decode"

[pools.decode]
role = "prefill"
"""


def prompt(number: int, length: int) -> list[int]:
    """A pattern again and again: the model is sure of how it goes on."""
    choose = random.Random(number)
    pattern = [choose.randrange(1000, 40000) for _ in range(24)]
    return list(itertools.islice(itertools.cycle(pattern), length))


@contextlib.contextmanager
def load(served: Served, references: References) -> Iterator[list[Stream]]:
    """Clients that ask for split answers, one after another, until the block ends; each is whole and right, whoever had to
    compute it. Yields what was answered."""
    over, answered = threading.Event(), list[Stream]()

    def client(number: int) -> None:
        for turn in itertools.count(number, CLIENTS):
            if over.is_set():
                return
            which, transport = turn % len(LENGTHS), TRANSPORTS[turn % len(TRANSPORTS)]
            stream = Stream(served, references.answers[which].prompt, TOKENS, transport=transport, deadline_s=DEADLINE_S)
            stream.start()
            assert stream.check_end(references, which), stream.error
            answered.append(stream)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield answered
        finally:
            over.set()
        for ended in clients:
            ended.result(timeout=2 * DEADLINE_S)


def scaled(served: Served, replicas: int) -> dict[str, admin_pb2.WorkerStatus]:
    """Both pools have so many workers, and every gateway knows."""
    for pool in ("prefill", "decode"):
        served.admin_call("ScalePool", admin_pb2.ScalePoolRequest(pool=pool, replicas=replicas))
    until(f"{replicas} of each phase", lambda: not served.status().unsettled, 300, 0.5)
    return served.workers()


def workers_of(answers: Sequence[Stream]) -> set[str]:
    """Who computed them."""
    ends = [stream.finish for stream in answers]
    return {name for end in ends if end is not None for name in (end.metrics.prefill_worker, end.metrics.decode_worker)}


def roles(served: Served) -> dict[str, str]:
    """Each ready worker's role by its incarnation."""
    return {worker.incarnation: worker.role for worker in served.workers().values()}


def moved(answers: Sequence[Stream]) -> int:
    """How many were split, with KV that arrived."""
    ends = [stream.finish.metrics for stream in answers if stream.finish is not None]
    return sum(end.path == "split" and not end.recomputed for end in ends)


def no_block_is_held(served: Served) -> bool:
    """Engines forget cached prefixes only when nobody refers to a block."""
    with contextlib.suppress(grpc.RpcError):
        return bool(served.admin_call("ResetPrefixCaches", admin_pb2.ResetPrefixCachesRequest()).workers == 2)
    return False


def test_both_phases_scale_1_2_1_and_change_roles_and_every_answer_is_whole_and_right(real: Served, tmp_path: Path) -> None:
    real.wait_ready(300, prefill=1, decode=1)
    before = roles(real)
    references = References.ask(real, [prompt(n, length) for n, length in enumerate(LENGTHS)], TOKENS)
    assert references.floor < CLEAR_GAP
    first = [admin_pb2.PoolSpec(name=p.name, role=p.role, replicas=1, engine_json=p.engine_json) for p in real.status().pools]
    begin_s = time.monotonic()
    with load(real, references) as answered:
        grown = scaled(real, 2)
        grown_s, while_growing = time.monotonic() - begin_s, len(answered)
        assert sorted(w.pool for w in grown.values()) == ["decode", "decode", "prefill", "prefill"]
        assert while_growing, "requests were answered as the engines loaded"
        until("all four answer", lambda: workers_of(answered[while_growing:]) >= grown.keys(), 120)
        asked, shrink_s = len(answered), time.monotonic()
        scaled(real, 1)
        shrunk_s = time.monotonic() - shrink_s
        until("the pair that is left answers", lambda: len(answered) > asked + 2 * CLIENTS, 60)
        asked, was, file = len(answered), roles(real), tmp_path / "pools.toml"
        file.write_text(SWAPPED)
        relabelled = done(real, "pools", "apply", str(file), "--wait", "--timeout", "60").splitlines()[-1]
        assert roles(real) == {incarnation: OTHER[role] for incarnation, role in was.items()}
        until("the pair answers with its roles changed", lambda: len(answered) > asked + 2 * CLIENTS, 60)
        assert apply(real, first) == ["relabel"]
    assert roles(real) == before, "the oldest stay, and no engine was started again"
    until("nothing is held", lambda: not held(real.status()), 30)
    until("no block is referred to", lambda: no_block_is_held(real), 20)
    log.info(
        "two engines more in %.0f s, %d answers meanwhile; gone in %.1f s; roles changed: %s; %d answers, %d of them split, "
        "near-ties below %.3f",
        grown_s, while_growing, shrunk_s, relabelled, len(answered), moved(answered), references.floor,
    )  # fmt: skip
