"""Mutual TLS between ranks, from a gateway to a worker, and from an actor to its ranks: who is let in, who is not, and that
nobody falls back to plaintext."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.gateway.client_config import WorkerClientSettings
from coordinator.gateway.worker_client import WorkerClient
from coordinator.pools import probe
from coordinator.routing.views import Role, WorkerState, WorkerView
from engine.sampling import SamplingParams
from engine.worker.config import WorkerSettings
from kvtransfer.node import KvNode
from kvtransfer.tls import TlsSettings, channel
from protos.errors import Code, SplitpointError
from protos.ids import AttemptId, WorkerId
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from protos.splitpoint.v1 import worker_pb2
from tests.support.certificates import Authority
from tests.support.kv_nodes import NodePair, complete, error_of, make_node, small_settings, until
from tests.support.workers import SimWorker, colocated_leg, running, start_worker

pytestmark = pytest.mark.timeout(90)
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md"


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "theirs")


Wrong = Callable[[Authority, Authority], TlsSettings | None]
WRONG: dict[str, Wrong] = {
    "signed by another authority": lambda ours, theirs: theirs.tls(trusts=ours.file),
    "trusts another authority": lambda ours, theirs: ours.tls(trusts=theirs.file),
    "expired": lambda ours, theirs: ours.tls(days=-1),
    "plaintext": lambda ours, theirs: None,
}
wrong_ones = pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())


# ---- rank to rank


@contextlib.asynccontextmanager
async def started(*nodes: KvNode) -> AsyncIterator[None]:
    try:
        for node in nodes:
            await asyncio.to_thread(node.start)
        yield
    finally:
        for node in nodes:
            await asyncio.to_thread(node.stop)


async def handshake(node: KvNode, connection: grpc.aio.Channel) -> pb.HandshakeResponse:
    endpoint = node.endpoint
    request = pb.HandshakeRequest(protocol_version=1, expected_incarnation=endpoint.incarnation)
    response: pb.HandshakeResponse = await pb_grpc.KvTransferServiceStub(connection).Handshake(request, timeout=10)
    return response


async def refused(node: KvNode, connection: grpc.aio.Channel) -> None:
    """No call of this client reaches the node."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await handshake(node, connection)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_ranks_and_their_actors_exchange_kv_under_mutual_tls(ours: Authority) -> None:
    async with NodePair(settings=small_settings(tls=ours.tls())) as pair:
        await complete(pair.transfer(100))
        await pair.settled()


@wrong_ones
async def test_a_rank_answers_no_peer_but_those_of_its_authority(ours: Authority, theirs: Authority, wrong: Wrong) -> None:
    node = make_node(small_settings(tls=ours.tls()))
    async with started(node):
        async with channel(node.endpoint.address, wrong(ours, theirs)) as connection:
            await refused(node, connection)
        async with channel(node.endpoint.address, ours.tls()) as connection:
            await handshake(node, connection)  # the same call, rightly certified


async def test_a_peer_without_a_certificate_is_refused(ours: Authority) -> None:
    """It would accept the server and keep the line secret, but nobody knows who it is."""
    node = make_node(small_settings(tls=ours.tls()))
    async with started(node):
        anonymous = grpc.ssl_channel_credentials(root_certificates=ours.file.read_bytes())
        async with grpc.aio.secure_channel(node.endpoint.address, anonymous) as connection:
            await refused(node, connection)


Pair = Callable[[Authority, Authority], tuple[TlsSettings | None, TlsSettings | None]]
STRANGERS: dict[str, Pair] = {
    "another authority's receiver": lambda ours, theirs: (ours.tls(), theirs.tls()),
    "a plaintext receiver": lambda ours, theirs: (ours.tls(), None),
    "a plaintext sender": lambda ours, theirs: (None, ours.tls()),
}


@pytest.mark.parametrize("strangers", STRANGERS.values(), ids=STRANGERS.keys())
async def test_a_pull_between_strangers_fails_and_holds_nothing(ours: Authority, theirs: Authority, strangers: Pair) -> None:
    sender, receiver = strangers(ours, theirs)
    async with NodePair(settings=small_settings(tls=sender), receiver_settings=small_settings(tls=receiver)) as pair:
        transfer = pair.transfer(40)
        await transfer.reserve()
        assert transfer.gather()
        error = await error_of(transfer.pull(5))
        assert error.code in (Code.WORKER_LOST, Code.DEADLINE_EXCEEDED), error
        await pair.send_control.release(transfer.id, "test")
        await pair.settled(10)


async def test_a_rank_whose_certificate_does_not_name_its_address_does_not_start(ours: Authority) -> None:
    node = make_node(small_settings(tls=ours.tls("10.1.2.3"), handshake_timeout_s=3))
    with pytest.raises(SplitpointError, match="advertise_host"):
        await asyncio.to_thread(node.start)


async def test_a_rank_whose_certificate_has_expired_does_not_start(ours: Authority) -> None:
    node = make_node(small_settings(tls=ours.tls(days=-1), handshake_timeout_s=3))
    with pytest.raises(SplitpointError, match="advertise_host"):
        await asyncio.to_thread(node.start)


