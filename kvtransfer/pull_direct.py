"""The decode side of a transfer that is asked for over UCX: headers are checked, payload is placed, its checksum is started and
compared, all on UCX's thread. The pull's task on the node's loop only waits for the outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvtransfer.checksum import checksum, prepare_on_device, rehearse_on_device
from kvtransfer.runtime import NodeRuntime
from kvtransfer.session import ReceiveSession
from kvtransfer.sources import Source
from kvtransfer.transports.base import AsksItself, Memory, TransportError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb


@dataclass(slots=True)
class Times:
    """Monotonic seconds."""

    first_at: float = 0.0
    last_at: float = 0.0


class DirectPull:
    """One share, whole blocks. Takes what comes (`transports.base.Takes`) on the transport's thread; `run` is the loop's."""

    def __init__(
        self,
        runtime: NodeRuntime,
        session: ReceiveSession,
        source: Source,
        channel: AsksItself,
        memory: Callable[[int, int], Memory],
    ) -> None:
        """`memory`: bytes of the session's slot, from one offset to another."""
        self._rt = runtime
        self._session = session
        self._source = source
        self._channel = channel
        self._memory = memory
        self._verified: Future[Times] = Future()
        self._times = Times()
        self._over = False
        self._prepared: dict[int, Any] = {}

    async def run(self, fetch: pb.FetchRequest, limit_s: float) -> Times:
        """Ask, and wait until the session is verified. Whoever cancels this closes the channel.

        Raises:
            SplitpointError: the sender's own word. TransportError, RejectedChunkError: as for every transfer.
        """
        self._channel.ask(fetch, self, limit_s)
        return await asyncio.wrap_future(self._verified)

    # -- on the transport's thread ---------------------------------------------------------------------------------------

    def place(self, header: pb.ChunkHeader, *, ahead: bool) -> Memory:
        """As `Takes`."""
        rt, session = self._rt, self._session
        self._times.first_at = self._times.first_at or rt.now()
        with rt.lock:
            if session.ended:
                raise TransportError("closed", f"the session is over: {session.reason}")
            start, end = session.announce(header, rt.now(), source=self._source.index, ahead=ahead)
            return self._memory(start, end)

    def soon(self) -> None:
        """As `Takes`."""
        rehearse_on_device(self._rt.receive_memory)

    def coming(self, header: pb.ChunkHeader, memory: Memory) -> None:
        """As `Takes`."""
        prepared = prepare_on_device(header.checksum.algorithm, memory)
        if prepared is not None:
            self._prepared[header.index] = prepared

    def summed(self, index: int, value: pb.Checksum) -> None:
        """As `Takes`."""
        self._told(lambda: self._session.summed(index, value, self._rt.now(), source=self._source.index))

    def landed(self, header: pb.ChunkHeader, memory: Memory) -> None:
        """As `Takes`."""
        rt = self._rt
        self._times.last_at = rt.now()
        algorithm = header.checksum.algorithm
        if algorithm == "off":
            self._compare(header, checksum(algorithm, memory))
            return
        prepared = self._prepared.pop(header.index, None)
        if prepared is not None:
            pending = prepared.start()

            def ready() -> bool:
                try:
                    if not pending():
                        return False
                    self._compare(header, pb.Checksum(algorithm=algorithm, value=pending.value()))
                except Exception as exc:  # raised where the pull is waited for, not on this thread
                    self._end(exc)
                return True

            self._channel.until(ready)
            return

        def computed(work: Future[pb.Checksum]) -> None:
            if not work.cancelled():
                self._channel.run(lambda: self._guarded(lambda: self._compare(header, work.result())))

        rt.executor.submit(checksum, algorithm, memory).add_done_callback(computed)

    def failed(self, exc: Exception) -> None:
        """As `Takes`."""
        self._end(exc)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:  # raised where the pull is waited for, not on this thread
            self._end(exc)

    def _compare(self, header: pb.ChunkHeader, value: pb.Checksum) -> None:
        self._told(lambda: self._session.landed(header.index, value, self._rt.now(), source=self._source.index))

    def _told(self, tell: Callable[[], bool]) -> None:
        rt, session = self._rt, self._session
        if self._over:
            return
        with rt.lock:
            if session.ended:
                raise TransportError("closed", f"the session is over: {session.reason}")
            whole = tell()
        if whole:
            self._end(None)

    def _end(self, exc: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        if not self._verified.set_running_or_notify_cancel():
            return
        if exc is None:
            self._verified.set_result(self._times)
        else:
            self._verified.set_exception(exc)
