"""The prepare and decode legs: pull a prompt's KV into staging, then continue from it. Waiting is done outside the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from functools import partial

from decode.colocated import ColocatedService
from decode.config import DecodeSettings
from decode.generation import stream_generation
from decode.intake import Intake, IntakeState, Staged, Transfer
from engine.protocol import EngineOutput, EngineRequest, KvReceive
from engine.worker.admission import Admission, Ticket
from engine.worker.legs import (
    EngineTimes,
    LegCall,
    LegHandler,
    LegHandlers,
    WorkerContext,
    check_prompt,
    checked_grant,
    sampling_of,
)
from engine.worker.seals import seal_mismatch
from protos.errors import Code, SplitpointError, invalid
from protos.ids import TransferId
from protos.splitpoint.v1 import worker_pb2

_log = logging.getLogger(__name__)

EXPIRY_GRACE_S = 5.0
"""A transfer is kept this long beyond its request's deadline, for a release that is on its way."""


def handlers(context: WorkerContext, settings: DecodeSettings) -> LegHandlers:
    """The prepare, decode and colocated legs' handlers, for the worker's server."""
    service = DecodeService(context, settings)
    colocated = ColocatedService(context, settings)
    legs: dict[str, LegHandler] = {"prepare": service.prepare, "decode": service.decode, "colocated": colocated.colocated}
    return LegHandlers(legs=legs, owners=(service,))


