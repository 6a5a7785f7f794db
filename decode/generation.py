"""One engine request as a stream of leg events: what the decode leg and the colocated leg have in common."""

from __future__ import annotations

from collections.abc import Callable

from engine.protocol import EngineOutput, EngineRequest
from engine.worker.legs import EngineTimes, LegCall, WorkerContext, run_engine, tokens_event
from protos.splitpoint.v1 import worker_pb2


async def stream_generation(
    call: LegCall,
    context: WorkerContext,
    request: EngineRequest,
    times: EngineTimes,
    *,
    phase: str,
    on_first: Callable[[EngineOutput], bool],
) -> None:
    """Run `request` and emit its tokens; the last output goes out as `FinishedEvent`.

    `on_first` is called with the first output, before it is emitted, and says whether the engine computed KV that it
    should have received. `phase` labels the stage metrics.

    Raises:
        SplitpointError, EngineDeadError: as `run_engine`.
    """
    recomputed = False

    async def on_output(output: EngineOutput) -> None:
        nonlocal recomputed
        if not times.seen_first:
            recomputed = on_first(output)
        times.note(output, call.elapsed_s())
        if output.finish_reason is None:
            await call.tokens(tokens_event(output))

    last = await run_engine(context, request, on_output)
    context.metrics.stage(f"{phase}_queued", times.queued_s)
    context.metrics.stage(f"{phase}_computing", times.computing_s)
    context.metrics.stage(f"{phase}_decoding", times.decoding_s)
    call.finished(
        worker_pb2.FinishedEvent(
            finish_reason=last.finish_reason or "",
            matched_token_id=last.matched_token_id,
            last=tokens_event(last),
            times=times.to_proto(call.elapsed_s()),
            recomputed=recomputed,
        )
    )
