"""`Fetch` and `Complete` as UCX messages, for pairs whose payload goes by UCX: asked, answered and confirmed on the threads that
drive UCX, without a turn through any event loop.

The bytes are protobuf: under `ASK_TAG` a `FetchRequest`, under `COMPLETE_TAG` a `CompleteRequest`, under number 0 of a
transfer's channel the `FetchAnswer`s to it, in order; the numbers from 1 on are payload, as ever. A message is believed as
little as one that came by gRPC: whoever serves it checks incarnation, capability and lease before anything is sent; an asker
who has proved nothing is answered over one of few connections, or not at all; and an answer is believed when it shows that the
one who gives it was asked.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from kvtransfer.transports.base import Memory, Serves, Takes, TransportError
from kvtransfer.transports.ucx_core import ASK_CHANNEL, CHUNK_BITS, UcxCore
from kvtransfer.transports.ucx_operation import Operation, Peer, failure_of
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

ASK_TAG = ASK_CHANNEL << CHUNK_BITS | 1
COMPLETE_TAG = ASK_CHANNEL << CHUNK_BITS | 2
MAX_MESSAGE_BYTES = 16 * 1024
"""A request with its worker address is a few hundred bytes; who sends more is no peer."""
SPIN_S = 0.003
"""How long the thread looks again and again for the answer to an ask: one that has to wait longer is told by a wake-up."""
LOOK_EVERY_S = 0.05
MAX_HALF_READ = 64
"""Messages that have begun to come. A peer that begins and goes no further gets no more memory than these."""
PROOF_BYTES = 16


def proof_of(grant: pb.TransferGrant, tag: int) -> bytes:
    """What whoever answers an ask under `tag` shows of having been asked: made of the capability, which says nothing of it."""
    return hmac.digest(grant.capability, tag.to_bytes(8, "little") + grant.transfer_id, "sha256")[:PROOF_BYTES]


class Answers:
    """The sender's way back to one asker."""

    def __init__(self, asks: Asks, peer: Peer, channel: int, grant: pb.TransferGrant) -> None:
        self._asks = asks
        self.peer = peer
        self._tag = channel << CHUNK_BITS
        self._proof = proof_of(grant, self._tag)
        self._believed = False

    def believe(self) -> None:
        """As `transports.base.Answers`."""
        self._believed = True

    def run(self, work: Callable[[], None]) -> None:
        """Do it on UCX's thread. Any thread."""
        self._asks.core.run(work)

    def watch(self, done: Callable[[], bool]) -> None:
        """As `transports.base.Answers`."""
        self._asks.watch(done)

    def soon(self) -> None:
        """As `transports.base.Answers`."""
        self._asks.say(self.peer, self._tag, pb.FetchAnswer(soon=True, proof=self._proof))

    def header(
        self, header: pb.ChunkHeader, settled: Callable[[TransportError | None], None], *, announced: bool = False
    ) -> None:
        """On the thread. `announced`: its payload and its checksum follow. `settled` hears when UCX has taken it, or why not."""
        self._asks.say(self.peer, self._tag, pb.FetchAnswer(header=header, proof=self._proof, announced=announced), settled)

    def checksum(self, index: int, value: pb.Checksum, settled: Callable[[TransportError | None], None]) -> None:
        """As `transports.base.Answers`."""
        found = pb.ChunkChecksum(index=index, checksum=value)
        self._asks.say(self.peer, self._tag, pb.FetchAnswer(checksum=found, proof=self._proof), settled)

    def error(self, error: SplitpointError) -> None:
        """There will be no more chunks. Any thread."""
        answer = pb.FetchAnswer(error=error.to_proto(), proof=self._proof)

        def say() -> None:
            peer = self.peer if self._believed else self._asks.core.admit(self.peer)
            if peer is None:
                self._asks.core.counters["answers_withheld"] += 1  # the asker hears it by its own deadline
                return
            self._asks.say(peer, self._tag, answer)

        self.run(say)