async def test_one_name_for_all_nodes_stands_for_their_addresses(ours: Authority) -> None:
    tls = ours.tls("node.splitpoint.test", peer_name="node.splitpoint.test")
    async with NodePair(settings=small_settings(tls=tls)) as pair:
        await complete(pair.transfer(40))


async def test_files_that_are_no_certificates_are_named(ours: Authority, tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("nothing")
    good = ours.tls()
    for field in ("cert_file", "key_file", "ca_file"):
        for path in (rubbish, tmp_path / "missing.pem"):
            node = make_node(small_settings(tls=good.model_copy(update={field: path})))
            with pytest.raises(ValueError, match=str(path)):
                await asyncio.to_thread(node.start)
    other_key = good.model_copy(update={"key_file": ours.tls().key_file})
    with pytest.raises(ValueError, match="key_file"):
        await asyncio.to_thread(make_node(small_settings(tls=other_key)).start)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
async def test_the_guides_certificates_serve(tmp_path: Path) -> None:
    (block,) = re.findall(r"```sh\n(openssl req -x509.*?)```", GUIDE.read_text(), re.DOTALL)
    made = await asyncio.to_thread(
        subprocess.run, ["sh", "-e", "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr
    files = {"cert_file": tmp_path / "node.pem", "key_file": tmp_path / "node.key", "ca_file": tmp_path / "ca.pem"}
    tls = TlsSettings(**files, peer_name="node.splitpoint.internal")
    async with NodePair(settings=small_settings(tls=tls)) as pair:
        await complete(pair.transfer(40))


# ---- gateway to worker


@contextlib.asynccontextmanager
async def worker_with(tls: TlsSettings) -> AsyncIterator[SimWorker]:
    """A worker with a real transfer node: its rank has registered over TLS, and its actor reaches the rank over TLS."""
    worker = await start_worker(None, wire=True, worker_settings=WorkerSettings(tls=tls), kvtransfer={"tls": tls})
    async with running(worker):
        yield worker


@contextlib.asynccontextmanager
async def client_of(worker: SimWorker, tls: TlsSettings | None) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(
        worker_id=WorkerId("w"),
        incarnation=worker.server.identity.incarnation,
        address=worker.address,
        settings=WorkerClientSettings(tls=tls, connect_timeout_s=1.0),
        clock=time.monotonic,
    )
    client.start()
    try:
        yield client
    finally:
        await client.close()


def view_of(worker: SimWorker) -> WorkerView:
    return WorkerView(
        worker_id=WorkerId("w"), incarnation=worker.server.identity.incarnation, pool="p", role=Role.COLOCATED,
        state=WorkerState.READY, address=worker.address, pid=0, fingerprint=b"", ranks=(), max_transfer_tokens=0,
        transports=(),
    )  # fmt: skip


async def test_a_gateway_and_a_worker_of_one_authority_serve_requests(ours: Authority) -> None:
    async with worker_with(ours.tls()) as worker, client_of(worker, ours.tls()) as client:
        await until(lambda: client.connected, 20)
        events: asyncio.Queue[worker_pb2.LegEvent] = asyncio.Queue()
        leg = colocated_leg(list(range(10, 30)), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        request = worker_pb2.StreamRequest(colocated=leg)
        client.open(AttemptId(leg.header.attempt_id), request, lambda event, _: events.put_nowait(event))
        async with asyncio.timeout(20):
            while (await events.get()).WhichOneof("event") != "finished":
                pass
        assert worker.server.ranks is not None
        (rank,) = await worker.server.ranks.status()
        assert rank.leases == 0
        assert await probe.probe(view_of(worker), 10, ours.tls()) is probe.Answer.WORKER


@wrong_ones
async def test_a_worker_takes_no_gateway_but_those_of_its_authority(ours: Authority, theirs: Authority, wrong: Wrong) -> None:
    """Its legs end as those of a lost worker, with the reason in the log; the worker's right gateways are not disturbed."""
    async with worker_with(ours.tls()) as worker:
        tls = wrong(ours, theirs)
        async with client_of(worker, tls) as client:
            ended: list[Any] = []
            leg = colocated_leg(list(range(10, 30)), SamplingParams(max_tokens=2))
            request = worker_pb2.StreamRequest(colocated=leg)
            client.open(AttemptId(leg.header.attempt_id), request, lambda event, _: ended.append(event))
            await until(lambda: bool(ended), 20)
            assert ended[0].failed.code == Code.WORKER_LOST
            assert not client.connected
        assert await probe.probe(view_of(worker), 2, tls) is probe.Answer.HOST
        async with client_of(worker, ours.tls()) as client:
            await until(lambda: client.connected, 20)


async def test_a_gateway_with_tls_speaks_to_no_plaintext_worker(ours: Authority) -> None:
    worker = await start_worker(None)
    async with running(worker):
        async with client_of(worker, ours.tls()) as client:
            await until(lambda: client.counts["worker_stream_lost"] > 0, 20)
            assert not client.connected
        async with client_of(worker, None) as client:
            await until(lambda: client.connected, 20)
