"""Whole requests over real worker servers under the faults that other systems fell for (docs/failure-cases.md): peers that fall
silent, refusals on one side, staging for one and a fifth prompts, equal ids."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.routing.views import Role
from decode.config import DecodeSettings
from decode.service import DecodeService
from engine.sampling import SamplingParams
from kvtransfer.node import KvNode
from prefill.config import PrefillSettings
from protos.errors import Code
from protos.ids import RequestId, TransferId
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2
from tests.contract.test_core import pool
from tests.contract.test_core_workers import Rig, view_of
from tests.contract.test_worker_ends import decode_streaming
from tests.support.cores import Reader, core_over, scripted, submission
from tests.support.pair import Pair, pair_of
from tests.support.workers import (
    SimWorker,
    decode_leg,
    engine_settings,
    failure,
    new_grant,
    prefill_leg,
    prepare_leg,
    start_worker,
)

pytestmark = pytest.mark.timeout(90)

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
PROMPT = list(range(10, 60))
PATIENT: dict[str, Any] = {
    "prefill_settings": PrefillSettings(staging_wait_s=60),
    "decode_settings": DecodeSettings(staging_wait_s=60),
}


@contextlib.asynccontextmanager
async def rig_of(prefill: dict[str, Any], decode: dict[str, Any], **settings: Any) -> AsyncIterator[Rig]:
    """A core over one worker of each role, real nodes between them, each with its own options of `start_worker`."""
    async with contextlib.AsyncExitStack() as stack:
        workers: list[SimWorker] = []
        for name, options in (("p", prefill), ("d", decode)):
            worker = await start_worker(None, name, wire=True, **options)
            stack.push_async_callback(worker.close)
            workers.append(worker)
        views = [view_of(worker, role) for worker, role in zip(workers, (Role.PREFILL, Role.DECODE), strict=True)]
        under_test = await stack.enter_async_context(core_over(views, transports=("grpc",), **settings))
        made = Rig(under_test, workers, views)
        yield made
        await made.idle()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Until it holds; engines and nodes tell nobody."""
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# Peers that fall silent -------------------------------------------------------------------------------------------------


def node_of(worker: SimWorker) -> KvNode:
    kv = worker.engine._kv
    assert kv is not None
    (node,) = kv._nodes
    assert isinstance(node, KvNode)
    return node


async def _pulls(worker: SimWorker, number: int) -> bool:
    return (await worker.server.rank_status(5))[0].sessions == number


async def _queue(worker: SimWorker, number: int) -> bool:
    return worker.engine.load().waiting == number


async def _waiting_for_kv(pair: Pair, number: int) -> tuple[str, kv_transfer_pb2.TransferGrant]:
    """A split request whose decode leg waits for KV that prefill, which is held, does not compute."""
    prompt, grant = [number + 3] * 30, new_grant()
    await pair.to_p.send(prefill=prefill_leg(prompt, GREEDY, grant))
    await pair.to_d.send(prepare=prepare_leg(prompt, pair.p, grant))
    seal = kv_transfer_pb2.Seal(transfer_id=grant.transfer_id, prompt_tokens=len(prompt))
    return await pair.to_d.send(decode=decode_leg(prompt, [7], GREEDY, seal)), grant


@pytest.mark.parametrize("how", ["clients leave", "the gateway dies"])
async def test_decode_is_empty_without_a_word_from_a_silent_prefill(how: str) -> None:
    """Prefill's engine computes nothing and its transfer node answers nobody; every client goes. Decode gives all back by
    itself, and when prefill moves again both serve."""
    async with pair_of(wire=True, **PATIENT) as pair:
        pair.p.clock.hold()
        legs = [await _waiting_for_kv(pair, number) for number in range(12)]
        await until(lambda: _pulls(pair.d, len(legs)))
        silent, spoken = node_of(pair.p), threading.Event()
        silent._rt.loop.call_soon_threadsafe(spoken.wait, 30.0)
        try:
            if how == "the gateway dies":
                await pair.to_d.close()
            else:
                for attempt, grant in legs:
                    await pair.to_d.abort(attempt)
                    await pair.to_d.release(grant.transfer_id)
            await pair.d_empty()
        finally:
            spoken.set()
        for _, grant in legs:
            await pair.to_p.release(grant.transfer_id)
        await pair.to_p.close()
        pair.p.clock.let_go()
        await pair.empty()
        pair.to_p, pair.to_d = await pair.p.gateway(), await pair.d.gateway()
        assert await pair.split(PROMPT, GREEDY) == await pair.colocated(PROMPT, GREEDY)
        await pair.empty()


