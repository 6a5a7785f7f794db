"""The colocated leg: one engine computes the prompt and continues. No transfer, no lease."""

from __future__ import annotations

from functools import partial

from decode.config import DecodeSettings
from decode.generation import stream_generation
from engine.protocol import EngineOutput, EngineRequest
from engine.worker.admission import Admission, Ticket
from engine.worker.legs import EngineTimes, LegCall, WorkerContext, check_prompt, sampling_of
from protos.splitpoint.v1 import worker_pb2


class ColocatedService:
    """One worker's colocated legs."""

    def __init__(self, context: WorkerContext, settings: DecodeSettings) -> None:
        self._context = context
        self.admission = Admission(settings.max_waiting_requests, settings.max_waiting_tokens)
        gauge = context.metrics.gauge
        gauge("colocated_waiting_requests", "Colocated legs without a first token.", lambda: self.admission.waiting_requests)
        gauge("colocated_waiting_tokens", "Their prompt tokens.", lambda: self.admission.waiting_tokens)

    async def colocated(self, call: LegCall, leg: worker_pb2.ColocatedLeg) -> None:
        """Run one `ColocatedLeg`.

        Raises:
            SplitpointError: PROMPT_TOO_LONG, INVALID_VALUE, QUEUE_FULL.
            EngineDeadError: the engine is gone.
        """
        prompt = list(leg.prompt_token_ids)
        check_prompt(prompt, self._context.info.max_model_len)
        sampling = sampling_of(leg.sampling_params)
        ticket = self.admission.admit(len(prompt))
        call.defer(partial(self._leave, ticket))

        def on_first(output: EngineOutput) -> bool:
            self.admission.started(ticket, self._context.now())
            return False

        await stream_generation(
            call,
            self._context,
            EngineRequest(request_id=call.attempt_id, prompt_token_ids=prompt, sampling=sampling),
            EngineTimes(before_engine_s=call.elapsed_s()),
            phase="colocated",
            on_first=on_first,
        )

    async def _leave(self, ticket: Ticket) -> None:
        self.admission.left(ticket)