@dataclass(slots=True, eq=False)
class _Entry:
    """What the shell keeps beside a transfer's pure state."""

    transfer: Transfer
    ticket: Ticket
    expiry: asyncio.TimerHandle
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing more will arrive: a decode leg that waits may look."""
    pull: asyncio.Timeout | None = None
    """Ends the running pull when it is rescheduled."""


class DecodeService:
    """One worker's transfers and decode legs.

    A transfer's slots are released at the engine's first output, and at every other end: its pull fails, its prepare leg is
    aborted, its decode leg ends, a `ReleaseLeg` comes, its time is over, the worker stops.
    """

    def __init__(self, context: WorkerContext, settings: DecodeSettings) -> None:
        self._context = context
        self._settings = settings
        self.intake = Intake(context.metrics.events)
        self._entries: dict[TransferId, _Entry] = {}
        self.admission = Admission(settings.max_waiting_requests, settings.max_waiting_tokens)
        gauge = context.metrics.gauge
        gauge("decode_waiting_requests", "Prepared or decoding, without an own token.", lambda: self.admission.waiting_requests)
        gauge("decode_transfers", "Transfers that hold staging.", self.open_transfers)

    async def prepare(self, call: LegCall, leg: worker_pb2.PrepareLeg) -> None:
        """Run one `PrepareLeg`: pull on every rank, answer when staged and verified.

        Raises:
            SplitpointError: QUEUE_FULL, INCOMPATIBLE_PEER, TRANSFER_REFUSED, and what the ranks answer (STAGING_FULL,
                TRANSFER_FAILED, ...).
        """
        ranks, _ = self._context.transfer()
        entry = self._open(call, leg)
        transfer = entry.transfer
        call.defer(partial(self._prepare_ended, entry))
        self.intake.pulling(transfer, self._context.now())
        try:
            async with asyncio.timeout(None) as entry.pull:
                responses = await ranks.pull(
                    leg.grant,
                    attempt_id=call.attempt_id,
                    senders=list(leg.prefill_ranks),
                    prompt_tokens=leg.prompt_tokens,
                    token_hash=leg.token_hash,
                    transport=leg.transport,
                    remaining_s=call.remaining_s(),
                    staging_wait_s=self._settings.staging_wait_s,
                )
        except SplitpointError as error:
            self._context.metrics.event(f"pull_{error.code}")
            if self.intake.failed(transfer, error, self._context.now()):
                self.admission.left(entry.ticket)
                entry.settled.set()
            raise
        except TimeoutError:
            if transfer.state is not IntakeState.RELEASED:
                raise
            raise _released(transfer) from None
        staged = Staged(
            seals=tuple(seal for r in responses for seal in r.seals or [r.seal]),
            bytes=sum(r.bytes for r in responses),
            seconds=max(r.seconds for r in responses),
            transport=responses[0].transport,
        )
        if not self.intake.arrived(transfer, staged, self._context.now()):
            raise _released(transfer)
        entry.settled.set()
        self._context.metrics.stage("transfer", staged.seconds)
        call.staged(worker_pb2.StagedEvent(bytes=staged.bytes, seconds=staged.seconds, transport=staged.transport))

    async def decode(self, call: LegCall, leg: worker_pb2.DecodeLeg) -> None:
        """Run one `DecodeLeg`: wait for the KV within the leg's deadline, check it, continue from it.

        Raises:
            SplitpointError: TRANSFER_REFUSED (unknown, over, taken; or the seal does not fit), TRANSFER_FAILED,
                INVALID_VALUE, PROMPT_TOO_LONG, QUEUE_FULL (when the prompt is to be computed here).
            EngineDeadError: the engine is gone.
        """
        transfer_id = TransferId(leg.transfer_id)
        transfer = self.intake.claim(transfer_id)
        entry = self._entries[transfer_id]
        call.defer(partial(self._end, transfer_id, "decode_ended"))
        prompt = list(leg.prompt_token_ids)
        tokens = [*prompt, *leg.output_token_ids]
        check_prompt(tokens, self._context.info.max_model_len)
        sampling = sampling_of(leg.sampling_params)
        if sampling.prompt_logprobs is not None:
            raise invalid("sampling_params.prompt_logprobs", "belongs to the prefill leg: loaded KV has none")
        await entry.settled.wait()
        times = EngineTimes(transfer_wait_s=call.elapsed_s())
        self._context.metrics.stage("transfer_wait", times.transfer_wait_s)
        kv = self._take(entry, leg, prompt, times)
        if kv is None:
            self._readmit(call, entry, len(tokens))
        times.before_engine_s = call.elapsed_s()

        def on_first(output: EngineOutput) -> bool:
            self.admission.started(entry.ticket, self._context.now())
            call.spawn(self._end(transfer_id, "loaded"))
            if kv is None:
                return True
            # Loaded KV counts as cached; the engine always computes the last token.
            if output.cached_tokens + 1 >= kv.staged_tokens:
                return False
            self._note_recompute("engine_recomputed", transfer, f"cached_tokens={output.cached_tokens}")
            return True

        await stream_generation(
            call,
            self._context,
            EngineRequest(request_id=call.attempt_id, prompt_token_ids=tokens, sampling=sampling, kv=kv),
            times,
            phase="decode",
            on_first=on_first,
        )

    # -- transfers ------------------------------------------------------------------------------------------------------

    async def release(self, transfer_id: TransferId, reason: str) -> bool:
        """End a transfer. Idempotent; False when it was not known."""
        return await self._end(transfer_id, reason)

    def open_transfers(self) -> int:
        """Transfers that hold or may come to hold staging."""
        return self.intake.holding()

    def transfers(self) -> list[TransferId]:
        """Every transfer that is not over, failed ones included."""
        return self.intake.known()

    async def close(self) -> None:
        """End every transfer."""
        await asyncio.gather(*(self._end(transfer_id, "worker_stops") for transfer_id in self.intake.known()))

    def _open(self, call: LegCall, leg: worker_pb2.PrepareLeg) -> _Entry:
        _, facts = self._context.transfer()
        transfer_id = checked_grant(leg.grant)
        if not leg.prefill_ranks:
            raise SplitpointError(Code.INCOMPATIBLE_PEER, "the prefill worker names no ranks")
        if not 0 < leg.prompt_tokens <= facts.max_transfer_tokens:
            raise SplitpointError(
                Code.TRANSFER_REFUSED,
                f"{leg.prompt_tokens} prompt tokens; this worker's staging holds 1 to {facts.max_transfer_tokens}",
                param="prompt_tokens",
            )
        # With its KV staged a decode computes one token, whatever its prompt: it is admitted as that.
        ticket = self.admission.admit(1)
        try:
            transfer = self.intake.prepare(
                transfer_id,
                attempt_id=call.attempt_id,
                prompt_tokens=leg.prompt_tokens,
                token_hash=leg.token_hash,
                prefill_incarnation=leg.prefill_incarnation,
                now=self._context.now(),
            )
        except SplitpointError:
            self.admission.left(ticket)
            raise
        expiry = asyncio.get_running_loop().call_later(call.remaining_s() + EXPIRY_GRACE_S, self._expire, transfer_id)
        entry = self._entries[transfer_id] = _Entry(transfer, ticket, expiry)
        return entry

    async def _prepare_ended(self, entry: _Entry) -> None:
        """A pull that failed keeps its transfer, so that a decode leg can compute the prompt; one that was cut off ends it."""
        transfer = entry.transfer
        if transfer.state is IntakeState.PULLING:
            await self._end(transfer.transfer_id, "prepare_cut_off")
        elif transfer.state in (IntakeState.FAILED, IntakeState.RELEASED):
            await self._release_slots(transfer.transfer_id, "pull_failed")

    async def _end(self, transfer_id: TransferId, reason: str) -> bool:
        transfer = self.intake.release(transfer_id, reason, self._context.now())
        if transfer is None:
            return False
        entry = self._entries.pop(transfer_id)
        entry.expiry.cancel()
        self.admission.left(entry.ticket)
        entry.settled.set()
        if entry.pull is not None and not entry.pull.expired():
            with contextlib.suppress(RuntimeError):  # the pull is over
                entry.pull.reschedule(asyncio.get_running_loop().time())
        await self._release_slots(transfer_id, reason)
        return True

    async def _release_slots(self, transfer_id: TransferId, reason: str) -> None:
        ranks, _ = self._context.transfer()
        await ranks.release(transfer_id, reason)

    def _expire(self, transfer_id: TransferId) -> None:
        self._context.metrics.event("transfer_expired")
        _log.warning("nobody consumed transfer_id=%s", transfer_id.hex())
        self._context.spawn(self._end(transfer_id, "expired"))

    def _take(self, entry: _Entry, leg: worker_pb2.DecodeLeg, prompt: list[int], times: EngineTimes) -> KvReceive | None:
        """The staged KV of a settled transfer, or None when the prompt is to be computed here.

        Raises:
            SplitpointError: TRANSFER_FAILED or TRANSFER_REFUSED, when there is none and `allow_recompute` is false.
        """
        transfer = entry.transfer
        if transfer.state is IntakeState.STAGED:
            assert transfer.staged is not None
            mismatch = _mismatch(transfer, transfer.staged, leg, prompt)
            if not mismatch:
                staged = self.intake.consume(transfer, self._context.now())
                times.transfer_s, times.transfer_bytes = staged.seconds, staged.bytes
                return KvReceive(transfer.transfer_id, transfer.prompt_tokens)
            self._context.metrics.event("seal_mismatch")
            error = SplitpointError(Code.TRANSFER_REFUSED, f"transfer {transfer.transfer_id.hex()}: {mismatch}")
        elif transfer.error is not None:
            error = SplitpointError(Code.TRANSFER_FAILED, f"the KV did not arrive: {transfer.error}")
        else:
            error = _released(transfer)
        if not leg.allow_recompute:
            raise error
        self._note_recompute("decode_recomputed", transfer, str(error))
        return None

    def _readmit(self, call: LegCall, entry: _Entry, tokens: int) -> None:
        """Admit a decode leg again, now as the prompt it has to compute. Raises `SplitpointError(QUEUE_FULL)`."""
        self.admission.left(entry.ticket)
        entry.ticket = self.admission.admit(tokens)
        call.defer(partial(self._leave, entry.ticket))

    async def _leave(self, ticket: Ticket) -> None:
        self.admission.left(ticket)

    def _note_recompute(self, event: str, transfer: Transfer, why: str) -> None:
        self._context.metrics.event(event)
        _log.warning("prompt computed on decode transfer_id=%s why=%s", transfer.transfer_id.hex(), why)


def _released(transfer: Transfer) -> SplitpointError:
    return SplitpointError(Code.TRANSFER_REFUSED, f"transfer {transfer.transfer_id.hex()} was released")


def _mismatch(transfer: Transfer, staged: Staged, leg: worker_pb2.DecodeLeg, prompt: list[int]) -> str:
    if not leg.HasField("seal"):
        return "seal: missing"
    if leg.seal.transfer_id != transfer.transfer_id:
        return "seal.transfer_id: of another transfer"
    if not leg.seal.prompt_tokens == transfer.prompt_tokens == len(prompt):
        return f"prompt_tokens: sealed {leg.seal.prompt_tokens}, pulled {transfer.prompt_tokens}, asked {len(prompt)}"
    return seal_mismatch(leg.seal, staged.seals, prompt, transfer.prefill_incarnation)