async def test_a_prefill_that_answers_nobody_costs_no_other_stream_a_token() -> None:
    """Decode's node waits for a handshake that nobody answers; its engine and its other requests know nothing of it."""
    async with pair_of(wire=True, **PATIENT) as pair:
        long = replace(GREEDY, max_tokens=40)
        prompts = [[n + 3] * 20 for n in range(6)]
        expected = [await pair.colocated(prompt, long) for prompt in prompts]
        silent, spoken = node_of(pair.p), threading.Event()
        silent._rt.loop.call_soon_threadsafe(spoken.wait, 60.0)
        try:
            grant = new_grant()
            await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
            seal = kv_transfer_pb2.Seal(transfer_id=grant.transfer_id, prompt_tokens=len(PROMPT))
            waiting = await pair.to_d.send(decode=decode_leg(PROMPT, [7], GREEDY, seal, allow_recompute=False))
            await until(lambda: _pulls(pair.d, 1))
            assert await asyncio.gather(*(pair.colocated(prompt, long) for prompt in prompts)) == expected
            await pair.to_d.abort(waiting)
            assert failure(await pair.to_d.event(waiting)).code in (Code.CANCELLED, Code.TRANSFER_FAILED)
            await pair.to_d.release(grant.transfer_id)
            await pair.d_empty()
        finally:
            spoken.set()
        await pair.empty()


async def test_staged_kv_whose_time_is_over_is_declined_and_counted() -> None:
    async with pair_of(wire=True) as pair:
        grant = new_grant()
        prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        sealed = (await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, grant)))).sealed
        assert (await pair.to_d.event(prepare)).HasField("staged")
        assert pair.d.server.handlers is not None
        (service,) = pair.d.server.handlers.owners
        assert isinstance(service, DecodeService)
        service._entries[TransferId(grant.transfer_id)].expiry._run()  # the loop's clock has come to its end
        late = decode_leg(PROMPT, list(sealed.first.token_ids), GREEDY, sealed.seal, allow_recompute=True)
        await until(lambda: _pulls(pair.d, 0))
        error = failure(await pair.to_d.event(await pair.to_d.send(decode=late)))
        assert error.code is Code.TRANSFER_REFUSED
        assert "expired" in error.message
        events = pair.d.events()
        assert (events["transfer_expired"], events["decode_late"]) == (1, 1)
        await pair.empty()


async def test_kv_that_arrived_and_was_not_used_is_counted() -> None:
    """The prompt was moved, verified and then computed again all the same: the answer is right and says so."""
    async with pair_of(wire=True) as pair:
        expected, _ = await pair.colocated(PROMPT, GREEDY)
        grant = new_grant()
        prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        sealed = (await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, grant)))).sealed
        assert (await pair.to_d.event(prepare)).HasField("staged")
        # The engine does not find it, for whatever reason.
        node_of(pair.d).scattered(grant.transfer_id)
        assert await pair.d.engine.reset_prefix_cache()
        first = list(sealed.first.token_ids)
        rest = replace(GREEDY, max_tokens=GREEDY.max_tokens - 1)
        events, last = await pair.to_d.last(await pair.to_d.send(decode=decode_leg(PROMPT, first, rest, sealed.seal)))
        tokens = [t for e in events for t in e.tokens.token_ids]
        assert [*first, *tokens, *last.finished.last.token_ids] == expected
        assert last.finished.recomputed
        assert pair.d.events()["engine_recomputed"] == 1
        await pair.empty()


def _no_seal(leg: worker_pb2.DecodeLeg) -> None:
    leg.ClearField("seal")


def _seal_of_another_transfer(leg: worker_pb2.DecodeLeg) -> None:
    leg.seal.transfer_id = bytes(16)


def _longer_prompt(leg: worker_pb2.DecodeLeg) -> None:
    leg.prompt_token_ids.append(3)


def _prompt_logprobs(leg: worker_pb2.DecodeLeg) -> None:
    leg.sampling_params.prompt_logprobs = 1


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (_no_seal, Code.TRANSFER_REFUSED, "seal: missing"),
        (_seal_of_another_transfer, Code.TRANSFER_REFUSED, "seal.transfer_id"),
        (_longer_prompt, Code.TRANSFER_REFUSED, "prompt_tokens"),
        (_prompt_logprobs, Code.INVALID_VALUE, "prefill"),
    ],
)
async def test_a_decode_leg_that_does_not_fit_its_staged_kv_is_refused_by_name(
    change: Callable[[worker_pb2.DecodeLeg], None], code: Code, says: str
) -> None:
    async with pair_of() as pair:
        grant = new_grant()
        prepare = await pair.to_d.send(prepare=prepare_leg(PROMPT, pair.p, grant))
        sealed = (await pair.to_p.event(await pair.to_p.send(prefill=prefill_leg(PROMPT, GREEDY, grant)))).sealed
        assert (await pair.to_d.event(prepare)).HasField("staged")
        leg = decode_leg(PROMPT, list(sealed.first.token_ids), GREEDY, sealed.seal)
        change(leg)
        error = failure(await pair.to_d.event(await pair.to_d.send(decode=leg)))
        assert (error.code, says in error.message) == (code, True), error
        await pair.to_p.release(grant.transfer_id)
        await pair.empty()


