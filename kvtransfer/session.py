"""The decode side of one rank: one receive session per transfer, from the first header to the engine's scatter.

Pure. `verified` is reached only when every chunk of every sender came in order and in bounds, of one generation, with the right
checksum, the byte count is whole, and each seal is of the prompt, the layout and the rank that was asked (rule 3).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.machine import Machine
from kvtransfer.plan import TransferPlan
from kvtransfer.staging import SlotHold
from kvtransfer.transports.base import Lent, Memory
from protos.splitpoint.v1 import kv_transfer_pb2 as pb


class SessionState(StrEnum):
    WAITING = "waiting"
    RECEIVING = "receiving"
    VERIFIED = "verified"
    TAKEN = "taken"  # the engine has the slot's view
    SCATTERED = "scattered"
    FAILED = "failed"
    ABANDONED = "abandoned"


class SessionEvent(StrEnum):
    HEADER = "header"
    VERIFY = "verify"
    TAKE = "take"
    SCATTERED = "scattered"
    FAIL = "fail"
    ABANDON = "abandon"  # release, cancel, deadline


_S, _E = SessionState, SessionEvent
TABLE: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (_S.WAITING, _E.HEADER): _S.RECEIVING,
    (_S.WAITING, _E.FAIL): _S.FAILED,
    (_S.WAITING, _E.ABANDON): _S.ABANDONED,
    (_S.RECEIVING, _E.HEADER): _S.RECEIVING,
    (_S.RECEIVING, _E.VERIFY): _S.VERIFIED,
    (_S.RECEIVING, _E.FAIL): _S.FAILED,
    (_S.RECEIVING, _E.ABANDON): _S.ABANDONED,
    (_S.VERIFIED, _E.TAKE): _S.TAKEN,
    (_S.VERIFIED, _E.SCATTERED): _S.SCATTERED,  # the engine needed none of it
    (_S.VERIFIED, _E.FAIL): _S.ABANDONED,  # whoever waited for it had given up before it could be told
    (_S.VERIFIED, _E.ABANDON): _S.ABANDONED,
    (_S.TAKEN, _E.TAKE): _S.TAKEN,
    (_S.TAKEN, _E.SCATTERED): _S.SCATTERED,
    (_S.TAKEN, _E.FAIL): _S.ABANDONED,
    (_S.TAKEN, _E.ABANDON): _S.ABANDONED,
}
ENDED = (_S.SCATTERED, _S.FAILED, _S.ABANDONED)
RECEIVE, SCATTER = "receive", "scatter"  # pins of a session's slot
ACCEPTED = {"crc32c": ("crc32c", "crc32c-8k"), "off": ("off",)}
"""Checksum algorithms that satisfy a setting: a sender with staging on a device computes CRC32C piece by piece there."""


class RejectedChunkError(ValueError):
    """What came is not what was asked for. `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Expected:
    """What the receiver knows of one sender's share before the first byte, from its own actor and the handshake."""

    transfer_id: bytes
    plan: TransferPlan
    token_hash: bytes
    fingerprint: bytes
    incarnation: str
    checksum: str
    max_chunk_bytes: int = 1 << 62


class Inflow:
    """One sender's share: the chunks it announces, in order, and which of them have landed."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.seal: pb.Seal | None = None
        """The sender's, once every chunk has landed."""
        self._announced: list[tuple[pb.ChunkHeader, bool]] = []
        self._announced_bytes = 0
        self._landed = 0
        self._due: dict[int, pb.Checksum | None] = {}
        """Chunks whose header came without the sender's checksum: what they had when they landed, if they have."""

    def announce(self, header: pb.ChunkHeader, *, ahead: bool = False) -> tuple[int, int]:
        """As `ReceiveSession.announce`."""
        expected = self.expected
        plan = expected.plan
        if header.transfer_id != expected.transfer_id:
            raise RejectedChunkError("transfer_id", f"chunk of transfer {header.transfer_id.hex()}")
        if self._announced and self._announced[-1][0].last:
            raise RejectedChunkError("after_last", f"chunk {header.index} after the last one")
        if header.index != len(self._announced):
            raise RejectedChunkError("order", f"chunk {header.index} where {len(self._announced)} was due")
        if self._announced and header.generation != self._announced[0][0].generation:
            raise RejectedChunkError("generation", f"generation {header.generation} after {self._announced[0][0].generation}")
        if header.offset != self._announced_bytes or header.offset != header.first_block * plan.block_bytes:
            raise RejectedChunkError(
                "offset", f"offset {header.offset}, first block {header.first_block}, due {self._announced_bytes}"
            )
        if header.num_blocks == 0 or header.bytes != header.num_blocks * plan.block_bytes:
            raise RejectedChunkError("bytes", f"{header.bytes} bytes for {header.num_blocks} blocks of {plan.block_bytes}")
        if header.bytes > expected.max_chunk_bytes:
            raise RejectedChunkError("bytes", f"{header.bytes} bytes in a chunk of at most {expected.max_chunk_bytes}")
        end = header.offset + header.bytes
        if end > plan.total_bytes or header.last != (end == plan.total_bytes):
            raise RejectedChunkError("bounds", f"bytes {header.offset} to {end} (last: {header.last}) of {plan.total_bytes}")
        if header.checksum.algorithm not in ACCEPTED[expected.checksum]:
            raise RejectedChunkError(
                "algorithm", f"checksum {header.checksum.algorithm!r} where {expected.checksum!r} is required"
            )
        if header.last:
            self._check_seal(header)
        if ahead:
            self._due[header.index] = None
        self._announced.append((header, False))
        self._announced_bytes = end
        return header.offset, end

    def landed(self, index: int, checksum: pb.Checksum) -> bool:
        """As `ReceiveSession.landed`, True when this share is whole."""
        if index >= len(self._announced) or self._announced[index][1]:
            raise RejectedChunkError("order", f"chunk {index} landed twice or unannounced")
        header = self._announced[index][0]
        if index in self._due:
            if self._due[index] is not None:
                raise RejectedChunkError("order", f"chunk {index} landed twice")
            self._due[index] = checksum
            return False
        if header.checksum != checksum:
            raise RejectedChunkError("checksum", f"chunk {index}: {checksum.value:#x} here, {header.checksum.value:#x} sent")
        self._announced[index] = (header, True)
        self._landed += 1
        if self._landed < len(self._announced) or not self._announced[-1][0].last:
            return False
        self.seal = self._announced[-1][0].seal
        return True

    def summed(self, index: int, checksum: pb.Checksum) -> bool:
        """As `ReceiveSession.summed`, True when this share is whole."""
        if index not in self._due:
            raise RejectedChunkError("order", f"a checksum of chunk {index}, which waits for none")
        header = self._announced[index][0]
        if checksum.algorithm != header.checksum.algorithm:
            text = f"checksum {checksum.algorithm!r} where {header.checksum.algorithm!r} was announced"
            raise RejectedChunkError("algorithm", text)
        header.checksum.CopyFrom(checksum)
        computed = self._due.pop(index)
        return computed is not None and self.landed(index, computed)

    def _check_seal(self, header: pb.ChunkHeader) -> None:
        expected, seal = self.expected, header.seal
        found: dict[str, tuple[object, object]] = {
            "seal.transfer_id": (seal.transfer_id, expected.transfer_id),
            "seal.prompt_tokens": (seal.prompt_tokens, expected.plan.prompt_tokens),
            "seal.incarnation": (seal.incarnation, expected.incarnation),
            "seal.num_chunks": (seal.num_chunks, header.index + 1),
            "seal.bytes": (seal.bytes, expected.plan.slot_bytes),
            "seal.rank": (seal.rank, expected.plan.sender_rank),
            "seal.ranks": (len(seal.ranks), 0),
        }
        for name, (got, due) in found.items():
            if got != due:
                raise RejectedChunkError(name, f"{name}: {got!r} where {due!r} is due")
        for name, got_bytes, due_bytes in (
            ("seal.token_hash", seal.token_hash, expected.token_hash),
            ("seal.fingerprint", seal.fingerprint, expected.fingerprint),
        ):
            if not hmac.compare_digest(got_bytes, due_bytes):
                raise RejectedChunkError(name, f"{name}: {got_bytes.hex()} where {due_bytes.hex()} is due")


class ReceiveSession:
    """One transfer's way into one slot, from one sender or several. `hold` is None until staging was found."""

    def __init__(self, transfer_id: bytes, *, expires_at: float, now: float) -> None:
        self.transfer_id = transfer_id
        self.expires_at = expires_at
        self.hold: SlotHold | None = None
        self.content_bytes = 0
        """What of the slot is the engine's; behind it shares land that must be rearranged."""
        self.inflows: tuple[Inflow, ...] = ()
        self.verified_at: float | None = None
        """Monotonic seconds."""
        self.lent: Lent | None = None
        """Where the bytes lie, when they stay where their sender staged them and not in the slot."""
        self.resting = False
        """It has its slot, and the pull is still to come."""
        self.reason = ""
        self.machine = Machine(f"session {transfer_id.hex()}", TABLE, _S.WAITING, now)

    @property
    def state(self) -> SessionState:
        return self.machine.state

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def readable(self) -> bool:
        """An engine may take the slot."""
        return self.machine.allows(SessionEvent.TAKE)

    def view(self, staging: Memory) -> Memory:
        """What the engine reads: of receive staging, or of the sender's."""
        assert self.hold is not None
        if self.lent is not None:
            return self.lent.view(self.content_bytes)
        return staging[self.hold.slot.offset : self.hold.slot.offset + self.content_bytes]

    @property
    def let_go(self) -> bool:
        """It is over, and its engine reads nothing of it."""
        return self.ended and (self.hold is None or not self.hold.pinned(SCATTER))

    @property
    def expected(self) -> Expected | None:
        """Of the first sender."""
        return self.inflows[0].expected if self.inflows else None

    @property
    def seals(self) -> tuple[pb.Seal, ...]:
        """Every sender's, once all is verified."""
        return tuple(inflow.seal for inflow in self.inflows if inflow.seal is not None)

    @property
    def seal(self) -> pb.Seal | None:
        """The first sender's."""
        return self.inflows[0].seal if self.inflows else None

    def begin(self, expected: Expected | Sequence[Expected], hold: SlotHold, content_bytes: int | None = None) -> None:
        """The slot is there and the requests go out, one for each of `expected`. `content_bytes` None: the whole slot."""
        several = (expected,) if isinstance(expected, Expected) else tuple(expected)
        self.inflows = tuple(Inflow(one) for one in several)
        self.content_bytes = hold.slot.num_bytes if content_bytes is None else content_bytes
        self.hold = hold

    def announce(self, header: pb.ChunkHeader, now: float, *, source: int = 0, ahead: bool = False) -> tuple[int, int]:
        """Check a header of the `source`-th sender against everything known; the byte range of its share that its payload
        fills. `ahead`: of its checksum only the algorithm is known, the value comes by `summed`.

        Raises:
            RejectedChunkError: wrong transfer, order, generation, bounds, or a payload after the last one.
        """
        found = self._inflow(source).announce(header, ahead=ahead)
        self.machine.fire(_E.HEADER, now, str(header.index))
        return found

    def landed(self, index: int, checksum: pb.Checksum, now: float, *, source: int = 0) -> bool:
        """Chunk `index` of the `source`-th sender lies in the slot and had this checksum when it landed. True when that made
        the session `verified`: every chunk of every sender is there.

        Raises:
            RejectedChunkError: the checksum differs, or the chunk was not announced or landed before.
        """
        return self._verified(self._inflow(source).landed(index, checksum), now)

    def summed(self, index: int, checksum: pb.Checksum, now: float, *, source: int = 0) -> bool:
        """The sender's checksum of a chunk that was announced ahead of it. Returns and raises as `landed`: whichever of both
        comes later compares."""
        return self._verified(self._inflow(source).summed(index, checksum), now)

    def _verified(self, whole: bool, now: float) -> bool:
        if not whole or any(inflow.seal is None for inflow in self.inflows):
            return False
        self.machine.fire(_E.VERIFY, now)
        self.verified_at = now
        return True

    def end(self, event: SessionEvent, reason: str, now: float) -> bool:
        """`FAIL`, `ABANDON` or `SCATTERED`. Idempotent: False when it had ended before or the event came too late."""
        if not self.machine.allows(event):
            return False
        self.machine.fire(event, now, reason)
        self.reason = reason
        if self.hold is not None:
            self.hold.end()
        return True

    def _inflow(self, source: int) -> Inflow:
        if not self.inflows:
            raise RejectedChunkError("order", "a chunk before anything was asked for")
        return self.inflows[source]
