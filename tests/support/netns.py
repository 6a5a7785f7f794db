"""Hosts in network namespaces: processes that share this machine's kernel and nothing by which a transfer could cut corners.

A host has its own network, IPC and mount namespace, its own `/sys` (where UCX looks for devices) and `/dev/shm`. So two of
them are two machines to UCX and to `kvtransfer.rpc.host_id`: payload between them crosses their link or does not arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import shutil
import subprocess
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from protos.errors import SplitpointError
from protos.splitpoint.v1 import common_pb2

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWNET = 0x40000000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21
START_TIMEOUT_S = 60.0

Commands = Mapping[str, Callable[..., Awaitable[Any]]]
_libc = ctypes.CDLL(None, use_errno=True)
_processes = multiprocessing.get_context("forkserver")


def missing() -> str:
    """What this machine lacks for namespaces, or "" when nothing."""
    held = int(
        next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")), 16
    )
    for number, name in ((CAP_SYS_ADMIN, "CAP_SYS_ADMIN"), (CAP_NET_ADMIN, "CAP_NET_ADMIN")):
        if not held >> number & 1:
            return f"no {name}: run as root"
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            return f"no `{tool}`"
    probe = subprocess.run(
        ["unshare", "--net", "--ipc", "--mount", "ip", "link", "set", "lo", "up"], capture_output=True, text=True
    )
    return "" if probe.returncode == 0 else f"no namespaces: {probe.stderr.strip()}"


def in_network_of(pid: int, *command: str) -> str:
    """Run a command in the network namespace of process `pid`; its output. Raises `CalledProcessError`."""
    return subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, capture_output=True, text=True).stdout


class Host:
    """One host, seen from the test: an agent that answers commands. Calls overlap. A `SplitpointError` comes back as itself,
    any other exception as a `RuntimeError` with its traceback."""

    def __init__(self, name: str, process: Any, pipe: Connection) -> None:
        self.name = name
        self.pid: int = process.pid
        self._process = process
        self._pipe = pipe
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._reader = Thread(target=self._read, name=f"host-{name}", daemon=True)
        self._reader.start()

    async def call(self, command: str, *arguments: Any, timeout_s: float = 60.0, **options: Any) -> Any:
        """What the agent answers. Raises what it raised; `TimeoutError`; `ConnectionError` when the host is gone."""
        if self._over:
            raise ConnectionError(f"host {self.name} is gone")
        number = next(self._numbers)
        answer = self._calls[number] = self._loop.create_future()
        try:
            self._pipe.send((number, command, arguments, options))
            async with asyncio.timeout(timeout_s):
                return await answer
        except OSError as exc:
            raise ConnectionError(f"host {self.name} is gone") from exc
        finally:
            self._calls.pop(number, None)

    async def kill(self) -> None:
        """End its process outright; returns when it is gone. Idempotent."""
        if self._process.exitcode is None:
            self._process.kill()
        await asyncio.to_thread(self._process.join)
        await asyncio.to_thread(self._reader.join)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, answer, error = self._pipe.recv()
                self._loop.call_soon_threadsafe(self._settle, number, answer, error)
        with contextlib.suppress(RuntimeError):  # the loop may have ended before the host did
            self._loop.call_soon_threadsafe(self._gone)

    def _settle(self, number: int, answer: Any, error: bytes | str | None) -> None:
        future = self._calls.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(answer)
        elif isinstance(error, bytes):
            future.set_exception(SplitpointError.from_proto(common_pb2.ErrorDetail.FromString(error)))
        else:
            future.set_exception(RuntimeError(f"on host {self.name}: {error}"))

    def _gone(self) -> None:
        self._over = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ConnectionError(f"host {self.name} is gone"))


@contextlib.asynccontextmanager
async def hosts(agent: Callable[[], Commands], *names: str, apart: bool = True) -> AsyncIterator[list[Host]]:
    """One host per name, each with loopback alone until somebody lays a link. Killed at the end, and their network with them.
    `apart` False: processes of this very host, in its network.

    `agent` is a module-level function that gives the host's commands; they run as tasks of one event loop.
    """
    started: list[Host] = []
    try:
        pipes = []
        for name in names:
            ours, theirs = _processes.Pipe()
            process = _processes.Process(target=_main, args=(theirs, name, agent, apart), daemon=True)
            process.start()
            theirs.close()
            pipes.append((name, process, ours))
        for name, process, pipe in pipes:
            started.append(Host(name, process, pipe))
        for host in started:
            await host.call("ready", timeout_s=START_TIMEOUT_S)
        yield started
    finally:
        for host in started:
            await host.kill()


def _main(pipe: Connection, name: str, agent: Callable[[], Commands], apart: bool) -> None:
    if apart:
        _leave_home(name)
    asyncio.run(_serve(pipe, agent()))


def _leave_home(name: str) -> None:
    _call(_libc.unshare, CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET)
    _call(_libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _call(_libc.mount, b"sysfs", b"/sys", b"sysfs", 0, None)
    _call(_libc.mount, b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    _call(_libc.sethostname, name.encode(), len(name))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")


async def _serve(pipe: Connection, commands: Commands) -> None:
    """Answer until the test closes its end, which it does at the latest by dying."""
    running: set[asyncio.Task[None]] = set()

    async def answer(number: int, command: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            result = True if command == "ready" else await commands[command](*arguments, **options)
        except SplitpointError as exc:
            pipe.send((number, None, exc.to_proto().SerializeToString()))
        except Exception:
            # The test hears of it, wherever it comes from.
            pipe.send((number, None, traceback.format_exc()))
        else:
            pipe.send((number, result, None))

    with contextlib.suppress(EOFError, OSError):
        while True:
            task = asyncio.create_task(answer(*await asyncio.to_thread(pipe.recv)))
            running.add(task)
            task.add_done_callback(running.discard)
    os._exit(0)
