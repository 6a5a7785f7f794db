"""The prefill side of a transfer that is asked for over UCX: the lease is checked, and header and payload are sent, on UCX's
thread, as soon as blocks are staged. The node's loop only guards it: deadline, the peer's silence, every early end, the drain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from kvtransfer.checksum import algorithm_for, checksum
from kvtransfer.lease import Lease
from kvtransfer.machine import Refusal
from kvtransfer.plan import BlockRange, next_chunk
from kvtransfer.runtime import NodeRuntime
from kvtransfer.transports.base import Answers, Memory, SendsItself, TakesAsks, TransportError
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

if TYPE_CHECKING:
    from kvtransfer.push import KvTransferServicer, Outgoing

logger = logging.getLogger(__name__)


STOPS = "the sender stops"


class DirectPush:
    """What a transport serves its peers with (`transports.base.Serves`). Methods are called on the transport's thread unless they
    say otherwise."""

    def __init__(self, runtime: NodeRuntime, servicer: KvTransferServicer, transport: TakesAsks) -> None:
        self._rt = runtime
        self._servicer = servicer
        self._transport = transport
        self._waiting: dict[tuple[bytes, bytes, int], asyncio.Task[None]] = {}
        """Asks for what is not reserved yet, by transfer, capability, rank: a forged one stands in nobody's way. The loop's."""
        self._unsettled = 0
        """Asks that the loop has not settled: as many wait as by gRPC, also while it stands still. Under the node's lock."""

    def asked(self, request: pb.FetchRequest, answers: Answers) -> None:
        """As `Serves`. What is not the ordinary case is settled on the loop, as it is for an ask by gRPC."""
        rt = self._rt
        found: Lease | Refusal | None = None
        if not self._unusual(request):
            with rt.lock:
                if rt.leases.live(request.grant.transfer_id) is not None:
                    found = self._servicer.fetched(request)
        deadline = rt.now() + request.remaining_s
        if isinstance(found, Lease):
            self._begin(request, found, answers, deadline)
            return
        with rt.lock:
            full = self._unsettled >= rt.settings.max_pending_fetches
            self._unsettled += not full
        if full:
            answers.error(rt.refused("pending", f"{rt.settings.max_pending_fetches} asks wait for an answer already"))
            return
        self._on_loop(lambda: self._wait(request, found, answers, deadline))

    def completed(self, request: pb.CompleteRequest) -> None:
        """As `Serves`."""
        rt = self._rt
        rt.metrics.event("completed_directly")
        actions = self._servicer.ended(request)
        rt.follow_from_engine(request.grant.transfer_id, actions)
        self._on_loop(lambda: self.left(request))

    def left(self, request: pb.CompleteRequest) -> None:
        """The receiver is not interested (any more). On the loop."""
        task = self._waiting.get((request.grant.transfer_id, request.grant.capability, request.receiver_rank))
        if task is not None:
            task.cancel()

    def _unusual(self, request: pb.FetchRequest) -> bool:
        mine = request.sender_incarnation == self._rt.incarnation and request.transport in self._rt.transports
        return not mine or request.HasField("share")

    def _on_loop(self, work: object) -> None:
        try:
            self._rt.loop.call_soon_threadsafe(work)  # type: ignore[arg-type]
        except RuntimeError:
            self._rt.metrics.event("ask_after_stop")

    # -- on the loop -----------------------------------------------------------------------------------------------------

    def _wait(self, request: pb.FetchRequest, found: Refusal | None, answers: Answers, deadline: float) -> None:
        key = request.grant.transfer_id, request.grant.capability, request.receiver_rank
        rt = self._rt

        async def run() -> None:
            try:
                lease = await self._reserved(request, found, deadline)
            except SplitpointError as error:
                answers.error(error)
                return
            except asyncio.CancelledError:
                answers.error(SplitpointError(Code.WORKER_LOST, STOPS))  # or nobody listens: then it is thrown away
                raise
            answers.run(lambda: self._begin(request, lease, answers, deadline))

        if key in self._waiting:
            self._settled()
            answers.error(rt.refused("fetch_again", "this transfer is being asked for already; a capability is used once"))
            return
        task = self._waiting[key] = rt.tasks.spawn(f"ask {request.grant.transfer_id.hex()}", run())

        # Not by the task itself: one that is cancelled before its first step does nothing.
        def over(_: object) -> None:
            del self._waiting[key]
            self._settled()

        task.add_done_callback(over)

    def _settled(self) -> None:
        with self._rt.lock:
            self._unsettled -= 1

    async def _reserved(self, request: pb.FetchRequest, found: Refusal | None, deadline: float) -> Lease:
        rt = self._rt
        if found is not None:
            raise rt.refusal(found)
        self._servicer.require_this(request)
        rt.transport(request.transport)
        if request.HasField("share"):
            raise rt.refused("share", "a share is asked for by gRPC")
        return await self._servicer.leased(request, deadline)

    def _guard(self, request: pb.FetchRequest, send: DirectSend, answers: Answers) -> None:
        async def run() -> None:
            try:
                failure = await self._servicer.until_sent(request, send.out, send.until_sent())
            except asyncio.CancelledError:
                answers.error(SplitpointError(Code.WORKER_LOST, STOPS))
                raise
            finally:
                self._rt.stop_kicking(send.out.lease.transfer_id)
            if failure is not None:
                answers.error(failure)

        self._rt.tasks.spawn(f"send {request.grant.transfer_id.hex()}", run())

    # -- on the transport's thread ---------------------------------------------------------------------------------------

    def _begin(self, request: pb.FetchRequest, lease: Lease, answers: Answers, deadline: float) -> None:
        answers.believe()
        try:
            channel = self._transport.open_answer(request)
        except TransportError as exc:
            error = self._servicer.unopened(request, lease, exc)
            answers.error(error)
            return
        out = self._servicer.outgoing(request, lease, None, channel, deadline)
        send = DirectSend(self._rt, self._servicer, out, channel, answers, announces=request.takes_announcements)
        self._rt.kick_with(lease.transfer_id, lambda: answers.run(send.advance), send.watch)
        self._on_loop(lambda: self._guard(request, send, answers))
        try:
            send.advance()
        except Exception as exc:  # it costs this transfer; whoever guards it hears of it, drains and answers
            send.fail(exc if isinstance(exc, TransportError) else TransportError("refused", f"it cannot be sent: {exc!r}"))


