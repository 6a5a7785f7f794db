"""A raw gRPC stream of bytes: what a transfer over gRPC can reach at most. One channel, messages made beforehand, nothing
checked, nothing copied on either side. Options: `message_bytes`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from kvtransfer.bench.shape import Case
from kvtransfer.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS

METHOD = "/splitpoint.bench.Stream/Bytes"


class Sender:
    def __init__(self, options: dict[str, Any]) -> None:
        self._message = np.random.default_rng(1).integers(0, 256, options["message_bytes"], dtype=np.uint8).tobytes()
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def setup(self) -> dict[Any, Any]:
        self._thread.start()
        self._ready.wait()
        return {"port": self._port}

    def connect(self, facts: dict[str, Any]) -> None:
        return

    def run(self, case: Case) -> float | None:
        return None

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.unary_stream_rpc_method_handler(self._stream)
        service, method = METHOD[1:].split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self._port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(0)

    async def _stream(self, request: bytes, context: Any) -> None:
        left = int.from_bytes(request, "little")
        while left > 0:
            await context.write(self._message[:left])
            left -= len(self._message)


class Receiver:
    def __init__(self, options: dict[str, Any]) -> None:
        self._runner = asyncio.Runner()
        self._channel: Any = None

    def setup(self) -> dict[Any, Any]:
        return {}

    def connect(self, facts: dict[str, Any]) -> None:
        async def dial() -> Any:
            return grpc.aio.insecure_channel(f"127.0.0.1:{facts['port']}", options=CHANNEL_OPTIONS)

        self._channel = self._runner.run(dial())

    def run(self, case: Case) -> float | None:
        return self._runner.run(self._run(case))

    async def _run(self, case: Case) -> float:
        stream = self._channel.unary_stream(METHOD)
        each = case.total_bytes // case.transfers
        room = asyncio.Semaphore(case.depth)
        begun = time.perf_counter()

        async def one() -> int:
            async with room:
                return sum([len(message) async for message in _messages(stream(each.to_bytes(8, "little")))])

        got = sum(await asyncio.gather(*(one() for _ in range(case.transfers))))
        seconds = time.perf_counter() - begun
        if got != case.total_bytes:
            raise RuntimeError(f"{got} bytes came, {case.total_bytes} were asked for")
        return seconds

    def verify(self, case: Case) -> None:
        return

    def close(self) -> None:
        async def hang_up() -> None:
            if self._channel is not None:
                await self._channel.close()

        self._runner.run(hang_up())
        self._runner.close()


async def _messages(call: Any) -> AsyncIterator[bytes]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


def sender(options: dict[str, Any]) -> Sender:
    return Sender(options)


def receiver(options: dict[str, Any]) -> Receiver:
    return Receiver(options)
