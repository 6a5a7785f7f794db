"""One system per session and configuration; tests leave it as they found it: one ready worker in each pool, idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.system import ROOT, Served, serve, until


@pytest.fixture(scope="session")
def simulated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Simulated engines (the tokenizer is the checkpoint's), one prefill and one decode worker, over real Ray and real KV
    transfer."""
    sets = [
        f"engine.model_path={checkpoint}",
        "pools.prefill.replicas=1",
        "pools.decode.replicas=1",
        # Another shape than prefill: every hand-over passes the rank map.
        "pools.decode.engine.tensor_parallel_size=2",
        "coordinator.heartbeat_interval_s=0.5",
        "coordinator.missed_heartbeats=4",
        "coordinator.drain_timeout_s=20",
        "coordinator.restart_backoff_s=0.2",
        "gateway.admin_http_port=0",
    ]
    with serve(ROOT / "deploy" / "simulated.toml", tmp_path_factory.mktemp("simulated"), sets, ready_s=90) as served:
        yield served


@pytest.fixture
def system(simulated: Served) -> Iterator[Served]:
    """The shared simulated system, healthy before and idle after."""
    simulated.wait_ready(30, prefill=1, decode=1)
    yield simulated
    simulated.wait_ready(60, prefill=1, decode=1)
    until("idle", simulated.idle, 10)


@pytest.fixture(scope="session")
def real(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo's own configuration: SmolLM2 on two real engines. Colocated requests go to the decode worker while there is one,
    so that a test can choose whose prefix cache it warms."""
    sets = [f"engine.model_path={checkpoint}", 'gateway.routing.colocated_roles=[["decode"], ["prefill"]]']
    # Status is as old as a heartbeat, and faults are told by what it shows; a busy box still has 4 s to answer.
    sets += ["coordinator.heartbeat_interval_s=0.25", "coordinator.missed_heartbeats=16", "coordinator.restart_backoff_s=0.2"]
    with serve(ROOT / "deploy" / "demo-cpu.toml", tmp_path_factory.mktemp("real"), sets, ready_s=360) as served:
        yield served
