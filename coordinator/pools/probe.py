"""Whether a worker answers on its data plane."""

from __future__ import annotations

import logging

import grpc.aio

from coordinator.routing.views import WorkerView
from kvtransfer.tls import TlsSettings
from kvtransfer.tls import channel as open_channel
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc

CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]

log = logging.getLogger(__name__)


async def answers(view: WorkerView, timeout_s: float, tls: TlsSettings | None) -> bool:
    """One round trip on the worker's own server; another incarnation at that address does not count."""
    async with open_channel(view.address, tls, CHANNEL_OPTIONS) as channel:
        try:
            reply = await worker_pb2_grpc.WorkerServiceStub(channel).DescribeWorker(
                worker_pb2.DescribeWorkerRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            log.info("probe of %s: %s", view.worker_id, error.code().name)
            return False
        return bool(reply.incarnation == view.incarnation)
