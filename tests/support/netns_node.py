"""A rank's transfer node and its actor's control on a host in a namespace, and one transfer between two such hosts."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import Any

import numpy as np

from coordinator.gateway.client_config import WorkerClientSettings
from coordinator.gateway.worker_client import WorkerClient
from engine.sampling import SamplingParams
from engine.worker.config import WorkerSettings
from kvtransfer.config import KvTransferSettings
from kvtransfer.control import RankControl
from kvtransfer.node import KvNode
from kvtransfer.rpc import at_rank
from protos.errors import SplitpointError
from protos.ids import AttemptId, Incarnation, WorkerId, new_capability, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import worker_pb2
from tests.support.kv_nodes import BLOCK_BYTES, BLOCK_TOKENS, TOKEN, make_node, prompt_bytes, small_settings
from tests.support.netns import Commands, Host
from tests.support.workers import SimWorker, colocated_leg, start_worker

# What a host forks from has imported everything: it costs a test a fraction of a second.
multiprocessing.set_forkserver_preload(["tests.support.netns_node", "kvtransfer.transports.ucx"])


class Agent:
    """What runs on the host. Prompts travel as tokens; both ends make their bytes from them."""

    def __init__(self) -> None:
        self._node: KvNode | None = None
        self._control: RankControl | None = None
        self._worker: SimWorker | None = None

    async def start(self, settings: dict[str, Any], incarnation: str = "", register_address: str = "") -> bytes:
        node = make_node(at_rank(KvTransferSettings(**settings), register_address), incarnation=incarnation)
        await asyncio.to_thread(node.start)
        self._node, self._control = node, RankControl([node.endpoint], TOKEN)
        return node.endpoint.SerializeToString()

    async def stop(self) -> None:
        if self._control is not None:
            await self._control.close()
        if self._node is not None:
            await asyncio.to_thread(self._node.stop)

    async def reserve(self, grant: bytes, tokens: list[int], remaining_s: float) -> None:
        hashed = token_hash(tokens)
        message = pb.TransferGrant.FromString(grant)
        await self.control.reserve(message, prompt_tokens=len(tokens), token_hash=hashed, remaining_s=remaining_s)

    async def gather(self, transfer_id: bytes, tokens: list[int], first: int, end: int) -> bool:
        data = prompt_bytes(tokens)
        view = self.node.send_view(transfer_id, first, end - first)
        if view is None:
            return False
        view[:] = data[first:end]
        self.node.commit_chunk(transfer_id, first, end - first, last=end == len(data))
        return True

    async def pull(self, grant: bytes, tokens: list[int], sender: bytes, transport: str, remaining_s: float) -> float:
        """Seconds from the first to the last byte."""
        (answer,) = await self.control.pull(
            pb.TransferGrant.FromString(grant),
            attempt_id="att-hosts",
            senders=[pb.RankEndpoint.FromString(sender)],
            prompt_tokens=len(tokens),
            token_hash=token_hash(tokens),
            transport=transport,
            remaining_s=remaining_s,
        )
        return answer.seconds

    async def scatter(self, transfer_id: bytes, tokens: list[int]) -> bool:
        """Take the slot as an engine would. True when it holds exactly the prompt's bytes."""
        view = self.node.receive_view(transfer_id)
        exact = view is not None and bool(np.array_equal(view, prompt_bytes(tokens)))
        self.node.scattered(transfer_id)
        return exact

    async def release(self, transfer_id: bytes) -> bool:
        return await self.control.release(transfer_id, "test")

    async def status(self) -> bytes:
        return self.node.status().SerializeToString()

    async def serve(self, host: str) -> tuple[str, str]:
        """Start a simulated worker that listens at `host`; its address and incarnation."""
        self._worker = await start_worker(None, worker_settings=WorkerSettings(bind_host=host, advertise_host=host))
        return self._worker.address, str(self._worker.server.identity.incarnation)

    async def ask(self, address: str, incarnation: str, prompt: list[int], settings: dict[str, Any]) -> list[int]:
        """One request to a worker, as a gateway sends it: the tokens. Raises `SplitpointError` with the leg's failure."""
        client = WorkerClient(
            worker_id=WorkerId("w"),
            incarnation=Incarnation(incarnation),
            address=address,
            settings=WorkerClientSettings(**settings),
            clock=time.monotonic,
        )
        events: asyncio.Queue[worker_pb2.LegEvent] = asyncio.Queue()
        leg = colocated_leg(prompt, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        client.start()
        try:
            request = worker_pb2.StreamRequest(colocated=leg)
            client.open(AttemptId(leg.header.attempt_id), request, lambda event, _: events.put_nowait(event))
            tokens: list[int] = []
            while True:
                event = await events.get()
                kind = event.WhichOneof("event")
                if kind == "failed":
                    raise SplitpointError.from_proto(event.failed)
                if kind == "finished":
                    return [*tokens, *event.finished.last.token_ids]
                tokens += event.tokens.token_ids
        finally:
            await client.close()

    async def transports(self) -> tuple[str, ...]:
        return self.node.transports

    @property
    def node(self) -> KvNode:
        assert self._node is not None, "start first"
        return self._node

    @property
    def control(self) -> RankControl:
        assert self._control is not None, "start first"
        return self._control


def agent() -> Commands:
    """The commands of a host."""
    made = Agent()
    names = ("start", "stop", "reserve", "gather", "pull", "scatter", "release", "status", "transports", "serve", "ask")
    return {name: getattr(made, name) for name in names}


def settings(host: str, **fields: Any) -> dict[str, Any]:
    """A node's that peers reach at `host`: both transports, staging for 256 blocks each way."""
    values: dict[str, Any] = {
        "transports": ("ucx", "grpc"),
        "bind_host": host,
        "advertise_host": host,
        "send_staging_bytes": 256 * BLOCK_BYTES,
        "receive_staging_bytes": 256 * BLOCK_BYTES,
        "progress_timeout_s": 3.0,
        "grpc_message_bytes": 64 * 1024,
        "chunk_bytes": 16 * BLOCK_BYTES,
    }
    return small_settings(**{**values, **fields}).model_dump(mode="json")


class Crossing:
    """One prompt on its way from `sender` to `receiver`, step by step or whole."""

    def __init__(self, sender: Host, receiver: Host, endpoint: bytes, transport: str, blocks: int) -> None:
        self.sender, self.receiver = sender, receiver
        self.endpoint, self.transport, self.blocks = endpoint, transport, blocks
        self.tokens = [int(t) for t in np.random.default_rng().integers(0, 30000, blocks * BLOCK_TOKENS)]
        grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
        self.id, self.grant = grant.transfer_id, grant.SerializeToString()

    async def reserve(self, remaining_s: float) -> None:
        await self.sender.call("reserve", self.grant, self.tokens, remaining_s)

    async def pull(self, remaining_s: float) -> float:
        arguments = self.grant, self.tokens, self.endpoint, self.transport, remaining_s
        return float(await self.receiver.call("pull", *arguments, timeout_s=remaining_s + 10))

    async def gather(self, first: int = 0, end: int | None = None) -> bool:
        return bool(await self.sender.call("gather", self.id, self.tokens, first, self.blocks if end is None else end))

    async def exact(self) -> bool:
        """The receiver's engine finds the prompt's bytes, and gives the slot back."""
        return bool(await self.receiver.call("scatter", self.id, self.tokens))

    async def whole(self, remaining_s: float) -> float:
        """All of it, undisturbed by the test. Seconds from the first to the last byte; raises `SplitpointError`."""
        pull = asyncio.create_task(self.pull(remaining_s))
        try:
            await self.reserve(remaining_s)
            assert await self.gather()
            seconds = await pull
        finally:
            pull.cancel()
            await asyncio.gather(pull, return_exceptions=True)
        assert await self.exact(), "other bytes arrived than were sent"
        return seconds


async def status(host: Host) -> pb.GetNodeStatusResponse:
    return pb.GetNodeStatusResponse.FromString(await host.call("status"))


async def settled(*which: Host, timeout_s: float) -> None:
    """Until the hosts' nodes hold no lease, no session and no byte of staging. Raises `TimeoutError` with their status."""
    last: dict[str, pb.GetNodeStatusResponse] = {}
    try:
        async with asyncio.timeout(timeout_s):
            for host in which:
                while not _idle(last.setdefault(host.name, await status(host))):
                    await asyncio.sleep(0.05)
                    last.pop(host.name)
    except TimeoutError:
        raise TimeoutError("\n".join(f"{name}: {said}" for name, said in last.items())) from None


def _idle(said: pb.GetNodeStatusResponse) -> bool:
    held = [pool.used_bytes + pool.quarantined_bytes for pool in (said.send, said.receive)]
    return not any(held) and said.leases == 0 and said.sessions == 0