async def test_a_decode_that_streams_holds_no_transfer_any_more() -> None:
    async with pair_of(wire=True) as pair:
        streaming = await decode_streaming(pair, 60.0)
        await until(lambda: _no_transfer(pair.d))
        assert await _pulls(pair.d, 0)
        await pair.let_go()
        _, last = await pair.to_d.last(streaming.attempt_id)
        assert last.HasField("finished")
        await pair.empty()


async def _no_transfer(worker: SimWorker) -> bool:
    return worker.server.open_transfers() == 0


# One side refuses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_on", ["prefill", "decode"])
async def test_around_one_sides_limit_an_answer_is_right_or_a_client_error(limit_on: str) -> None:
    """The two roles differ in their longest prompt. What the smaller one refuses after the other has done its part leaves
    nothing behind, long before any lease would end."""
    limit = 64
    small, large = {"engine": engine_settings(max_model_len=limit)}, {"engine": engine_settings(max_model_len=256)}
    prefill, decode_ = (small, large) if limit_on == "prefill" else (large, small)
    async with rig_of(prefill, decode_) as made:
        for length in (limit - 2, limit - 1, limit, limit + 1, *[limit + 30] * 10):
            prompt = [(length * 31 + i) % 900 + 3 for i in range(length)]
            reader = made.run(prompt=prompt, path="split", **{**OPTIONS, "max_tokens": 1 if length == limit - 1 else 2})
            await reader.end()
            # Decode's prompt is one longer: the forwarded token is part of it.
            if length < limit - (limit_on == "decode" and length != limit - 1):
                solo = await made.answer(prompt=prompt, path="colocated", **{**OPTIONS, "max_tokens": len(reader.tokens)})
                assert reader.error is None
                assert reader.tokens == solo.tokens
            else:
                assert reader.error is not None
                assert reader.error.code is Code.PROMPT_TOO_LONG
                assert reader.error.status.http == 400
                assert len(reader.tokens) == reader.error.tokens_sent == (limit_on == "decode")
            async with asyncio.timeout(5):
                await made.idle()
        assert not made.under_test.core.router.breakers


async def test_a_decode_that_refuses_every_transfer_leaves_prefill_empty() -> None:
    """It has not the room that its description promised: each refusal comes while prefill computes or has sealed."""
    async with rig_of({}, {"staging_blocks": 8}) as made:
        promising = [replace(view, max_transfer_tokens=512) for view in made.views]
        made.under_test.members(promising)
        prompts = [[(n * 17 + i) % 900 + 3 for i in range(100)] for n in range(10)]
        expected = [(await made.answer(prompt=p, path="colocated", **OPTIONS)).tokens for p in prompts]
        for prompt, tokens in zip(prompts, expected, strict=True):
            reader = await made.answer(prompt=prompt, path="split", **OPTIONS)
            assert reader.tokens == tokens
            assert reader.ledger.recomputed or reader.ledger.path == "colocated"
            async with asyncio.timeout(5):
                await made.idle()
        assert made.under_test.metric("retries_total", reason="transfer_refused") > 0


