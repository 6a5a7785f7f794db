"""`splitpoint bench serve-path --parity` against a service whose paths part where two candidates nearly tie."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.bench.serve_path import ServePathSpec, parity
from protos.splitpoint.v1 import common_pb2, generation_pb2

pytestmark = pytest.mark.timeout(60)


class Parting:
    """Answers `1 2 3`; to the split path, asked for three tokens of input, `1 9 3`, where 2 and 9 nearly tie."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        split = dict(context.invocation_metadata())["x-splitpoint-path"] == "split"
        parts = split and len(request.tokenized.input_ids) == 3
        assert request.sampling_params.logprobs >= 2
        second = [(9, -0.70), (2, -0.72)] if parts else [(2, -0.69), (9, -0.74)]
        rows = [[(1, -0.1), (5, -3.0 if split else -3.25)], second, [(3, -0.2), (4, -2.0)]]
        positions = [
            common_pb2.PositionLogprobs(entries=[common_pb2.TokenLogprob(token_id=t, logprob=p) for t, p in row]) for row in rows
        ]
        ids = [row[0][0] for row in rows]
        yield generation_pb2.GenerateResponse(complete=generation_pb2.GenerateComplete(output_ids=ids, logprobs=positions))


async def test_where_the_paths_part_the_record_says_how_near_a_tie_that_was() -> None:
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        Parting().Generate,
        request_deserializer=generation_pb2.GenerateRequest.FromString,
        response_serializer=generation_pb2.GenerateResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("splitpoint.v1.GenerationService", {"Generate": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    times_cleared = 0

    async def cleared() -> None:
        nonlocal times_cleared
        times_cleared += 1

    spec = ServePathSpec(parity_lengths=(3, 5), parity_output_tokens=3)
    try:
        found = await parity(f"127.0.0.1:{port}", spec, ("a text",), cleared=cleared)
        uncleared = await parity(f"127.0.0.1:{port}", spec, ("a text",))
    finally:
        await server.stop(0)
    assert times_cleared == 3 * 4, "three prompts, split once and colocated three times"
    assert uncleared == {**found, "caches_emptied": False}
    assert (found["compared"], found["equal"], found["floor"]) == (3, 2, 3)
    assert found["floor_nats"] == 0.0
    assert found["moved_nats"] == pytest.approx(0.25, abs=1e-5), "of the first token, where both had said the same"
    (parted,) = found["different"]
    assert (parted["prompt"], parted["position"], parted["same_two_best"]) == ("3 tokens", 1, True)
    assert parted["split_gap_nats"] == pytest.approx(0.02, abs=1e-5)
    assert parted["colocated_gap_nats"] == pytest.approx(0.05, abs=1e-5)
