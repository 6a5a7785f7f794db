"""Two Ray nodes in namespaces: placement, the real model across their link, partitions that heal and that do not.

One cluster for the module, because starting Ray twice costs half of the time; the partition that Ray gives a node up for is last.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.e2e.parity import COLOCATED, SPLITS, ask, assert_same, assert_took, reset_caches
from tests.e2e.streams import References, Stream
from tests.e2e.system import ROOT, Served, end, start, until
from tests.support.netns import missing
from tests.support.netns_link import address, can_relay
from tests.support.ray_hosts import FRONT, HEAD, OTHER, TwoNodes, two_nodes

_LACKS = missing() or can_relay()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(_LACKS), reason=f"two nodes: {_LACKS}"),
]
DEADLINE_S = 40.0
TOKENS = 400


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@contextlib.contextmanager
def served(nodes: TwoNodes, config: str, folder: Path, *sets: str, ready_s: float, host: str = FRONT) -> Iterator[Served]:
    common = [
        f"coordinator.ray_address={nodes.address}",
        'coordinator.placement.strategy="spread"',
        "coordinator.drain_timeout_s=10",
        "coordinator.restart_backoff_s=0.2",
        "pools.prefill.replicas=1",
        "pools.decode.replicas=1",
        *(f"gateway.{door}_host={host}" for door in ("http", "grpc", "admin")),
        *(f"{part}.advertise_host=auto" for part in ("worker", "kvtransfer")),
    ]
    system = start(
        ROOT / "deploy" / config, folder, [*common, *sets], ready_s=ready_s, prefix=nodes.on(HEAD), environment=nodes.environment
    )
    try:
        yield system
    finally:
        end(system.process, system.output)
    assert system.process.returncode == 0, system.output.read_text()


def homes(system: Served) -> dict[str, str]:
    """The address of each pool's worker."""
    return {worker.pool: worker.address.rpartition(":")[0] for worker in system.workers().values()}


@pytest.mark.vllm
@pytest.mark.ucx
def test_the_model_prefills_on_one_node_and_decodes_on_the_other(nodes: TwoNodes, checkpoint: Path, tmp_path: Path) -> None:
    prompt = tuple((7919 * i + 13) % 40000 + 100 for i in range(300))
    sampling = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with served(nodes, "demo-cpu.toml", tmp_path, f"engine.model_path={checkpoint}", ready_s=150) as system:
        assert sorted(homes(system).values()) == [address(HEAD), address(OTHER)]
        reset_caches(system)
        reference = ask(system, prompt, sampling, COLOCATED)
        for way in SPLITS:
            reset_caches(system)
            before = nodes.carried()
            answer = ask(system, prompt, sampling, way)
            assert_same(answer, reference)
            assert_took(answer, way, forwards=True)
            # 8.8 MB in packets of at most 9,000 bytes, of which the sender may hand over several in one
            assert nodes.carried() - before > 50, f"{way} did not use the link"
        until("idle", system.idle, 10)


