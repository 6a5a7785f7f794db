"""The decode side of one rank: one receive session per transfer, from the first header to the engine's scatter.

Pure. `verified` is reached only when every chunk came in order and in bounds, of one generation, with the right checksum, the
byte count is whole, and the seal is of the prompt, the layout and the process that was asked (rule 3).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.machine import Machine
from kvtransfer.plan import TransferPlan
from kvtransfer.staging import SlotHold
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
    (_S.VERIFIED, _E.ABANDON): _S.ABANDONED,
    (_S.TAKEN, _E.TAKE): _S.TAKEN,
    (_S.TAKEN, _E.SCATTERED): _S.SCATTERED,
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
    """What the receiver knows before the first byte, from its own actor and the handshake."""

    transfer_id: bytes
    plan: TransferPlan
    token_hash: bytes
    fingerprint: bytes
    incarnation: str
    checksum: str


class ReceiveSession:
    """One transfer's way into one slot. `hold` is None until staging was found."""

    def __init__(self, transfer_id: bytes, *, expires_at: float, now: float) -> None:
        self.transfer_id = transfer_id
        self.expires_at = expires_at
        self.hold: SlotHold | None = None
        self.expected: Expected | None = None
        self.seal: pb.Seal | None = None
        self.reason = ""
        self.machine = Machine(f"session {transfer_id.hex()}", TABLE, _S.WAITING, now)
        self._announced: list[tuple[pb.ChunkHeader, bool]] = []
        self._announced_bytes = 0
        self._landed = 0

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

    def begin(self, expected: Expected, hold: SlotHold) -> None:
        """The slot is there and the request goes out."""
        self.expected = expected
        self.hold = hold

    def announce(self, header: pb.ChunkHeader, now: float) -> tuple[int, int]:
        """Check a header against everything known; the byte range of the slot that its payload fills.

        Raises:
            RejectedChunkError: wrong transfer, order, generation, bounds, or a payload after the last one.
        """
        expected = self._expected()
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
        end = header.offset + header.bytes
        if end > plan.total_bytes or header.last != (end == plan.total_bytes):
            raise RejectedChunkError("bounds", f"bytes {header.offset} to {end} (last: {header.last}) of {plan.total_bytes}")
        if header.checksum.algorithm not in ACCEPTED[expected.checksum]:
            raise RejectedChunkError(
                "algorithm", f"checksum {header.checksum.algorithm!r} where {expected.checksum!r} is required"
            )
        if header.last:
            self._check_seal(header)
        self.machine.fire(_E.HEADER, now, str(header.index))
        self._announced.append((header, False))
        self._announced_bytes = end
        return header.offset, end

    def landed(self, index: int, checksum: pb.Checksum, now: float) -> bool:
        """Chunk `index` lies in the slot and has this checksum there. True when that made the session `verified`.

        Raises:
            RejectedChunkError: the checksum differs, or the chunk was not announced or landed before.
        """
        if index >= len(self._announced) or self._announced[index][1]:
            raise RejectedChunkError("order", f"chunk {index} landed twice or unannounced")
        header = self._announced[index][0]
        if header.checksum != checksum:
            raise RejectedChunkError("checksum", f"chunk {index}: {checksum.value:#x} here, {header.checksum.value:#x} sent")
        self._announced[index] = (header, True)
        self._landed += 1
        if self._landed < len(self._announced) or not self._announced[-1][0].last:
            return False
        self.seal = self._announced[-1][0].seal
        self.machine.fire(_E.VERIFY, now)
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

    def _expected(self) -> Expected:
        if self.expected is None:
            raise RejectedChunkError("order", "a chunk before anything was asked for")
        return self.expected

    def _check_seal(self, header: pb.ChunkHeader) -> None:
        expected, seal = self._expected(), header.seal
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
