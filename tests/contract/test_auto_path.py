"""Path `auto` through the real gateway core and front ends, over workers with the simulated engine."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from coordinator.compare.auto_table import choices
from coordinator.compare.load import ArmTarget, GrpcClient, Slo, run_probe
from coordinator.compare.workload import WorkloadSpec, make
from coordinator.routing.auto import COLOCATED, SPLIT, StepTimes
from coordinator.routing.path_choice import draw_of
from protos.splitpoint.v1 import admin_pb2, generation_pb2, generation_pb2_grpc
from tests.contract.test_core_workers import Rig, rig
from tests.support.gateway import frontend, grpc_address, grpc_server, http_server

pytestmark = pytest.mark.timeout(60)
SLOW = 1000.0
"""What a path's file says of it where the other is to be chosen: far from what any correction makes of a few requests."""
URL = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [5] * 40, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
AUTO = {"model_file": "times.json", "explore_share": 0.0}


def times(slow: str = "", factor: float = SLOW) -> dict[str, StepTimes]:
    def of(path: str) -> StepTimes:
        by = factor if path == slow else 1.0
        return StepTimes(first_token_s=1e-3 * by, prompt_token_s=1e-5 * by, step_s=1e-3 * by, running_s=1e-4 * by)

    return {path: of(path) for path in (SPLIT, COLOCATED)}


@contextlib.asynccontextmanager
async def http(default_path: str = "auto", **options: Any) -> AsyncIterator[tuple[Rig, httpx.AsyncClient]]:
    auto = {**AUTO, **options.pop("auto", {})}
    settings = {"default_path": default_path, "auto": auto}
    async with (
        rig(**{"step_times": times(), **options}, **settings) as made,
        http_server(made.under_test.core, frontend(**settings)) as client,
    ):
        yield made, client


async def ask(client: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
    named = {f"x-splitpoint-{name.replace('_', '-')}": value for name, value in headers.items()}
    response = await client.post(URL, json=BODY, headers=named)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def decisions(made: Rig, **options: Any) -> admin_pb2.ListDecisionsResponse:
    return made.under_test.core.paths.shown(**options)


@pytest.mark.parametrize(("slow", "better"), [(SPLIT, COLOCATED), (COLOCATED, SPLIT)])
async def test_the_path_that_is_predicted_better_is_taken_and_reported(slow: str, better: str) -> None:
    async with http(step_times=times(slow)) as (made, client):
        reply = await ask(client)
        ledger = reply["metrics"]
        assert (ledger["path"], ledger["path_reason"]) == (better, "predicted")
        assert (ledger["transfer_bytes"] > 0) == (better == SPLIT)
        shown = decisions(made)
        (found,) = shown.decisions
        assert (shown.decided, shown.remembered) == (1, 1)
        assert (found.path, found.reason, found.prompt_tokens) == (better, "predicted", 40)
        assert (found.slo_ttft_s, found.slo_tpot_s) == (1.0, 0.05)
        assert {each.path for each in found.predictions} == {SPLIT, COLOCATED}
        mine = next(each for each in found.predictions if each.path == better)
        assert ledger["predicted_ttft_ms"] == pytest.approx(mine.ttft_s * 1e3)
        others = next(each for each in found.predictions if each.path == slow)
        assert (mine.own_misses < 0.01, mine.others_misses, others.own_misses > 0.99) == (True, 0, True)
        assert made.under_test.core.paths.phases.idle
        assert found.measured
        assert found.ttft_s * 1e3 == pytest.approx(ledger["ttft_ms"])
        assert 0 < found.tpot_s < 1
        assert {c.path: c.measured for c in shown.corrections} == {better: 1, slow: 0}
        assert made.under_test.metric("auto_decisions_total", path=better, reason="predicted") == 1
        assert made.under_test.metric("auto_measured_ratio_count", path=better, time="ttft") == 1
        body = (made.under_test.core.metrics.exposition()[0]).decode()
        assert re.search(rf'splitpoint_auto_correction{{[^}}]*path="{better}"', body)


async def test_headers_override_the_path_and_the_objective() -> None:
    async with http(step_times=times(COLOCATED)) as (made, client):
        reply = await ask(client, path="colocated")
        assert (reply["metrics"]["path"], reply["metrics"]["path_reason"]) == ("colocated", "")
        assert not decisions(made).decisions, "what is asked for is never decided on"
        await ask(client, slo_ttft_ms="800", slo_tpot_ms="7.5")
        (found,) = decisions(made).decisions
        assert (found.slo_ttft_s, found.slo_tpot_s) == (0.8, 0.0075)
        async with grpc_server(made.under_test.core, frontend(auto=AUTO)) as channel:
            request = generation_pb2.GenerateRequest(tokenized=generation_pb2.TokenizedInput(input_ids=BODY["prompt"]))
            request.sampling_params.max_tokens = 4
            metadata = [("x-splitpoint-path", "auto"), ("x-splitpoint-slo-tpot-ms", "9")]
            replies = [r async for r in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata)]
        assert replies[-1].complete.metrics.path_reason
        assert decisions(made).decisions[0].slo_tpot_s == 0.009


