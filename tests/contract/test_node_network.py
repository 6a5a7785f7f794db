"""What a node makes of its surroundings: proxies of the environment, oversized messages, a peer that fails for a moment."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.worker_client import _channel_options
from coordinator.pools import probe
from engine.sampling import SamplingParams
from engine.worker.config import WorkerSettings
from kvtransfer.peers import Peers
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from tests.support.kv_nodes import NodePair, complete, small_settings
from tests.support.workers import colocated_leg, running, start_worker

pytestmark = pytest.mark.timeout(60)

PROXY = "http://127.0.0.1:9"  # nobody listens at the discard port


async def test_a_proxy_in_the_environment_is_for_the_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, PROXY)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with NodePair() as pair:
        await complete(pair.transfer(20))
        await pair.settled()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").is_file(), reason="no IPv6 here")
async def test_nodes_and_workers_listen_on_ipv6_too() -> None:
    async with NodePair(settings=small_settings(bind_host="::1", advertise_host="::1")) as pair:
        assert pair.senders[0].endpoint.address.startswith("[::1]:")
        await complete(pair.transfer(20))
    worker = await start_worker(None, worker_settings=WorkerSettings(bind_host="::1", advertise_host="::1"))
    async with running(worker):
        gateway = await worker.gateway()
        leg = colocated_leg(list(range(10, 30)), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        _, last = await gateway.last(await gateway.send(colocated=leg))
        assert last.WhichOneof("event") == "finished"


def test_gateways_and_probes_go_past_the_proxy_too() -> None:
    for options in (_channel_options(GatewaySettings().worker_client), probe.CHANNEL_OPTIONS):
        assert ("grpc.enable_http_proxy", 0) in options


async def test_a_message_that_no_peer_sends_is_refused_by_its_size() -> None:
    async with NodePair() as pair:
        async with grpc.aio.insecure_channel(pair.senders[0].endpoint.address) as channel:
            stub = pb_grpc.KvTransferServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Handshake(pb.HandshakeRequest(fingerprint=bytes(16 * 1024 * 1024)), timeout=10)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await complete(pair.transfer(20))


class _OnceBroken(pb_grpc.KvTransferServiceServicer):
    def __init__(self) -> None:
        self.calls = 0

    async def Handshake(self, request: pb.HandshakeRequest, context: grpc.aio.ServicerContext) -> pb.HandshakeResponse:
        self.calls += 1
        if self.calls == 1:
            await context.abort(grpc.StatusCode.INTERNAL, "a moment's trouble")
        return pb.HandshakeResponse(accepted=True, endpoint=pb.RankEndpoint(incarnation="peer"))


async def test_a_handshake_that_failed_by_accident_is_tried_again() -> None:
    server = grpc.aio.server()
    servicer = _OnceBroken()
    pb_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peers = Peers(pb.KvCompatibility(), b"fingerprint", 5.0)
    endpoint = pb.RankEndpoint(address=f"127.0.0.1:{port}", incarnation="peer")
    try:
        with pytest.raises(SplitpointError) as caught:
            async with peers.use(endpoint):
                pass
        assert caught.value.code is Code.INTERNAL
        async with peers.use(endpoint) as (_, found):
            assert found.incarnation == "peer"
        assert servicer.calls == 2
    finally:
        await peers.close()
        await server.stop(None)
