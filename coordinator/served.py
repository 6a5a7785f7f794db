"""`splitpoint serve` in a process of its own, for commands that need a system for a while."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

READY_TIMEOUT_S = 600.0
END_TIMEOUT_S = 120.0


class ServeError(RuntimeError):
    """The system did not get ready or did not end in order; the text says where to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The served system, as its ready file describes it. Addresses are HOST:PORT."""

    process: subprocess.Popen[bytes]
    model: str
    http: str
    grpc: str
    admin: str


@contextlib.contextmanager
def served(arguments: Sequence[str], state_dir: Path, *, ready_timeout_s: float = READY_TIMEOUT_S) -> Iterator[Running]:
    """Serve with these arguments of `splitpoint serve`, its state and logs below `state_dir`; SIGTERM at the end.

    Its output goes where this process's goes. Meanwhile SIGTERM ends this process as `SystemExit`, so that the system ends too.

    Raises:
        ServeError: it did not get ready, or did not end in order.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    ready = state_dir / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "coordinator.cli", "serve", "--ready-file", str(ready), *arguments]
    command += [f"--set=coordinator.state_dir={state_dir}", *(f"--set=gateway.{n}_port=0" for n in ("http", "grpc", "admin"))]
    # A session of its own: Ctrl-C reaches the command, which then ends the system in order.
    with _sigterm(_exit):
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
        try:
            _wait_ready(process, ready, ready_timeout_s)
            said = json.loads(ready.read_text())
            gateway = said["gateways"][0]
            yield Running(
                process=process, model=said["model"], http=gateway["http"], grpc=gateway["grpc"], admin=gateway["admin"]
            )
        finally:
            # A second SIGTERM does not cut the end short.
            with _sigterm(signal.SIG_IGN):
                _end(process)
    if process.returncode != 0:
        raise ServeError(f"serve ended with status {process.returncode}; its logs are below {state_dir}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _sigterm(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Handled so meanwhile; only a main thread can, and elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while not ready.is_file():
        if process.poll() is not None:
            raise ServeError(f"serve ended with status {process.returncode} before it was ready; logs below {ready.parent}")
        if time.monotonic() > until_s:
            raise ServeError(f"serve was not ready after {timeout_s:g} s; logs below {ready.parent}")
        time.sleep(0.2)
