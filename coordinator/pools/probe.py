"""Whether a worker answers on its data plane, and if not, whether its host does."""

from __future__ import annotations

import asyncio
import enum
import errno
import logging

import grpc.aio

from coordinator.routing.views import WorkerView
from kvtransfer.tls import TlsSettings
from kvtransfer.tls import channel as open_channel
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc

CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

log = logging.getLogger(__name__)


class Answer(enum.Enum):
    """What a probe heard."""

    WORKER = "worker"
    """The very process that was asked for."""
    HOST = "host"
    """Its host alone: the process is gone, stopped, or another one has its port."""
    NOTHING = "nothing"
    """Not even the host: it is dead, or the network between is."""


async def probe(view: WorkerView, timeout_s: float, tls: TlsSettings | None) -> Answer:
    """One round trip on the worker's own server; another incarnation at that address does not count. Takes at most twice
    `timeout_s`. The host is asked first: a worker is only held to have failed while the network was there."""
    fault = await dial(view.address, timeout_s)
    if is_silence(fault):
        log.info("probe of %s: its host is silent", view.worker_id)
        return Answer.NOTHING
    async with open_channel(view.address, tls, CHANNEL_OPTIONS) as channel:
        try:
            reply = await worker_pb2_grpc.WorkerServiceStub(channel).DescribeWorker(
                worker_pb2.DescribeWorkerRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            log.info("probe of %s: %s", view.worker_id, error.code().name)
            return Answer.HOST
        return Answer.WORKER if reply.incarnation == view.incarnation else Answer.HOST


def is_silence(fault: OSError | None) -> bool:
    """What `dial` found is that nobody is there, not even the host."""
    return isinstance(fault, TimeoutError) or (fault is not None and fault.errno in _SILENT)


async def dial(address: str, timeout_s: float) -> OSError | None:
    """Open a connection to `HOST:PORT` and close it. Why it cannot be done: `TimeoutError` when nothing was heard within
    `timeout_s`, else the kernel's own error; None when it can. Of a host that is there every process's port answers at once."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:
        return error
    writer.close()
    return None
