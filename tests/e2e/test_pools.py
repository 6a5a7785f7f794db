"""Pools that grow, shrink and change roles under load, over real Ray and real KV transfer, with simulated engines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from coordinator.pools.admin_http import SCALE_PATH
from protos.splitpoint.v1 import admin_pb2
from tests.e2e.system import Served, until
from tests.e2e.test_serve import completion, splitpoint

pytestmark = pytest.mark.timeout(300)

log = logging.getLogger(__name__)

CLIENTS = 4
PROMPTS = 5
TOKENS = 24
GROWN = """
[pools.prefill]
role = "prefill"
replicas = 2

[pools.decode]
role = "decode"
replicas = 3
engine = { tensor_parallel_size = 2 }

[pools.spare]
role = "decode"

[pools.both]
role = "colocated"
"""


@contextlib.contextmanager
def load(served: Served) -> Iterator[list[str]]:
    """Clients that ask one thing after another until the block ends; every answer is the one of a calm moment. Yields the
    answers; fails with what any of them got else."""
    expected = [_text(served, n) for n in range(PROMPTS)]
    over, answered = threading.Event(), list[str]()

    def client(number: int) -> None:
        while not over.is_set():
            which = (number + len(answered)) % PROMPTS
            assert _text(served, which) == expected[which]
            answered.append(expected[which])

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, n) for n in range(CLIENTS)]
        try:
            yield answered
        finally:
            over.set()
        for ended in clients:
            ended.result(timeout=60)


def _text(served: Served, number: int) -> str:
    reply = completion(served, number, TOKENS)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def done(served: Served, *arguments: str) -> str:
    """A command that has to succeed; its output."""
    ended = splitpoint(served, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _target(served: Served, pool: str) -> int:
    return next(p.target for p in served.status().pools if p.name == pool)


def labels(served: Served) -> dict[str, tuple[str, str]]:
    """Pool and incarnation by worker."""
    return {i: (w.pool, w.incarnation) for i, w in served.workers(state="").items()}


def apply(served: Served, pools: list[admin_pb2.PoolSpec]) -> list[str]:
    """Apply and wait until it is done; what was done to workers."""
    reply = served.admin_call("ApplyPools", admin_pb2.ApplyPoolsRequest(pools=pools))
    until("settled", lambda: not served.status().unsettled, 60)
    return sorted({step.action for step in reply.plan})


def test_each_phase_scales_and_workers_change_roles_while_no_request_fails(system: Served, tmp_path: Path) -> None:
    """Prefill 1-4-1, decode 1-3-1, and in between two prefill workers become a decode and a colocated one and come back."""
    before = labels(system)
    first = [
        admin_pb2.PoolSpec(name=p.name, role=p.role, replicas=p.target, engine_json=p.engine_json) for p in system.status().pools
    ]
    file = tmp_path / "pools.toml"
    file.write_text(GROWN)
    with load(system) as answered:
        scale = f"http://{system.status().gateways[0].admin_http_address}{SCALE_PATH.format(pool='prefill')}"
        assert httpx.put(scale, json={"spec": {"replicas": 2}}, trust_env=False).json()["spec"] == {"replicas": 2}
        done(
            system, "autoscale", "prefill", "--min", "4", "--max", "4", "--metrics-interval-s", "0.5", "--look-back-period-s", "1"
        )
        until("prefill has grown", lambda: _target(system, "prefill") == 4 and not system.status().unsettled, 90)
        assert httpx.put(scale, json={"spec": {"replicas": 2}}, trust_env=False).status_code == 409
        [autoscaler] = system.status().autoscaling.autoscalers
        assert not [gap for gap in ("does not answer", "silent") if gap in autoscaler.decision.reason]
        done(system, "autoscale", "prefill", "--off")
        done(system, "scale", "decode", "--replicas", "3", "--wait", "--timeout", "80")
        grown = labels(system)
        assert [pool for pool, _ in grown.values()].count("prefill") == 4

        assert "relabel" in done(system, "pools", "apply", str(file), "--dry-run")
        assert labels(system) == grown
        said = done(system, "pools", "apply", str(file), "--wait", "--timeout", "60")
        log.info("relabelled under load: %s", said.splitlines()[-1])
        changed = labels(system)
        assert {i: incarnation for i, (_, incarnation) in changed.items()} == {i: inc for i, (_, inc) in grown.items()}
        assert sorted(pool for pool, _ in changed.values()) == ["both"] + ["decode"] * 3 + ["prefill"] * 2 + ["spare"]
        count = len(answered)
        until("the changed pools serve", lambda: len(answered) > count + 2 * CLIENTS, 60)

        assert apply(system, first) == ["keep", "stop"]
    assert labels(system) == before, "the oldest stay"
    assert len(answered) > 4 * CLIENTS
    until("idle", system.idle, 20)


@pytest.mark.parametrize(("kind", "state"), [("warm", "ready"), ("placed", "placed")])
def test_the_spare_of_a_killed_worker_takes_over_while_no_request_fails(system: Served, kind: str, state: str) -> None:
    """A coordinator that was killed before knows a reserved place again, of which no process runs."""
    first = [
        admin_pb2.PoolSpec(name=p.name, role=p.role, replicas=p.target, engine_json=p.engine_json) for p in system.status().pools
    ]
    [old] = [pool for pool in first if pool.name == "decode"]
    decode = admin_pb2.PoolSpec(name="decode", role="decode", replicas=2, engine_json=old.engine_json, spares=1, spare_kind=kind)
    apply(system, [*(pool for pool in first if pool.name != "decode"), decode])
    before = system.workers("decode", state="")
    [spare] = [i for i, worker in before.items() if worker.spare]
    assert before[spare].state == state
    victim = next(i for i, worker in before.items() if not worker.spare)
    if kind == "placed":
        os.kill(system.pid_of_actor("CoordinatorActor"), signal.SIGKILL)
        until("the coordinator is back", lambda: _settled(system), 60)
        assert {i: w.spare for i, w in system.workers("decode", state="").items()} == {i: w.spare for i, w in before.items()}
    with load(system) as answered:
        os.kill(before[victim].pid, signal.SIGKILL)
        until("the spare serves", lambda: spare in serving(system) and victim not in serving(system), 60)
        count = len(answered)
        until("requests are answered", lambda: len(answered) > count + 2 * CLIENTS, 60)
        until("settled", lambda: _settled(system), 60)
    after = system.workers("decode", state="")
    assert set(after) - set(before) == {i for i, worker in after.items() if worker.spare}
    [pool] = [p for p in system.status().pools if p.name == "decode"]
    assert (pool.ready, pool.spares, pool.spares_ready, pool.spare_kind) == (2, 1, 1, kind)
    apply(system, first)
    until("idle", system.idle, 20)


def serving(served: Served) -> set[str]:
    return {i for i, worker in served.workers("decode").items() if not worker.spare}


def _settled(served: Served) -> bool:
    try:
        return not served.status().unsettled
    except grpc.RpcError:
        return False
