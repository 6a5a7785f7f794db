"""The decode side of one rank: ask a peer for one transfer, let it land in staging, believe it when all of it is verified."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import grpc

from kvtransfer.completion import Completer
from kvtransfer.machine import Refusal
from kvtransfer.plan import Fit
from kvtransfer.pull_direct import DirectPull
from kvtransfer.rearrange import clear_beyond, fit_blocks
from kvtransfer.rpc import is_peer_lost
from kvtransfer.runtime import DRAIN_POLL_S, NodeRuntime
from kvtransfer.session import ReceiveSession, RejectedChunkError, SessionEvent
from kvtransfer.sessions import LATE_PULL
from kvtransfer.sources import Source, Sources, find_sources
from kvtransfer.transports.base import AsksItself, ChecksAsItLands, Lends, Memory, ReceiveChannel, Transport, TransportError
from kvtransfer.waiting import Copies, all_or_first_failure
from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """When bytes came, monotonic seconds. `open_chunk`: a header came whose payload is not whole yet."""

    first_at: float = 0.0
    last_at: float = 0.0
    open_chunk: bool = False
    check: asyncio.Task[bool] | None = None


class Puller:
    """Runs pulls. Everything here belongs to the node's loop."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self._rt = runtime
        self._completer = Completer(runtime)

    async def pull(self, request: pb.PullRequest) -> pb.PullResponse:
        """The whole of one `Pull`. Cancelling it, or releasing the transfer, ends its task, its stream and its channel; the
        slot comes back when nothing can write into it any more.

        Raises:
            SplitpointError: why nothing usable was staged.
        """
        rt = self._rt
        transfer_id = request.grant.transfer_id
        now = rt.now()
        expires_at = now + request.remaining_s + rt.settings.lease_grace_s
        with rt.lock:
            session = rt.sessions.adopt(transfer_id) or rt.sessions.open(transfer_id, expires_at=expires_at, now=now)
        if isinstance(session, Refusal):
            if session.reason == LATE_PULL:
                rt.tasks.spawn(f"late pull {transfer_id.hex()}", self._completer.too_late(request))
            raise rt.refusal(session)
        rt.metrics.started(request.transport)
        task = rt.pulls[transfer_id] = asyncio.create_task(self._run(request, session, now + request.remaining_s))
        error: SplitpointError
        try:
            response = await task
            response.total_s = rt.now() - now
            waited_s = max(0.0, response.total_s - response.seconds)
            chunks = sum(seal.num_chunks for seal in response.seals)
            rt.metrics.delivered(request.transport, response.bytes, response.seconds, waited_s=waited_s, chunks=chunks)
            return response
        except asyncio.CancelledError:
            if not session.ended:
                self._end(session, SessionEvent.ABANDON, "cancelled")
                rt.metrics.failed(request.transport, "cancelled")
                raise
            error, reason = SplitpointError(Code.CANCELLED, f"released: {session.reason}"), "released"
        except SplitpointError as exc:
            error, reason = exc, str(exc.code)
        except RejectedChunkError as exc:
            error, reason = SplitpointError(Code.TRANSFER_FAILED, f"rejected, {exc.reason}: {exc}"), f"rejected.{exc.reason}"
        except TransportError as exc:
            # A transport knows its own way to a peer and not the peer: that one may be reached another way.
            text = f"transport {request.transport}, {exc.reason}: {exc}"
            error, reason = SplitpointError(Code.TRANSFER_FAILED, text), exc.reason
        except BaseException:
            self._end(session, SessionEvent.FAIL, "fault")
            rt.metrics.failed(request.transport, "fault")
            raise
        finally:
            del rt.pulls[transfer_id]
        self._end(session, SessionEvent.FAIL, reason)
        rt.metrics.failed(request.transport, reason)
        logger.warning("transfer %s: pull failed: %s; %s", transfer_id.hex(), error, session.machine.story())
        raise rt.remember(error)

    async def prepare(self, request: pb.PullRequest) -> None:
        """The slot of a `pull` that follows with the same request. Until then it is given back by a release, or expires.

        Raises:
            SplitpointError: why there is none; nothing is held then.
        """
        rt = self._rt
        transfer_id = request.grant.transfer_id
        now = rt.now()
        expires_at = now + request.remaining_s + rt.settings.lease_grace_s
        with rt.lock:
            session = rt.sessions.open(transfer_id, expires_at=expires_at, now=now)
        if isinstance(session, Refusal):
            raise rt.refusal(session)
        task = rt.pulls[transfer_id] = asyncio.create_task(self._prepare(request, session, now + request.remaining_s))
        try:
            await task
        except asyncio.CancelledError:
            if session.ended:
                raise rt.remember(SplitpointError(Code.CANCELLED, f"released: {session.reason}")) from None
            self._end(session, SessionEvent.ABANDON, "cancelled")
            raise
        except SplitpointError as error:
            self._end(session, SessionEvent.FAIL, str(error.code))
            raise rt.remember(error) from None
        finally:
            del rt.pulls[transfer_id]

    async def _prepare(self, request: pb.PullRequest, session: ReceiveSession, deadline: float) -> None:
        rt = self._rt
        try:
            async with asyncio.timeout(max(0.0, deadline - rt.now())), AsyncExitStack() as stack:
                rt.transport(request.transport)
                sources = await find_sources(rt, request, stack)
                await self._room(request, session, sources, deadline)
        except TimeoutError:
            raise SplitpointError(Code.DEADLINE_EXCEEDED, f"{request.remaining_s:.3f} s were over before staging") from None
        finally:
            with rt.lock:
                rt.sessions.rest(session)
            rt.follow(session.transfer_id, ())

    async def _run(self, request: pb.PullRequest, session: ReceiveSession, deadline: float) -> pb.PullResponse:
        rt = self._rt
        try:
            async with asyncio.timeout(max(0.0, deadline - rt.now())):
                transport = rt.transport(request.transport)
                async with AsyncExitStack() as stack:
                    sources = await find_sources(rt, request, stack)
                    await self._room(request, session, sources, deadline)
                    return await self._fetch_all(request, session, transport, sources, deadline)
        except TimeoutError:
            text = f"{request.remaining_s:.3f} s were over in state {session.state}"
            raise SplitpointError(Code.DEADLINE_EXCEEDED, text) from None

    async def _room(self, request: pb.PullRequest, session: ReceiveSession, sources: Sources, deadline: float) -> None:
        """Give the session its slot, or take up the one that `prepare` gave it."""
        rt = self._rt
        expected = [source.expected(request, rt.settings.checksum) for source in sources.each]
        if session.hold is not None:
            if [inflow.expected for inflow in session.inflows] != expected:
                raise rt.refused("prepared", "the pull is not the one that staging was prepared for")
            with rt.lock:
                resumed = rt.sessions.resume(session)
            if not resumed:
                raise SplitpointError(Code.CANCELLED, f"released: {session.reason}")
            return
        if not rt.receive.fits(sources.slot_bytes):
            text = f"{sources.slot_bytes} bytes can never fit {rt.receive.capacity_bytes} bytes of receive staging"
            raise rt.refused("too_large", text)
        wait_s = max(0.0, deadline - rt.now())
        if request.HasField("staging_wait_s"):
            wait_s = min(wait_s, request.staging_wait_s)
        try:
            slot = await rt.receive_room.acquire(session.transfer_id, sources.slot_bytes, wait_s)
        except TimeoutError:
            text = f"no {sources.slot_bytes} bytes of receive staging in {wait_s:.3f} s; {rt.receive.free_bytes} are free"
            raise rt.refused("staging_full", text, Code.STAGING_FULL) from None
        with rt.lock:
            rt.sessions.begin(session, slot, expected, sources.content_bytes)

    async def _fetch_all(
        self, request: pb.PullRequest, session: ReceiveSession, transport: Transport, sources: Sources, deadline: float
    ) -> pb.PullResponse:
        """Every share at once. The first that fails ends the others."""
        rt = self._rt
        copies = Copies(rt.executor)
        works = [self._fetch(request, session, transport, source, copies, deadline) for source in sources.each]
        try:
            if len(works) == 1:
                progresses = [await works[0]]
            else:
                progresses = await all_or_first_failure(works)
        finally:
            for source in sources.each:
                if source.asked:
                    if source.call is not None and source.outcome != "delivered":
                        source.call.cancel()
                    rt.tasks.spawn(f"complete {session.transfer_id.hex()}", self._completer.complete(request, source, session))
                rt.tasks.spawn(f"drain {session.transfer_id.hex()}", self._drain(session, source, copies))
        if rt.rank == 0:
            for endpoint in sources.unneeded:
                rt.tasks.spawn(f"unneeded {session.transfer_id.hex()}", self._completer.unneeded(request, endpoint))
        seconds = max(p.last_at for p in progresses) - min(p.first_at for p in progresses)
        num_bytes = sum(source.transfer.total_bytes for source in sources.each)
        seals = session.seals
        return pb.PullResponse(seal=seals[0], bytes=num_bytes, seconds=seconds, transport=request.transport, seals=seals)

    async def _fetch(
        self,
        request: pb.PullRequest,
        session: ReceiveSession,
        transport: Transport,
        source: Source,
        copies: Copies,
        deadline: float,
    ) -> _Progress:
        """One share. Whatever it leaves open is its caller's to end."""
        rt = self._rt
        fetch = pb.FetchRequest(
            grant=request.grant,
            attempt_id=request.attempt_id,
            sender_incarnation=source.endpoint.incarnation,
            receiver_incarnation=rt.incarnation,
            transport=request.transport,
            receiver_host_id=rt.host_id,
            remaining_s=max(0.0, deadline - rt.now()),
            token_hash=request.token_hash,
        )
        source.ask(fetch)
        try:
            channel = source.channel = transport.open_receive(source.endpoint, fetch)
            source.asked = True
            if source.plan is None and isinstance(channel, Lends):
                channel.lend()
                source.lends = channel
            async with rt.watch.pulling(source.stub, source.endpoint):
                if source.plan is None and isinstance(channel, AsksItself) and channel.asks:
                    progress = await self._fetch_directly(fetch, session, source, channel)
                else:
                    source.call = source.stub.Fetch(fetch, timeout=fetch.remaining_s)
                    progress = await self._receive(session, source, channel, copies)
            source.outcome = "delivered"
            return progress
        except grpc.aio.AioRpcError as exc:
            source.outcome = "transport"
            error = from_rpc_error(exc)
            if is_peer_lost(exc):
                raise SplitpointError(Code.WORKER_LOST, f"{source.endpoint.address}: {error.message}") from exc
            raise error from exc
        except (TransportError, RejectedChunkError) as exc:
            source.outcome = exc.reason
            raise
        except SplitpointError:
            source.outcome = "transport"
            raise

    async def _fetch_directly(
        self, fetch: pb.FetchRequest, session: ReceiveSession, source: Source, channel: AsksItself
    ) -> _Progress:
        rt = self._rt
        rt.metrics.event("asked_directly")
        fetch.takes_announcements = True
        direct = DirectPull(rt, session, source, channel, partial(self._memory, session))
        times = await direct.run(fetch, rt.settings.progress_timeout_s)
        source.tell = channel.tell
        rt.watch.heard_sender(source.endpoint)
        return _Progress(times.first_at, times.last_at)

    async def _receive(self, session: ReceiveSession, source: Source, channel: ReceiveChannel, copies: Copies) -> _Progress:
        """Take messages until the share is verified. The checksum of a chunk runs while the next one arrives."""
        progress = _Progress()
        try:
            await self._take_all(session, source, channel, copies, progress)
        finally:
            # After an end the slot may get another transfer's bytes before the last checksum is done: nobody compares them.
            if progress.check is not None:
                progress.check.cancel()
                progress.check.add_done_callback(lambda check: check.cancelled() or check.exception())
        return progress

    async def _take_all(
        self, session: ReceiveSession, source: Source, channel: ReceiveChannel, copies: Copies, progress: _Progress
    ) -> None:
        rt = self._rt
        limit_s = rt.settings.progress_timeout_s

        def target(header: pb.ChunkHeader) -> Memory:
            start, end = session.announce(header, rt.now(), source=source.index)
            progress.open_chunk = True
            return self._memory(session, *source.place(header.index, start, end))

        while True:
            try:
                # Between chunks the sender may still compute; inside one it had data, and silence is a failure.
                async with asyncio.timeout(limit_s if progress.open_chunk else None):
                    message = await source.call.read()
            except TimeoutError:
                raise TransportError("timeout", f"no byte for {limit_s:g} s inside a chunk") from None
            if message is grpc.aio.EOF:
                raise TransportError("closed", "the stream ended before the last chunk")
            progress.first_at = progress.first_at or rt.now()
            rt.watch.heard_sender(source.endpoint)
            header = await channel.accept(message, target, limit_s)
            progress.last_at = rt.now()
            if header is None:
                continue
            progress.open_chunk = False
            await self._checked(progress)
            value = channel.landed_crc32c(header.index) if isinstance(channel, ChecksAsItLands) else None
            progress.check = asyncio.create_task(self._check(session, source, header, value, copies))
            if header.last:
                await self._checked(progress)
                return

    async def _checked(self, progress: _Progress) -> None:
        if progress.check is not None:
            check, progress.check = progress.check, None
            await check

    async def _check(
        self, session: ReceiveSession, source: Source, header: pb.ChunkHeader, crc32c: int | None, copies: Copies
    ) -> bool:
        """The checksum of a chunk, and its way to its place where it did not land there. True: the session is verified."""
        rt = self._rt
        memory = self._memory(session, *source.place(header.index, header.offset, header.offset + header.bytes))
        if crc32c is None:
            checksum = await rt.checksum(memory, header.checksum.algorithm)
        else:
            checksum = pb.Checksum(algorithm="crc32c", value=crc32c)
        if source.plan is not None and source.piece_bytes:
            rows = self._memory(session, 0, session.content_bytes)
            await copies.run(_put, source.plan.fit, memory, header, rows)
        with rt.lock:
            if source.lends is not None:
                session.lent = source.lends.lent
            return session.landed(header.index, checksum, rt.now(), source=source.index)

    def _memory(self, session: ReceiveSession, start: int, end: int) -> Memory:
        if session.hold is None:
            raise TransportError("closed", "the session has no slot")
        offset = session.hold.slot.offset
        return self._rt.receive_memory[offset + start : offset + end]

    async def _drain(self, session: ReceiveSession, source: Source, copies: Copies) -> None:
        """Hold the slot until the channel, and a copy inside the slot, can write into it no more (rule 13)."""
        rt, channel = self._rt, source.channel
        await copies.settled()
        if channel is not None:
            await channel.close()
            while not await channel.drained(DRAIN_POLL_S):
                pass
        with rt.lock:
            rt.sessions.drained(session)
        rt.follow(session.transfer_id, ())

    def _end(self, session: ReceiveSession, event: SessionEvent, reason: str) -> None:
        rt = self._rt
        with rt.lock:
            rt.sessions.end(session, event, reason, rt.now())
        rt.follow(session.transfer_id, ())


def _put(fit: Fit, landed: Memory, header: pb.ChunkHeader, rows: Memory) -> None:
    fit_blocks(fit, landed, header.first_block, rows)
    if header.last:
        clear_beyond(fit, header.first_block + header.num_blocks, rows)
