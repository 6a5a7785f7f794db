"""The whole control plane over real Ray, real gRPC and real KV transfer, with simulated engines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import yaml

from protos.errors import Code
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import admin_pb2
from tests.e2e.system import ROOT, Served, start, until

pytestmark = pytest.mark.timeout(180)

GUIDE = ROOT / "docs" / "guide-operators.md"
WAYS = [("split", "ucx"), ("split", "grpc"), ("colocated", None)]
_GUARDED = admin_pb2.ScalePoolRequest(pool="decode", replicas=2, current_replicas=7)
PROMPT = list(range(1000, 1100))


def tokens(served: Served, prompt: list[int], path: str, transport: str | None, max_tokens: int = 16) -> list[int]:
    """The ids a client sees, once streamed and once whole: they must agree."""
    replies = served.generate(prompt, path=path, transport=transport, max_tokens=max_tokens)
    streamed = [i for r in replies if r.HasField("chunk") for i in r.chunk.token_ids]
    assert replies[-1].complete.finish_reason == "length"
    return streamed


def splitpoint(served: Served, *arguments: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    """The command, as an operator runs it. `timeout_s` is longer than the command's own."""
    command = [sys.executable, "-m", "coordinator.cli", *arguments, "--admin", served.admin]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)


def number_of(worker_id: str) -> int:
    """Ids count up: decode-10 came after decode-9."""
    return int(worker_id.rpartition("-")[2])


def completion(served: Served, number: int, max_tokens: int) -> httpx.Response:
    body = {"model": served.model, "prompt": [2000 + number] * 40, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with served.client() as client:
        return client.post("/v1/completions", json=body, headers={"x-splitpoint-deadline-s": "30"})


@contextlib.contextmanager
def in_flight(served: Served, count: int, max_tokens: int) -> Iterator[list[Future[httpx.Response]]]:
    """`count` requests that have reached the engines; yields their futures."""
    with ThreadPoolExecutor(count) as pool:
        futures: list[Future[httpx.Response]] = [pool.submit(completion, served, i, max_tokens) for i in range(count)]
        until("requests run", lambda: sum(w.running for w in served.status().workers) > 0, 20, 0.02)
        yield futures


@contextlib.contextmanager
def steady_load(served: Served, clients: int, max_tokens: int) -> Iterator[list[str]]:
    """`clients` that ask one thing after another, each the same again and again; yields what they have been answered until now.
    Fails with any answer that is not 200 and the one of a calm moment."""
    over = threading.Event()
    texts: list[str] = []
    calm = [completion(served, number, max_tokens).json()["choices"][0]["text"] for number in range(clients)]

    def ask_on(number: int) -> None:
        while not over.is_set():
            reply = completion(served, number, max_tokens)
            assert reply.status_code == 200, reply.text
            text = reply.json()["choices"][0]["text"]
            assert text == calm[number]
            texts.append(text)

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask_on, number) for number in range(clients)]
        try:
            until("requests run", lambda: sum(w.running for w in served.status().workers) > 0, 20, 0.02)
            yield texts
        finally:
            over.set()
        for each in asking:
            each.result(timeout=60)


def assert_right_or_explicit(served: Served, futures: list[Future[httpx.Response]], max_tokens: int) -> list[int]:
    """Every request ended: with exactly the tokens of a calm run, or with an error that says so. Returns the statuses."""
    statuses = []
    for number, future in enumerate(futures):
        reply = future.result(timeout=60)
        statuses.append(reply.status_code)
        if reply.status_code == 200:
            again = completion(served, number, max_tokens)
            assert again.status_code == 200, again.text
            assert reply.json()["choices"][0]["text"] == again.json()["choices"][0]["text"]
        else:
            assert reply.status_code in (429, 500, 503, 504), reply.text
            assert reply.json()["error"]["message"]
    return statuses