KEY = "sk-batch-0123456789"
KEYS = {"batch": {"key_sha256": hashlib.sha256(KEY.encode()).hexdigest().upper(), "ttft_ms": 5000, "tpot_ms": 250}}


async def test_a_key_has_an_objective_of_its_own_and_headers_go_before_it(capfd: pytest.CaptureFixture[str]) -> None:
    def asked(made: Rig) -> tuple[float, float, str]:
        found = decisions(made).decisions[0]
        return found.slo_ttft_s, found.slo_tpot_s, found.objective_source

    auto = {**AUTO, "keys": KEYS}
    async with http(auto={"keys": KEYS}) as (made, client):
        headers = {"authorization": f"Bearer {KEY}"}
        reply = (await client.post(URL, json=BODY, headers=headers)).json()
        assert asked(made) == (5.0, 0.25, "key batch")
        assert reply["metrics"]["objective_source"] == "key batch"
        for other in (f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer", ""):
            assert (await client.post(URL, json=BODY, headers={"authorization": other})).status_code == 200
            assert asked(made) == (1.0, 0.05, "default"), other
        await client.post(URL, json=BODY, headers={"authorization": f"bearer  {KEY}", "x-splitpoint-slo-tpot-ms": "80"})
        assert asked(made) == (5.0, 0.08, "TTFT key batch, TPOT header")
        both = {**headers, "x-splitpoint-slo-tpot-ms": "80", "x-splitpoint-slo-ttft-ms": "700"}
        await client.post(URL, json=BODY, headers=both)
        assert asked(made) == (0.7, 0.08, "header")
        twice = await client.post(URL, json=BODY, headers=[("authorization", f"Bearer {KEY}"), ("authorization", "Bearer b")])
        assert (twice.status_code, twice.json()["error"]["message"]) == (400, "authorization may be given once")

        async with grpc_server(made.under_test.core, frontend(auto=auto)) as channel:
            request = generation_pb2.GenerateRequest(tokenized=generation_pb2.TokenizedInput(input_ids=BODY["prompt"]))
            request.sampling_params.max_tokens = 4
            metadata = [("x-splitpoint-path", "auto"), ("authorization", f"Bearer {KEY}")]
            replies = [r async for r in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata)]
        assert replies[-1].complete.metrics.objective_source == "key batch"
        assert asked(made) == (5.0, 0.25, "key batch")
        told = str(decisions(made)) + made.under_test.core.metrics.exposition()[0].decode() + "".join(capfd.readouterr())
        assert KEY not in told
        assert hashlib.sha256(KEY.encode()).hexdigest() not in told


async def test_an_objective_that_is_no_number_is_refused_by_its_name() -> None:
    async with http() as (made, client):
        for name in ("x-splitpoint-slo-ttft-ms", "x-splitpoint-slo-tpot-ms"):
            response = await client.post(URL, json=BODY, headers={name: "fast"})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert error["message"] == f'{name} must be a number in (0, 3600000], got "fast"'
        async with grpc_server(made.under_test.core, frontend(auto=AUTO)) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(generation_pb2.GenerateRequest(text="x"), metadata=[("x-splitpoint-slo-ttft-ms", "0")])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(call))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert decisions(made).decided == 0


@pytest.mark.parametrize("path", [SPLIT, COLOCATED])
async def test_a_path_that_is_asked_for_is_never_left(path: str) -> None:
    """Neither by the configuration nor by a header, however bad it looks and however much is explored."""
    for default, headers in ((path, {}), ("auto", {"path": path})):
        async with http(default, step_times=times(path), auto={"explore_share": 0.5}) as (made, client):
            for _ in range(12):
                assert (await ask(client, **headers))["metrics"]["path"] == path
            assert decisions(made).decided == 0


