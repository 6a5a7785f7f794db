"""Real transfer nodes of two workers and their controls, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np

from kvtransfer.config import KvTransferSettings
from kvtransfer.control import RankControl
from kvtransfer.layout import PROTOCOL_VERSION
from kvtransfer.node import KvNode
from kvtransfer.transports import TransportContext, create_transport
from kvtransfer.transports.base import Transport
from protos.errors import SplitpointError
from protos.ids import new_capability, new_incarnation, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc

TOKEN = "test-control-token"
BLOCK_TOKENS = 16
BLOCK_BYTES = 8192

Transports = Callable[[], Sequence[Transport]]


def compatibility(**fields: Any) -> pb.KvCompatibility:
    """A small model's, `fields` replaced."""
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "model": "test",
        "model_revision": "r1",
        "tokenizer_hash": "t1",
        "cache_dtype": "uint8",
        "layout": "test:plain",
        "block_tokens": BLOCK_TOKENS,
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "engine": "test",
        "block_bytes_per_layer": BLOCK_BYTES // 2,
    }
    return pb.KvCompatibility(**{**values, **fields})


def make_node(
    settings: KvTransferSettings | None = None,
    *,
    rank: int = 0,
    incarnation: str = "",
    transports: Sequence[Transport] | None = None,
    block_bytes: int = BLOCK_BYTES,
    **fields: Any,
) -> KvNode:
    """A node that is not started, small staging."""
    return KvNode(
        settings or small_settings(),
        rank=rank,
        incarnation=incarnation or new_incarnation(),
        compatibility=compatibility(**fields),
        block_bytes=block_bytes,
        control_token=TOKEN,
        transports=transports,
    )


def small_settings(**fields: Any) -> KvTransferSettings:
    """Small staging, short times, several chunks and messages even for short prompts."""
    values: dict[str, Any] = {
        "transports": ("grpc",),
        "default_transport": "grpc",
        "send_staging_bytes": 64 * BLOCK_BYTES,
        "receive_staging_bytes": 64 * BLOCK_BYTES,
        "progress_timeout_s": 0.5,
        "lease_grace_s": 0.2,
        "handshake_timeout_s": 5.0,
        "grpc_message_bytes": 3000,
        "chunk_bytes": 4 * BLOCK_BYTES,
    }
    return KvTransferSettings(**{**values, **fields})


