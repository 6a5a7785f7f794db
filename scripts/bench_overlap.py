"""How much of a transfer is exposed when the chunks of a chunked prefill travel while later chunks compute.

    python scripts/bench_overlap.py [--rates 1000,10000] [--transports ucx,grpc] [--repeat 3] [--json FILE]

Two hosts in network namespaces, a `veth` between them whose rate the kernel holds (`tbf`), a real transfer node on each. The
prefill is paced: a step computes one chunk in the time that its shape says, then the chunk is gathered into staging and
committed, as an engine's step does. *exposed* is the time from the last chunk's gather until all of it is verified on the other
host; *at once* is the same with nothing gathered before the last chunk has been computed. *raw* is one TCP stream of the same
bytes over the same link, nothing checked. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from coordinator.manifest import hardware, versions  # noqa: E402
from kvtransfer.config import KvTransferSettings  # noqa: E402
from kvtransfer.control import RankControl  # noqa: E402
from protos.ids import new_capability, new_transfer_id, token_hash  # noqa: E402
from protos.splitpoint.v1 import kv_transfer_pb2 as pb  # noqa: E402
from tests.support.kv_nodes import BLOCK_TOKENS, TOKEN, make_node  # noqa: E402
from tests.support.netns import Commands, Host, hosts, missing  # noqa: E402
from tests.support.netns_link import address, can_limit_rate, kernel_link  # noqa: E402
from tests.support.netns_node import Agent, settled  # noqa: E402

MIB = 1024 * 1024
CHUNK_BLOCKS = 16
"""Of either shape: 256 tokens."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model on a machine, as far as overlap is concerned."""

    name: str
    token_bytes: int
    prompt_tokens: int
    chunk_tokens: int
    prefill_tokens_per_s: float

    @property
    def total_bytes(self) -> int:
        return self.token_bytes * self.prompt_tokens

    @property
    def chunks(self) -> int:
        return -(-self.prompt_tokens // self.chunk_tokens)

    @property
    def chunk_s(self) -> float:
        return self.chunk_tokens / self.prefill_tokens_per_s

    def bound_s(self, wire_s: float, compute_s: float) -> float:
        """The least that can be exposed: the last chunk, or what the link could not carry since the first was there.

        `wire_s`: what all the bytes take on the link; `compute_s`: from the start until the last chunk was gathered.
        """
        return max(wire_s / self.chunks, wire_s - compute_s * (self.chunks - 1) / self.chunks)


SHAPES = (
    # 30 layers, 3 KV heads of 64, bfloat16; a few cores compute a few hundred tokens a second.
    Shape(name="135M on a CPU", token_bytes=23040, prompt_tokens=2048, chunk_tokens=256, prefill_tokens_per_s=800),
    # 32 layers, 8 KV heads of 128, bfloat16; an assumed rate of one accelerator.
    Shape(name="8B on a GPU", token_bytes=131072, prompt_tokens=2048, chunk_tokens=256, prefill_tokens_per_s=8000),
)


class BenchAgent(Agent):
    """A host whose prefill is paced. Times are monotonic seconds, the same clock on both hosts: they share the kernel."""

    async def begin(self, settings: dict[str, Any], block_bytes: int) -> bytes:
        node = make_node(KvTransferSettings(**settings), block_bytes=block_bytes, block_bytes_per_layer=block_bytes // 2)
        await asyncio.to_thread(node.start)
        self._node, self._control = node, RankControl([node.endpoint], TOKEN)
        self._kv = np.random.default_rng(1).integers(0, 256, (CHUNK_BLOCKS, block_bytes), dtype=np.uint8)
        return node.endpoint.SerializeToString()

    async def prefill(
        self, transfer_id: bytes, blocks: int, chunk_blocks: int, chunk_s: float, at_once: bool
    ) -> tuple[float, float]:
        """Compute and gather every chunk: when it began, when the last one was gathered."""
        return await asyncio.to_thread(self._prefill, transfer_id, blocks, chunk_blocks, chunk_s, at_once)

    def _prefill(self, transfer_id: bytes, blocks: int, chunk_blocks: int, chunk_s: float, at_once: bool) -> tuple[float, float]:
        began_s = due = time.monotonic()
        waiting: list[tuple[int, int]] = []
        for first in range(0, blocks, chunk_blocks):
            due += chunk_s
            time.sleep(max(0.0, due - time.monotonic()))
            waiting.append((first, min(chunk_blocks, blocks - first)))
            if at_once and first + chunk_blocks < blocks:
                continue
            for start, count in waiting:
                view = self.node.send_view(transfer_id, start, count)
                assert view is not None, "the reservation is gone"
                view[:] = self._kv[:count]
                self.node.commit_chunk(transfer_id, start, count, last=start + count == blocks)
            waiting = []
        return began_s, time.monotonic()

    async def sink(self, host: str) -> int:
        """Take one TCP stream and throw it away; the port."""
        server = socket.create_server((host, 0))
        self._sunk = asyncio.get_running_loop().run_in_executor(None, _drain, server)
        return int(server.getsockname()[1])

    async def sunk(self) -> float:
        """When the stream had ended."""
        return await self._sunk

    async def blast(self, host: str, port: int, num_bytes: int) -> float:
        """Send a TCP stream; when it began."""
        return await asyncio.to_thread(_blast, host, port, num_bytes)

    async def timed_pull(self, grant: bytes, tokens: int, hashed: bytes, sender: bytes, transport: str) -> dict[str, float]:
        message = pb.TransferGrant.FromString(grant)
        (answer,) = await self.control.pull(
            message,
            attempt_id="att-bench",
            senders=[pb.RankEndpoint.FromString(sender)],
            prompt_tokens=tokens,
            token_hash=hashed,
            transport=transport,
            remaining_s=120,
        )
        verified_s = time.monotonic()
        self.node.receive_view(message.transfer_id)
        self.node.scattered(message.transfer_id)
        return {"verified_s": verified_s, "transfer_s": answer.seconds}


def _drain(server: socket.socket) -> float:
    buffer = bytearray(MIB)
    with server, server.accept()[0] as stream:
        while stream.recv_into(buffer):
            pass
    return time.monotonic()


def _blast(host: str, port: int, num_bytes: int) -> float:
    piece = bytes(MIB)
    with socket.create_connection((host, port)) as stream:
        began_s = time.monotonic()
        for _ in range(num_bytes // MIB):
            stream.sendall(piece)
    return began_s


def agent() -> Commands:
    made = BenchAgent()
    return {
        name: getattr(made, name) for name in ("begin", "reserve", "prefill", "timed_pull", "status", "sink", "sunk", "blast")
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """Seconds: until the last chunk was gathered, from the first to the last byte, from the last gather to verified."""

    compute_s: float
    transfer_s: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the repetitions; seconds."""

    shape: str
    mbit: float
    transport: str
    total_bytes: int
    compute_s: float
    transfer_s: float
    exposed_s: float
    exposed_at_once_s: float
    bound_s: float
    raw_gbit_per_s: float

    @property
    def ratio(self) -> float:
        """Exposed to total transfer time."""
        return self.exposed_s / self.transfer_s

    @property
    def hidden(self) -> float:
        """The share of what an unoverlapped transfer exposes that overlap hides."""
        return 1 - self.exposed_s / self.exposed_at_once_s


async def one(p: Host, d: Host, endpoint: bytes, shape: Shape, transport: str, *, at_once: bool) -> Run:
    tokens = np.random.default_rng().integers(0, 30000, shape.prompt_tokens).tolist()
    grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
    sent, hashed = grant.SerializeToString(), token_hash(tokens)
    await p.call("reserve", sent, tokens, 120.0)
    pull = asyncio.create_task(d.call("timed_pull", sent, len(tokens), hashed, endpoint, transport, timeout_s=130))
    blocks, chunk = shape.prompt_tokens // BLOCK_TOKENS, shape.chunk_tokens // BLOCK_TOKENS
    began_s, last_s = await p.call("prefill", grant.transfer_id, blocks, chunk, shape.chunk_s, at_once, timeout_s=130)
    answer = await pull
    return Run(compute_s=last_s - began_s, transfer_s=answer["transfer_s"], exposed_s=answer["verified_s"] - last_s)


async def raw_s(p: Host, d: Host, num_bytes: int) -> float:
    """Seconds of one TCP stream of so many bytes."""
    port = await d.call("sink", address(1))
    began_s = await p.call("blast", address(1), port, num_bytes, timeout_s=130)
    return float(await d.call("sunk") - began_s)


async def measure(shape: Shape, mbit: float, transports: list[str], repeat: int) -> list[Row]:
    block_bytes = shape.token_bytes * BLOCK_TOKENS
    staging = shape.total_bytes + block_bytes
    rows = []
    async with hosts(agent, "prefill", "decode") as (p, d), kernel_link(p, d, mbit=mbit, mtu=9000):
        endpoints = []
        for index, host in enumerate((p, d)):
            settings = KvTransferSettings(
                bind_host=address(index), advertise_host=address(index), send_staging_bytes=staging, receive_staging_bytes=staging
            )
            endpoints.append(await host.call("begin", settings.model_dump(mode="json"), block_bytes))
        wire_s = statistics.median([await raw_s(p, d, shape.total_bytes) for _ in range(repeat)])
        for transport in transports:
            await one(p, d, endpoints[0], shape, transport, at_once=True)  # connections, first touches
            overlapped = [await one(p, d, endpoints[0], shape, transport, at_once=False) for _ in range(repeat)]
            at_once = [await one(p, d, endpoints[0], shape, transport, at_once=True) for _ in range(repeat)]
            rows.append(
                Row(
                    shape=shape.name,
                    mbit=mbit,
                    transport=transport,
                    total_bytes=shape.total_bytes,
                    compute_s=(compute_s := statistics.median(run.compute_s for run in overlapped)),
                    transfer_s=statistics.median(run.transfer_s for run in overlapped),
                    exposed_s=statistics.median(run.exposed_s for run in overlapped),
                    exposed_at_once_s=statistics.median(run.exposed_s for run in at_once),
                    bound_s=shape.bound_s(wire_s, compute_s),
                    raw_gbit_per_s=shape.total_bytes * 8e-9 / wire_s,
                )
            )
            print(line(rows[-1]), flush=True)  # noqa: T201 - a command
        await settled(p, d, timeout_s=10)
    return rows


HEAD = f"{'shape':14} {'link':>10} {'':4} {'MB':>5} {'compute s':>9} {'transfer s':>10} {'exposed s':>9} {'ratio':>5} " + (
    f"{'bound s':>8} {'at once s':>9} {'hidden':>6} {'raw Gbit/s':>10}"
)


def line(row: Row) -> str:
    return (
        f"{row.shape:14} {row.mbit / 1000:>3g} Gbit/s {row.transport:4} {row.total_bytes / 1e6:>5.0f} {row.compute_s:>9.2f} "
        f"{row.transfer_s:>10.3f} {row.exposed_s:>9.3f} {row.ratio:>5.0%} {row.bound_s:>8.3f} {row.exposed_at_once_s:>9.3f} "
        f"{row.hidden:>6.0%} {row.raw_gbit_per_s:>10.2f}"
    )


async def main(arguments: argparse.Namespace) -> None:
    rows: list[Row] = []
    print(f"link: veth + tbf; {arguments.repeat} repetitions, medians\n{HEAD}", flush=True)  # noqa: T201 - a command
    for shape in SHAPES:
        for mbit in arguments.rates:
            rows += await measure(shape, mbit, arguments.transports, arguments.repeat)
    if arguments.json is not None:
        record = {
            "benchmark": "overlap",
            "link": "veth + tbf",
            "repeat": arguments.repeat,
            "shapes": [asdict(shape) for shape in SHAPES],
            "rows": [asdict(row) | {"ratio": row.ratio, "hidden": row.hidden} for row in rows],
            "versions": versions(),
            "hardware": hardware(),
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=[1000.0, 10000.0])
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["ucx", "grpc"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    if why := missing() or can_limit_rate():
        sys.exit(f"bench_overlap: {why}")
    # The hosts find their agent in this module, under the name by which it can be imported.
    multiprocessing.set_forkserver_preload(["tests.support.netns_node", "kvtransfer.transports.ucx"])
    asyncio.run(main(parser.parse_args()))
