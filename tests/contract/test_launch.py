"""What `serve` refuses before it starts anything, and what actor processes set up first. No Ray."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from coordinator.config import Settings, load
from coordinator.launch import LaunchError, _check_cluster, _unready, plaintext_doors, serve
from coordinator.pools.process import use_cores
from coordinator.pools.ray_cluster import Cluster, remove_stale_directories
from coordinator.pools.ray_nodes import kill_here, process_tree
from coordinator.pools.reports import ProcessRef
from coordinator.pools.shared_memory import python_segments_of
from protos.splitpoint.v1 import admin_pb2
from tests.support.certificates import Authority

pytestmark = pytest.mark.timeout(60)


def settings(tmp_path: Path, *sets: str) -> Settings:
    (tmp_path / "tokenizer.json").write_text("{}")
    common = ["engine.kind=simulated", f"engine.model_path={tmp_path}", f"coordinator.state_dir={tmp_path / 'state'}"]
    ports = [f"gateway.{name}_port=0" for name in ("http", "grpc", "admin", "admin_http")]
    return load(sets=[*common, *ports, *sets], environment={})


def refusal(configured: Settings) -> str:
    with pytest.raises(LaunchError) as caught:
        serve(configured, Console(file=io.StringIO()))
    return str(caught.value)


def test_a_missing_model_is_said_with_what_to_do(tmp_path: Path) -> None:
    text = refusal(settings(tmp_path, f"engine.model_path={tmp_path / 'nowhere'}"))
    assert "nowhere" in text
    assert "splitpoint models fetch" in text


@pytest.mark.parametrize("name", ["http", "grpc", "admin", "admin_http"])
def test_a_taken_port_is_named(tmp_path: Path, name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refusal(settings(tmp_path, f"gateway.{name}_port={port}"))
    assert f"gateway.{name}_port" in text
    assert str(port) in text


@pytest.mark.parametrize(("address", "hint"), [("embedded", "too busy"), ("10.0.0.1:6379", "is a cluster running")])
def test_a_ray_that_does_not_start_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, hint: str
) -> None:
    @contextlib.contextmanager
    def never(*_: object) -> Iterator[None]:
        raise Exception("The current node timed out during startup.")
        yield

    monkeypatch.setattr("coordinator.launch.joined", never)
    text = refusal(settings(tmp_path, f"coordinator.ray_address={address}"))
    assert "timed out during startup" in text
    assert hint in text


def test_what_other_machines_can_reach_unencrypted_is_said(tmp_path: Path) -> None:
    assert plaintext_doors(settings(tmp_path)) == []
    opened = settings(
        tmp_path, "gateway.http_host=0.0.0.0", "kvtransfer.bind_host=10.0.0.1", "worker.advertise_host=auto",
        "coordinator.ray_address=10.0.0.9:6379",
    )  # fmt: skip
    assert plaintext_doors(opened) == ["gateway.http_host 0.0.0.0", "worker.bind_host auto", "kvtransfer.bind_host 10.0.0.1"]
    # An embedded Ray has the address that it was given.
    assert plaintext_doors(settings(tmp_path, "worker.advertise_host=auto")) == []
    assert plaintext_doors(settings(tmp_path, "worker.advertise_host=auto", "coordinator.node_ip=10.0.0.1")) == [
        "worker.bind_host auto"
    ]


def test_under_tls_only_the_public_ports_and_kv_beside_it_are_open(tmp_path: Path) -> None:
    tls = Authority(tmp_path).tls()
    files = [f"security.{name}={getattr(tls, name)}" for name in ("cert_file", "key_file", "ca_file")]
    hosts = ["gateway.http_host=0.0.0.0", "kvtransfer.bind_host=10.0.0.1", "worker.bind_host=10.0.0.1"]
    inside = settings(tmp_path, *hosts, *files, 'kvtransfer.transports=["grpc"]')
    assert plaintext_doors(inside) == ["gateway.http_host 0.0.0.0"]
    beside = settings(tmp_path, *hosts, *files, "security.allow_unencrypted_kv=true")
    assert plaintext_doors(beside) == ["gateway.http_host 0.0.0.0", "kvtransfer.bind_host 10.0.0.1"]


def test_certificates_that_cannot_be_used_are_said_before_anything_starts(tmp_path: Path) -> None:
    tls = Authority(tmp_path).tls()
    files = [f"security.{name}={getattr(tls, name)}" for name in ("cert_file", "ca_file")]
    text = refusal(settings(tmp_path, *files, f"security.key_file={tmp_path}/none.key", 'kvtransfer.transports=["grpc"]'))
    assert "security.cert_file" in text
    assert "none.key" in text


class TestCluster:
    """What is refused, or said, of a Ray cluster that was joined."""

    AUTO = ("worker.advertise_host=auto", "kvtransfer.advertise_host=auto")

    def check(self, configured: Settings, **cluster: object) -> str:
        said = io.StringIO()
        defaults: dict[str, object] = {"address": "10.0.0.1:6379", "temp_dir": None, "num_gpus": 0, "gcs_storage": "rocksdb"}
        _check_cluster(configured, Cluster(**{**defaults, **cluster}), Console(file=said, width=200))  # type: ignore[arg-type]
        return said.getvalue()

    def test_a_sound_one_needs_no_words(self, tmp_path: Path) -> None:
        assert self.check(settings(tmp_path, *self.AUTO), nodes=3) == ""

    def test_serve_belongs_on_the_head(self, tmp_path: Path) -> None:
        with pytest.raises(LaunchError, match="head node"):
            self.check(settings(tmp_path, *self.AUTO), on_head=False)

    @pytest.mark.parametrize("part", ["worker", "kvtransfer"])
    def test_a_loopback_address_is_refused_where_there_are_other_nodes(self, tmp_path: Path, part: str) -> None:
        configured = settings(tmp_path, *self.AUTO, f"{part}.advertise_host=127.0.0.1")
        with pytest.raises(LaunchError, match=rf"2 nodes: {part}.advertise_host is 127.0.0.1 \(interface lo\)"):
            self.check(configured, nodes=2)
        assert self.check(configured, nodes=1) == ""

    def test_a_gcs_in_memory_is_said_or_refused(self, tmp_path: Path) -> None:
        assert "every engine ends" in self.check(settings(tmp_path, *self.AUTO), gcs_storage="memory")
        with pytest.raises(LaunchError, match="require_durable_gcs"):
            self.check(settings(tmp_path, *self.AUTO, "coordinator.require_durable_gcs=true"), gcs_storage="memory")

    @pytest.mark.parametrize("storage", ["", "punched cards"])
    def test_a_gcs_whose_storage_is_not_known_is_said_or_refused_until_it_is(self, tmp_path: Path, storage: str) -> None:
        required = (*self.AUTO, "coordinator.require_durable_gcs=true")
        assert "not known" in self.check(settings(tmp_path, *self.AUTO), gcs_storage=storage)
        with pytest.raises(LaunchError, match=r"coordinator\.gcs_storage, one of rocksdb, redis.*require_durable_gcs"):
            self.check(settings(tmp_path, *required), gcs_storage=storage)
        said = settings(tmp_path, *required, "coordinator.gcs_storage=redis")
        if storage:
            with pytest.raises(LaunchError, match=storage):
                self.check(said, gcs_storage=storage)
        else:
            assert self.check(said, gcs_storage=storage) == ""

    def test_what_the_gcs_says_counts_more_than_what_is_said_of_it(self, tmp_path: Path) -> None:
        said = settings(tmp_path, *self.AUTO, "coordinator.require_durable_gcs=true", "coordinator.gcs_storage=rocksdb")
        with pytest.raises(LaunchError, match="in memory"):
            self.check(said, gcs_storage="memory")

    def test_a_private_one_is_not_asked(self, tmp_path: Path) -> None:
        assert self.check(settings(tmp_path), temp_dir=tmp_path, gcs_storage="memory", nodes=2) == ""


def test_a_gateways_address_that_leads_nowhere_is_named_with_its_interface() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        found = _unready([admin_pb2.GatewayStatus(gateway_id="gateway/0", http_address=address)])
    assert found.startswith(f"gateway/0 advertises {address} as http_address (interface lo)")


def test_one_launcher_per_state_directory(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with (state / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4711")
        file.flush()
        assert "pid 4711" in refusal(settings(tmp_path))


def test_directories_of_killed_launchers_are_removed_and_no_others() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(20)
    stale, own = Path(f"/tmp/sp-ray-{dead.pid}-test"), Path(f"/tmp/sp-ray-{os.getpid()}-test")
    stale.mkdir()
    own.mkdir()
    try:
        remove_stale_directories()
        assert not stale.exists()
        assert own.exists()
    finally:
        own.rmdir()


def test_workers_get_cores_of_their_own_going_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    for slot, threads, cores in ((0, 1, [2]), (1, 1, [3]), (3, 1, [2]), (1, 2, [5, 2]), (0, 9, [2, 3, 5])):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "")
        monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
        assert use_cores(slot, threads, pin=True) == cores
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(cores)))


def test_an_operators_own_binding_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "7")
    use_cores(0, 1, pin=True)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "7"


@pytest.mark.fault
class TestKilling:
    PARENT = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); time.sleep(99)"
    )

    def family(self) -> tuple[subprocess.Popen[bytes], psutil.Process]:
        parent = subprocess.Popen([sys.executable, "-c", self.PARENT])
        process = psutil.Process(parent.pid)
        while not process.children():
            assert parent.poll() is None
        return parent, process.children()[0]

    def test_a_stopped_process_and_its_children_die(self) -> None:
        parent, child = self.family()
        psutil.Process(parent.pid).suspend()
        assert kill_here([ProcessRef(parent.pid, psutil.Process(parent.pid).create_time())], 10) == []
        assert not psutil.pid_exists(parent.pid)
        assert not child.is_running()

    def test_a_child_whose_parent_is_gone_already_dies_too(self) -> None:
        parent, child = self.family()
        refs = [ProcessRef(parent.pid, psutil.Process(parent.pid).create_time()), ProcessRef(child.pid, child.create_time())]
        parent.kill()
        parent.wait(5)
        assert child.is_running()
        assert kill_here(refs, 10) == []
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    def test_shared_memory_that_nobody_has_mapped_any_more_is_removed(self) -> None:
        """The resource tracker that would do it may be killed with its group, or long gone."""
        with ExitStack() as cleanup:
            mine, kept = (SharedMemory(create=True, size=4096) for _ in range(2))
            for segment in (mine, kept):
                cleanup.callback(segment.close)
                resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
            cleanup.callback(Path(f"/dev/shm/{kept.name}").unlink)
            assert {f"/dev/shm/{s.name}" for s in (mine, kept)} <= set(python_segments_of(os.getpid()))
            mine.close()
            gone = ProcessRef(2**22 + 1, 1.0, (f"/dev/shm/{mine.name}", f"/dev/shm/{kept.name}"))
            assert kill_here([gone], 1) == []
            assert not Path(f"/dev/shm/{mine.name}").exists()
            assert Path(f"/dev/shm/{kept.name}").exists(), "somebody still has it mapped"

    def test_another_process_with_the_same_pid_is_left_alone(self) -> None:
        parent, child = self.family()
        assert kill_here([ProcessRef(parent.pid, 1.0)], 1) == []
        assert parent.poll() is None
        kill_here([ProcessRef(parent.pid, psutil.Process(parent.pid).create_time())], 10)
        parent.wait(5)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    def test_the_own_tree_starts_with_this_process(self) -> None:
        assert process_tree()[0].pid == os.getpid()


@pytest.mark.fault
class TestGuardian:
    LAUNCHER = """
