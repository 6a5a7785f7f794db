"""The advisor on a running system: real Ray and KV transfer, simulated engines, load of long prompts."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.system import ROOT, Served, serve, until
from tests.e2e.test_serve import splitpoint

pytestmark = pytest.mark.timeout(240)

log = logging.getLogger(__name__)

CLIENTS = 16
PROMPT_TOKENS = 1000
KINDS = 4
"""Different prompts; asked again and again, and no cache keeps them."""

SETS = [
    "pools.prefill.replicas=1",
    "pools.decode.replicas=2",
    "engine.enable_prefix_caching=false",
    "engine.max_num_batched_tokens=1024",
    # Sixteen prompts of 1,000 tokens wait 3.2 s for one worker, 1.6 s for two.
    "engine.simulated.prefill_token_s=200e-6",
    "advisor.enabled=true",
    "advisor.apply=true",
    "advisor.ttft_goal_s=2.4",
    # Not what this is about: a busy machine must not miss it.
    "advisor.tpot_goal_s=1",
    "advisor.interval_s=0.5",
    "advisor.window_s=6",
    "advisor.hold_s=1",
    "advisor.dwell_s=3",
    "coordinator.heartbeat_interval_s=0.5",
    "coordinator.missed_heartbeats=20",
    "coordinator.drain_timeout_s=20",
]


class Load:
    """Clients that ask one thing after another."""

    def __init__(self, served: Served) -> None:
        self.answered = 0
        self._served = served
        self._over = threading.Event()
        with served.client() as client:
            self._expected = [self._text(number, client) for number in range(KINDS)]

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
                number = (number + 1) % KINDS
                assert self._text(number, client) == self._expected[number]
                self.answered += 1

    def _text(self, number: int, client: httpx.Client) -> str:
        body = {"model": self._served.model, "prompt": [2000 + number] * PROMPT_TOKENS, "max_tokens": 3}
        sampling = {"temperature": 0, "ignore_eos": True}
        reply = client.post("/v1/completions", json=body | sampling, headers={"x-splitpoint-path": "split"})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])


def test_a_worker_follows_the_prompts_and_no_request_notices(checkpoint: Path, tmp_path: Path) -> None:
    with serve(ROOT / "deploy" / "simulated.toml", tmp_path, [f"engine.model_path={checkpoint}", *SETS], ready_s=90) as served:
        served.wait_ready(60, prefill=1, decode=2)
        before = {w.worker_id: w.incarnation for w in served.workers().values()}
        load = Load(served)
        with load.running():
            until("prompts have got a worker more", lambda: _targets(served)["prefill"] == 2, 80)
            until("it is in its place", lambda: not served.status().unsettled, 30)
            count = load.answered
            until("more are answered", lambda: load.answered > count + 3 * CLIENTS, 60)
            said = splitpoint(served, "advise", "-o", "wide")
        assert said.returncode == 0, said.stderr
        log.info("%s answers; %s", load.answered, said.stdout)
        assert _targets(served) == {"prefill": 2, "decode": 1}
        after = {w.worker_id: w.incarnation for w in served.workers().values()}
        assert after == before, "it was relabelled, no engine was started"
        assert {cost.how: cost.measured_changes for cost in served.status().advisor.costs}["relabel"] == 1
        until("idle", served.idle, 20)


def _targets(served: Served) -> dict[str, int]:
    return {pool.name: pool.target for pool in served.status().pools}
