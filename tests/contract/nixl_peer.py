"""The other process of the NIXL tests: one transport over 32 MiB of staging, told what to do by JSON lines on its input."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import google_crc32c
import numpy as np

from kvtransfer.config import KvTransferSettings
from kvtransfer.transports import TransportContext, create_transport
from kvtransfer.transports.base import TransportError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

STAGING_BYTES = 32 << 20


def pattern(num_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


class Peer:
    """Chunks of a send or a receive lie at the start of its staging."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.sending = np.zeros(STAGING_BYTES, np.uint8)
        self.receiving = np.zeros(STAGING_BYTES, np.uint8)
        context = TransportContext(KvTransferSettings(), 0, incarnation, "host", self.sending, self.receiving)
        self.transport: Any = create_transport("nixl", context)
        self.channels: dict[int, Any] = {}

    async def start(self) -> dict[str, Any]:
        await self.transport.start()
        return {"address": self.transport.worker_address().hex()}

    def endpoint(self, incarnation: str, address: str) -> pb.RankEndpoint:
        return pb.RankEndpoint(incarnation=incarnation, transport_addresses={"nixl": bytes.fromhex(address)})

    async def open_receive(self, number: int, sender: str, address: str) -> dict[str, Any]:
        request = pb.FetchRequest(sender_incarnation=sender, receiver_incarnation=self.incarnation)
        self.channels[number] = self.transport.open_receive(self.endpoint(sender, address), request)
        return {"request": request.SerializeToString().hex()}

    async def open_send(self, number: int, request: str) -> dict[str, Any]:
        self.channels[number] = self.transport.open_send(pb.FetchRequest.FromString(bytes.fromhex(request)))
        return {}

    async def send(self, number: int, num_bytes: int, seed: int) -> dict[str, Any]:
        payload = self.sending[:num_bytes]
        payload[:] = pattern(num_bytes, seed)
        header = pb.ChunkHeader(bytes=num_bytes)
        return {"responses": [r.SerializeToString().hex() async for r in self.channels[number].send(header, payload)]}

    async def accept(self, number: int, response: str, timeout_s: float) -> dict[str, Any]:
        message = pb.FetchResponse.FromString(bytes.fromhex(response))
        memory = self.receiving[: message.header.bytes]
        await self.channels[number].accept(message, lambda _: memory, timeout_s)
        return {"crc": google_crc32c.value(memory.tobytes())}

    async def drained(self, number: int, timeout_s: float) -> dict[str, Any]:
        return {"drained": await self.channels[number].drained(timeout_s)}

    async def close(self, number: int) -> dict[str, Any]:
        await self.channels[number].close()
        return {}

    async def counters(self) -> dict[str, Any]:
        return {"counters": self.transport.counters(), "fds": len(os.listdir("/proc/self/fd"))}

    async def stop(self) -> dict[str, Any]:
        await self.transport.stop()
        return {}


async def main() -> None:
    peer = Peer(sys.argv[1])
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
