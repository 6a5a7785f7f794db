"""A simulated worker in a process of its own, to be killed or stopped. Its engine takes real time.

The processes are forked from one that has imported everything, so that each costs a test a fraction of a second. One ends
with the pipe to its test, so that none outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import grpc
import psutil

from coordinator.routing.views import RankView, Role, WorkerState, WorkerView
from engine.config import EngineSettings, SimulatedSettings
from kvtransfer.control import RankControl
from protos.ids import Incarnation, WorkerId
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2, worker_pb2_grpc
from tests.support.workers import TOKEN, StepClock, start_worker

START_TIMEOUT_S = 60.0
BLOCK_TOKENS, BLOCK_BYTES, STAGING_BLOCKS = 8, 512 * 1024, 136
ENGINE = EngineSettings(
    kind="simulated",
    max_model_len=1024,
    max_num_batched_tokens=64,
    max_num_seqs=1,
    block_tokens=BLOCK_TOKENS,
    enable_prefix_caching=False,
    simulated=SimulatedSettings(
        num_kv_blocks=256, block_bytes=BLOCK_BYTES, vocab_size=997, eos_token_id=2,
        step_base_s=0.02, prefill_token_s=1e-3,
    ),
)  # fmt: skip
"""One request at a time, 64 tokens of a prompt in 84 ms: whatever a test waits for is seen while it lasts."""


class PacedClock(StepClock):
    """Steps take the time that the model says."""

    async def sleep(self, seconds: float) -> None:
        self.steps += 1
        await asyncio.sleep(seconds)


class WorkerChild:
    """One such process, seen from the test: killed, stopped, asked what its rank holds."""

    def __init__(self, process: BaseProcess, view: WorkerView, ranks: list[kv_transfer_pb2.RankEndpoint]) -> None:
        self.process = psutil.Process(process.pid)
        self.view = view
        self.control = RankControl(ranks, TOKEN)
        self._child = process

    @property
    def incarnation(self) -> str:
        return self.view.incarnation

    async def status(self) -> kv_transfer_pb2.GetNodeStatusResponse:
        (rank,) = await self.control.status()
        return rank

    def stop(self) -> None:
        """SIGSTOP, seen to have happened."""
        self.process.suspend()
        while self.process.status() != psutil.STATUS_STOPPED:
            os.sched_yield()

    def go_on(self) -> None:
        self.process.resume()

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        await _kill(self._child)


@contextlib.asynccontextmanager
async def worker_children(transport: str, *roles: Role, **kvtransfer: Any) -> AsyncIterator[list[WorkerChild]]:
    """One child per role, all serving; killed at the end."""
    children: list[WorkerChild] = []
    started = [_start(f"{role.value}{number}", transport, kvtransfer) for number, role in enumerate(roles)]
    try:
        for (process, pipe), role in zip(started, roles, strict=True):
            children.append(await _connect(process, pipe, role))
        yield children
    finally:
        for child in children:
            await child.control.close()
        for process, pipe in started:
            await _kill(process)
            pipe.close()


_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.worker_child", "kvtransfer.node", "kvtransfer.transports.ucx"])


def _start(name: str, transport: str, kvtransfer: dict[str, Any]) -> tuple[BaseProcess, Connection]:
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_main, args=(theirs, name, transport, kvtransfer), daemon=True)
    process.start()
    theirs.close()
    return process, ours


async def _kill(process: BaseProcess) -> None:
    if process.pid is not None and process.exitcode is None:
        process.kill()
    await asyncio.to_thread(process.join)


async def _connect(process: BaseProcess, pipe: Connection, role: Role) -> WorkerChild:
    assert await asyncio.to_thread(pipe.poll, START_TIMEOUT_S), "the worker has not started"
    address: str = pipe.recv()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        said = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=10)
    view = WorkerView(
        worker_id=WorkerId(said.worker_id),
        incarnation=Incarnation(said.incarnation),
        pool=role.value,
        role=role,
        state=WorkerState.READY,
        address=address,
        pid=process.pid or 0,
        fingerprint=b"same",
        ranks=tuple(
            RankView(rank=r.rank, address=r.address, host_id=r.host_id, ucx_worker_address=r.ucx_worker_address)
            for r in said.ranks
        ),
        max_transfer_tokens=said.max_transfer_tokens,
        transports=tuple(said.transports),
    )
    return WorkerChild(process, view, list(said.ranks))


def _main(pipe: Connection, name: str, transport: Any, kvtransfer: dict[str, Any]) -> None:
    asyncio.run(_serve(pipe, name, transport, kvtransfer))


async def _serve(pipe: Connection, name: str, transport: Any, kvtransfer: dict[str, Any]) -> None:
    worker = await start_worker(
        None,
        name,
        wire=True,
        transport=transport,
        staging_blocks=STAGING_BLOCKS,
        engine=ENGINE,
        clock=PacedClock(),
        kvtransfer=kvtransfer,
    )
    pipe.send(worker.address)
    with contextlib.suppress(EOFError, OSError):
        await asyncio.to_thread(pipe.recv)
    await worker.close()
