"""Two transfer nodes and what lies between them, without threads and sockets: real tables, real servicers, real pulls, real
transports; a network that delays, loses and cuts by a seeded random source; processes that stop and die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np

from coordinator.compare.proof.virtual_time import Inline
from kvtransfer.config import KvTransferSettings
from kvtransfer.control_service import KvControlServicer
from kvtransfer.push import KvTransferServicer
from kvtransfer.rpc import control_metadata
from kvtransfer.staging import Slot, Staging
from kvtransfer.transports.base import Transport
from kvtransfer.wire import parse_fetch
from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import TOKEN, make_node

BUFFERED = 2
"""Messages of a stream that are on their way at once."""


class Aborted(Exception):  # noqa: N818 - grpc's own is no error either
    """What `context.abort` raises in a servicer."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        super().__init__(details)
        self.rpc_error = rpc_error(code, details, trailing)


def rpc_error(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailing)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


class Context:
    """A call's, on the server's side."""

    def __init__(self, write: Callable[[Any], Coroutine[Any, Any, None]] | None = None) -> None:
        self.write = write

    def invocation_metadata(self) -> Any:
        return control_metadata(TOKEN)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise Aborted(code, details, trailing_metadata)


class VirtualNode:
    """A node on the running loop. `stopped` holds everything that goes in or out of its process; `dead` ends it."""

    def __init__(self, name: str, settings: KvTransferSettings, transport: Transport) -> None:
        self.name = name
        self.node = make_node(settings, incarnation=name)
        self.rt = rt = self.node._rt
        rt.now = asyncio.get_running_loop().time  # type: ignore[method-assign]
        rt.bind()
        rt.executor = rt.waiters = Inline()  # type: ignore[assignment]
        rt.transports[transport.scheme] = transport
        rt.endpoint.CopyFrom(pb.RankEndpoint(address=name, incarnation=name, host_id="host"))
        self._poisoned = [Poison(rt.send, rt.send_memory), Poison(rt.receive, rt.receive_memory)]
        self.transfers = KvTransferServicer(rt)
        self.control = KvControlServicer(rt, TOKEN)
        self.running = asyncio.Event()
        self.running.set()
        self.dead = False
        self.calls: set[asyncio.Task[Any]] = set()
        self.sweep = asyncio.create_task(rt.sweep())

    def check_untouched(self) -> None:
        """Raises `AssertionError` when something wrote into staging that was free."""
        for poison in self._poisoned:
            poison.check()

    async def ask(self, method: str, request: Any) -> Any:
        """A call of the worker's own actor. Raises `SplitpointError`."""
        try:
            return await self.spawn(getattr(self.control, method)(request, Context()))
        except Aborted as exc:
            raise from_rpc_error(exc.rpc_error) from None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Something that runs inside this process."""
        task = asyncio.create_task(work)
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)
        return task

    async def die(self) -> None:
        """Nothing of it runs afterwards, and nothing is said to anybody."""
        self.dead = True
        self.running.set()
        for task in [self.sweep, *self.calls, *self.rt.tasks._running]:
            task.cancel()
        await asyncio.gather(*self.calls, self.sweep, return_exceptions=True)
        await self.rt.tasks.cancel_all()


class Poison:
    """Fills a slot with a pattern when it is freed: who reads it afterwards finds that, who writes it is found."""

    BYTE = 0xEE

    def __init__(self, staging: Staging, memory: np.ndarray) -> None:
        self._memory = memory[: staging.capacity_bytes]
        self._used = np.zeros(staging.capacity_bytes, dtype=bool)
        self._free, staging.free = staging.free, self.free  # type: ignore[method-assign]

    def free(self, slot: Slot) -> None:
        self._free(slot)
        span = slice(slot.offset, slot.offset + slot.num_bytes)
        self._memory[span] = self.BYTE
        self._used[span] = True

    def check(self) -> None:
        """When every slot is free again."""
        assert (self._memory[self._used] == self.BYTE).all(), "bytes landed in staging that was free"


class Network:
    """Between nodes. A message takes up to `latency_s`, is held while an end is stopped, and is refused when one is dead."""

    def __init__(self, rng: random.Random, *, latency_s: float, loss: float) -> None:
        self._rng = rng
        self._latency_s = latency_s
        self._loss = loss
        self.nodes: dict[str, VirtualNode] = {}

    async def cross(self, *ends: VirtualNode) -> None:
        """One message. Raises `AioRpcError`."""
        await asyncio.sleep(self._rng.uniform(0, self._latency_s))
        for end in ends:
            await end.running.wait()
        if any(end.dead for end in ends):
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "connection reset")

    def connect(self, here: VirtualNode) -> Peers:
        return Peers(self, here)

    def loses(self) -> bool:
        return self._rng.random() < self._loss


class Peers:
    """Stands for `kvtransfer.peers.Peers`: everybody agrees."""

    def __init__(self, network: Network, here: VirtualNode) -> None:
        self._network, self._here = network, here

    @asynccontextmanager
    async def agreed(self, endpoint: pb.RankEndpoint) -> AsyncIterator[tuple[Any, pb.RankEndpoint, None]]:
        there = self._network.nodes[endpoint.address]
        try:
            await self._network.cross(self._here, there)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc
        yield Stub(self._network, self._here, there), there.rt.endpoint, None

    @asynccontextmanager
    async def use(self, endpoint: pb.RankEndpoint) -> AsyncIterator[tuple[Any, pb.RankEndpoint]]:
        async with self.agreed(endpoint) as (stub, theirs, _):
            yield stub, theirs


class Stub:
    def __init__(self, network: Network, here: VirtualNode, there: VirtualNode) -> None:
        self._network, self._here, self._there = network, here, there

    def Fetch(self, request: pb.FetchRequest, timeout: float) -> Stream:
        return Stream(self._network, self._here, self._there, request, timeout)

    async def Complete(self, request: pb.CompleteRequest, timeout: float) -> pb.CompleteResponse:
        return await self._unary("Complete", request, timeout)

    async def Heartbeat(self, request: pb.HeartbeatRequest, timeout: float) -> pb.HeartbeatResponse:
        return await self._unary("Heartbeat", request, timeout)

    async def _unary(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                await self._network.cross(self._here, self._there)
                if self._network.loses():
                    await asyncio.Event().wait()
                try:
                    answer = await self._there.spawn(getattr(self._there.transfers, method)(request, Context()))
                except Aborted as exc:
                    raise exc.rpc_error from None
                await self._network.cross(self._there, self._here)
                return answer
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline") from None


class Stream:
    """One `Fetch`."""

    def __init__(
        self, network: Network, here: VirtualNode, there: VirtualNode, request: pb.FetchRequest, timeout_s: float
    ) -> None:
        self._network, self._here, self._there = network, here, there
        self._messages: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(BUFFERED)
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._over: Exception | None = None
        self._server = there.spawn(self._serve(pb.FetchRequest.FromString(request.SerializeToString())))

    async def _serve(self, request: pb.FetchRequest) -> None:
        try:
            await self._network.cross(self._here, self._there)
            async with asyncio.timeout_at(self._deadline):
                await self._there.transfers.Fetch(request, Context(self._write))
            await self._network.cross(self._there, self._here)
            self._messages.put_nowait(None)
        except Aborted as exc:
            await asyncio.sleep(0)
            self._messages.put_nowait(exc.rpc_error)
        except grpc.aio.AioRpcError as exc:
            self._messages.put_nowait(exc)
        except TimeoutError:
            self._messages.put_nowait(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"))
        except asyncio.CancelledError:
            self._messages.put_nowait(rpc_error(grpc.StatusCode.UNAVAILABLE, "connection reset"))
            raise

    async def _write(self, message: Any) -> None:
        data = message.SerializeToString()
        await self._room.acquire()
        await self._network.cross(self._there, self._here)
        self._messages.put_nowait(data)

    async def read(self) -> Any:
        if self._over is not None:
            raise self._over
        try:
            async with asyncio.timeout_at(self._deadline):
                item = await self._messages.get()
                await self._here.running.wait()
        except TimeoutError:
            item = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline")
        if item is None:
            return grpc.aio.EOF
        if isinstance(item, Exception):
            self._over = item
            raise item
        self._room.release()
        return parse_fetch(item)

    def cancel(self) -> bool:
        self._over = self._over or rpc_error(grpc.StatusCode.CANCELLED, "cancelled here")
        return self._server.cancel()


def explained(answer: BaseException | Any) -> None:
    """Raises unless this is an answer, or an error that says what happened."""
    if isinstance(answer, BaseException) and not isinstance(answer, SplitpointError | asyncio.CancelledError):
        raise answer
    if isinstance(answer, SplitpointError) and answer.code is Code.INTERNAL:
        raise answer