class TestAnswers:
    def test_every_way_gives_the_same_tokens_over_grpc(self, system: Served) -> None:
        answers = {way: tokens(system, PROMPT, *way) for way in WAYS}
        assert len(set(map(tuple, answers.values()))) == 1
        assert len(next(iter(answers.values()))) == 16

    def test_every_way_gives_the_same_chat_over_http(self, system: Served) -> None:
        replies = {way: system.chat("Say something.", path=way[0], transport=way[1]) for way in WAYS}
        assert len({r["choices"][0]["message"]["content"] for r in replies.values()}) == 1
        for (path, transport), reply in replies.items():
            assert reply["metrics"]["path"] == path
            assert reply["metrics"]["transport"] == (transport or "")

    def test_the_split_path_really_moves_kv(self, system: Served) -> None:
        metrics = system.chat("Move it. " * 50, path="split")["metrics"]
        assert metrics["transfer_bytes"] > 0
        assert metrics["prefill_worker"].startswith("prefill-")
        assert metrics["decode_worker"].startswith("decode-")
        assert not metrics["recomputed"]

    def test_models_health_version_and_metrics(self, system: Served) -> None:
        with system.client() as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").json()["data"][0]["id"] == system.model
            assert client.get("/version").json()["versions"]["ray"]
            assert "splitpoint_ttft_seconds" in client.get("/metrics").text