class DirectSend:
    """One receiver's chunks, in order. Everything but `until_sent` belongs to the transport's thread."""

    def __init__(
        self,
        runtime: NodeRuntime,
        servicer: KvTransferServicer,
        out: Outgoing,
        channel: SendsItself,
        answers: Answers,
        *,
        announces: bool,
    ) -> None:
        """`announces`: the receiver takes headers ahead of their chunks' checksums."""
        self._rt = runtime
        self._servicer = servicer
        self.out = out
        self._channel = channel
        self._answers = answers
        self._first_block = 0
        self._index = 0
        self._over = False
        self._all_sent = False
        self._checking = False
        self._announces = announces
        self._ahead: tuple[BlockRange, pb.ChunkHeader] | None = None
        """Announced, and not sent."""
        self._sent: Future[None] = Future()

    async def until_sent(self) -> None:
        """Until the last chunk is on its way. On the loop.

        Raises:
            SplitpointError: the transfer is over, or its time is.
            TransportError: the payload cannot go.
        """
        rt, lease = self._rt, self.out.lease
        # All may be over, and delivered, before the loop came here.
        if not lease.live and not self._sent.done():
            raise rt.refused("ended", f"this transfer is over: {lease.state} ({lease.reason})")
        try:
            async with asyncio.timeout(max(0.0, self.out.deadline - rt.now())):
                await asyncio.wrap_future(self._sent)
        except TimeoutError:
            text = f"{lease.staged_blocks} of {lease.num_blocks} blocks were staged when the time was over"
            raise rt.remember(SplitpointError(Code.DEADLINE_EXCEEDED, text)) from None

    def watch(self, done: Callable[[], bool]) -> None:
        """A gather is nearly `done`: look at it from the transport's thread. Any thread."""

        def begin() -> None:
            self._answers.watch(done)
            self._answers.soon()
            self._rehearse()

        self._answers.run(begin)

    def _announce(self) -> None:
        """Say what comes while it is computed and gathered: it then finds its receiver with the place chosen and all prepared."""
        lease, out = self.out.lease, self.out
        if not self._announces:
            return
        blocks = next_chunk(self._first_block, lease.committed_blocks, out.block_bytes, out.chunk_bytes)
        if blocks is None:
            return
        payload = self._servicer.payload(lease, blocks)
        algorithm = algorithm_for(self._rt.settings.checksum, payload)
        if algorithm == "off":
            return  # there is nothing that could follow
        header = self._servicer.header(out, self._index, blocks, pb.Checksum(algorithm=algorithm))
        try:
            self._channel.announce_now(header, payload, self._answers, self._settled)
        except TransportError as exc:
            self._end(exc)
            return
        self._ahead = blocks, header

    def _rehearse(self) -> None:
        """Do once for nothing what follows the gather: after a long sleep the first time takes several times as long."""
        lease = self.out.lease
        blocks = next_chunk(self._first_block, lease.committed_blocks, self.out.block_bytes, self.out.chunk_bytes)
        if blocks is not None and not (self._over or self._checking):
            value = self._servicer.checksum_at_hand(lease, blocks, self._servicer.payload(lease, blocks))
            if value is not None:
                self._servicer.header(self.out, self._index, blocks, value).SerializeToString()

    def advance(self) -> None:
        """Send what is staged and not sent. Called whenever more may be."""
        rt, out = self._rt, self.out
        lease = out.lease
        while not (self._over or self._checking):
            with rt.lock:
                staged, live = lease.staged_blocks, lease.live
            if not live:
                return
            if self._ahead is not None:
                if staged >= self._ahead[0].end:
                    self._send_announced(*self._ahead)
                return
            blocks = next_chunk(self._first_block, staged, out.block_bytes, out.chunk_bytes)
            if blocks is None:
                self._announce()
                return
            payload = self._servicer.payload(lease, blocks)
            value = self._servicer.checksum_at_hand(lease, blocks, payload)
            if value is None:
                self._compute(payload, partial(self._send, blocks, payload))
                return
            self._send(blocks, payload, value)

    def _send_announced(self, blocks: BlockRange, header: pb.ChunkHeader) -> None:
        """The payload at once; its checksum while it travels."""
        payload = self._servicer.payload(self.out.lease, blocks)
        self._checking = True
        try:
            self._channel.send_announced(header, payload, self._settled)
        except TransportError as exc:
            self._end(exc)
            return

        def under_way() -> bool:
            self._checking = False
            if self._over:
                return True
            value = self._servicer.checksum_at_hand(self.out.lease, blocks, payload)
            if value is None:
                self._compute(payload, partial(self._vouch, blocks, header))
            else:
                self._vouch(blocks, header, value)
                self.advance()
            return True

        # Not before the transport had its turn: it has an answer of the receiver to see before bytes move.
        self._answers.watch(under_way)

    def _vouch(self, blocks: BlockRange, header: pb.ChunkHeader, value: pb.Checksum) -> None:
        if self._over or not self.out.lease.live:
            return
        self._ahead = None
        self._answers.checksum(header.index, value, self._settled)
        self._on_its_way(blocks, header)

    def _compute(self, payload: Memory, then: Callable[[pb.Checksum], None]) -> None:
        """The checksum on another thread; what was sent before moves meanwhile."""
        rt = self._rt
        self._checking = True

        def computed(work: Future[pb.Checksum]) -> None:
            def go_on() -> None:
                self._checking = False
                failure = TransportError("closed", "the node stops") if work.cancelled() else work.exception()
                if failure is not None:
                    self._end(failure)
                    return
                then(work.result())
                self.advance()

            self._answers.run(go_on)

        try:
            work = rt.executor.submit(checksum, algorithm_for(rt.settings.checksum, payload), payload)
        except RuntimeError:
            self._end(TransportError("closed", "the node stops"))
            return
        work.add_done_callback(computed)

    def _send(self, blocks: BlockRange, payload: Memory, value: pb.Checksum) -> None:
        out = self.out
        if self._over or not out.lease.live:
            return
        header = self._servicer.header(out, self._index, blocks, value)
        try:
            self._channel.send_now(header, payload, self._answers, self._settled)
        except TransportError as exc:
            self._end(exc)
            return
        self._on_its_way(blocks, header)

    def _on_its_way(self, blocks: BlockRange, header: pb.ChunkHeader) -> None:
        out = self.out
        if self._over:  # it failed as it was sent
            return
        self._first_block = blocks.end
        self._index += 1
        if header.last:
            with self._rt.lock:
                self._rt.leases.sent(out.lease, self._rt.now(), receiver=out.receiver)
            self._all_sent = True
            self._end(None)

    def fail(self, failure: TransportError) -> None:
        """It cannot go on."""
        self._end(failure)

    def _settled(self, failure: TransportError | None) -> None:
        if failure is None:
            return
        if self._all_sent:
            self._lost(failure)
        else:
            self._end(failure)

    def _lost(self, failure: TransportError) -> None:
        """All was handed over, and some of it did not arrive. Nobody guards the sending any more."""
        rt, lease = self._rt, self.out.lease
        with rt.lock:
            if not lease.live:
                return  # delivered all the same; or whoever ended it has said so
            _, actions = rt.leases.release(lease.transfer_id, failure.reason, rt.now())
        rt.metrics.event("lost_after_the_last_chunk")
        # Before what ends the sending may say less: whoever guards it may not have seen yet that all was sent.
        self._answers.error(rt.remember(SplitpointError(Code.TRANSFER_FAILED, f"{failure.reason}: {failure}")))
        rt.follow_from_engine(lease.transfer_id, actions)

    def _end(self, failure: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        if not self._sent.set_running_or_notify_cancel():
            return
        if failure is None:
            self._sent.set_result(None)
        else:
            self._sent.set_exception(failure)
