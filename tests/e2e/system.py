"""A whole system as a user starts it: `splitpoint serve` in a process of its own, and eyes on what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
import psutil

from coordinator.pools.shared_memory import segments_of
from protos.splitpoint.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def until(what: str, check: Callable[[], T | None], timeout_s: float, every_s: float = 0.1) -> T:
    """The first value of `check` that is neither None nor False; fails naming `what` when the time is over."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = check()
        if value is not None and value is not False:
            return value
        assert time.monotonic() < end_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)


@dataclass
class Served:
    """One running system."""

    process: subprocess.Popen[bytes]
    model: str
    http: str
    grpc: str
    admin: str
    state_dir: Path
    output: Path

    def client(self, timeout_s: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=f"http://{self.http}", timeout=timeout_s, trust_env=False)

    def chat(self, text: str, *, path: str = "split", transport: str | None = None, **body: Any) -> dict[str, Any]:
        """One chat answer over HTTP; asserts 200."""
        headers = {"x-splitpoint-path": path, **({"x-splitpoint-transport": transport} if transport else {})}
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 16,
            "temperature": 0,
            **body,
        }
        with self.client() as client:
            reply = client.post("/v1/chat/completions", json=request, headers=headers)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def generate(
        self, prompt_token_ids: Sequence[int], *, path: str = "split", transport: str | None = None, max_tokens: int = 16
    ) -> list[generation_pb2.GenerateResponse]:
        """One streamed answer over gRPC, greedy, EOS ignored."""
        request = generation_pb2.GenerateRequest(
            model=self.model, tokenized=generation_pb2.TokenizedInput(input_ids=list(prompt_token_ids)), stream=True
        )
        request.sampling_params.max_tokens = max_tokens
        request.sampling_params.temperature = 0
        request.sampling_params.ignore_eos = True
        metadata = [("x-splitpoint-path", path), *([("x-splitpoint-transport", transport)] if transport else [])]
        with grpc.insecure_channel(self.grpc) as channel:
            return list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60, metadata=metadata))

    def admin_call(self, method: str, request: Any, timeout_s: float = 60.0) -> Any:
        with grpc.insecure_channel(self.admin) as channel:
            return getattr(admin_pb2_grpc.AdminServiceStub(channel), method)(request, timeout=timeout_s)

    def status(self) -> admin_pb2.GetStatusResponse:
        # Short beside what is waited for with it: one answer that never comes must not be the whole wait.
        return self.admin_call("GetStatus", admin_pb2.GetStatusRequest(), timeout_s=15.0)

    def workers(self, pool: str = "", state: str = "ready") -> dict[str, admin_pb2.WorkerStatus]:
        """By id; all pools and all states with ""."""
        return {w.worker_id: w for w in self.status().workers if (not pool or w.pool == pool) and (not state or w.state == state)}

    def wait_ready(self, timeout_s: float, **replicas: int) -> dict[str, admin_pb2.WorkerStatus]:
        """Until each named pool has exactly so many workers, all ready."""

        def check() -> dict[str, admin_pb2.WorkerStatus] | None:
            with contextlib.suppress(grpc.RpcError):
                everyone = self.workers(state="")
                if all([w.state for w in everyone.values() if w.pool == p] == ["ready"] * n for p, n in replicas.items()):
                    return everyone
            return None

        return until(f"{replicas} ready", check, timeout_s)

    def wait_replaced(self, worker_id: str, timeout_s: float) -> dict[str, admin_pb2.WorkerStatus]:
        """Until `worker_id` is gone and each pool has one worker, ready."""

        def gone() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return worker_id not in self.workers(state="")
            return False

        until(f"{worker_id} gone", gone, timeout_s)
        return self.wait_ready(timeout_s, prefill=1, decode=1)

    def idle(self) -> bool:
        """Nothing is in flight, queued, leased or staged anywhere."""
        status = self.status()
        busy = sum(w.running + w.waiting + w.leases for w in status.workers) + sum(g.in_flight for g in status.gateways)
        staging = [s for w in status.workers for s in (w.resources.send_staging, w.resources.receive_staging)]
        return busy + sum(s.used_bytes + s.quarantined_bytes for s in staging) == 0

    def log(self, name: str) -> str:
        """An actor's log of this run."""
        return "\n".join(path.read_text() for path in self.state_dir.glob(f"*/{name}.log"))

    def pid_of_actor(self, title: str) -> int:
        """The process of the actor whose class is `title`."""
        found = [p for p in psutil.Process(self.process.pid).children(recursive=True) if title in " ".join(_cmdline(p))]
        assert len(found) == 1, f"{title}: {found}"
        return found[0].pid


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def start(
    config: Path,
    state_dir: Path,
    sets: Sequence[str],
    *,
    ready_s: float,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Served:
    """Start and wait until requests are served. The caller ends it. `prefix`: what runs the command, which it becomes."""
    state_dir.mkdir(parents=True, exist_ok=True)
    ready, output = state_dir / "ready.json", state_dir / "serve.out"
    free_ports = [f"gateway.{name}_port=0" for name in ("http", "grpc", "admin")]
    arguments = [f"--set={item}" for item in [*free_ports, f"coordinator.state_dir={state_dir}", *sets]]
    command = [*prefix, sys.executable, "-m", "coordinator.cli", "serve", "-c", str(config)]
    command += ["--ready-file", str(ready), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with output.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
    try:
        until("ready", lambda: ready.is_file() or process.poll() is not None, ready_s, 0.2)
        assert process.poll() is None, output.read_text()
    except BaseException:
        end(process, output)
        raise
    said = json.loads(ready.read_text())
    gateway = said["gateways"][0]
    return Served(
        process=process,
        model=said["model"],
        http=gateway["http"],
        grpc=gateway["grpc"],
        admin=gateway["admin"],
        state_dir=state_dir,
        output=output,
    )


def end(process: subprocess.Popen[bytes], output: Path) -> None:
    """SIGTERM, and an orderly end within its time."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise AssertionError(f"serve did not end: {output.read_text()}") from None


@contextlib.contextmanager
def serve(config: Path, state_dir: Path, sets: Sequence[str], *, ready_s: float) -> Iterator[Served]:
    """`start`, then `end`, and assert that nothing is left: no process, port, directory or shared-memory segment."""
    served = start(config, state_dir, sets, ready_s=ready_s)
    try:
        yield served
        assert served.process.poll() is None, f"serve ended by itself: {served.output.read_text()}"
    finally:
        launcher = psutil.Process(served.process.pid) if served.process.poll() is None else None
        family = launcher.children(recursive=True) if launcher is not None else []
        segments = {segment for process in family for segment in segments_of(process.pid)}
        end(served.process, served.output)
    assert served.process.returncode == 0, served.output.read_text()
    assert_gone(family, served.process.pid, segments)
    for address in (served.http, served.grpc, served.admin):
        host, port = address.rsplit(":", 1)
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0, f"{address} still answers"


def assert_gone(processes: Sequence[psutil.Process], launcher_pid: int, segments: set[str]) -> None:
    """No process of the system is left, no directory of its Ray, no shared-memory segment."""
    _, alive = psutil.wait_procs(list(processes), timeout=10)
    left = [" ".join(_cmdline(p))[:100] for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"processes left: {left}"
    assert not list(Path("/tmp").glob(f"sp-ray-{launcher_pid}-*"))
    until("shared memory freed", lambda: not [name for name in segments if Path(name).exists()], 5)
