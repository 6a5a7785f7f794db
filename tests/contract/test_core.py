"""The gateway core over real streams to scripted workers: every stage, every way out of it, nothing left."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable

import pytest

from coordinator.gateway.api import Tokens
from coordinator.gateway.unread import MAX_UNREAD_EVENTS
from coordinator.routing.config import RoutingSettings
from coordinator.routing.views import Role, WorkerState
from protos.errors import Code
from protos.splitpoint.v1 import worker_pb2
from tests.support.cores import PROMPT, CoreUnderTest, Reader, scripted, submission
from tests.support.scripted_worker import ScriptedWorker

TIMES = worker_pb2.LegTimes(queued_s=0.001, computing_s=0.002, decoding_s=0.001)


def pool(prefill: int = 1, decode: int = 1, colocated: int = 0) -> list[ScriptedWorker]:
    return [
        *(ScriptedWorker(f"p{i}", Role.PREFILL) for i in range(prefill)),
        *(ScriptedWorker(f"d{i}", Role.DECODE) for i in range(decode)),
        *(ScriptedWorker(f"c{i}", Role.COLOCATED) for i in range(colocated)),
    ]


async def first_of(workers: list[ScriptedWorker], kind: str) -> tuple[ScriptedWorker, object]:
    """Whichever of these gets a leg of this kind."""
    waits = {asyncio.create_task(w.leg(kind)): w for w in workers}
    try:
        done, _ = await asyncio.wait(waits, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        return waits[task], task.result()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


# The good case --------------------------------------------------------------------------------------------------------


async def test_split_from_end_to_end() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = under_test.run(max_tokens=4, prompt_logprobs=None)
        prefill, prepare = await p.leg("prefill"), await d.leg("prepare")
        assert prefill.prompt_token_ids == PROMPT
        assert prefill.sampling_params.max_tokens == 1
        assert 0 < prefill.header.remaining_s <= 20.0
        assert prepare.grant == prefill.grant
        assert prepare.prefill_incarnation == p.view.incarnation
        assert [r.ucx_worker_address for r in prepare.prefill_ranks] == [b"ucx"]
        assert (prepare.prompt_tokens, prepare.transport) == (len(PROMPT), "ucx")

        p.sealed(prefill, 11, cached_tokens=3, times=TIMES)
        await reader.has(1)
        decode = await d.leg("decode")
        assert decode.output_token_ids == [11]
        assert decode.prompt_token_ids == PROMPT
        assert decode.seal.transfer_id == decode.transfer_id == prefill.grant.transfer_id
        assert decode.sampling_params.max_tokens == 3
        assert len({prefill.header.attempt_id, prepare.header.attempt_id, decode.header.attempt_id}) == 3

        d.staged(prepare)
        d.tokens(decode, 12)
        await reader.has(2)
        d.finished(decode, 13, 14, times=TIMES)
        await reader.end()
        assert reader.tokens == [11, 12, 13, 14]
        assert reader.finished is not None
        assert reader.finished.finish_reason == "length"
        assert reader.events[0].cached_tokens == 3

        ledger = reader.ledger
        assert (ledger.path, ledger.transport, ledger.attempts) == ("split", "ucx", 3)
        assert (ledger.prefill_worker, ledger.decode_worker) == ("p0", "d0")
        assert ledger.first_token_forwarded
        assert not ledger.partial
        assert ledger.transfer_bytes == 4096
        parts = (
            ledger.gateway_s,
            ledger.prefill_queue_s,
            ledger.prefill_s,
            ledger.transfer_wait_s,
            ledger.decode_queue_s,
            ledger.decode_s,
            ledger.worker_s,
            ledger.retry_s,
            ledger.residual_s,
        )
        assert sum(parts) == pytest.approx(ledger.e2e_s)
        assert 0 < ledger.ttft_s < ledger.e2e_s
        assert ledger == reader.ledger, "final"

        assert p.of("release") == d.of("release") == []
        assert under_test.metric("choices_total", path="split", status="ok", error_type="") == 1
        assert under_test.metric("ttft_seconds_count", path="split") == 1
        assert under_test.metric("inter_token_latency_seconds_count", path="split") == 2
        assert under_test.metric("kv_transfer_bytes_sum", transport="ucx") == 4096
        assert under_test.metric("phase_duration_seconds_count", path="split", phase="decode") == 1


async def test_colocated_by_request() -> None:
    workers = pool(1, 1, 1)
    c = workers[2]
    async with scripted(*workers) as under_test:
        reader = under_test.run(path="colocated", max_tokens=2)
        leg = await c.leg("colocated")
        assert leg.prompt_token_ids == PROMPT
        c.tokens(leg, 1, cached_tokens=2)
        c.finished(leg, 2, reason="stop", matched_token_id=2, times=TIMES)
        await reader.end()
        assert reader.tokens == [1, 2]
        assert reader.finished is not None
        assert reader.finished.matched_token_id == 2
        assert reader.events[0].cached_tokens == 2
        assert (reader.ledger.path, reader.ledger.transport) == ("colocated", "")


async def test_many_choices_share_the_streams() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        readers = [under_test.run(max_tokens=3, prompt=[i, i + 1]) for i in range(24)]
        prefills = [await p.leg("prefill", n + 1) for n in range(24)]
        for leg in prefills:
            p.sealed(leg, leg.prompt_token_ids[0] + 100)
        decodes = [await d.leg("decode", n + 1) for n in range(24)]
        for leg in reversed(decodes):
            d.tokens(leg, leg.prompt_token_ids[0] + 200)
        for leg in decodes:
            d.finished(leg, leg.prompt_token_ids[0] + 300)
        for i, reader in enumerate(readers):
            await reader.end()
            assert reader.tokens == [i + 100, i + 200, i + 300]


async def test_a_slow_client_delays_nobody_and_gets_every_token() -> None:
    (c,) = workers = pool(0, 0, 1)
    async with scripted(*workers) as under_test:
        count = MAX_UNREAD_EVENTS * 3
        choice = under_test.core.submit(submission(path="colocated", max_tokens=count))
        events = choice.__aiter__()
        slow = asyncio.ensure_future(events.__anext__())
        leg = await c.leg("colocated")
        c.tokens(leg, 0)
        first = await slow
        for i in range(1, count):
            c.tokens(leg, i)
        c.finished(leg)
        quick = under_test.run(path="colocated", max_tokens=1)
        c.finished(await c.leg("colocated", 2), 7)
        await quick.end()
        assert under_test.core.in_flight == 0, "the slow client's choice ended without being read"
        rest = [event async for event in events]
        assert len(rest) <= MAX_UNREAD_EVENTS + 2
        tokens = [t for e in (first, *rest) if isinstance(e, Tokens) for t in e.token_ids]
        assert tokens == list(range(count))


async def test_readiness_needs_connected_workers() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        core = under_test.core
        assert core.ready()
        under_test.members([])
        assert not core.ready()
        d.connected.clear()
        under_test.members([p.view, d.view])
        reader = under_test.run()
        await d.leg("prepare")
        assert core.ready(), "the leg went over a stream that is up"
        await reader.leave()


async def test_a_gateway_that_serves_while_one_phase_is_away_is_ready() -> None:
    """Else a balancer takes every gateway out while any of them would answer."""
    for which in (0, 1):
        workers = pool()
        left = workers[which]
        async with scripted(*workers) as under_test:
            under_test.members([left.view])
            assert under_test.core.ready()
            reader = under_test.run(max_tokens=1)
            left.finished(await left.leg("colocated"), 7)
            await reader.end()
            assert reader.error is None


async def test_a_phase_that_is_offered_no_whole_requests_makes_nobody_ready() -> None:
    workers = pool()
    routing = RoutingSettings(colocated_roles=((Role.COLOCATED,),))
    async with scripted(*workers, routing=routing) as under_test:
        assert under_test.core.ready()
        for left in workers:
            under_test.members([left.view])
            assert not under_test.core.ready()


# The client leaves ----------------------------------------------------------------------------------------------------

Stage = Callable[[CoreUnderTest, ScriptedWorker, ScriptedWorker], object]


async def at_prefilling(under_test: CoreUnderTest, p: ScriptedWorker, d: ScriptedWorker) -> Reader:
    reader = under_test.run()
    await p.leg("prefill")
    await d.leg("prepare")
    return reader


async def at_staged(under_test: CoreUnderTest, p: ScriptedWorker, d: ScriptedWorker) -> Reader:
    reader = await at_prefilling(under_test, p, d)
    d.staged(await d.leg("prepare"))
    await reader.hears("staged")
    return reader


async def at_forwarded(under_test: CoreUnderTest, p: ScriptedWorker, d: ScriptedWorker) -> Reader:
    reader = await at_prefilling(under_test, p, d)
    p.sealed(await p.leg("prefill"), 1)
    await reader.has(1)
    await d.leg("decode")
    return reader


async def at_decoding(under_test: CoreUnderTest, p: ScriptedWorker, d: ScriptedWorker) -> Reader:
    reader = await at_forwarded(under_test, p, d)
    d.staged(await d.leg("prepare"))
    d.tokens(await d.leg("decode"), 2)
    await reader.has(2)
    return reader


STAGES = [at_prefilling, at_staged, at_forwarded, at_decoding]


def live_attempts(p: ScriptedWorker, d: ScriptedWorker, stage: object) -> set[str]:
    prefill, prepare = p.of("prefill")[0], d.of("prepare")[0]
    decode = [leg.header.attempt_id for leg in d.of("decode")]
    return {
        at_prefilling: {prefill.header.attempt_id, prepare.header.attempt_id},
        at_staged: {prefill.header.attempt_id},
        at_forwarded: {prepare.header.attempt_id, *decode},
        at_decoding: set(decode),
    }[stage]  # type: ignore[index]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_ends_every_leg_and_transfer_at_once(stage: Stage) -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await stage(under_test, p, d)  # type: ignore[misc]
        await reader.leave()
        under_test.assert_idle()
        p_release, d_release = await p.leg("release"), await d.leg("release")
        transfer = p.of("prefill")[0].grant.transfer_id
        assert p_release.transfer_id == d_release.transfer_id == transfer
        assert p_release.reason == "client_left"
        # A release follows its worker's aborts on the same stream, so they have arrived.
        aborted = {a.attempt_id for a in (*p.of("abort"), *d.of("abort"))}
        assert aborted == live_attempts(p, d, stage)
        assert under_test.metric("choices_total", path="split", status="cancelled", error_type="") == 1


@pytest.mark.parametrize("stage", STAGES)
async def test_the_deadline_ends_every_stage(stage: Stage) -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await stage(under_test, p, d)  # type: ignore[misc]
        choice = reader.choice
        assert choice._timer is not None
        choice._timer._run()  # the loop's clock has come to the deadline
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.DEADLINE_EXCEEDED
        assert reader.error.tokens_sent == len(reader.tokens)
        assert (await p.leg("release")).reason == "deadline"
        assert (await d.leg("release")).reason == "deadline"


async def test_a_deadline_of_a_black_hole_is_kept() -> None:
    workers = pool()
    async with scripted(*workers) as under_test:
        reader = under_test.run(deadline_s=0.2)
        await workers[0].leg("prefill")
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.DEADLINE_EXCEEDED


async def test_no_time_left_starts_nothing() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = under_test.run(deadline_s=0.0)
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.DEADLINE_EXCEEDED
        assert p.received == d.received == []


async def test_a_stop_string_ends_the_engine_and_is_a_success() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_decoding(under_test, p, d)
        await reader.choice.close("stop")
        await reader.choice.close("stop")
        await reader.end()
        assert reader.error is None
        assert (await d.leg("abort")).attempt_id == d.of("decode")[0].header.attempt_id
        assert reader.ledger.partial
        assert under_test.metric("choices_total", path="split", status="ok", error_type="") == 1


async def test_an_abandoned_iterator_is_cleaned_up() -> None:
    (c,) = workers = pool(0, 0, 1)
    async with scripted(*workers) as under_test:

        async def peek() -> None:
            async for _ in under_test.core.submit(submission(path="colocated")):
                break

        task = asyncio.create_task(peek())
        leg = await c.leg("colocated")
        c.tokens(leg, 1)
        await task
        del task
        gc.collect()
        assert (await c.leg("abort")).attempt_id == leg.header.attempt_id


async def test_closing_before_the_start_and_iterating_after_the_end() -> None:
    (c,) = workers = pool(0, 0, 1)
    async with scripted(*workers) as under_test:
        choice = under_test.core.submit(submission(path="colocated"))
        await choice.close("client_left")
        assert [event async for event in choice] == []
        assert c.received == []


async def test_closing_the_core_ends_what_runs() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_decoding(under_test, p, d)
        assert not await under_test.core.drain(0.01)
        await under_test.core.close()
        await reader.end()
        assert reader.finished is None
        assert reader.error is not None, "an answer that was cut off is no success"
        assert (reader.error.code, reader.error.tokens_sent) == (Code.STREAM_BROKEN, len(reader.tokens))
        assert (await d.leg("abort")).attempt_id == d.of("decode")[0].header.attempt_id
        assert (await p.leg("release")).transfer_id == p.of("prefill")[0].grant.transfer_id
        assert await under_test.core.drain(1)


async def test_closing_the_core_before_the_first_token_sends_the_client_elsewhere() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_prefilling(under_test, p, d)
        await under_test.core.close()
        await reader.end()
        assert reader.error is not None
        assert (reader.error.code, reader.error.tokens_sent) == (Code.DRAINING, 0)
        assert under_test.metric("choices_total", path="split", status="error", error_type="draining") == 1


async def test_a_silent_membership_shows_its_age() -> None:
    async with scripted(*pool(0, 0, 1)) as under_test:
        core, now_s = under_test.core, time.monotonic()
        core.metrics.exposition()
        assert 0 <= under_test.metric("membership_age_seconds") < 60
        core.clock = lambda: now_s + 1000.0
        core.metrics.exposition()
        assert under_test.metric("membership_age_seconds") >= 999
        assert under_test.metric("workers_connected") == 1


# Workers fail ---------------------------------------------------------------------------------------------------------


async def test_prefill_lost_is_retried_on_another_with_new_ids() -> None:
    workers = pool(2, 1)
    d = workers[2]
    async with scripted(*workers) as under_test:
        reader = under_test.run(max_tokens=2)
        lost, old = await first_of(workers[:2], "prefill")
        other = next(w for w in workers[:2] if w is not lost)
        await lost.lose()
        new = await other.leg("prefill")
        assert new.header.attempt_id != old.header.attempt_id  # type: ignore[attr-defined]
        assert new.grant.transfer_id != old.grant.transfer_id  # type: ignore[attr-defined]
        assert (await d.leg("release")).transfer_id == old.grant.transfer_id  # type: ignore[attr-defined]
        second = await d.leg("prepare", 2)
        assert second.prefill_incarnation == other.view.incarnation, "decode never meets the lost worker again"
        assert (await d.leg("abort")).attempt_id == d.of("prepare")[0].header.attempt_id
        other.sealed(new, 1)
        d.finished(await d.leg("decode"), 2)
        await reader.end()
        assert reader.tokens == [1, 2]
        assert reader.ledger.retry_s > 0
        assert not reader.ledger.recomputed
        assert under_test.metric("retries_total", reason="worker_lost") == 1
        assert under_test.metric("recoveries_total", kind="prefill_retry") == 1


async def test_the_only_prefill_lost_means_decode_computes_the_prompt_itself() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_prefilling(under_test, p, d)
        await p.lose()
        leg = await d.leg("colocated")
        assert leg.prompt_token_ids == PROMPT
        d.finished(leg, 1, 2, 3, 4)
        await reader.end()
        assert reader.tokens == [1, 2, 3, 4]
        assert (reader.ledger.path, reader.ledger.recomputed) == ("split", True)
        assert under_test.metric("events_total", event="local_recompute") == 1


@pytest.mark.parametrize("staged", [False, True])
async def test_prefill_lost_after_the_seal_changes_nothing_by_itself(staged: bool) -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_forwarded(under_test, p, d)
        if staged:
            d.staged(d.of("prepare")[0])
            await reader.hears("staged")
        await p.lose()
        d.finished(d.of("decode")[0], 2, 3, 4, times=TIMES)
        await reader.end()
        assert reader.tokens == [1, 2, 3, 4]
        assert reader.ledger.retry_s == 0.0
        assert len(d.received) == 2, "prepare and decode, nothing more"


async def test_prefill_lost_while_decode_has_staged_what_came_is_recomputed() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_staged(under_test, p, d)
        await p.lose()
        d.finished(await d.leg("colocated"), 1, 2, 3, 4)
        await reader.end()
        assert reader.tokens == [1, 2, 3, 4]
        assert (await d.leg("release")).transfer_id == d.of("prepare")[0].grant.transfer_id


async def test_the_only_decode_lost_before_the_seal_leaves_one_worker_for_everything() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_prefilling(under_test, p, d)
        await d.lose()
        p.finished(await p.leg("colocated"), 1, 2, 3, 4)
        await reader.end()
        assert reader.tokens == [1, 2, 3, 4]
        assert (await p.leg("abort")).attempt_id == p.of("prefill")[0].header.attempt_id
        assert under_test.metric("recoveries_total", kind="colocated") == 1


@pytest.mark.parametrize("sent", [0, 2])
async def test_the_only_worker_is_tried_again_when_its_stream_comes_back(sent: int) -> None:
    (c,) = workers = pool(0, 0, 1)
    async with scripted(*workers) as under_test:
        reader = under_test.run(path="colocated", max_tokens=4)
        leg = await c.leg("colocated")
        if sent:
            c.tokens(leg, *range(1, sent + 1))
            await reader.has(sent)
        c.end_streams()
        again = await c.leg("colocated", 2)
        assert again.prompt_token_ids == [*PROMPT, *range(1, sent + 1)]
        c.finished(again, *range(sent + 1, 5))
        await reader.end()
        assert reader.error is None
        assert reader.tokens == [1, 2, 3, 4]
        assert under_test.metric("retries_total", reason="worker_lost") == 1
        assert under_test.metric("events_total", event="lost_worker_tried_again") == 1


async def test_a_strict_pair_is_tried_again_when_its_stream_comes_back() -> None:
    p, d = workers = pool()
    async with scripted(*workers, allow_recompute=False) as under_test:
        reader = await at_prefilling(under_test, p, d)
        p.end_streams()
        again = await p.leg("prefill", 2)
        p.sealed(again, 1)
        d.finished(await d.leg("decode"), 2, 3, 4)
        await reader.end()
        assert reader.tokens == [1, 2, 3, 4]
        assert not reader.ledger.recomputed


async def test_the_only_worker_gone_for_good_is_an_error_within_the_budget() -> None:
    (c,) = workers = pool(0, 0, 1)
    async with scripted(*workers) as under_test:
        reader = under_test.run(path="colocated")
        await c.leg("colocated")
        await c.lose()
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.WORKER_LOST
        assert under_test.metric("retries_total", reason="worker_lost") == under_test.core.settings.retry_budget


async def test_load_is_charged_once_per_worker_and_given_back() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        load = under_test.core.router.load
        reader = await at_prefilling(under_test, p, d)
        assert load.in_flight_tokens(p.view.incarnation) == len(PROMPT)
        assert load.in_flight_tokens(d.view.incarnation) == len(PROMPT) + 4
        p.sealed(p.of("prefill")[0], 1)
        await reader.has(1)
        assert load.in_flight_tokens(p.view.incarnation) == 0
        assert load.in_flight_tokens(d.view.incarnation) == len(PROMPT) + 4, "prepare and decode are one request"
        await reader.leave()
        assert load.total_in_flight_tokens() == 0


async def test_strict_mode_refuses_to_recompute() -> None:
    p, d = workers = pool()
    async with scripted(*workers, allow_recompute=False) as under_test:
        reader = await at_prefilling(under_test, p, d)
        await p.lose()
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.WORKER_LOST
        assert d.of("colocated") == []


async def test_decode_lost_before_the_first_token_takes_another_decode() -> None:
    workers = pool(1, 2)
    p = workers[0]
    async with scripted(*workers) as under_test:
        reader = under_test.run(max_tokens=2)
        await p.leg("prefill")
        lost, _ = await first_of(workers[1:], "prepare")
        other = next(w for w in workers[1:] if w is not lost)
        await lost.lose()
        p.sealed(await p.leg("prefill", 2), 1)
        other.finished(await other.leg("decode"), 2)
        await reader.end()
        assert reader.tokens == [1, 2]


@pytest.mark.parametrize("stage", [at_forwarded, at_decoding])
async def test_decode_lost_after_the_first_token_is_resumed_without_a_gap(stage: Stage) -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await stage(under_test, p, d)  # type: ignore[misc]
        sent = list(reader.tokens)
        await d.lose()
        leg = await p.leg("colocated")
        assert leg.prompt_token_ids == PROMPT + sent
        assert leg.sampling_params.max_tokens == 4 - len(sent)
        p.finished(leg, *range(90, 90 + 4 - len(sent)))
        await reader.end()
        assert reader.tokens == [*sent, *range(90, 90 + 4 - len(sent))]
        assert under_test.metric("recoveries_total", kind="migrate") == 1
        assert reader.ledger.partial == (len(sent) > 0)


async def test_a_seeded_stream_breaks_with_the_number_of_tokens_sent() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = under_test.run(seed=1, temperature=1.0)
        p.sealed(await p.leg("prefill"), 1)
        decode = await d.leg("decode")
        assert reader.tokens == []
        d.tokens(decode, 1, 2)
        await reader.has(2)
        await d.lose()
        await reader.end()
        assert reader.error is not None
        assert (reader.error.code, reader.error.tokens_sent) == (Code.STREAM_BROKEN, 2)


async def test_overload_everywhere_is_429_after_the_budget() -> None:
    workers = pool(0, 0, 4)
    async with scripted(*workers) as under_test:
        reader = under_test.run(path="colocated")
        tried = set()
        for _ in range(3):
            left = [w for w in workers if w.view.worker_id not in tried]
            worker, leg = await first_of(left, "colocated")
            tried.add(worker.view.worker_id)
            worker.failed(leg, Code.QUEUE_FULL)
        await reader.end()
        assert reader.error is not None
        assert reader.error.status.http == 429
        assert len(tried) == 3, "one attempt and two more, each on another worker"
        assert sum(len(w.of("colocated")) for w in workers) == 3


async def test_a_client_error_of_one_leg_ends_the_other_at_once() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_prefilling(under_test, p, d)
        p.failed(p.of("prefill")[0], Code.PROMPT_TOO_LONG, "too long")
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.PROMPT_TOO_LONG
        assert (await d.leg("abort")).attempt_id == d.of("prepare")[0].header.attempt_id
        assert (await d.leg("release")).transfer_id == p.of("prefill")[0].grant.transfer_id
        assert not under_test.core.router.breakers, "client errors trip nothing"


async def test_100_client_errors_close_no_worker() -> None:
    (c,) = workers = pool(0, 0, 1)
    async with scripted(*workers) as under_test:
        for n in range(100):
            reader = under_test.run(path="colocated")
            c.failed(await c.leg("colocated", n + 1), Code.INVALID_VALUE)
            await reader.end()
        reader = under_test.run(path="colocated", max_tokens=1)
        c.finished(await c.leg("colocated", 101), 1)
        await reader.end()
        assert reader.error is None


async def test_transfer_failing_after_the_seal_leaves_it_to_decode() -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_forwarded(under_test, p, d)
        d.failed(d.of("prepare")[0], Code.TRANSFER_FAILED)
        d.finished(d.of("decode")[0], 2, 3, 4, recomputed=True, times=TIMES)
        await reader.end()
        assert reader.tokens == [1, 2, 3, 4]
        assert reader.ledger.recomputed
        assert (await p.leg("release")).transfer_id == p.of("prefill")[0].grant.transfer_id
        assert under_test.metric("kv_transfer_failures_total", reason="transfer_failed") == 1
        assert under_test.metric("recoveries_total", kind="recompute") == 1


async def test_nobody_there_is_503() -> None:
    async with scripted() as under_test:
        reader = under_test.run()
        await reader.end()
        assert reader.error is not None
        assert reader.error.status.http == 503
        assert not under_test.core.ready()


async def test_a_worker_that_leaves_the_membership_fails_its_legs_over() -> None:
    workers = pool(0, 0, 2)
    async with scripted(*workers) as under_test:
        reader = under_test.run(path="colocated", max_tokens=2)
        gone, leg = await first_of(workers, "colocated")
        gone.tokens(leg, 1)
        await reader.has(1)
        other = next(w for w in workers if w is not gone)
        under_test.members([other.view])
        resumed = await other.leg("colocated")
        assert resumed.prompt_token_ids == [*PROMPT, 1]
        other.finished(resumed, 2)
        await reader.end()
        assert reader.tokens == [1, 2]


async def test_a_draining_worker_finishes_its_legs_and_gets_no_more() -> None:
    workers = pool(0, 0, 2)
    async with scripted(*workers) as under_test:
        reader = under_test.run(path="colocated", max_tokens=1)
        old, leg = await first_of(workers, "colocated")
        other = next(w for w in workers if w is not old)
        draining = [w.view if w is other else type(w.view)(**{**_fields(w.view), "state": WorkerState.DRAINING}) for w in workers]
        under_test.members(draining)
        new = under_test.run(path="colocated", max_tokens=1)
        other.finished(await other.leg("colocated"), 5)
        await new.end()
        old.finished(leg, 6)
        await reader.end()
        assert (reader.tokens, new.tokens) == ([6], [5])


def _fields(view: object) -> dict:
    return {name: getattr(view, name) for name in view.__dataclass_fields__}  # type: ignore[attr-defined]


async def test_a_bug_in_one_request_ends_it_with_an_error_id(monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_decoding(under_test, p, d)
        bystander = under_test.run()
        await p.leg("prefill", 2)

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(reader.choice, "_emit", broken)
        d.tokens(d.of("decode")[0], 3)
        await reader.end()
        assert reader.error is not None
        assert reader.error.code is Code.INTERNAL
        assert reader.error.error_id
        assert reader.error.tokens_sent >= 2
        assert (await d.leg("abort")).attempt_id == d.of("decode")[0].header.attempt_id
        assert under_test.metric("events_total", event="gateway_fault") == 1
        p.sealed(p.of("prefill")[1], 1)
        await bystander.has(1)
        await bystander.leave()


async def test_a_request_that_cannot_even_end_in_order_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = workers = pool()
    async with scripted(*workers) as under_test:
        reader = await at_decoding(under_test, p, d)

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(reader.choice._request, "handle", broken)
        d.tokens(d.of("decode")[0], 3)
        await reader.end()
        assert reader.error is not None
        assert (reader.error.code, bool(reader.error.error_id)) == (Code.INTERNAL, True)
        assert (await d.leg("abort")).attempt_id == d.of("decode")[0].header.attempt_id
        assert reader.choice._timer is None


async def test_late_events_of_a_dead_attempt_change_nothing() -> None:
    workers = pool(2, 1)
    d = workers[2]
    async with scripted(*workers) as under_test:
        reader = under_test.run(max_tokens=2)
        first, old = await first_of(workers[:2], "prefill")
        other = next(w for w in workers[:2] if w is not first)
        first.failed(old, Code.STAGING_FULL)
        new = await other.leg("prefill")
        first.sealed(old, 77)
        other.sealed(new, 1)
        d.finished(await d.leg("decode"), 2)
        await reader.end()
        assert reader.tokens == [1, 2]


@pytest.mark.parametrize("round_number", range(3))
async def test_random_disconnects_leave_nothing(round_number: int) -> None:
    rng = random.Random(round_number)
    p, d = workers = pool()
    async with scripted(*workers) as under_test:

        async def serve() -> None:
            prefill = decode = 0
            while True:
                await asyncio.sleep(0)
                for leg in p.of("prefill")[prefill:]:
                    prefill += 1
                    p.sealed(leg, 1)
                for leg in d.of("decode")[decode:]:
                    decode += 1
                    d.tokens(leg, 2)
                    if rng.random() < 0.5:
                        d.finished(leg, 3, 4)

        serving = asyncio.create_task(serve())
        readers = [under_test.run() for _ in range(40)]
        for reader in readers:
            wanted = rng.randrange(3)
            if wanted:
                await reader.has(wanted)
            await reader.leave()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        under_test.assert_idle()
