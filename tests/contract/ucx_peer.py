"""The other process of the UCX tests: one transport, told what to do by JSON lines on its input."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import google_crc32c
import numpy as np

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.ucx import UcxTransport
from protos.splitpoint.v1 import kv_transfer_pb2 as pb


def pattern(num_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


class Peer:
    def __init__(self, incarnation: str, host_id: str, same_host: Any) -> None:
        self.incarnation = incarnation
        self.host_id = host_id
        self.transport = UcxTransport(host_id=host_id, spin_s=2.0, same_host=same_host)
        self.channels: dict[int, Any] = {}
        self.memory: dict[int, np.ndarray] = {}

    async def start(self) -> dict[str, Any]:
        await self.transport.start()
        return {
            "endpoint": pb.RankEndpoint(
                host_id=self.host_id,
                incarnation=self.incarnation,
                ucx_worker_address=self.transport.worker_address(),
            )
            .SerializeToString()
            .hex()
        }

    async def open_receive(self, number: int, sender: str) -> dict[str, Any]:
        endpoint = pb.RankEndpoint.FromString(bytes.fromhex(sender))
        request = pb.FetchRequest(
            sender_incarnation=endpoint.incarnation, receiver_incarnation=self.incarnation, receiver_host_id=self.host_id
        )
        self.channels[number] = self.transport.open_receive(endpoint, request)
        return {"request": request.SerializeToString().hex()}

    async def open_send(self, number: int, request: str) -> dict[str, Any]:
        self.channels[number] = self.transport.open_send(pb.FetchRequest.FromString(bytes.fromhex(request)))
        return {}

    async def send(self, number: int, num_bytes: int, seed: int) -> dict[str, Any]:
        self.memory[number] = pattern(num_bytes, seed)
        header = pb.ChunkHeader(bytes=num_bytes)
        responses = [r.SerializeToString().hex() async for r in self.channels[number].send(header, self.memory[number])]
        return {"responses": responses}

    async def accept(self, number: int, response: str, timeout_s: float) -> dict[str, Any]:
        message = pb.FetchResponse.FromString(bytes.fromhex(response))
        self.memory[number] = np.zeros(message.header.bytes, np.uint8)
        begin = time.perf_counter()
        header = await self.channels[number].accept(message, lambda _: self.memory[number], timeout_s)
        seconds = time.perf_counter() - begin
        assert header is not None
        return {"crc": google_crc32c.value(self.memory[number].tobytes()), "seconds": seconds}

    async def drained(self, number: int, timeout_s: float) -> dict[str, Any]:
        return {"drained": await self.channels[number].drained(timeout_s)}

    async def close(self, number: int) -> dict[str, Any]:
        await self.channels[number].close()
        return {}

    async def peer_done(self, number: int) -> dict[str, Any]:
        self.channels[number].peer_done()
        return {}

    async def peer_died(self, incarnation: str) -> dict[str, Any]:
        self.transport.peer_died(incarnation)
        return {}

    async def counters(self) -> dict[str, Any]:
        return {"counters": self.transport.counters(), "fds": len(os.listdir("/proc/self/fd"))}

    async def stop(self) -> dict[str, Any]:
        await self.transport.stop()
        return {}


async def main() -> None:
    peer = Peer(sys.argv[1], sys.argv[2], sys.argv[3])
    answer = await peer.start()
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return
        command = json.loads(line)
        try:
            answer = await getattr(peer, command.pop("do"))(**command)
        except TransportError as exc:
            answer = {"failed": exc.reason, "message": str(exc)}


if __name__ == "__main__":
    asyncio.run(main())