async def test_exploration_goes_the_other_way_by_the_requests_id_and_is_corrected_by_what_it_finds() -> None:
    async with http(step_times=times(SPLIT, 3.0), auto={"explore_share": 0.25}) as (made, client):
        for _ in range(60):
            await ask(client)
        shown = decisions(made)
        assert len(shown.decisions) == 60
        explored = [d for d in shown.decisions if d.reason == "explored"]
        assert {d.request_id for d in explored} == {d.request_id for d in shown.decisions if draw_of(d.request_id) < 0.25}
        assert {c.path: c.measured for c in shown.corrections} == {
            path: sum(d.path == path for d in shown.decisions) for path in (SPLIT, COLOCATED)
        }


async def test_a_choice_that_lost_is_reported_with_how_much() -> None:
    # What is chosen is promised to be ten times as fast as it can be; the other path not much slower than it is.
    promised = times(SPLIT, 1.0)
    promised[COLOCATED] = StepTimes(first_token_s=1e-9, prompt_token_s=1e-12, step_s=1e-9, running_s=0.0)
    promised[SPLIT] = StepTimes(first_token_s=1e-7, prompt_token_s=1e-12, step_s=1e-7, running_s=0.0)
    async with http(step_times=promised) as (made, client):
        await ask(client)
        (lost,) = decisions(made, lost_only=True).decisions
        other = next(each for each in lost.predictions if each.path == SPLIT)
        assert lost.path == COLOCATED
        assert lost.lost_by == pytest.approx(lost.stress - other.stress)
        assert lost.lost_by > 0
        assert made.under_test.metric("auto_lost_total", path=COLOCATED) == 1
        await ask(client)
        assert len(decisions(made, limit=1).decisions) == 1
        assert decisions(made).decided == 2


async def test_with_one_role_left_there_is_one_path_and_with_none_an_error() -> None:
    async with http(prefill=0) as (made, client):
        assert (await ask(client))["metrics"]["path_reason"] == "only_path"
        assert decisions(made).decisions[0].path == COLOCATED
    async with http(prefill=0, decode=0) as (made, client):
        response = await client.post(URL, json=BODY)
        assert (response.status_code, response.json()["error"]["reason"]) == (503, "no_worker")
        assert made.under_test.metric("events_total", event="auto_no_path") == 1


async def test_a_gateway_whose_model_was_not_read_does_not_start() -> None:
    with pytest.raises(ValueError, match="model_file"):
        async with rig(prefill=0, decode=0, auto=AUTO):
            pass


async def test_an_arm_of_path_auto_asks_for_the_objective_that_it_is_judged_by() -> None:
    """The load client of a comparison over a gateway's gRPC port: objectives grow with prompts, ledgers fill the table."""
    slo = Slo(ttft_s=0.5, tpot_s=0.25, ttft_s_per_token=0.01)
    sent = make(WorkloadSpec(seed=1, requests=20, prompt_tokens=(8, 40), output_tokens=(3, 6), first_token=3, end_token=250))
    async with (
        rig(step_times=times(), auto={**AUTO, "explore_share": 0.3}) as made,
        grpc_address(made.under_test.core, frontend(auto=AUTO)) as address,
        GrpcClient(address, arms={"either": ArmTarget("auto", slo=slo)}) as client,
    ):
        probe = await run_probe(client, sent, path="either", rate_per_s=100.0, deadline_s=30.0)
        shown = {d.prompt_tokens: (d.slo_ttft_s, d.slo_tpot_s, d.objective_source) for d in decisions(made).decisions}
    assert not [outcome.failure for outcome in probe.outcomes if outcome.failure]
    lengths = {len(request.prompt_token_ids) for request in sent.requests}
    assert shown == {tokens: (pytest.approx(0.5 + 0.01 * tokens), 0.25, "header") for tokens in lengths}
    found = choices(probe.outcomes)
    assert found.decided == 20
    assert found.split == sum((outcome.ledger or {})["path"] == SPLIT for outcome in probe.outcomes)
    assert found.explored == sum((outcome.ledger or {})["path_reason"] == "explored" for outcome in probe.outcomes)
    assert sum(len(errors["TTFT"]) for errors in found.errors.values()) == 20
