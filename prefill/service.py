"""The prefill leg: admit, reserve staging, compute the prompt, answer with the first token and the seal."""

from __future__ import annotations

from functools import partial

from engine.handover import prefill_params
from engine.protocol import EngineOutput, EngineRequest, KvSend
from engine.worker.admission import Admission, Ticket
from engine.worker.legs import (
    EngineTimes,
    LegCall,
    LegHandlers,
    WorkerContext,
    check_prompt,
    checked_grant,
    run_engine,
    sampling_of,
    tokens_event,
)
from engine.worker.seals import make_seal
from prefill.config import PrefillSettings
from protos.errors import Code, SplitpointError
from protos.ids import TransferId, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2


def handlers(context: WorkerContext, settings: PrefillSettings) -> LegHandlers:
    """The prefill leg's handler, for the worker's server."""
    return LegHandlers(legs={"prefill": PrefillService(context, settings).prefill})


class PrefillService:
    """One worker's prefill legs.

    A leg's send slot is reserved before the engine hears of the request, and released in every end but the sealed one: from
    there on the lease belongs to the transfer, and ends with the peer's `Complete`, a `ReleaseLeg`, or its expiry.
    """

    def __init__(self, context: WorkerContext, settings: PrefillSettings) -> None:
        self._context = context
        self._settings = settings
        self.admission = Admission(settings.max_waiting_requests, settings.max_waiting_tokens)
        context.metrics.gauge(
            "prefill_waiting_requests", "Prefill legs without a first token.", lambda: self.admission.waiting_requests
        )
        context.metrics.gauge("prefill_waiting_tokens", "Their prompt tokens.", lambda: self.admission.waiting_tokens)

    async def prefill(self, call: LegCall, leg: worker_pb2.PrefillLeg) -> None:
        """Run one `PrefillLeg`.

        Raises:
            SplitpointError: PROMPT_TOO_LONG, INVALID_VALUE, QUEUE_FULL, STAGING_FULL (no room within `staging_wait_s`),
                TRANSFER_REFUSED (the prompt can never fit this worker's staging, or the engine has no KV transfer).
            EngineDeadError: the engine is gone.
        """
        prompt = list(leg.prompt_token_ids)
        check_prompt(prompt, self._context.info.max_model_len)
        sampling = prefill_params(sampling_of(leg.sampling_params))
        ticket = self.admission.admit(len(prompt))
        call.defer(partial(self._leave, ticket))
        transfer_id: TransferId | None = None
        if leg.HasField("grant"):
            transfer_id = checked_grant(leg.grant)
            await self._reserve(call, leg.grant, prompt)
        times = EngineTimes(before_engine_s=call.elapsed_s())

        async def on_output(output: EngineOutput) -> None:
            self.admission.started(ticket, self._context.now())
            times.note(output, call.elapsed_s())

        request = EngineRequest(
            request_id=call.attempt_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            kv=None if transfer_id is None else KvSend(transfer_id),
        )
        output = await run_engine(self._context, request, on_output)
        first = tokens_event(output)
        self._context.metrics.stage("prefill_queued", times.queued_s)
        self._context.metrics.stage("prefill_computing", times.computing_s)
        if transfer_id is None or output.finish_reason == "stop":
            call.finished(
                worker_pb2.FinishedEvent(
                    finish_reason=output.finish_reason or "",
                    matched_token_id=output.matched_token_id,
                    last=first,
                    times=times.to_proto(call.elapsed_s()),
                )
            )
            return
        seal = self._seal(transfer_id, prompt)
        call.sealed(worker_pb2.SealedEvent(first=first, seal=seal, times=times.to_proto(call.elapsed_s())))

    async def _reserve(self, call: LegCall, grant: kv_transfer_pb2.TransferGrant, prompt: list[int]) -> None:
        ranks, facts = self._context.transfer()
        if len(prompt) > facts.max_transfer_tokens:
            raise SplitpointError(
                Code.TRANSFER_REFUSED,
                f"{len(prompt)} prompt tokens are more than this worker's staging can hold ({facts.max_transfer_tokens})",
                param="prompt_token_ids",
            )
        # Before the call: a reservation whose answer is never read must be released too.
        call.defer(partial(self._release_unless_sealed, call, TransferId(grant.transfer_id)))
        await ranks.reserve(
            grant,
            prompt_tokens=len(prompt),
            token_hash=token_hash(prompt),
            remaining_s=call.remaining_s(),
            staging_wait_s=self._settings.staging_wait_s,
        )

    def _seal(self, transfer_id: TransferId, prompt: list[int]) -> kv_transfer_pb2.Seal:
        _, facts = self._context.transfer()
        return make_seal(transfer_id, prompt, facts, self._context.incarnation)

    async def _release_unless_sealed(self, call: LegCall, transfer_id: TransferId) -> None:
        if not call.was_sealed:
            ranks, _ = self._context.transfer()
            await ranks.release(transfer_id, "prefill_not_sealed")

    async def _leave(self, ticket: Ticket) -> None:
        self.admission.left(ticket)