def prompt_bytes(tokens: Sequence[int], block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """KV that tells one prompt from another, `[blocks, block_bytes]`."""
    blocks = -(-len(tokens) // BLOCK_TOKENS)
    seed = int.from_bytes(token_hash(list(tokens))[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


class Transfer:
    """One prompt on its way from `sender` to `receiver`."""

    def __init__(self, pair: NodePair, num_tokens: int, transport: str) -> None:
        self.pair = pair
        self.transport = transport
        self.tokens = [int(token) for token in np.random.default_rng().integers(0, 30000, num_tokens)]
        self.hash = token_hash(self.tokens)
        self.grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
        self.data = prompt_bytes(self.tokens)
        self.attempt_id = "att-test"

    @property
    def id(self) -> bytes:
        return self.grant.transfer_id

    async def reserve(self, remaining_s: float = 10.0, **kwargs: Any) -> list[pb.ReserveResponse]:
        return await self.pair.send_control.reserve(
            self.grant, prompt_tokens=len(self.tokens), token_hash=self.hash, remaining_s=remaining_s, **kwargs
        )

    async def pull(self, remaining_s: float = 10.0, **kwargs: Any) -> list[pb.PullResponse]:
        values: dict[str, Any] = {
            "attempt_id": self.attempt_id,
            "senders": [node.endpoint for node in self.pair.senders],
            "prompt_tokens": len(self.tokens),
            "token_hash": self.hash,
            "transport": self.transport,
            "remaining_s": remaining_s,
        }
        return await self.pair.receive_control.pull(self.grant, **{**values, **kwargs})

    def gather(
        self, first: int = 0, end: int | None = None, ready: Callable[[], bool] | None = None, crcs: np.ndarray | None = None
    ) -> bool:
        """Write and commit blocks on every rank, as an engine would. False when some rank had no slot."""
        end = len(self.data) if end is None else end
        for node in self.pair.senders:
            view = node.send_view(self.id, first, end - first)
            if view is None:
                return False
            view[:] = self.data[first:end]
            node.commit_chunk(self.id, first, end - first, last=end == len(self.data), ready=ready, crcs=crcs)
        return True

    def scatter(self) -> list[np.ndarray | None]:
        """Take and give back every rank's slot, as an engine would; copies of what lay there."""
        copies = []
        for node in self.pair.receivers:
            view = node.receive_view(self.id)
            copies.append(None if view is None else view.copy())
            node.scattered(self.id)
        return copies


class NodePair:
    """`world_size` started senders and receivers. `async with` it; leaving it checks nothing, stops everything."""

    def __init__(
        self,
        *,
        world_size: int = 1,
        settings: KvTransferSettings | None = None,
        receiver_settings: KvTransferSettings | None = None,
        transports: Transports | None = None,
        receiver_fields: dict[str, Any] | None = None,
    ) -> None:
        def made() -> Sequence[Transport] | None:
            return None if transports is None else transports()

        tp = {"tensor_parallel_size": world_size}
        sender, receiver = new_incarnation(), new_incarnation()
        ranks = range(world_size)
        self.senders = [make_node(settings, rank=r, incarnation=sender, transports=made(), **tp) for r in ranks]
        fields = {**tp, **(receiver_fields or {})}
        self._settings = settings or small_settings(), receiver_settings or settings or small_settings()
        self.receivers = [make_node(self._settings[1], rank=r, incarnation=receiver, transports=made(), **fields) for r in ranks]

    async def __aenter__(self) -> NodePair:
        for node in self.nodes:
            await asyncio.to_thread(node.start)
        sends, receives = (settings.tls for settings in self._settings)
        self.send_control = RankControl([node.endpoint for node in self.senders], TOKEN, sends)
        self.receive_control = RankControl([node.endpoint for node in self.receivers], TOKEN, receives)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.send_control.close()
        await self.receive_control.close()
        for node in self.nodes:
            await asyncio.to_thread(node.stop)

    @property
    def nodes(self) -> list[KvNode]:
        return [*self.senders, *self.receivers]

    def transfer(self, num_tokens: int, transport: str = "grpc") -> Transfer:
        return Transfer(self, num_tokens, transport)

    @property
    def idle(self) -> bool:
        """No byte used or quarantined, no lease, no session, on any node."""
        return all(_idle(node.status()) for node in self.nodes)

    async def settled(self, timeout_s: float = 3.0) -> None:
        """Until everything is idle. Raises `TimeoutError` with every node's status."""
        try:
            await until(lambda: self.idle, timeout_s)
        except TimeoutError:
            raise TimeoutError("\n".join(str(node.status()) for node in self.nodes)) from None


def _idle(status: pb.GetNodeStatusResponse) -> bool:
    held = [pool.used_bytes + pool.quarantined_bytes for pool in (status.send, status.receive)]
    return not any(held) and status.leases == 0 and status.sessions == 0


async def error_of(work: Awaitable[Any]) -> SplitpointError:
    """The `SplitpointError` that `work` must end with."""
    try:
        answer = await work
    except SplitpointError as error:
        return error
    raise AssertionError(f"answered {answer!r}")


def assert_scattered(transfer: Transfer) -> None:
    """Every rank's engine finds the prompt's bytes, and gives its slot back."""
    for copy in transfer.scatter():
        assert copy is not None
        assert np.array_equal(copy, transfer.data)


async def complete(transfer: Transfer) -> list[pb.PullResponse]:
    """A whole undisturbed transfer."""
    pull = asyncio.create_task(transfer.pull())
    await transfer.reserve()
    assert transfer.gather()
    answers = await pull
    assert_scattered(transfer)
    return answers


def fetch_request(pair: NodePair, transfer: Transfer, remaining_s: float = 2.0) -> pb.FetchRequest:
    """What a receiver would ask rank 0 of the senders."""
    return pb.FetchRequest(
        grant=transfer.grant,
        sender_incarnation=pair.senders[0].endpoint.incarnation,
        transport="grpc",
        remaining_s=remaining_s,
    )


async def fetch(pair: NodePair, request: pb.FetchRequest) -> list[pb.FetchResponse]:
    """The whole stream, as a peer of any make would take it."""
    async with grpc.aio.insecure_channel(pair.senders[0].endpoint.address) as channel:
        call = pb_grpc.KvTransferServiceStub(channel).Fetch(request, timeout=10)
        return [message async for message in call]


def fresh(scheme: str) -> Transport:
    """A transport that is not started."""
    return create_transport(scheme, TransportContext(small_settings(), 0, "", "host"))


async def until(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    """Until `condition()` holds; asked every 2 ms. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is another thread's and has no event
            await asyncio.sleep(0.002)