@pytest.mark.parametrize("strict", [False, True])
async def test_one_prefill_of_ten_that_fails_costs_its_own_request_alone(strict: bool) -> None:
    p, d = workers = pool()
    async with scripted(*workers, allow_recompute=not strict) as under_test:
        readers = [under_test.run(max_tokens=2, prompt=[n + 1, n + 2]) for n in range(10)]
        prefills = [await p.leg("prefill", number) for number in range(1, 11)]
        failing = prefills[3].prompt_token_ids[0] - 1
        for leg in prefills:
            if leg is prefills[3]:
                p.failed(leg, Code.INTERNAL, "a fault")
            else:
                p.sealed(leg, 100 + leg.prompt_token_ids[0])
        if strict:
            await readers[failing].end()
            assert readers[failing].error is not None
            assert (readers[failing].error.code, readers[failing].error.tokens_sent) == (Code.INTERNAL, 0)
            assert d.of("colocated") == []
        else:
            d.finished(await d.leg("colocated"), 100 + failing + 1, 200)
        for number in range(1, 11):
            prepare = await d.leg("prepare", number)
            if prepare.grant != prefills[3].grant:
                d.staged(prepare)
        for number in range(1, 10):
            d.finished(await d.leg("decode", number), 200)
        for number, reader in enumerate(readers):
            await reader.end()
            if number != failing or not strict:
                assert reader.error is None
                assert reader.tokens == [100 + number + 1, 200]
        (aborted,) = [abort.attempt_id for abort in d.of("abort")]
        assert aborted in [leg.header.attempt_id for leg in d.of("prepare") if leg.grant == prefills[3].grant]
        assert {release.transfer_id for release in d.of("release")} == {prefills[3].grant.transfer_id}


# Room for one and a fifth prompts ---------------------------------------------------------------------------------------

SHORT_WAIT: dict[str, Any] = {
    "prefill_settings": PrefillSettings(staging_wait_s=0.3),
    "decode_settings": DecodeSettings(staging_wait_s=0.3),
}


@pytest.mark.parametrize("at_once", [1, 2, 4, 8])
async def test_prompts_that_share_staging_for_one_all_end(at_once: int) -> None:
    """Every prompt takes 60 % of either side's staging, in chunks: each request is answered right, whatever that takes."""
    options = {"staging_blocks": 16, **SHORT_WAIT}
    async with rig_of(options, options, retry_budget=3) as made:
        prompts = [[(n * 37 + i) % 900 + 3 for i in range(77)] for n in range(at_once)]
        expected = [(await made.answer(prompt=p, path="colocated", **OPTIONS)).tokens for p in prompts]
        readers = [made.run(prompt=p, path="split", **OPTIONS) for p in prompts]
        for reader, tokens in zip(readers, expected, strict=True):
            await reader.end()
            if reader.error is None:
                assert reader.tokens == tokens
            else:
                assert reader.error.code is Code.STAGING_FULL
        assert any(reader.error is None for reader in readers)


async def test_a_circle_of_waits_for_staging_is_broken_by_its_bound() -> None:
    """Decode holds room for A, prefill for B; A's KV has no room at prefill, B's none at decode. Neither waits for ever."""
    async with pair_of(wire=True, staging_blocks=12, **SHORT_WAIT) as pair:
        prompts = {"A": [3] * 77, "B": [4] * 77}
        expected = {name: await pair.colocated(prompt, GREEDY) for name, prompt in prompts.items()}
        grants = {name: new_grant() for name in prompts}
        a_pull = await pair.to_d.send(prepare=prepare_leg(prompts["A"], pair.p, grants["A"]))
        b_prefill = await pair.to_p.send(prefill=prefill_leg(prompts["B"], GREEDY, grants["B"]))
        b_sealed = (await pair.to_p.event(b_prefill)).sealed
        b_pull = await pair.to_d.send(prepare=prepare_leg(prompts["B"], pair.p, grants["B"]))
        a_prefill = await pair.to_p.send(prefill=prefill_leg(prompts["A"], GREEDY, grants["A"]))
        assert failure(await pair.to_d.event(b_pull)).code is Code.STAGING_FULL
        assert failure(await pair.to_p.event(a_prefill)).code is Code.STAGING_FULL
        # B is computed where its KV has no room, A starts again.
        first = list(b_sealed.first.token_ids)
        rest = replace(GREEDY, max_tokens=GREEDY.max_tokens - 1)
        leg = decode_leg(prompts["B"], first, rest, b_sealed.seal, allow_recompute=True)
        events, last = await pair.to_d.last(await pair.to_d.send(decode=leg))
        assert last.finished.recomputed
        tokens = [*first, *(t for e in events for t in e.tokens.token_ids), *last.finished.last.token_ids]
        assert tokens == expected["B"][0]
        await pair.to_p.release(grants["B"].transfer_id)
        await pair.to_d.release(grants["A"].transfer_id)
        assert failure(await pair.to_d.event(a_pull)).code in (Code.TRANSFER_REFUSED, Code.CANCELLED)
        assert await pair.split(prompts["A"], GREEDY) == expected["A"]
        await pair.empty()


