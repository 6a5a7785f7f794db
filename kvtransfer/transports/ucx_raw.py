"""UCX with nothing around it, for measurements: one endpoint, blocking calls that spin. Never in a serving process."""

from __future__ import annotations

import os
import select
from typing import Any, TextIO

import numpy as np

from kvtransfer.transports.base import Memory
from kvtransfer.transports.ucx_environment import UCX_ENVIRONMENT

for _name, _value in UCX_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import ucxx._lib.libucxx as ucx  # noqa: E402
from ucxx._lib.arr import Array  # noqa: E402

_ASK, _PAYLOAD = 1, 2


class RawPort:
    """One UCX worker and one endpoint without error handling. `address` goes to the peer."""

    def __init__(self) -> None:
        self._context = ucx.UCXContext({}, feature_flags=(ucx.Feature.TAG,))
        self._worker = ucx.UCXWorker(self._context)
        self.address: bytes = self._worker.address.tobytes()
        self._endpoint: Any = None
        self._byte = np.zeros(1, np.uint8)

    def connect(self, address: bytes) -> None:
        """Make the endpoint."""
        peer = ucx.UCXAddress.create_from_buffer(bytearray(address))
        self._endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, peer, False)

    def ask(self) -> None:
        self._finish(self._endpoint.tag_send(Array(self._byte), ucx.UCXXTag(_ASK)))

    def wait_for_ask(self) -> None:
        self._finish(self._endpoint.tag_recv(Array(self._byte), ucx.UCXXTag(_ASK)))

    def send(self, payload: Memory) -> None:
        self._finish(self._endpoint.tag_send(Array(payload), ucx.UCXXTag(_PAYLOAD)))

    def receive(self, payload: Memory) -> None:
        self._finish(self._endpoint.tag_recv(Array(payload), ucx.UCXXTag(_PAYLOAD)))

    def progress_until_closed(self, stream: TextIO) -> None:
        """Serve the peer until `stream` ends."""
        while not select.select([stream], [], [], 0)[0]:
            self._worker.progress()

    def _finish(self, request: Any) -> None:
        while not request.completed:
            self._worker.progress()
        request.check_error()