class TestOperators:
    def test_status_says_what_is_there(self, system: Served) -> None:
        done = splitpoint(system, "status", "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert {p["name"]: (p["target"], p["ready"]) for p in said["pools"]} == {"prefill": (1, 1), "decode": (1, 1)}
        assert said["gateways"][0]["http_address"] == system.http
        for worker in said["workers"]:
            assert psutil.pid_exists(int(worker["pid"]))

    def test_the_manifest_holds_configuration_versions_and_start_arguments(self, system: Served) -> None:
        manifest = json.loads(splitpoint(system, "manifest").stdout)
        assert manifest["settings"]["engine"]["kind"] == "simulated"
        assert manifest["versions"]["ray"]
        assert manifest["model"]["tokenizer.json"]
        assert manifest["model"]["chat_template"]
        assert {w["pool"] for w in manifest["workers"]} == {"prefill", "decode"}
        assert all(w["start_arguments"]["kind"] == "simulated" for w in manifest["workers"])
        assert (system.state_dir / manifest["run_id"] / "manifest.json").is_file()

    def test_one_phase_scales_by_itself_and_back(self, system: Served) -> None:
        before = system.workers()
        assert splitpoint(system, "scale", "decode", "--replicas", "2", "--current-replicas", "1").returncode == 0
        grown = system.wait_ready(60, decode=2, prefill=1)
        assert {i: w.incarnation for i, w in before.items()}.items() <= {i: w.incarnation for i, w in grown.items()}.items()
        assert tokens(system, PROMPT, "split", None) == tokens(system, PROMPT, "colocated", None)
        assert splitpoint(system, "scale", "decode", "--replicas", "1").returncode == 0
        shrunk = system.wait_ready(60, decode=1, prefill=1)
        assert {i: w.pid for i, w in shrunk.items()} == {i: w.pid for i, w in before.items()}, "the oldest stays"

    @pytest.mark.timeout(600)
    def test_the_guides_commands_to_scale_and_drain(self, system: Served) -> None:
        """In the guide's order, on the workers that are there, with requests on their way all the time."""
        (block,) = re.findall(r"## Scale and drain\n\n```\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        commands = [shlex.split(line)[1:] for line in block.splitlines()]
        (prefill,) = system.workers("prefill").values()
        said: dict[str, list[str]] = {}
        answered: dict[str, int] = {}
        try:
            assert splitpoint(system, "scale", "decode", "--replicas", "2", "--wait").returncode == 0
            names = {f"decode-{n}": worker for n, worker in enumerate(sorted(system.workers("decode"), key=number_of), 1)}
            with steady_load(system, 4, 300) as texts:
                for arguments in commands:
                    asked = [names.get(argument, argument) for argument in arguments]
                    what = " ".join(arguments[:2])
                    before = len(texts)
                    done = splitpoint(system, *asked, timeout_s=240)
                    answered[arguments[0]] = len(texts) - before
                    assert done.returncode == 0, done.stderr
                    said.setdefault(what, []).append(done.stdout)
        finally:
            back = splitpoint(system, "scale", "decode", "--replicas", "1", "--wait", "--timeout", "120", timeout_s=150)
        assert back.returncode == 0, back.stderr
        after = system.wait_ready(60, prefill=1, decode=1)
        assert [(w.worker_id, w.incarnation) for w in after.values() if w.pool == "prefill"] == [
            (prefill.worker_id, prefill.incarnation)
        ], "the prefill worker stayed"
        assert answered["drain"] > 0, "others served on meanwhile"
        assert "target 1, ready 3" in said["scale decode"][1], "a dry run changes nothing"
        decode = {w["worker_id"]: w for w in json.loads(said["get workers"][0])}
        assert len(decode) == 3
        assert names["decode-1"] not in decode, "drained, and followed by another"
        assert not decode[names["decode-2"]]["cordoned"]
        assert [line.split()[1] for line in said["get pools"][0].splitlines() if " / " in line or line.startswith("│")] == [
            "prefill",
            "decode",
        ]
        requests = yaml.safe_load(said["get requests"][0])
        assert {request["gateway_id"] for request in requests} == {"gateway/0"}, "there were some"
        assert all(request["prompt_tokens"] == 40 for request in requests)

    def test_a_scale_that_is_taken_back_at_once_changes_nothing(self, system: Served) -> None:
        before = system.workers()
        system.admin_call("ScalePool", admin_pb2.ScalePoolRequest(pool="prefill", replicas=3))
        system.admin_call("ScalePool", admin_pb2.ScalePoolRequest(pool="prefill", replicas=1))
        after = system.wait_ready(60, prefill=1, decode=1)
        assert {i: w.incarnation for i, w in after.items()} == {i: w.incarnation for i, w in before.items()}

    @pytest.mark.parametrize(
        ("method", "request_", "code", "param"),
        [
            ("ScalePool", admin_pb2.ScalePoolRequest(pool="decod", replicas=1), Code.NOT_FOUND, "pool"),
            ("ScalePool", admin_pb2.ScalePoolRequest(replicas=1), Code.INVALID_VALUE, "pool"),
            ("ScalePool", admin_pb2.ScalePoolRequest(pool="decode", replicas=5000), Code.INVALID_VALUE, "replicas"),
            (
                "ScalePool",
                admin_pb2.ScalePoolRequest(pool="decode", replicas=2, current_replicas=7),
                Code.CONFLICT,
                "current_replicas",
            ),
            ("DrainWorker", admin_pb2.DrainWorkerRequest(worker_id="decode-999"), Code.NOT_FOUND, "worker_id"),
            ("DrainWorker", admin_pb2.DrainWorkerRequest(), Code.INVALID_VALUE, "worker_id"),
            ("DrainWorker", admin_pb2.DrainWorkerRequest(worker_id="x", timeout_s=-1), Code.INVALID_VALUE, "timeout_s"),
        ],
    )
    def test_refusals_name_the_field(self, system: Served, method: str, request_: object, code: Code, param: str) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            system.admin_call(method, request_)
        error = from_rpc_error(caught.value)
        assert (error.code, error.param) == (code, param)

    def test_the_last_worker_of_both_phases_cannot_be_scaled_away(self, system: Served) -> None:
        assert splitpoint(system, "scale", "prefill", "--replicas", "0").returncode == 0
        until("prefill is empty", lambda: not system.workers("prefill", state=""), 60)
        # Whole requests still work on the decode worker, also when the client asked for the split path by default.
        assert completion(system, 1, 8).status_code == 200
        refused = splitpoint(system, "scale", "decode", "--replicas", "0")
        assert refused.returncode == 1
        assert "cannot go to 0" in refused.stderr
        assert splitpoint(system, "scale", "prefill", "--replicas", "1").returncode == 0
        system.wait_ready(60, prefill=1, decode=1)

    def test_prefix_caches_are_reset_on_every_worker(self, system: Served) -> None:
        tokens(system, PROMPT, "colocated", None)
        until("idle", system.idle, 10)
        reply = system.admin_call("ResetPrefixCaches", admin_pb2.ResetPrefixCachesRequest())
        assert reply.workers == 2
        assert system.admin_call("ResetPrefixCaches", admin_pb2.ResetPrefixCachesRequest(pools=["decode"])).workers == 1

    def test_a_drain_lets_requests_finish_and_replaces_the_worker(self, system: Served) -> None:
        [(old, status)] = system.workers("decode").items()
        with in_flight(system, 4, 300) as futures:
            done = splitpoint(system, "drain", old, "--json")
        assert done.returncode == 0, done.stderr
        assert "no requests, no leases" in json.loads(done.stdout)["worker"]["detail"]
        system.wait_ready(60, prefill=1, decode=1)
        assert assert_right_or_explicit(system, futures, 300) == [200] * 4
        [(new, replacement)] = system.workers("decode").items()
        assert new != old
        assert replacement.incarnation != status.incarnation

    def test_a_drain_ends_what_is_left_when_its_time_is_over(self, system: Served) -> None:
        [old] = system.workers("decode")
        with in_flight(system, 2, 3000) as futures:
            done = splitpoint(system, "drain", old, "--timeout", "1", "--json")
            assert "timed out" in json.loads(done.stdout)["worker"]["detail"]
            statuses = [future.result(timeout=60).status_code for future in futures]
        assert set(statuses) <= {200, 503}
        system.wait_ready(60, prefill=1, decode=1)


@pytest.mark.fault
class TestFaults:
    @pytest.mark.parametrize("pool", ["prefill", "decode"])
    def test_a_killed_worker_is_replaced_and_requests_end_right_or_explicitly(self, system: Served, pool: str) -> None:
        [(old, status)] = system.workers(pool).items()
        with in_flight(system, 6, 200) as futures:
            os.kill(status.pid, signal.SIGKILL)
        healed = system.wait_replaced(old, 60)
        assert status.incarnation not in {w.incarnation for w in healed.values()}
        assert_right_or_explicit(system, futures, 200)
        assert tokens(system, PROMPT, "split", None) == tokens(system, PROMPT, "colocated", None)

    def test_a_stopped_worker_is_fenced_and_replaced(self, system: Served) -> None:
        """Ray sees nothing wrong with a stopped process; heartbeat and probe do. Its requests go elsewhere."""
        [(old, status)] = system.workers("prefill").items()
        process = psutil.Process(status.pid)
        with ThreadPoolExecutor(6) as pool:
            process.suspend()
            futures = [pool.submit(completion, system, i, 20) for i in range(6)]
            healed = system.wait_replaced(old, 60)
        assert not process.is_running()
        assert status.incarnation not in {w.incarnation for w in healed.values()}
        assert assert_right_or_explicit(system, futures, 20) == [200] * 6
        assert "fencing" in system.log("coordinator")

    def test_a_killed_coordinator_stops_no_traffic_and_no_worker(self, system: Served) -> None:
        before = {i: (w.pid, w.incarnation) for i, w in system.workers().items()}
        with in_flight(system, 4, 300) as futures:
            os.kill(system.pid_of_actor("CoordinatorActor"), signal.SIGKILL)
            assert completion(system, 50, 8).status_code == 200
        assert assert_right_or_explicit(system, futures, 300) == [200] * 4
        system.wait_ready(60, prefill=1, decode=1)
        assert {i: (w.pid, w.incarnation) for i, w in system.workers().items()} == before

    def test_targets_survive_the_coordinator(self, system: Served) -> None:
        system.admin_call("ScalePool", admin_pb2.ScalePoolRequest(pool="decode", replicas=2))
        system.wait_ready(60, decode=2)
        os.kill(system.pid_of_actor("CoordinatorActor"), signal.SIGKILL)

        def target() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return {p.name: p.target for p in system.status().pools} == {"prefill": 1, "decode": 2}
            return False

        until("the coordinator is back", target, 60)
        system.wait_ready(60, decode=2, prefill=1)
        system.admin_call("ScalePool", admin_pb2.ScalePoolRequest(pool="decode", replicas=1))
        system.wait_ready(60, decode=1, prefill=1)


@pytest.mark.fault
def test_a_killed_launcher_leaves_nothing_running(checkpoint: Path, tmp_path: Path) -> None:
    sets = [f"engine.model_path={checkpoint}", "pools.prefill.replicas=1", "pools.decode.replicas=1"]
    served = start(ROOT / "deploy" / "simulated.toml", tmp_path, sets, ready_s=90)
    family = psutil.Process(served.process.pid).children(recursive=True)
    assert len(family) >= 6
    served.process.kill()
    served.process.wait(10)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [" ".join(p.cmdline())[:100] for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_second_launcher_on_the_same_state_is_refused(system: Served) -> None:
    command = [sys.executable, "-m", "coordinator.cli", "serve", f"--set=coordinator.state_dir={system.state_dir}"]
    command += ["-c", str(ROOT / "deploy" / "simulated.toml"), *(f"--set=gateway.{p}_port=0" for p in ("http", "grpc", "admin"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert f"pid {system.process.pid}" in done.stderr
