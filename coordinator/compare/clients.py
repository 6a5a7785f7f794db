"""One load client in as many processes as it takes to be on time.

A schedule is dealt out in turn, every N-th request to the same process; all count from one start on the monotonic clock that the
processes of a host share, and their outcomes are put together again. One process, this one, is the beginning: where a
schedule was sent late, the next one is sent by twice as many.

Between this process and its own children Python objects go through a pipe; nothing of it reaches a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from coordinator.compare.load import ArmTarget, Outcome, Piece, RequestFailedError, Sending, send
from coordinator.compare.target import connect
from coordinator.compare.undisturbed import prompt_client
from coordinator.compare.workload import PlannedRequest

START_AFTER_S = 0.1
"""From the last process's "ready" to the start: time for all to hear of it. One that hears too late shows as send lag."""
CONNECT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Part:
    """What one process sends."""

    sendings: list[Sending]
    path: str
    deadline_s: float
    arms: dict[str, ArmTarget]


def most_processes() -> int:
    """More clients than cores would only wait for each other."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ClientProcesses:
    """A `Client` and a `ScheduleSender` of one target. Use it as an async context manager: at its end its processes are gone."""

    def __init__(
        self,
        target: str,
        *,
        model: str = "",
        api_key: str = "",
        arms: Mapping[str, ArmTarget] | None = None,
        processes: int = 1,
        most: int | None = None,
    ) -> None:
        """`processes` send from the beginning; it never becomes more than `most` (default: the cores this process may use)."""
        self._target = target
        self._model = model
        self._api_key = api_key
        self._arms = dict(arms or {})
        self._processes = processes
        self._most = max(processes, most_processes() if most is None else most)
        self._client = connect(target, model=model, api_key=api_key, arms=self._arms)
        self._children: list[_Child] = []

    async def __aenter__(self) -> ClientProcesses:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        children, self._children = self._children, []
        await asyncio.gather(*(child.end() for child in children))
        await self._client.__aexit__(None, None, None)

    @property
    def processes(self) -> int:
        """How many send the next schedule."""
        return self._processes

    async def model(self, timeout_s: float) -> str:
        """The served model's id. Raises `RequestFailedError`."""
        self._model = await self._client.model(timeout_s)
        return self._model

    def know(self, name: str, target: ArmTarget) -> None:
        """From now on requests of the arm go there."""
        self._arms[name] = target
        self._client.know(name, target)

    def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        """See `Client`; from this process."""
        return self._client.ask(request, path, deadline_s)

    def fell_behind(self) -> None:
        """See `ScheduleSender`."""
        self._processes = min(self._most, 2 * self._processes)

    def notes(self) -> list[str]:
        """What a record should say of the client."""
        return [f"client processes: {self._processes} at the end, because one was late"] if self._processes > 1 else []

    async def send(
        self, sendings: Sequence[Sending], path: str, deadline_s: float, on_done: Callable[[], None]
    ) -> tuple[float, list[Outcome]]:
        """See `ScheduleSender`. Raises `ChildProcessError` when a process ends under way; none is left then."""
        count = min(self._processes, len(sendings))
        if count <= 1:
            return await send(self._client, sendings, path, deadline_s, on_done=on_done)
        while len(self._children) < count:
            self._children.append(_Child(self._target, self._model, self._api_key))
        children = self._children[:count]
        try:
            parts = [_Part(list(sendings[i::count]), path, deadline_s, self._arms) for i in range(count)]
            await asyncio.gather(*(child.give(part) for child, part in zip(children, parts, strict=True)))
            start = time.perf_counter() + START_AFTER_S
            for child in children:
                child.start(start)
            found = await asyncio.gather(*(child.outcomes(on_done) for child in children))
        except BaseException:
            # Out of step with what they are asked, whoever is left.
            for child in self._children:
                child.kill()
            self._children.clear()
            raise
        return start, sorted((outcome for part in found for outcome in part), key=lambda outcome: outcome.index)


class _Child:
    """One process, seen from its parent."""

    def __init__(self, target: str, model: str, api_key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, target, model, api_key), name="load-client", daemon=True
        )
        self._process.start()
        theirs.close()

    async def give(self, part: _Part) -> None:
        """Returns when every request of the part is ready to be sent."""
        await asyncio.to_thread(self._tell, part)
        await self._hear()

    def start(self, start_s: float) -> None:
        self._tell(start_s)

    async def outcomes(self, on_done: Callable[[], None]) -> list[Outcome]:
        found: list[Outcome] = await self._hear()
        for _ in found:
            on_done()
        return found

    async def end(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        await asyncio.to_thread(self._process.join, END_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """At once; whoever waits for it hears that it has ended."""
        self._process.kill()
        self._process.join()
        self._process.close()

    def _tell(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as exc:
            raise self._ended() from exc

    async def _hear(self) -> Any:
        try:
            return await asyncio.to_thread(self._pipe.recv)
        except (EOFError, OSError) as exc:
            raise self._ended() from exc

    def _ended(self) -> ChildProcessError:
        return ChildProcessError("a client process of the load generator ended by itself; what it said is on stderr")


def _serve(pipe: Connection, target: str, model: str, api_key: str) -> None:
    # Ctrl-C reaches the whole group of processes; this one ends when its parent says so or is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with prompt_client(), contextlib.suppress(EOFError, BrokenPipeError):
        asyncio.run(_send_parts(pipe, target, model, api_key))


async def _send_parts(pipe: Connection, target: str, model: str, api_key: str) -> None:
    async def begin() -> float:
        pipe.send("ready")
        start: float = await asyncio.to_thread(pipe.recv)
        return start

    async with connect(target, model=model, api_key=api_key) as client:
        # Connects. Where nobody answers, every request will say so itself.
        with contextlib.suppress(RequestFailedError):
            await client.model(CONNECT_TIMEOUT_S)
        while (part := await asyncio.to_thread(pipe.recv)) is not None:
            for name, arm in part.arms.items():
                client.know(name, arm)
            _, outcomes = await send(client, part.sendings, part.path, part.deadline_s, begin=begin)
            pipe.send(outcomes)