@pytest.fixture(scope="module")
def simulated(nodes: TwoNodes, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    sets = [
        f"engine.model_path={checkpoint}",
        "coordinator.heartbeat_interval_s=0.5",
        "coordinator.missed_heartbeats=4",
        "coordinator.probe_timeout_s=1",
        "coordinator.partition_grace_s=8",
        "gateway.worker_client.keepalive_time_s=1",
        "coordinator.gateways=2",
        'coordinator.placement.gateways="spread"',
    ]
    folder = tmp_path_factory.mktemp("simulated")
    with served(nodes, "simulated.toml", folder, *sets, ready_s=60, host="auto") as system:
        assert system.admin.startswith(address(HEAD)), "the first gateway is asked, which a cut of the link does not take away"
        yield system


def _gateways(system: Served) -> dict[str, str]:
    """The address of each gateway's node."""
    return {gateway.gateway_id: gateway.http_address.rpartition(":")[0] for gateway in system.status().gateways}


def test_each_node_has_a_gateway_and_both_say_the_same(nodes: TwoNodes, simulated: Served) -> None:
    gateways = simulated.status().gateways
    assert {g.gateway_id: (g.http_address.rpartition(":")[0], g.detail) for g in gateways} == {
        "gateway/0": (address(HEAD), ""),
        "gateway/1": (address(OTHER), ""),
    }
    prompt = tuple(range(100, 200))
    answers = [
        ask(replace(simulated, grpc=gateway.grpc_address), prompt, {"max_tokens": 8, "temperature": 0.0}, way)
        for gateway in gateways
        for way in (COLOCATED, *SPLITS)
    ]
    assert len(answers) == 6
    for answer in answers:
        assert_same(answer, answers[0])


def _streams(system: Served, prompts: list[list[int]], transport: str) -> list[Stream]:
    streams = [Stream(system, prompt, TOKENS, transport=transport, deadline_s=DEADLINE_S) for prompt in prompts]
    for stream in streams:
        stream.start()
    until("tokens flow", lambda: all(stream.tokens for stream in streams), 20)
    return streams


def _prompts(count: int, length: int) -> list[list[int]]:
    return [[(31 * i + 101 * n) % 40000 + 100 for i in range(length)] for n in range(count)]


def _incarnations(system: Served) -> dict[str, str]:
    return {worker_id: worker.incarnation for worker_id, worker in system.workers(state="").items()}


def _whole(system: Served) -> bool:
    with contextlib.suppress(grpc.RpcError):
        workers = system.workers().values()
        return len(workers) == 2 and all(worker.heartbeat_age_s < 2 for worker in workers)
    return False


def test_a_partition_of_five_seconds_heals_without_a_restart(nodes: TwoNodes, simulated: Served) -> None:
    before = _incarnations(simulated)
    assert sorted(homes(simulated).values()) == [address(HEAD), address(OTHER)]
    prompts = _prompts(4, 200)
    references = References.ask(simulated, prompts, TOKENS)
    streams = _streams(simulated, prompts, "ucx")
    nodes.cut()
    time.sleep(5.0)  # the length of the partition is what is tested
    nodes.heal()
    for index, stream in enumerate(streams):
        stream.check_end(references, index)
    until("both are heard again", lambda: _whole(simulated), 30)
    assert _incarnations(simulated) == before

    def split() -> bool:
        return all(ask(simulated, tuple(prompts[0]), {"max_tokens": 4}, way).token_ids for way in SPLITS)

    until("KV crosses the link again", split, 30)
    until("idle", simulated.idle, 30)
    assert _incarnations(simulated) == before


def test_a_killed_launcher_is_followed_by_one_that_takes_the_system_up(nodes: TwoNodes, simulated: Served) -> None:
    before = _incarnations(simulated)
    first = simulated.process
    first.kill()
    first.wait(10)
    assert ask(simulated, tuple(range(100, 200)), {"max_tokens": 4}, COLOCATED).token_ids, "nobody who serves noticed"
    command = [str(word) for word in first.args]  # type: ignore[union-attr]
    environment = {**os.environ, **nodes.environment}
    other = [*command, "--set=engine.max_num_seqs=7"]
    refused = subprocess.run(other, env=environment, cwd=ROOT, capture_output=True, timeout=60)
    assert refused.returncode == 1
    assert b"another configuration (engine)" in refused.stdout + refused.stderr
    ready = simulated.state_dir / "ready.json"
    ready.unlink(missing_ok=True)
    with simulated.output.open("wb") as out:
        simulated.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    until("taken up", lambda: ready.is_file() or simulated.process.poll() is not None, 60)
    assert "taking up" in simulated.output.read_text()
    assert json.loads(ready.read_text())["gateways"][0]["http"] == simulated.http
    assert _incarnations(simulated) == before


def test_a_gcs_that_is_started_again_loses_no_engine_and_no_traffic(nodes: TwoNodes, simulated: Served) -> None:
    before = _incarnations(simulated)
    prompt = tuple(range(100, 200))
    with nodes.without_gcs():
        for way in 3 * (COLOCATED, *SPLITS):
            assert ask(simulated, prompt, {"max_tokens": 4}, way).token_ids
        began_s = time.monotonic()
        with contextlib.suppress(grpc.RpcError):  # whether Ray finds the coordinator now is its matter
            simulated.status()
        assert time.monotonic() - began_s < 15, "an operator is not left waiting for the GCS"
    until("both are heard again", lambda: _whole(simulated), 40)
    assert _incarnations(simulated) == before
    assert _gateways(simulated) == {"gateway/0": address(HEAD), "gateway/1": address(OTHER)}


def _on_the_head(system: Served) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return _gateways(system) == {"gateway/0": address(HEAD), "gateway/1": address(HEAD)}
    return False


def test_a_longer_one_ends_in_replacement_and_every_request_ends_by_its_deadline(nodes: TwoNodes, simulated: Served) -> None:
    before = _incarnations(simulated)
    (lost,) = [i for i, worker in simulated.workers().items() if worker.address.startswith(address(OTHER))]
    prompts = _prompts(4, 200)
    references = References.ask(simulated, prompts, TOKENS)
    streams = _streams(simulated, prompts, "grpc")
    nodes.cut()
    after = simulated.wait_replaced(lost, 60)
    assert set(homes(simulated).values()) == {address(HEAD)}
    assert {i: w.incarnation for i, w in after.items() if i in before} == {i: n for i, n in before.items() if i != lost}
    for index, stream in enumerate(streams):
        stream.check_end(references, index)
    assert ask(simulated, tuple(prompts[0]), {"max_tokens": 4}, SPLITS[0]).token_ids
    until("the lost gateway is on the head", lambda: _on_the_head(simulated), 60)
    other = next(g for g in simulated.status().gateways if g.gateway_id == "gateway/1")

    def serves() -> bool:
        with contextlib.suppress(grpc.RpcError):  # it has yet to hear of the workers
            return bool(
                ask(replace(simulated, grpc=other.grpc_address), tuple(prompts[0]), {"max_tokens": 4}, SPLITS[0]).token_ids
            )
        return False

    until("it serves there", serves, 20)
    nodes.heal()
    until("idle", simulated.idle, 30)
