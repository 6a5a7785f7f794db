"""A worker behind its real server and mux, over loopback: parity of the paths, refusals, drain, odd messages, slow gateways."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode.config import DecodeSettings
from engine.sampling import SamplingParams
from engine.worker.config import WorkerSettings
from engine.worker.server import SERVICE
from prefill.config import PrefillSettings
from protos.errors import Code
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc
from tests.support.pair import pair_of
from tests.support.workers import (
    BLOCK_BYTES,
    TOKEN,
    colocated_leg,
    decode_leg,
    engine_settings,
    failure,
    header,
    new_grant,
    prefill_leg,
    prepare_leg,
    running,
    start_worker,
)

pytestmark = pytest.mark.timeout(60)

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = list(range(10, 60))


@pytest.mark.parametrize("wire", [False, True], ids=["memory", "grpc"])
async def test_split_equals_colocated_for_many_seeds(wire: bool) -> None:
    async with pair_of(wire=wire) as pair:
        for seed in range(40):
            rng = random.Random(seed)
            prompt = [rng.randrange(3, 997) for _ in range(rng.choice([1, 7, 8, 9, 16, 31, 33, 64, 100]))]
            sampling = SamplingParams(
                max_tokens=rng.choice([1, 2, 3, 20]),
                temperature=rng.choice([0, 0.8]),
                seed=seed,
                stop_token_ids=tuple(rng.sample(range(997), 100)),
                ignore_eos=rng.random() < 0.5,
            )
            split = await pair.split(prompt, sampling, forward=rng.random() < 0.7)
            assert split == await pair.colocated(prompt, sampling), f"seed {seed}"
        await pair.empty()
        assert "decode_recomputed" not in pair.d.events()


async def test_a_worker_forgets_the_transfers_it_has_ended_itself() -> None:
    async with pair_of() as pair:
        await pair.split(PROMPT, GREEDY)
        await pair.d.server.attempts.wait_idle()
        assert len(pair.d.server.transfers) == 0, "a stream's end would release each of them once more"
        assert len(pair.p.server.transfers) == 1, "its peer ends a sealed one without a word"
        grant = new_grant()
        refused = await pair.to_p.send(prefill=prefill_leg([1] * 10_000, GREEDY, grant))
        failure(await pair.to_p.event(refused))
        await pair.p.server.attempts.wait_idle()
        assert len(pair.p.server.transfers) == 1


async def test_concurrent_split_requests_agree_with_colocated() -> None:
    async with pair_of(wire=True, staging_blocks=40) as pair:
        prompts = [[3 + (7 * i + j) % 900 for j in range(20 + 5 * i)] for i in range(16)]
        split = await asyncio.gather(*(pair.split(p, GREEDY) for p in prompts))
        assert split == [await pair.colocated(p, GREEDY) for p in prompts]
        await pair.empty()


async def test_several_ranks_move_together() -> None:
    async with pair_of(wire=True, engine=engine_settings(tensor_parallel_size=2)) as pair:
        assert len(pair.p.ranks) == 2
        assert await pair.split(PROMPT, GREEDY) == await pair.colocated(PROMPT, GREEDY)
        await pair.empty()


@pytest.mark.parametrize(("prefill", "decode"), [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((8, 1), (4, 1)), ((2, 2), (1, 2))])
async def test_workers_of_different_shape_hand_over(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    """(tensor parallelism, pipeline stages): every rank of the simulated model proves each byte that it loads."""
    p, d = (engine_settings(tensor_parallel_size=tp, pipeline_parallel_size=pp) for tp, pp in (prefill, decode))
    async with pair_of(wire=True, engine=p, decode_engine=d) as pair:
        assert (len(pair.p.ranks), len(pair.d.ranks)) == (prefill[0] * prefill[1], decode[0] * decode[1])
        for prompt in (PROMPT, PROMPT[:1]):
            assert await pair.split(prompt, GREEDY) == await pair.colocated(prompt, GREEDY)
        await pair.empty()


async def test_workers_of_other_models_refuse_by_name() -> None:
    other = engine_settings(pipeline_parallel_size=2)
    async with pair_of(wire=True, decode_engine=other) as pair:
        grant = new_grant()
        failed = failure(await pair.to_d.event(await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))))
        assert failed.code == "incompatible_peer"
        assert "total_layers: 1 here, 2 there" in failed.message
        await pair.empty()


async def test_times_are_said_and_exclusive() -> None:
    async with pair_of(wire=True) as pair:
        grant = new_grant()
        prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        sealed = (await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, grant)))).sealed
        staged = (await pair.to_d.event(prepare)).staged
        assert staged.transport == "grpc"
        assert staged.bytes == sealed.seal.bytes == -(-len(PROMPT) // 8) * BLOCK_BYTES
        attempt = await pair.to_d.send(decode=decode_leg(PROMPT, list(sealed.first.token_ids), GREEDY, sealed.seal))
        _, last = await pair.to_d.last(attempt)
        assert sealed.times.computing_s > 0
        times = last.finished.times
        assert times.transfer_bytes == staged.bytes
        assert min(times.queued_s, times.computing_s, times.decoding_s, times.transfer_wait_s) >= 0
        assert times.computing_s > 0
        assert times.decoding_s > 0
        await pair.empty()


# -- refusals -------------------------------------------------------------------------------------------------------------


async def test_bad_legs_are_refused_by_name_and_leave_nothing() -> None:
    async with pair_of() as pair:
        grant, short = new_grant(), new_grant()
        short.capability = b"short"
        no_length = worker_pb2.ColocatedLeg(header=header(), prompt_token_ids=[5])
        cases: list[tuple[dict[str, Any], Code, str]] = [
            ({"prefill": prefill_leg([], GREEDY, None)}, Code.INVALID_VALUE, "prompt_token_ids"),
            ({"prefill": prefill_leg([5], GREEDY, short)}, Code.INVALID_VALUE, "grant.capability"),
            ({"prefill": prefill_leg([997], GREEDY, grant)}, Code.INVALID_VALUE, "prompt_token_ids"),
            ({"prefill": prefill_leg([5] * 512, GREEDY, grant)}, Code.PROMPT_TOO_LONG, "prompt_token_ids"),
            ({"colocated": colocated_leg([], GREEDY)}, Code.INVALID_VALUE, "prompt_token_ids"),
            ({"colocated": colocated_leg([5] * 512, GREEDY)}, Code.PROMPT_TOO_LONG, "prompt_token_ids"),
            ({"colocated": colocated_leg([5], SamplingParams(max_tokens=0))}, Code.INVALID_VALUE, "max_tokens"),
            ({"colocated": no_length}, Code.INVALID_VALUE, "sampling_params"),
        ]
        for leg, code, param in cases:
            error = failure(await pair.to_p.event(await pair.to_p.send(**leg)))
            assert (error.code, error.param) == (code, param), leg
        await pair.empty()
        assert pair.p.server.metrics.events["leg_fault"] == 0


async def test_a_prompt_that_can_never_be_staged_is_refused_with_the_limit() -> None:
    async with pair_of(staging_blocks=4) as pair:
        long = [5] * 33
        on_p = await pair.to_p.send(prefill=prefill_leg(long, GREEDY, new_grant()))
        on_d = await pair.to_d.send(prepare=prepare_leg(long, pair.p, new_grant()))
        for event in (await pair.to_p.event(on_p), await pair.to_d.event(on_d)):
            error = failure(event)
            assert error.code is Code.TRANSFER_REFUSED
            assert "32" in error.message
        await pair.empty()


@pytest.mark.parametrize("wire", [False, True], ids=["memory", "grpc"])
async def test_full_send_staging_is_waited_for_and_then_refused(wire: bool) -> None:
    prefill = PrefillSettings(staging_wait_s=0.1)
    async with pair_of(wire=wire, staging_blocks=8, prefill_settings=prefill) as pair:
        first = new_grant()
        held = await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg([5] * 40, GREEDY, first)))
        assert held.WhichOneof("event") == "sealed"
        refused = await pair.to_p.send(prefill=prefill_leg([6] * 40, GREEDY, new_grant()))
        assert failure(await pair.to_p.event(refused)).code is Code.STAGING_FULL
        await pair.to_p.release(first.transfer_id)
        free = new_grant()
        again = await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg([6] * 40, GREEDY, free)))
        assert again.WhichOneof("event") == "sealed"
        await pair.to_p.release(free.transfer_id)
        await pair.empty()


async def test_full_receive_staging_is_waited_for_and_then_refused() -> None:
    decode = DecodeSettings(staging_wait_s=0.1)
    async with pair_of(staging_blocks=8, decode_settings=decode) as pair:
        pair.p.clock.hold()  # nothing is ever staged
        first = new_grant()
        await pair.to_p.send(prefill=prefill_leg([5] * 40, GREEDY, first))
        waiting = await pair.to_d.send(prepare=prepare_leg([5] * 40, pair.p, first))
        refused = await pair.to_d.send(prepare=prepare_leg([6] * 40, pair.p, new_grant()))
        assert failure(await pair.to_d.event(refused)).code is Code.STAGING_FULL
        await pair.to_d.abort(waiting)
        assert failure(await pair.to_d.event(waiting)).code is Code.CANCELLED
        pair.p.clock.let_go()
        await pair.to_p.release(first.transfer_id)
        await pair.empty()


async def test_admission_refuses_beyond_its_bound_and_forgets_who_left() -> None:
    worker = await start_worker(None, decode_settings=DecodeSettings(max_waiting_requests=2))
    async with running(worker):
        gateway = await worker.gateway()
        inside = worker.clock.hold()
        waiting = [await gateway.send(colocated=colocated_leg(PROMPT, GREEDY)) for _ in range(2)]
        await inside.wait()
        refused = failure(await gateway.event(await gateway.send(colocated=colocated_leg(PROMPT, GREEDY))))
        assert refused.code is Code.QUEUE_FULL
        assert refused.retry_after_s > 0
        for attempt in waiting:
            await gateway.abort(attempt)
            assert failure(await gateway.event(attempt)).code is Code.CANCELLED
        worker.clock.let_go()
        _, last = await gateway.last(await gateway.send(colocated=colocated_leg(PROMPT, GREEDY)))
        assert last.WhichOneof("event") == "finished"


async def test_a_worker_without_kv_transfer_refuses_what_needs_it() -> None:
    worker = await start_worker(None)
    async with running(worker):
        gateway = await worker.gateway()
        attempt = await gateway.send(prefill=prefill_leg(PROMPT, GREEDY, new_grant()))
        assert failure(await gateway.event(attempt)).code is Code.TRANSFER_REFUSED
        attempt = await gateway.send(prefill=prefill_leg(PROMPT, GREEDY, None))
        event = await gateway.event(attempt)
        assert event.finished.finish_reason == "length"
        assert len(event.finished.last.token_ids) == 1


async def test_decode_is_refused_for_unknown_foreign_and_used_transfers() -> None:
    async with pair_of() as pair:
        grant = new_grant()
        prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        sealed = (await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, grant)))).sealed
        await pair.to_d.event(prepare)
        first = list(sealed.first.token_ids)

        unknown = decode_leg(PROMPT, first, GREEDY, sealed.seal, allow_recompute=True)
        unknown.transfer_id = bytes(16)
        assert failure(await pair.to_d.event(await pair.to_d.send(decode=unknown))).code is Code.TRANSFER_REFUSED

        # The KV is of another prompt of the same length: nothing may be decoded from it.
        other = [PROMPT[0] + 1, *PROMPT[1:]]
        foreign = failure(await pair.to_d.event(await pair.to_d.send(decode=decode_leg(other, first, GREEDY, sealed.seal))))
        assert foreign.code is Code.TRANSFER_REFUSED
        assert "token_hash" in foreign.message

        used = failure(await pair.to_d.event(await pair.to_d.send(decode=decode_leg(PROMPT, first, GREEDY, sealed.seal))))
        assert used.code is Code.TRANSFER_REFUSED
        assert "released" in used.message
        await pair.empty()
        assert pair.d.events()["seal_mismatch"] == 1


async def test_a_transfer_id_is_used_once() -> None:
    async with pair_of() as pair:
        pair.p.clock.hold()
        grant = new_grant()
        await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, grant))
        first = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        second = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        assert failure(await pair.to_d.event(second)).code is Code.TRANSFER_REFUSED
        pair.p.clock.let_go()
        assert (await pair.to_d.event(first)).WhichOneof("event") == "staged"
        await pair.to_d.release(grant.transfer_id)
        third = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        assert failure(await pair.to_d.event(third)).code is Code.TRANSFER_REFUSED
        await pair.empty()


# -- the stream -----------------------------------------------------------------------------------------------------------


async def test_one_engine_step_leaves_in_one_frame() -> None:
    worker = await start_worker(None)
    async with running(worker):
        gateway = await worker.gateway()
        inside = worker.clock.hold()
        attempts = [await gateway.send(colocated=colocated_leg([5 + i], GREEDY)) for i in range(8)]
        await inside.wait()
        await gateway.settled()
        worker.clock.let_go()
        for attempt in attempts:
            await gateway.last(attempt)
        # Whole steps of eight, several at once to a slower gateway; ragged are the refusal, the first leg's head start, its end.
        assert len([events for events in gateway.frames if events % 8]) <= 3
        assert len(gateway.frames) <= 3 + GREEDY.max_tokens


async def test_a_gateway_that_does_not_read_holds_up_only_itself() -> None:
    worker = await start_worker(None, worker_settings=WorkerSettings(max_pending_events=4))
    async with running(worker):
        sampling = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, logprobs=20)
        quick = await worker.gateway()
        expected = [await _tokens(quick, [5 + i], sampling) for i in range(4)]
        # Without this gRPC would take in more than the legs have to say, and nobody would ever be slow.
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
        async with grpc.aio.insecure_channel(worker.address, options=window) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Stream()
            legs = [colocated_leg([5 + i], sampling) for i in range(4)]
            for leg in legs:
                await call.write(worker_pb2.StreamRequest(colocated=leg))
            # Every one of these finishes although the other gateway has not read a byte.
            for _ in range(3):
                await _tokens(quick, [90], sampling)
            assert worker.engine.load().running == 0
            assert len(worker.server.attempts) == 4
            got: dict[str, list[int]] = {leg.header.attempt_id: [] for leg in legs}
            open_legs = set(got)
            while open_legs:
                for event in (await call.read()).events:
                    kind = event.WhichOneof("event")
                    part = event.tokens if kind == "tokens" else event.finished.last
                    got[event.attempt_id] += part.token_ids
                    if kind == "finished":
                        open_legs.remove(event.attempt_id)
            assert [got[leg.header.attempt_id] for leg in legs] == expected
            call.cancel()


async def _tokens(gateway: Any, prompt: list[int], sampling: SamplingParams) -> list[int]:
    events, last = await gateway.last(await gateway.send(colocated=colocated_leg(prompt, sampling)))
    return [t for e in events for t in e.tokens.token_ids] + list(last.finished.last.token_ids)


async def test_late_duplicate_and_unknown_messages_are_counted() -> None:
    worker = await start_worker(None)
    async with running(worker):
        gateway = await worker.gateway()
        leg = colocated_leg(PROMPT, GREEDY)
        attempt = await gateway.send(colocated=leg)
        await gateway.send(colocated=leg)
        await gateway.last(attempt)
        nameless = colocated_leg(PROMPT, GREEDY)
        nameless.header.attempt_id = ""
        await gateway.send(colocated=nameless)
        await gateway.abort(attempt)
        await gateway.abort("never-was")
        await gateway.release(bytes(16))
        await gateway.call.write(worker_pb2.StreamRequest())
        # The stream is in order: when this one is done, the others have been read.
        await gateway.last(await gateway.send(colocated=colocated_leg(PROMPT, GREEDY)))
        await worker.server.attempts.wait_idle()
        events = worker.events()
        assert events == {
            "attempt_duplicate": 1,
            "attempt_without_id": 1,
            "abort_late": 1,
            "abort_unknown": 1,
            "release_unknown": 1,
            "leg_empty": 1,
        }
        text = worker.server.metrics.exposition().decode()
        assert 'splitpoint_worker_events_total{event="abort_unknown"} 1.0' in text
        assert 'splitpoint_worker_legs_total{leg="colocated",outcome="ok"} 2.0' in text


async def test_half_closing_lets_the_legs_finish() -> None:
    worker = await start_worker(None)
    async with running(worker):
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Stream()
            await call.write(worker_pb2.StreamRequest(colocated=colocated_leg(PROMPT, GREEDY)))
            await call.done_writing()
            events = [event async for frame in call for event in frame.events]
        assert events[-1].finished.finish_reason == "length"
        assert sum(len(e.tokens.token_ids) for e in events) + len(events[-1].finished.last.token_ids) == 12
        assert await call.code() is grpc.StatusCode.OK


# -- life -----------------------------------------------------------------------------------------------------------------


async def test_drain_refuses_new_legs_and_waits_for_requests_and_leases() -> None:
    async with pair_of() as pair:
        grant = new_grant()
        prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        sealed = (await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, grant)))).sealed
        assert (await pair.to_d.event(prepare)).WhichOneof("event") == "staged"
        held = new_grant()
        await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, held)))

        assert not await pair.p.server.drain(0.2)  # a lease is open
        assert not await pair.d.server.drain(0.2)  # so is a transfer
        for gateway in (pair.to_p, pair.to_d):
            error = failure(await gateway.event(await gateway.send(colocated=colocated_leg(PROMPT, GREEDY))))
            assert error.code is Code.DRAINING
        # The request that is under way finishes.
        first = list(sealed.first.token_ids)
        _, last = await pair.to_d.last(await pair.to_d.send(decode=decode_leg(PROMPT, first, GREEDY, sealed.seal)))
        assert last.WhichOneof("event") == "finished"
        assert await pair.d.server.drain(5)
        await pair.to_p.release(held.transfer_id)
        assert await pair.p.server.drain(5)
        pair.p.server.end_drain()
        again = await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, None))
        assert (await pair.to_p.event(again)).WhichOneof("event") == "finished"


async def test_health_follows_serving_and_draining() -> None:
    worker = await start_worker(None)
    async with running(worker):
        gateway = await worker.gateway()
        stub = health_pb2_grpc.HealthStub(gateway.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        status = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == status.SERVING
        worker.server.begin_drain()
        assert (await watch.read()).status == status.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == status.SERVING
        worker.server.end_drain()
        assert (await watch.read()).status == status.SERVING
        watch.cancel()


async def test_ranks_register_with_the_token_only() -> None:
    async with pair_of() as pair:
        stub = worker_pb2_grpc.WorkerServiceStub(pair.to_p.channel)
        known = worker_pb2.RegisterRankRequest(endpoint=pair.p.ranks[0], world_size=1)
        for metadata in ((), (("x-splitpoint-control-token", "wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.RegisterRank(known, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        known.endpoint.incarnation = "another"
        with pytest.raises(grpc.aio.AioRpcError, match="is not this worker") as refused:
            await stub.RegisterRank(known, metadata=(("x-splitpoint-control-token", TOKEN),))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        described = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest())
        assert described.incarnation == pair.p.server.identity.incarnation
        assert described.max_transfer_tokens == 64 * 8
        assert list(described.transports) == ["grpc"]


@pytest.mark.ucx
async def test_split_equals_colocated_over_ucx() -> None:
    pytest.importorskip("ucxx")
    async with pair_of(wire=True, transport="ucx") as pair:
        for length in (1, 8, 50, 200):
            prompt = [3 + (7 * i) % 900 for i in range(length)]
            assert await pair.split(prompt, GREEDY) == await pair.colocated(prompt, GREEDY)
        await pair.empty()
        assert list(pair.d.server.describe().transports) == ["ucx"]
