"""Every process is restarted in its turn, and the coordinator is killed, while clients ask: real Ray, simulated engines."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from protos.errors import Code
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import admin_pb2
from tests.e2e.system import ROOT, Served, serve, until
from tests.e2e.test_serve import completion, splitpoint

pytestmark = [pytest.mark.timeout(240), pytest.mark.fault]

CLIENTS, PROMPTS, TOKENS = 3, 3, 20
BEYOND = admin_pb2.ScalePoolRequest(pool="decode", replicas=2, current_replicas=7)
"""A coordinator that answers refuses it."""


def free_base() -> int:
    """The first port of two gateways' fixed ones: a gateway that is restarted has to come back at its own."""
    for base in range(21000, 29000, 20):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in (base, base + 1, base + 2, base + 10, base + 11, base + 12):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise AssertionError("no free ports")


class Balancer:
    """Goes where `/health` says 200, and elsewhere when a port is closed: what a load balancer in front of gateways does."""

    def __init__(self, served: Served, addresses: list[str]) -> None:
        self._doors = [replace(served, http=address) for address in addresses]
        self._turn = itertools.count()

    def ask(self, number: int) -> str:
        """One answer's text; anything but a 200 fails. A connection that was accepted is never tried again."""
        for turn in range(next(self._turn), next(self._turn) + 200 * len(self._doors)):
            door = self._doors[turn % len(self._doors)]
            with contextlib.suppress(httpx.ConnectError):
                with door.client() as client:
                    if client.get("/health").status_code != httpx.codes.OK:
                        continue
                reply = completion(door, number, TOKENS)
                assert reply.status_code == httpx.codes.OK, reply.text
                return str(reply.json()["choices"][0]["text"])
        raise AssertionError("no gateway is ready")


@contextlib.contextmanager
def load(balancer: Balancer) -> Iterator[list[str]]:
    """Clients that ask until the block ends. Yields the answers so far; fails with whatever any client got but the right one."""
    expected = [balancer.ask(number) for number in range(PROMPTS)]
    over, answered = threading.Event(), list[str]()

    def client(number: int) -> None:
        for which in itertools.count(number):
            if over.is_set():
                return
            text = balancer.ask(which % PROMPTS)
            assert text == expected[which % PROMPTS]
            answered.append(text)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield answered
        finally:
            over.set()
        for ended in clients:
            ended.result(timeout=60)


def refusal(served: Served) -> Code | str:
    """What `scale` answers."""
    with pytest.raises(grpc.RpcError) as caught:
        served.admin_call("ScalePool", BEYOND, timeout_s=10)
    return from_rpc_error(caught.value).code


def test_every_process_is_restarted_and_the_coordinator_killed_while_no_request_fails(checkpoint: Path, tmp_path: Path) -> None:
    base = free_base()
    ports = [f"gateway.{name}_port={base + n}" for n, name in enumerate(("http", "grpc", "admin"))]
    sets = [f"engine.model_path={checkpoint}", "pools.prefill.replicas=1", "pools.decode.replicas=1", *ports]
    sets += ["coordinator.gateways=2", "coordinator.heartbeat_interval_s=0.5", "coordinator.missed_heartbeats=6"]
    # Half a second for a request, so that each process has some when its turn comes, and cores are left to start others.
    sets += ["engine.simulated.step_base_s=0.025"]
    with serve(ROOT / "deploy" / "simulated.toml", tmp_path, sets, ready_s=90) as served:
        before = served.status()
        balancer = Balancer(served, [f"127.0.0.1:{base}", f"127.0.0.1:{base + 10}"])
        with load(balancer) as answered:
            done = splitpoint(served, "rollout", "restart", "prefill", "decode", "--gateways", "--wait", "--timeout", "80")
            assert done.returncode == 0, done.stderr
            assert "prefill-1, decode-1, gateway/0, gateway/1" in done.stdout
            after = served.status()
            assert not {w.incarnation for w in before.workers} & {w.incarnation for w in after.workers}
            assert sorted(w.pool for w in after.workers) == ["decode", "prefill"]
            assert not {g.pid for g in before.gateways} & {g.pid for g in after.gateways}
            assert len(after.gateways) == 2

            count = len(answered)
            os.kill(served.pid_of_actor("CoordinatorActor"), signal.SIGKILL)
            assert refusal(served) == Code.NO_WORKER
            until("traffic goes on", lambda: len(answered) > count + 2 * CLIENTS, 20)
            until("the coordinator is back", lambda: refusal(served) == Code.CONFLICT, 40)
            until("all is as desired", lambda: not served.status().unsettled, 30)
            now = served.status()
            assert {w.worker_id: w.incarnation for w in now.workers} == {w.worker_id: w.incarnation for w in after.workers}
            assert {g.pid for g in now.gateways} == {g.pid for g in after.gateways}
        assert len(answered) > 10 * CLIENTS
