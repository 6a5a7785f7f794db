"""What a decode worker knows of each transfer, from its prepare leg to its end. Pure: events in, states and facts out.

    prepared -pull-> pulling -staged-> staged -consume-> consumed -release-> released
                        `------fail-> failed

Every state but the last can be released. A transfer is consumed once; after its end it is remembered for a while, so that a late
event is told from one of a transfer that never was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.machine import Machine, Tombstones
from protos.errors import Code, SplitpointError
from protos.ids import TransferId
from protos.splitpoint.v1 import kv_transfer_pb2


class IntakeState(StrEnum):
    PREPARED = "prepared"
    PULLING = "pulling"
    STAGED = "staged"
    FAILED = "failed"
    CONSUMED = "consumed"
    RELEASED = "released"


class IntakeEvent(StrEnum):
    PULL = "pull"
    STAGED = "staged"
    FAIL = "fail"
    CONSUME = "consume"
    RELEASE = "release"


_S, _E = IntakeState, IntakeEvent
TABLE: dict[tuple[IntakeState, IntakeEvent], IntakeState] = {
    (_S.PREPARED, _E.PULL): _S.PULLING,
    (_S.PREPARED, _E.FAIL): _S.FAILED,
    (_S.PULLING, _E.STAGED): _S.STAGED,
    (_S.PULLING, _E.FAIL): _S.FAILED,
    (_S.STAGED, _E.CONSUME): _S.CONSUMED,
    (_S.PREPARED, _E.RELEASE): _S.RELEASED,
    (_S.PULLING, _E.RELEASE): _S.RELEASED,
    (_S.STAGED, _E.RELEASE): _S.RELEASED,
    (_S.FAILED, _E.RELEASE): _S.RELEASED,
    (_S.CONSUMED, _E.RELEASE): _S.RELEASED,
}

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What arrived: verified on every rank."""

    seals: tuple[kv_transfer_pb2.Seal, ...]
    """One per rank, in rank order."""
    bytes: int
    """Of all ranks together."""
    seconds: float
    """First to last byte, of the slowest rank."""
    transport: str


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer on its way into this worker."""

    transfer_id: TransferId
    attempt_id: str
    prompt_tokens: int
    token_hash: bytes
    prefill_incarnation: str
    machine: Machine[IntakeState, IntakeEvent]
    staged: Staged | None = None
    error: SplitpointError | None = None
    claimed: bool = False

    @property
    def state(self) -> IntakeState:
        return self.machine.state


class Intake:
    """All transfers of one decode worker that are not over. `now` is the caller's monotonic clock, seconds."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        """Late, duplicate and unknown events are added to `counts`, the caller's own when given."""
        self._transfers: dict[TransferId, Transfer] = {}
        self._ended = Tombstones(_REMEMBERED)
        self.counts: Counter[str] = Counter() if counts is None else counts

    def __len__(self) -> int:
        return len(self._transfers)

    def known(self) -> list[TransferId]:
        """Every transfer that is not over, failed ones included."""
        return list(self._transfers)

    def holding(self) -> int:
        """Transfers that hold or may come to hold staging."""
        return sum(1 for t in self._transfers.values() if t.state is not IntakeState.FAILED)

    def prepare(
        self,
        transfer_id: TransferId,
        *,
        attempt_id: str,
        prompt_tokens: int,
        token_hash: bytes,
        prefill_incarnation: str,
        now: float,
    ) -> Transfer:
        """A prepare leg has come.

        Raises:
            SplitpointError: TRANSFER_REFUSED, the id is in use or has been (ids are single-use).
        """
        known = self._transfers.get(transfer_id)
        ended = self._ended.get(transfer_id)
        if known is not None or ended is not None:
            self.counts["prepare_duplicate"] += 1
            state = known.state if known is not None else ended
            raise SplitpointError(Code.TRANSFER_REFUSED, f"transfer {transfer_id.hex()} is {state} here already")
        transfer = Transfer(
            transfer_id=transfer_id,
            attempt_id=attempt_id,
            prompt_tokens=prompt_tokens,
            token_hash=token_hash,
            prefill_incarnation=prefill_incarnation,
            machine=Machine(f"intake {transfer_id.hex()}", TABLE, IntakeState.PREPARED, now),
        )
        self._transfers[transfer_id] = transfer
        return transfer

    def pulling(self, transfer: Transfer, now: float) -> None:
        """The ranks were asked to pull."""
        transfer.machine.fire(IntakeEvent.PULL, now)

    def arrived(self, transfer: Transfer, staged: Staged, now: float) -> bool:
        """All ranks have staged and verified. False, and counted, when the transfer is over: the slots must be released."""
        if not self._expected(transfer, IntakeEvent.STAGED):
            return False
        transfer.staged = staged
        transfer.machine.fire(IntakeEvent.STAGED, now)
        return True

    def failed(self, transfer: Transfer, error: SplitpointError, now: float) -> bool:
        """The pull failed. False, and counted, when the transfer is over."""
        if not self._expected(transfer, IntakeEvent.FAIL):
            return False
        transfer.error = error
        transfer.machine.fire(IntakeEvent.FAIL, now, error.code.value)
        return True

    def claim(self, transfer_id: TransferId) -> Transfer:
        """A decode leg takes charge of the transfer it names, whatever its state; only one leg can.

        Raises:
            SplitpointError: TRANSFER_REFUSED, it never was prepared here, or it is over, or another leg has it.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.claimed:
            how = self._ended.get(transfer_id) if transfer is None else "claimed"
            self.counts["decode_unknown" if how is None else "decode_late"] += 1
            raise SplitpointError(Code.TRANSFER_REFUSED, f"transfer {transfer_id.hex()} is {how or 'not known'} here")
        transfer.claimed = True
        return transfer

    def consume(self, transfer: Transfer, now: float) -> Staged:
        """A decode leg takes the staged KV, once. Raises `InvalidTransition` when it is not staged."""
        transfer.machine.fire(IntakeEvent.CONSUME, now)
        assert transfer.staged is not None
        return transfer.staged

    def release(self, transfer_id: TransferId, reason: str, now: float) -> Transfer | None:
        """End a transfer, in whatever state. Idempotent: None when it is over or never was; else its slots must be released."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return None
        transfer.machine.fire(IntakeEvent.RELEASE, now, reason)
        self._ended.add(transfer_id, f"released ({reason})")
        return transfer

    def _expected(self, transfer: Transfer, event: IntakeEvent) -> bool:
        if transfer.machine.allows(event):
            return True
        self.counts[f"late_{event}"] += 1
        return False
