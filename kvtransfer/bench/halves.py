"""Both halves of every path, each in a process of its own, told what to do over a pipe of its parent.

A half is `setup() -> facts`, `connect(the other half's facts)`, `run(case) -> seconds or None`, `close()`. The receiver's seconds
count: from the word "go", which both halves get at once, until its last byte is where the case says.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kvtransfer.bench.shape import Case

_PR_SET_PDEATHSIG = 1
ANSWER_S = 240.0
"""Starting vLLM takes a minute on a busy machine; a run that takes this long is broken."""
STOP_S = 10.0


class Half(Protocol):
    def setup(self) -> dict[Any, Any]:
        """Facts for the other half: plain values."""

    def connect(self, facts: dict[str, Any]) -> None: ...

    def run(self, case: Case) -> float | None:
        """Receiver: seconds. Sender: None, or its own where the later of both counts."""

    def verify(self, case: Case) -> None:
        """Receiver: raise `AssertionError` unless the last run's bytes are the sender's."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PathSpec:
    """One path: `module` has `sender(options)` and `receiver(options)`."""

    name: str
    module: str
    options: tuple[tuple[str, Any], ...] = ()


class PathError(RuntimeError):
    """A half failed; the message is its own."""


class Pair:
    """The two processes of one path, from the parent's side. While it is not being timed both are stopped (SIGSTOP), so that what
    a library spins or polls costs the others nothing."""

    def __init__(self, spec: PathSpec, cores: Mapping[str, Collection[int]] | None = None) -> None:
        """`cores`: those that "sender" and "receiver" may use; None leaves both to the kernel."""
        context = multiprocessing.get_context("spawn")
        self.name = spec.name
        self._pipes: dict[str, Connection] = {}
        self._processes: dict[str, Any] = {}
        for side in ("sender", "receiver"):
            ours, theirs = context.Pipe()
            own = None if cores is None else frozenset(cores[side])
            process = context.Process(target=_serve, args=(theirs, spec.module, side, dict(spec.options), own), daemon=True)
            process.start()
            theirs.close()
            self._pipes[side], self._processes[side] = ours, process

    def start(self) -> None:
        """Set both halves up and make them known to each other. Raises `PathError`."""
        facts = self._both("setup")
        for side, other in (("sender", "receiver"), ("receiver", "sender")):
            self._tell(side, "connect", facts[other])
        for side in self._pipes:
            self._answer(side)

    def run(self, case: Case) -> float:
        """Seconds of one run. Raises `PathError`."""
        if case.staged:
            self._tell("sender", "run", case)
            self._answer("sender")
            self._tell("receiver", "run", case)
            seconds = self._answer("receiver")
        else:
            seconds = max(taken for taken in self._both("run", case).values() if taken is not None)
        assert isinstance(seconds, float)
        return seconds

    def ask(self, side: str, command: str) -> Any:
        """What a method of one half returns: plain values. Raises `PathError`."""
        self._tell(side, command)
        return self._answer(side)

    def verify(self, case: Case) -> None:
        """Raises `PathError` when the receiver does not hold the sender's bytes."""
        self._tell("receiver", "verify", case)
        self._answer("receiver")

    def pause(self) -> None:
        for process in self._processes.values():
            _signal(process, signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes.values():
            _signal(process, signal.SIGCONT)

    def close(self) -> None:
        """End both; one that does not is killed. Idempotent."""
        self.resume()
        for pipe in self._pipes.values():
            try:
                pipe.send(("close",))
            except OSError:
                continue  # it is gone already
        for process in self._processes.values():
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes.values():
            pipe.close()

    def _both(self, *message: Any) -> dict[str, Any]:
        for side in self._pipes:
            self._tell(side, *message)
        # The receiver first: its failure is usually the cause of the sender's.
        return {side: self._answer(side) for side in ("receiver", "sender")}

    def _tell(self, side: str, *message: Any) -> None:
        # A half that has ended said why before: its answer is still in the pipe.
        with contextlib.suppress(BrokenPipeError):
            self._pipes[side].send(message)

    def _answer(self, side: str) -> Any:
        pipe = self._pipes[side]
        try:
            if not pipe.poll(ANSWER_S):
                raise PathError(f"{self.name}: the {side} did not answer within {ANSWER_S:g} s")
            kind, value = pipe.recv()
        except (EOFError, OSError) as exc:
            raise PathError(f"{self.name}: the {side}'s process ended") from exc
        if kind == "failed":
            raise PathError(f"{self.name}: {side}: {value}")
        return value


def _signal(process: Any, number: int) -> None:
    if process.is_alive():
        os.kill(process.pid, number)


def _serve(pipe: Connection, module: str, side: str, options: dict[str, Any], cores: frozenset[int] | None) -> None:
    # A parent that is killed cannot end children that it has stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    half: Half | None = None
    try:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        half = getattr(importlib.import_module(module), side)(options)
        while True:
            command, *arguments = pipe.recv()
            if command == "close":
                return
            pipe.send(("done", getattr(half, command)(*arguments)))
    except (EOFError, KeyboardInterrupt):
        return
    except BaseException as exc:
        last = traceback.extract_tb(exc.__traceback__)[-1]
        pipe.send(("failed", f"{type(exc).__name__}: {exc} ({last.filename.rpartition('/')[2]}:{last.lineno})"))
    finally:
        if half is not None:
            half.close()