class Asking:
    """The receiver's end of one ask, on UCX's thread. `operation` makes the receive of a chunk, or raises `TransportError`."""

    def __init__(
        self,
        asks: Asks,
        peer: Peer,
        channel: int,
        takes: Takes,
        operation: Callable[..., Operation],
        limit_s: float,
        grant: pb.TransferGrant,
    ) -> None:
        self._asks = asks
        self.peer = peer
        self._tag = channel << CHUNK_BITS
        self._proof = proof_of(grant, self._tag)
        self._takes = takes
        self._operation = operation
        self._limit_s = limit_s
        self._missing: dict[int, int] = {}
        """By chunk that is not complete. One thing: it is due. Two, bytes and checksum: the sender still computes them."""
        self._moved_at = 0.0
        """When one landed, or was due while no other was: several share one link, so all progress by that."""
        self.over = False

    def expect(self) -> None:
        """It may be answered at once."""
        self._guarded(self._takes.soon)

    def look(self) -> bool:
        """Take answers that have come. False: none waits."""
        found = False
        while not self.over and (num_bytes := self._asks.core.probe(self._tag)) is not None:
            self._asks.read(self._tag, num_bytes, self._answered)
            found = True
        return found

    def check(self, now: float) -> None:
        """Called now and then: is the peer there, does what it announced arrive?"""
        if self.over:
            return
        if self._asks.core.lost(self.peer):
            self.fail(TransportError("peer_lost", f"the connection to incarnation {self.peer.incarnation!r} failed"))
        elif (due := self._due()) and now > self._moved_at + self._limit_s:
            text = f"no chunk landed for {self._limit_s:.3f} s, {min(due)} is due"
            text += f" ({self._asks.core.condition(self.peer)})"
            self.fail(TransportError("timeout", text))

    def fail(self, exc: Exception) -> None:
        """End it, once."""
        if not self.over:
            self.over = True
            self._takes.failed(exc)

    def _answered(self, data: bytes) -> None:
        if self.over:
            return
        try:
            answer = pb.FetchAnswer.FromString(data)
        except DecodeError:
            answer = pb.FetchAnswer()
        if not hmac.compare_digest(answer.proof, self._proof):
            # Of nobody who was asked: it changes nothing, and the answer may still come.
            self._asks.core.counters["answers_not_believed"] += 1
            return
        if answer.soon:
            self._guarded(self._takes.soon)
            return
        if answer.HasField("error"):
            self.fail(SplitpointError.from_proto(answer.error))
            return
        if answer.HasField("checksum"):
            self._came(answer.checksum.index)
            self._guarded(lambda: self._takes.summed(answer.checksum.index, answer.checksum.checksum))
            return
        header = answer.header
        try:
            memory = self._takes.place(header, ahead=answer.announced)
            # Decided by the header alone, before UCX is given the place.
            operation = self._operation(
                header, memory, lambda failure: self._landed(header, memory, failure), announced=answer.announced
            )
        except Exception as exc:  # whatever it is ends this transfer and is raised where that is waited for, not this thread
            self.fail(exc)
            return
        if not answer.announced and not self._due():
            self._moved_at = self._asks.now
        self._missing[header.index] = 2 if answer.announced else 1
        self._asks.core.post(operation)
        self._guarded(lambda: self._takes.coming(header, memory))

    def _landed(self, header: pb.ChunkHeader, memory: Memory, failure: TransportError | None) -> None:
        self._came(header.index)
        self._moved_at = self._asks.now
        if self.over:
            return
        if failure is not None:
            self.fail(TransportError(failure.reason, f"chunk {header.index}: {failure}"))
            return
        self._guarded(lambda: self._takes.landed(header, memory))

    def _due(self) -> list[int]:
        return [index for index, missing in self._missing.items() if missing == 1]

    def _came(self, index: int) -> None:
        """Bytes or checksum of a chunk."""
        if not self._due():
            self._moved_at = self._asks.now
        missing = self._missing.pop(index, 0) - 1
        if missing > 0:
            self._missing[index] = missing

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:  # as above
            self.fail(exc)


