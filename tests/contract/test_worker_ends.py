"""Every way a leg can end, at every stage it can be in: nothing is left on either worker. Nothing here sleeps to be in time:
engines and transfers are held at the stage and let go afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from decode.config import DecodeSettings
from engine.sampling import SamplingParams
from engine.sim_kv import KvCorruptionError
from prefill.config import PrefillSettings
from protos.errors import Code
from protos.ids import new_transfer_id
from protos.splitpoint.v1 import kv_transfer_pb2
from tests.support.pair import Pair, pair_of
from tests.support.workers import Gateway, colocated_leg, decode_leg, failure, new_grant, prefill_leg, prepare_leg

pytestmark = pytest.mark.timeout(60)

SAMPLING = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPT = list(range(10, 60))
LONG_S = 30.0


@dataclass
class Reached:
    """A leg at a stage: whose stream carries it and which attempt it is."""

    gateway: Gateway
    attempt_id: str


Stage = Callable[[Pair, float], Awaitable[Reached]]


async def _seal(pair: Pair, grant: kv_transfer_pb2.TransferGrant) -> tuple[kv_transfer_pb2.Seal, list[int]]:
    event = await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, SAMPLING, grant)))
    return event.sealed.seal, list(event.sealed.first.token_ids)


async def prefill_waits_for_staging(pair: Pair, remaining_s: float) -> Reached:
    held = new_grant()  # most of the send staging
    assert (await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg([5] * 400, SAMPLING, held)))).HasField("sealed")
    attempt = await pair.to_p.send(prefill=prefill_leg([6] * 400, SAMPLING, new_grant(), remaining_s))
    await pair.to_p.settled()
    pair.after.append(lambda: pair.to_p.release(held.transfer_id))
    return Reached(pair.to_p, attempt)


async def prefill_queued_behind_a_full_engine(pair: Pair, remaining_s: float) -> Reached:
    inside = pair.p.clock.hold()
    await pair.to_p.send(prefill=prefill_leg(PROMPT, SAMPLING, None))
    await inside.wait()
    attempt = await pair.to_p.send(prefill=prefill_leg(PROMPT, SAMPLING, new_grant(), remaining_s))
    await pair.to_p.settled()
    return Reached(pair.to_p, attempt)


async def prefill_computing(pair: Pair, remaining_s: float) -> Reached:
    inside = pair.p.clock.hold()
    attempt = await pair.to_p.send(prefill=prefill_leg(PROMPT, SAMPLING, new_grant(), remaining_s))
    await inside.wait()
    return Reached(pair.to_p, attempt)


async def prepare_pulling(pair: Pair, remaining_s: float) -> Reached:
    inside = pair.p.clock.hold()
    grant = new_grant()
    await pair.to_p.send(prefill=prefill_leg(PROMPT, SAMPLING, grant))
    await inside.wait()
    attempt = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant, remaining_s))
    await pair.to_d.settled()
    pair.after.append(lambda: pair.to_p.release(grant.transfer_id))
    return Reached(pair.to_d, attempt)


async def decode_waiting_for_kv(pair: Pair, remaining_s: float) -> Reached:
    pulling = await prepare_pulling(pair, LONG_S)
    (transfer_id,) = pair.d_intake().known()
    seal = kv_transfer_pb2.Seal(transfer_id=transfer_id, prompt_tokens=len(PROMPT))
    attempt = await pair.to_d.send(decode=decode_leg(PROMPT, [7], SAMPLING, seal, remaining_s=remaining_s))
    await pair.to_d.settled()
    assert pulling.gateway is pair.to_d
    return Reached(pair.to_d, attempt)


async def decode_in_the_engine(pair: Pair, remaining_s: float) -> Reached:
    grant = new_grant()
    prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
    seal, first = await _seal(pair, grant)
    assert (await pair.to_d.event(prepare)).HasField("staged")
    inside = pair.d.clock.hold()
    attempt = await pair.to_d.send(decode=decode_leg(PROMPT, first, SAMPLING, seal, remaining_s=remaining_s))
    await inside.wait()
    return Reached(pair.to_d, attempt)


async def decode_streaming(pair: Pair, remaining_s: float) -> Reached:
    reached = await decode_in_the_engine(pair, remaining_s)
    await _stream_a_little(pair, reached)
    return reached


async def colocated_computing(pair: Pair, remaining_s: float) -> Reached:
    inside = pair.d.clock.hold()
    attempt = await pair.to_d.send(colocated=colocated_leg(PROMPT, SAMPLING, remaining_s))
    await inside.wait()
    return Reached(pair.to_d, attempt)


async def colocated_streaming(pair: Pair, remaining_s: float) -> Reached:
    reached = await colocated_computing(pair, remaining_s)
    await _stream_a_little(pair, reached)
    return reached


async def _stream_a_little(pair: Pair, reached: Reached) -> None:
    """Let the engine go step by step until the first token is out; it stays held in the next step."""
    while reached.gateway.queue(reached.attempt_id).empty():
        inside = pair.d.clock.one_step()
        await inside.wait()
        await reached.gateway.settled()
    assert (await reached.gateway.event(reached.attempt_id)).HasField("tokens")


RUNNING: list[Stage] = [
    prefill_waits_for_staging,
    prefill_queued_behind_a_full_engine,
    prefill_computing,
    prepare_pulling,
    decode_waiting_for_kv,
    decode_in_the_engine,
    decode_streaming,
    colocated_computing,
    colocated_streaming,
]
PATIENT: dict[str, Any] = {
    "prefill_settings": PrefillSettings(staging_wait_s=LONG_S),
    "decode_settings": DecodeSettings(staging_wait_s=LONG_S),
}
wires = pytest.mark.parametrize("wire", [False, True], ids=["memory", "grpc"])
stages = pytest.mark.parametrize("stage", RUNNING, ids=lambda s: s.__name__)


@wires
@stages
async def test_abort(stage: Stage, wire: bool) -> None:
    async with pair_of(wire=wire, **PATIENT) as pair:
        leg = await stage(pair, LONG_S)
        await leg.gateway.abort(leg.attempt_id)
        # It ends at once, while the engine or the transfer is still being held.
        error = failure((await leg.gateway.last(leg.attempt_id))[1])
        assert error.code is Code.CANCELLED
        await leg.gateway.abort(leg.attempt_id)
        await pair.let_go()
        await pair.empty()


@wires
@stages
async def test_broken_stream(stage: Stage, wire: bool) -> None:
    async with pair_of(wire=wire, **PATIENT) as pair:
        leg = await stage(pair, LONG_S)
        broken = pair.p if leg.gateway is pair.to_p else pair.d
        await leg.gateway.close()
        # Everything it carried ends at once, while the engine or the transfer is still being held.
        async with asyncio.timeout(10):
            await broken.server.attempts.wait_idle()
        await pair.let_go()
        await pair.empty()
        assert broken.events()["stream_broken"] == 1


@stages
async def test_deadline(stage: Stage) -> None:
    async with pair_of(**PATIENT) as pair:
        leg = await stage(pair, 0.4)
        error = failure((await leg.gateway.last(leg.attempt_id))[1])
        assert error.code is Code.DEADLINE_EXCEEDED
        await pair.let_go()
        await pair.empty()


async def test_no_time_left_starts_nothing() -> None:
    async with pair_of() as pair:
        for gateway, leg in (
            (pair.to_p, {"prefill": prefill_leg(PROMPT, SAMPLING, new_grant(), 0.0)}),
            (pair.to_d, {"prepare": prepare_leg(PROMPT, pair.p, new_grant(), -1.0)}),
            (pair.to_d, {"colocated": colocated_leg(PROMPT, SAMPLING, 0.0)}),
        ):
            error = failure(await gateway.event(await gateway.send(**leg)))
            assert error.code is Code.DEADLINE_EXCEEDED
        await pair.empty()
        assert pair.p.clock.steps == pair.d.clock.steps == 0


@wires
async def test_a_broken_stream_releases_what_is_sealed_and_staged(wire: bool) -> None:
    async with pair_of(wire=wire) as pair:
        sealed, staged = new_grant(), new_grant()
        await _seal(pair, sealed)
        prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, staged))
        await _seal(pair, staged)
        assert (await pair.to_d.event(prepare)).HasField("staged")
        await pair.to_p.close()
        await pair.to_d.close()
        await pair.empty()


@wires
async def test_release_ends_a_transfer_at_once(wire: bool) -> None:
    async with pair_of(wire=wire) as pair:
        pulling = await prepare_pulling(pair, LONG_S)
        (transfer_id,) = pair.d_intake().known()
        await pair.to_d.release(transfer_id)
        assert failure(await pair.to_d.event(pulling.attempt_id)).code is Code.TRANSFER_REFUSED
        await pair.to_d.release(transfer_id)
        await pair.let_go()
        await pair.empty()


async def test_the_first_token_that_ends_the_request_leaves_no_lease() -> None:
    async with pair_of(wire=True) as pair:
        ending = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=tuple(range(997)))
        event = await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, ending, new_grant())))
        assert event.finished.finish_reason == "stop"
        assert event.finished.matched_token_id == event.finished.last.token_ids[0]
        await pair.empty()


# -- the peer dies --------------------------------------------------------------------------------------------------------


@wires
@pytest.mark.parametrize("recompute", [False, True])
async def test_prefill_worker_stops_while_decode_waits_for_its_kv(wire: bool, recompute: bool) -> None:
    async with pair_of(wire=wire) as pair:
        expected, _ = await pair.colocated(PROMPT, SAMPLING)
        pulling = await prepare_pulling(pair, LONG_S)
        (transfer_id,) = pair.d_intake().known()
        seal = kv_transfer_pb2.Seal(transfer_id=transfer_id, prompt_tokens=len(PROMPT))
        leg = decode_leg(PROMPT, [], SAMPLING, seal, allow_recompute=recompute)
        decode = await pair.to_d.send(decode=leg)
        await pair.to_d.settled()
        await pair.p.server.stop(grace_s=0)
        assert failure(await pair.to_d.event(pulling.attempt_id)).status.retryable
        events, last = await pair.to_d.last(decode)
        if recompute:
            assert last.finished.recomputed
            assert [t for e in events for t in e.tokens.token_ids] + list(last.finished.last.token_ids) == expected
            assert pair.d.events()["decode_recomputed"] == 1
        else:
            assert failure(last).code is Code.TRANSFER_FAILED
        await pair.d_empty()


async def test_a_dead_prefill_engine_is_worker_lost_and_refuses_from_then_on() -> None:
    async with pair_of() as pair:
        leg = await prefill_computing(pair, LONG_S)
        pair.p.engine.crash()
        assert failure(await pair.to_p.event(leg.attempt_id)).code is Code.WORKER_LOST
        again = await pair.to_p.send(prefill=prefill_leg(PROMPT, SAMPLING, None))
        assert failure(await pair.to_p.event(again)).code is Code.WORKER_LOST
        assert pair.p.server.engine_death is not None
        assert not pair.p.server.serving
        await pair.let_go()
        await pair.empty()


async def test_a_dead_decode_engine_after_the_first_token_is_worker_lost() -> None:
    async with pair_of(wire=True) as pair:
        leg = await decode_streaming(pair, LONG_S)
        pair.d.engine.crash()
        _, last = await pair.to_d.last(leg.attempt_id)
        assert failure(last).code is Code.WORKER_LOST
        await pair.let_go()
        await pair.empty()


async def test_wrong_bytes_in_staging_kill_the_engine_loudly() -> None:
    async with pair_of() as pair:
        assert pair.fabric is not None
        pair.fabric.corrupt = True
        grant = new_grant()
        prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        seal, first = await _seal(pair, grant)
        assert (await pair.to_d.event(prepare)).HasField("staged")
        decode = await pair.to_d.send(decode=decode_leg(PROMPT, first, SAMPLING, seal))
        assert failure(await pair.to_d.event(decode)).code is Code.WORKER_LOST
        assert isinstance(pair.d.server.engine_death, KvCorruptionError)
        await pair.empty()


@wires
async def test_a_failed_pull_leaves_the_transfer_to_a_decode_that_computes_the_prompt(wire: bool) -> None:
    async with pair_of(wire=wire, decode_settings=DecodeSettings(staging_wait_s=0.1), staging_blocks=8) as pair:
        expected, _ = await pair.colocated(PROMPT, SAMPLING)
        blocker = await prepare_pulling(pair, LONG_S)  # seven of eight blocks of receive staging
        async with asyncio.timeout(20):
            while wire and not (await pair.d.server.rank_status(5))[0].receive.used_bytes:  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.01)
        grant = new_grant()
        refused = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        assert failure(await pair.to_d.event(refused)).code is Code.STAGING_FULL
        seal = kv_transfer_pb2.Seal(transfer_id=grant.transfer_id, prompt_tokens=len(PROMPT))
        decode = await pair.to_d.send(decode=decode_leg(PROMPT, [], SAMPLING, seal, allow_recompute=True))
        events, last = await pair.to_d.last(decode)
        assert last.finished.recomputed
        assert [t for e in events for t in e.tokens.token_ids] + list(last.finished.last.token_ids) == expected
        await pair.to_d.abort(blocker.attempt_id)
        assert failure(await pair.to_d.event(blocker.attempt_id)).code is Code.CANCELLED
        await pair.let_go()
        await pair.empty()


async def test_stopping_a_busy_worker_ends_everything() -> None:
    async with pair_of(wire=True) as pair:
        decode = await decode_in_the_engine(pair, LONG_S)
        colocated = await pair.to_d.send(colocated=colocated_leg(PROMPT, SAMPLING))
        await pair.to_d.settled()
        await pair.d.server.stop()
        for attempt in (decode.attempt_id, colocated):
            assert failure(await pair.to_d.event(attempt)).code is Code.WORKER_LOST
        assert pair.d.server.attempts.busy == 0
        assert pair.d.engine.load().running == pair.d.engine.load().waiting == 0
        # Of the other worker only its stream is left, and no leg.
        left = [t for t in asyncio.all_tasks() if t.get_name().startswith(("decode-", "colocated-", "prepare-", "d-stream-"))]
        assert left == []


async def test_a_stop_that_fails_half_way_still_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair_of(wire=True) as pair:
        server, stopped = pair.p.server, asyncio.Event()
        assert server.ranks is not None
        close, stop = server.ranks.close, pair.p.engine.stop

        async def failing() -> None:
            await close()
            raise OSError("a channel does not close")

        async def stopping() -> None:
            await stop()
            stopped.set()

        monkeypatch.setattr(server.ranks, "close", failing)
        monkeypatch.setattr(pair.p.engine, "stop", stopping)
        with pytest.raises(OSError, match="does not close"):
            await server.stop()
        assert stopped.is_set(), "an engine that nobody stops keeps its accelerators"


async def test_a_late_release_of_a_transfer_that_never_was_changes_nothing() -> None:
    async with pair_of(wire=True) as pair:
        await pair.to_d.release(new_transfer_id())
        await pair.to_p.release(new_transfer_id())
        assert await pair.split(PROMPT, SAMPLING) == await pair.colocated(PROMPT, SAMPLING)
        await pair.empty()
        assert pair.d.events()["release_unknown"] == 1
