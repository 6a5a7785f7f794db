"""The advisor on a running system: real Ray and KV transfer, simulated engines, load that shifts to answers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.system import ROOT, Served, serve, until
from tests.e2e.test_serve import splitpoint

pytestmark = pytest.mark.timeout(240)

log = logging.getLogger(__name__)

CLIENTS = 12
KINDS = 4
"""Different prompts of each shape; asked again and again, and no cache keeps them."""

SETS = [
    "pools.prefill.replicas=1",
    "pools.decode.replicas=3",
    "engine.enable_prefix_caching=false",
    "engine.max_num_batched_tokens=1024",
    # Twelve prompts of 1,000 tokens wait 2.4 s for one worker, 1.2 s for two; twelve answers take 34 ms a token on two workers,
    # 24 ms on three.
    "engine.simulated.prefill_token_s=200e-6",
    "engine.simulated.decode_sequence_s=5e-3",
    "advisor.enabled=true",
    "advisor.apply=true",
    "advisor.ttft_goal_s=1.8",
    "advisor.tpot_goal_s=0.03",
    "advisor.interval_s=0.5",
    "advisor.window_s=6",
    "advisor.hold_s=1",
    "advisor.dwell_s=3",
    "coordinator.heartbeat_interval_s=0.5",
    "coordinator.missed_heartbeats=20",
    "coordinator.drain_timeout_s=20",
]


@dataclass(frozen=True)
class Shape:
    """Of the requests that come."""

    prompt_tokens: int
    output_tokens: int


PROMPTS = Shape(1000, 3)
ANSWERS = Shape(16, 60)


class Load:
    """Clients that ask one thing after another, of the shape that `shape` is then."""

    def __init__(self, served: Served) -> None:
        self.shape = PROMPTS
        self.answered = 0
        self._served = served
        self._over = threading.Event()
        self._expected = {(shape, n): self._text(shape, n) for shape in (PROMPTS, ANSWERS) for n in range(KINDS)}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Fails with what any client got but the answer of a calm moment."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._ask_on, n) for n in range(CLIENTS)]
            try:
                yield
            finally:
                self._over.set()
            for ended in clients:
                ended.result(timeout=60)

    def _ask_on(self, number: int) -> None:
        with self._served.client() as client:
            while not self._over.is_set():
                number, shape = number + 1, self.shape
                assert self._text(shape, number % KINDS, client) == self._expected[shape, number % KINDS]
                self.answered += 1

    def _text(self, shape: Shape, number: int, client: httpx.Client | None = None) -> str:
        body = {
            "model": self._served.model,
            "prompt": [2000 + number] * shape.prompt_tokens,
            "max_tokens": shape.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if client is None:
            with self._served.client() as client:
                return self._text(shape, number, client)
        reply = client.post("/v1/completions", json=body, headers={"x-splitpoint-path": "split"})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])


def test_workers_follow_the_load_from_prompts_to_answers_and_no_request_notices(checkpoint: Path, tmp_path: Path) -> None:
    with serve(ROOT / "deploy" / "simulated.toml", tmp_path, [f"engine.model_path={checkpoint}", *SETS], ready_s=90) as served:
        served.wait_ready(60, prefill=1, decode=3)
        before = {w.worker_id: w.incarnation for w in served.workers().values()}
        load = Load(served)
        with load.running():
            grown = until("prompts have got a worker more", lambda: _prefill_workers(served, at_least=2), 80)
            count = load.answered
            until("more prompts are answered", lambda: load.answered > count + 3 * CLIENTS, 60)
            load.shape = ANSWERS
            until("answers have got it back", lambda: _prefill_workers(served, at_most=grown - 1), 80)
            count = load.answered
            until("more answers come", lambda: load.answered > count + 3 * CLIENTS, 60)
            said = splitpoint(served, "advise", "-o", "wide")
        assert said.returncode == 0, said.stderr
        log.info("prefill workers 1, %d, %d; %d answers; %s", grown, _targets(served)["prefill"], load.answered, said.stdout)
        until("settled", lambda: not served.status().unsettled, 30)
        after = {w.worker_id: w.incarnation for w in served.workers().values()}
        assert after == before, "workers were relabelled, no engine was started"
        assert {cost.how: cost.measured_changes for cost in served.status().advisor.costs}["relabel"] >= 2
        until("idle", served.idle, 20)


def _targets(served: Served) -> dict[str, int]:
    return {pool.name: pool.target for pool in served.status().pools}


def _prefill_workers(served: Served, *, at_least: int = 0, at_most: int = 4) -> int | None:
    """How many there are, once they are as many and in their place."""
    status = served.status()
    count = next(pool.target for pool in status.pools if pool.name == "prefill")
    return count if at_least <= count <= at_most and not status.unsettled else None