async def test_ten_times_as_many_aborts_as_there_are_places_take_none() -> None:
    """Aborted right after admission, while nothing moves: afterwards every place of both sides can be filled at once."""
    places = 4
    bounds = {
        "prefill_settings": PrefillSettings(max_waiting_requests=places, staging_wait_s=60),
        "decode_settings": DecodeSettings(max_waiting_requests=places, staging_wait_s=60),
    }
    async with pair_of(wire=True, staging_blocks=places * 7, **bounds) as pair:
        prompts = [[n + 3] * 50 for n in range(places)]
        expected = [await pair.colocated(prompt, GREEDY) for prompt in prompts]
        pair.p.clock.hold()
        for number in range(10 * places):
            grant, prompt = new_grant(), prompts[number % places]
            legs = [
                (pair.to_p, await pair.to_p.send(prefill=prefill_leg(prompt, GREEDY, grant))),
                (pair.to_d, await pair.to_d.send(prepare=prepare_leg(prompt, pair.p, grant))),
            ]
            for gateway, attempt in legs:
                await gateway.abort(attempt)
                # Decode may hear of its peer's end first.
                assert failure(await gateway.event(attempt)).code in (Code.CANCELLED, Code.QUEUE_FULL, Code.TRANSFER_REFUSED)
            await pair.to_p.release(grant.transfer_id)
            await pair.to_d.release(grant.transfer_id)
        pair.p.clock.let_go()
        await pair.empty()
        assert await asyncio.gather(*(pair.split(prompt, GREEDY) for prompt in prompts)) == expected
        await pair.empty()


async def test_prefill_computes_nothing_for_requests_aborted_in_its_queue() -> None:
    async with pair_of(wire=True, **PATIENT) as pair:
        inside = pair.p.clock.hold()
        grants = [new_grant() for _ in range(8)]
        attempts = []
        for number, grant in enumerate(grants):
            # Two steps each: a step computes 32 tokens.
            attempts.append(await pair.to_p.send(prefill=prefill_leg([number + 3] * 64, GREEDY, grant)))
            if number == 0:
                await inside.wait()
        await pair.to_p.settled()
        await until(lambda: _queue(pair.p, 7))
        for attempt, grant in list(zip(attempts, grants, strict=True))[1::2]:
            await pair.to_p.abort(attempt)
            assert failure(await pair.to_p.event(attempt)).code is Code.CANCELLED
            await pair.to_p.release(grant.transfer_id)
        assert pair.p.engine.load().waiting == 3, "the queue is shorter while the engine still stands"
        before = pair.p.clock.steps
        pair.p.clock.let_go()
        for attempt, grant in list(zip(attempts, grants, strict=True))[::2]:
            assert (await pair.to_p.event(attempt)).HasField("sealed")
            await pair.to_p.release(grant.transfer_id)
        assert pair.p.clock.steps - before == 4 * 2 - 1, "the held step counts already"
        await pair.empty()


# Equal ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 50])
async def test_a_callers_id_is_a_label_and_no_key(count: int) -> None:
    """All requests carry one id of the caller's and different prompts; some of them leave."""
    async with rig_of({"staging_blocks": 256}, {"staging_blocks": 256}) as made:
        prompts = [[(n * 13 + i) % 900 + 3 for i in range(20)] for n in range(count)]
        expected = [(await made.answer(prompt=p, path="colocated", **OPTIONS)).tokens for p in prompts]
        core = made.under_test.core
        same = [replace(submission(prompt, path="split", **OPTIONS), request_id=RequestId("the same")) for prompt in prompts]
        readers = [Reader(core.submit(request)) for request in same]
        assert {request.client_request_id for request in same} == {"client"}
        for reader in readers[1::2]:
            await reader.leave()
        for reader, tokens in list(zip(readers, expected, strict=True))[::2]:
            await reader.end()
            assert reader.error is None, reader.error
            assert reader.tokens == tokens


async def test_two_gateways_with_the_same_clients_do_not_meet() -> None:
    """Two front ends with equal seeds, each with a load generator that numbers its requests from 0."""
    options = {"staging_blocks": 256}
    async with rig_of(options, options) as made:
        prompts = [[(n * 13 + i) % 900 + 3 for i in range(20)] for n in range(12)]
        expected = [(await made.answer(prompt=p, path="colocated", **OPTIONS)).tokens for p in prompts]
        async with core_over(made.views, transports=("grpc",)) as other:
            readers = [
                Reader(core.submit(replace(submission(prompt, path="split", **OPTIONS), request_id=RequestId(f"request {n}"))))
                for n, prompt in enumerate(prompts)
                for core in (made.under_test.core, other.core)
            ]
            for number, reader in enumerate(readers):
                await reader.end()
                assert reader.error is None, reader.error
                assert reader.tokens == expected[number // 2]
        for worker in made.workers:
            assert "attempt_duplicate" not in worker.events()