import subprocess, sys
from pathlib import Path
from coordinator.pools.guardian import guarded
with guarded(Path(sys.argv[1])):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    print(child.pid, flush=True)
    sys.stdin.readline()
"""

    def launch(self, directory: Path) -> tuple[subprocess.Popen[str], psutil.Process, psutil.Process]:
        """The launcher, its child and its guardian, once the guardian has seen the child."""
        directory.mkdir()
        launcher = subprocess.Popen(
            [sys.executable, "-c", self.LAUNCHER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert launcher.stdout is not None
        child = psutil.Process(int(launcher.stdout.readline()))
        guardian = next(p for p in psutil.Process(launcher.pid).children() if p.pid != child.pid)
        # It looks at the family when it starts and every LOOK_EVERY_S; its first look waits for its imports.
        before = guardian.cpu_times().user
        while guardian.status() != psutil.STATUS_SLEEPING or guardian.cpu_times().user == before:
            assert guardian.is_running()
        return launcher, child, guardian

    def test_a_killed_launchers_family_and_directory_go(self, tmp_path: Path) -> None:
        launcher, child, guardian = self.launch(tmp_path / "temporary")
        launcher.kill()
        launcher.wait(10)
        _, alive = psutil.wait_procs([child, guardian], timeout=20)
        assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
        assert not (tmp_path / "temporary").exists()

    def test_an_orderly_end_touches_nothing(self, tmp_path: Path) -> None:
        launcher, child, guardian = self.launch(tmp_path / "temporary")
        assert launcher.stdin is not None
        launcher.stdin.write("\n")
        launcher.stdin.close()
        assert launcher.wait(20) == 0
        psutil.wait_procs([guardian], timeout=20)
        assert not guardian.is_running()
        assert (tmp_path / "temporary").exists()
        assert child.is_running()
        child.kill()