class Asks:
    """A guest of UCX's thread (ucx_core.Guest): what is asked here, what is asked of others."""

    def __init__(self, core: UcxCore) -> None:
        self.core = core
        self.now = 0.0
        self._serves: Serves | None = None
        self._way_back: Callable[[pb.FetchRequest], Answers] | None = None
        self._asking: set[Asking] = set()
        self._reading: list[tuple[Any, np.ndarray, Callable[[bytes], None]]] = []
        self._watched: list[Callable[[], bool]] = []
        self._spin_until = 0.0
        self._looked_at = 0.0
        core.invite(self)

    @property
    def served(self) -> bool:
        """Somebody answers here."""
        return self._serves is not None

    def serve(self, serves: Serves, way_back: Callable[[pb.FetchRequest], Answers]) -> None:
        """Answer peers. `way_back` makes the way back to an asker, or raises `TransportError` for an address that is none. Called
        before any peer knows this worker's address."""
        self._way_back = way_back
        self._serves = serves
        self.core.keep_tags(ASK_TAG, COMPLETE_TAG)

    # -- on the thread ---------------------------------------------------------------------------------------------------

    def ask(self, asking: Asking, request: pb.FetchRequest) -> None:
        """Send it, and take what comes."""
        self._asking.add(asking)
        self._spin_until = self.now + SPIN_S

        def settled(failure: TransportError | None) -> None:
            if failure is not None:
                asking.fail(failure)

        self.say(asking.peer, ASK_TAG, request, settled)
        asking.expect()

    def leave(self, asking: Asking) -> None:
        """Its receiver wants no more."""
        asking.over = True
        self._asking.discard(asking)

    def say(
        self, peer: Peer, tag: int, message: Message, settled: Callable[[TransportError | None], None] = lambda failure: None
    ) -> None:
        """One small message. `settled` hears when UCX has taken it, or why not."""
        data = np.frombuffer(bytearray(message.SerializeToString()), np.uint8)
        # Nobody waits for its end, so the thread may sleep meanwhile.
        operation = self.core.prepare_operation(peer, data, tag, 0.0, settled, sending=True)
        operation.message = True
        self.core.post(operation)

    def read(self, tag: int, num_bytes: int, then: Callable[[bytes], None]) -> None:
        """Take the message that `probe` found. One that is too long is cut, and with that thrown away."""
        whole = 0 < num_bytes <= MAX_MESSAGE_BYTES and len(self._reading) < MAX_HALF_READ
        buffer = np.zeros(num_bytes if whole else 1, np.uint8)
        request = self.core.take(tag, buffer)
        if request.completed and whole:
            self._take(request, buffer, then)
        else:
            self._reading.append((request, buffer, then if whole else _throw_away))

    def watch(self, done: Callable[[], bool]) -> None:
        """Ask `done` in every turn until it says True."""
        self._watched.append(done)

    def turn(self, now: float) -> bool:
        """As `Guest`."""
        self.now = now
        if self._serves is not None:
            for tag, then in ((ASK_TAG, self._asked), (COMPLETE_TAG, self._completed)):
                while (num_bytes := self.core.probe(tag)) is not None:
                    self.read(tag, num_bytes, then)
        for asking in list(self._asking):
            if asking.look():
                self._spin_until = now + SPIN_S
        reading, self._reading = self._reading, []
        for entry in reading:
            if entry[0].completed:
                self._take(*entry)
            else:
                self._reading.append(entry)
        watched, self._watched = self._watched, []
        self._watched += [done for done in watched if not self._done(done)]
        if now - self._looked_at > LOOK_EVERY_S:
            self._looked_at = now
            for asking in list(self._asking):
                asking.check(now)
        self._asking = {asking for asking in self._asking if not asking.over}
        # What is half received wakes the thread itself, and a peer that stops in the middle must not keep it awake.
        return bool(self._watched) or (bool(self._asking or self._reading) and now < self._spin_until)

    def end(self) -> None:
        """As `Guest`."""
        for asking in list(self._asking):
            asking.fail(TransportError("closed", "UCX is stopped"))
        self._asking.clear()
        self._watched.clear()

    def _take(self, request: Any, buffer: np.ndarray, then: Callable[[bytes], None]) -> None:
        failure = failure_of(request)
        if failure is not None:
            logger.info("ucx: a message of %d bytes was not read: %s", len(buffer), failure)
            self.core.counters["messages_not_read"] += 1
            return
        then(buffer.tobytes())

    def _asked(self, data: bytes) -> None:
        try:
            request = pb.FetchRequest.FromString(data)
            assert self._way_back is not None
            answers = self._way_back(request)
        except (DecodeError, TransportError) as exc:
            # There is nobody to answer: the asker hears it by its own deadline.
            self.core.counters["asks_not_understood"] += 1
            logger.warning("ucx: an ask that cannot be answered: %s", exc)
            return
        self.core.counters["asks"] += 1
        assert self._serves is not None
        try:
            self._serves.asked(request, answers)
        except Exception as exc:
            # A fault of ours costs this ask; on this thread everybody's transfers live.
            self._fault()
            answers.error(SplitpointError(Code.INTERNAL, f"the sender failed: {exc!r}"))

    def _completed(self, data: bytes) -> None:
        try:
            request = pb.CompleteRequest.FromString(data)
        except DecodeError:
            self.core.counters["asks_not_understood"] += 1
            return
        assert self._serves is not None
        try:
            self._serves.completed(request)
        except Exception:  # as above; the lease ends by its deadline
            self._fault()

    def _done(self, done: Callable[[], bool]) -> bool:
        try:
            return done()
        except Exception:  # as above
            self._fault()
            return True

    def _fault(self) -> None:
        self.core.counters["faults"] += 1
        logger.exception("ucx: a fault while serving peers")


def _throw_away(data: bytes) -> None:
    return
