"""A Ray cluster of two nodes, each in network, IPC and mount namespaces of its own, over a link that can be cut.

The head has a second device that leads to this process and on to the other node, so a test talks to what they serve as any
client would.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.netns import Commands, Host, hosts, in_network_of
from tests.support.netns_link import CUT, Relay, address, relay_link

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE, FRONT = "10.78.0.1", "10.78.0.2"
"""This process's end of the head's second device, and the head's."""
HEAD, OTHER = 0, 1
START_TIMEOUT_S = 60.0


def no_commands() -> Commands:
    """The hosts' agent: they hold namespaces, and what runs there is started from outside."""
    return {}


class TwoNodes:
    """Made by `two_nodes`. `address` is the cluster's, `environment` what every process of it needs."""

    def __init__(self, runner: asyncio.Runner, both: Sequence[Host], relay: Relay, folder: Path) -> None:
        self._runner = runner
        self._hosts = both
        self._relay = relay
        self._folder = folder
        self._temp_dir = Path(tempfile.mkdtemp(prefix="sp2-", dir="/tmp"))  # a socket's path holds 107 characters
        self.address = f"{address(HEAD)}:6379"
        self.environment: Mapping[str, str] = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            # Ray gives a silent node up after about 12 s instead of a minute.
            "RAY_health_check_initial_delay_ms": "2000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "10",
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(self._temp_dir / "gcs"),
        }

    def on(self, index: int) -> list[str]:
        """What runs a command on a node: a prefix that becomes it."""
        return ["nsenter", "-t", str(self._hosts[index].pid), "-n", "-m", "-i", "-u", f"--wd={ROOT}"]

    def start(self, index: int) -> None:
        """Start the node's Ray; returns when it runs."""
        command = [*self.on(index), sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address(index)}"]
        command += ["--num-cpus=2", "--object-store-memory=104857600", "--disable-usage-stats"]
        if index == HEAD:
            command += ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._temp_dir}"]
        else:
            command += [f"--address={self.address}"]
        output = self._folder / f"ray-{index}.out"
        with output.open("wb") as out:
            started = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **self.environment}, timeout=START_TIMEOUT_S
            )
        assert started.returncode == 0, output.read_text()

    @contextlib.contextmanager
    def without_gcs(self) -> Iterator[None]:
        """The head's GCS is killed for the length of the block; then the same command starts it again."""
        (gcs,) = [process for process in self._processes() if process.name() == "gcs_server"]
        command, environment = gcs.cmdline(), gcs.environ()
        gcs.kill()
        gcs.wait(10)
        try:
            yield
        finally:
            subprocess.Popen([*self.on(HEAD), *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _processes(self) -> list[psutil.Process]:
        """All of Ray on both nodes: each names the directory of this cluster in its command or is a child of one that does."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self._temp_dir) in word for word in process.cmdline()):
                    found[process.pid] = process
                    found.update((child.pid, child) for child in process.children(recursive=True))
        return list(found.values())

    def cut(self) -> None:
        """From now on no packet passes between the nodes."""
        self._runner.run(self._relay.set(forth=CUT, back=CUT))

    def heal(self) -> None:
        """The link is as it was."""
        self._runner.run(self._relay.set())

    def carried(self) -> int:
        """Packets that were sent over the link so far, both ways."""
        counters = self._runner.run(self._relay.counters())
        return counters.get("forth", 0) + counters.get("back", 0)

    def close(self) -> None:
        """End Ray on both nodes; what does not end is killed."""
        family = self._processes()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=10)
        shutil.rmtree(self._temp_dir, ignore_errors=True)


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Both nodes up and joined; afterwards no process, device or directory of theirs is left."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            both = runner.run(stack.enter_async_context(hosts(no_commands, "head", "other")))
            relay = runner.run(stack.enter_async_context(relay_link(*both)))
            stack.callback(_close_front_door)
            _front_door(both[HEAD].pid, both[OTHER].pid)
            nodes = TwoNodes(runner, both, relay, folder)
            try:
                nodes.start(HEAD)
                nodes.start(OTHER)
                yield nodes
            finally:
                nodes.close()
        finally:
            runner.run(stack.aclose())


def _front_name() -> str:
    return f"sp{os.getpid()}"


def _close_front_door() -> None:
    """The device and its routes. The head's namespace would take them along, but only when the last connection in it is over."""
    subprocess.run(["ip", "link", "del", _front_name()], capture_output=True)


def _front_door(head: int, other: int) -> None:
    """A device pair between the head and this process, which the head passes on to the other node."""
    name = _front_name()
    pair = ["ip", "link", "add", name, "type", "veth", "peer", "name", "front0", "netns", str(head)]
    subprocess.run(pair, check=True, capture_output=True)
    subprocess.run(["ip", "addr", "add", f"{OUTSIDE}/24", "dev", name], check=True)
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    in_network_of(head, "ip", "addr", "add", f"{FRONT}/24", "dev", "front0")
    in_network_of(head, "ip", "link", "set", "front0", "up")
    in_network_of(head, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    for index in (HEAD, OTHER):
        subprocess.run(["ip", "route", "add", f"{address(index)}/32", "via", FRONT, "dev", name], check=True)
    in_network_of(other, "ip", "route", "add", f"{OUTSIDE}/32", "via", address(HEAD))
