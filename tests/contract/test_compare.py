"""The load loop and a whole quick comparison against an in-process `GenerationService` of known behaviour."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rich.console import Console

from coordinator.compare import cli, load
from coordinator.compare.load import GrpcClient, Slo, run_one_at_a_time, run_probe
from coordinator.compare.report import show
from coordinator.compare.run import ComparisonError, quick
from coordinator.compare.sources import read
from coordinator.compare.verdict import Verdict
from coordinator.compare.workload import WorkloadSpec, make
from protos.splitpoint.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.timeout(60)

TTFT_S = 0.02
STEP_S = 0.002


class FakeService(generation_pb2_grpc.GenerationServiceServicer):
    """First token after `TTFT_S`, then one each `STEP_S`. Knobs break it."""

    def __init__(self) -> None:
        self.requests: list[tuple[generation_pb2.GenerateRequest, str]] = []
        self.short_by = 0
        self.refuse_path = ""
        self.hang = False

    async def ListModels(self, request: Any, context: Any) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse(models=[generation_pb2.ModelInfo(id="fake")])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        path = dict(context.invocation_metadata())["x-splitpoint-path"]
        self.requests.append((request, path))
        if path == self.refuse_path:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        if self.hang:
            await asyncio.Event().wait()
        count = request.sampling_params.max_tokens - self.short_by
        for number in range(count):
            await asyncio.sleep(STEP_S if number else TTFT_S)
            chunk = generation_pb2.GenerateStreamChunk(token_ids=[1], completion_tokens=number + 1)
            yield generation_pb2.GenerateResponse(chunk=chunk)
        e2e_s = TTFT_S + STEP_S * (count - 1)
        ledger = common_pb2.StageLedger(path=path, prefill_s=TTFT_S, decode_s=e2e_s - TTFT_S, e2e_s=e2e_s)
        yield generation_pb2.GenerateResponse(complete=generation_pb2.GenerateComplete(completion_tokens=count, metrics=ledger))


@pytest.fixture
async def service() -> AsyncIterator[tuple[FakeService, str]]:
    fake = FakeService()
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield fake, f"127.0.0.1:{port}"
    await server.stop(None)


def spec(requests: int) -> WorkloadSpec:
    return WorkloadSpec(seed=3, requests=requests, prompt_tokens=(8, 16), output_tokens=(2, 6))


async def test_open_loop_sends_when_due_not_when_answered(service: tuple[FakeService, str]) -> None:
    """30 requests in about a tenth of the time that one after the other would take; each is timed from when it was due."""
    _, target = service
    workload = make(spec(30))
    async with GrpcClient(target) as client:
        probe = await run_probe(client, workload, path="split", rate_per_s=200.0, deadline_s=10)
    assert [outcome.failure for outcome in probe.outcomes] == [""] * 30
    assert [outcome.due_s for outcome in probe.outcomes] == pytest.approx(list(workload.due_s(200.0)))
    for outcome, request in zip(probe.outcomes, workload.requests, strict=True):
        assert outcome.tokens == outcome.wanted_tokens == request.output_tokens
        assert outcome.ttft_s is not None
        assert outcome.e2e_s is not None
        assert outcome.lag_s >= 0
        assert outcome.ttft_s >= TTFT_S + outcome.lag_s - 0.001
        assert len(outcome.gaps_s) == outcome.tokens - 1
        assert outcome.tpot_s == pytest.approx(sum(outcome.gaps_s) / len(outcome.gaps_s))
        assert outcome.ledger is not None
        assert outcome.ledger["path"] == "split"


async def test_requests_force_their_output_and_name_their_path(service: tuple[FakeService, str]) -> None:
    fake, target = service
    workload = make(spec(3)).salted("x")
    async with GrpcClient(target, model="fake") as client:
        await run_probe(client, workload, path="colocated", rate_per_s=1000.0, deadline_s=10)
    assert len(fake.requests) == 3
    sent = {tuple(request.tokenized.input_ids): request for request, _ in fake.requests}
    for planned in workload.requests:
        request = sent[planned.prompt_token_ids]
        assert request.sampling_params.ignore_eos
        assert request.sampling_params.max_tokens == planned.output_tokens
        assert request.stream
    assert {path for _, path in fake.requests} == {"colocated"}


async def test_wrong_length_and_refusals_are_misses(service: tuple[FakeService, str]) -> None:
    fake, target = service
    generous = Slo(ttft_s=60, tpot_s=60)
    async with GrpcClient(target) as client:
        fake.short_by = 1
        short = await run_probe(client, make(spec(4)), path="split", rate_per_s=100.0, deadline_s=10)
        fake.short_by, fake.refuse_path = 0, "split"
        refused = await run_probe(client, make(spec(4)), path="split", rate_per_s=100.0, deadline_s=10)
        fake.refuse_path, fake.hang = "", True
        late = await run_probe(client, make(spec(2)), path="split", rate_per_s=100.0, deadline_s=0.3)
    assert short.attainment(generous) == refused.attainment(generous) == late.attainment(generous) == 0
    assert all("were forced" in outcome.failure for outcome in short.outcomes)
    assert all(outcome.failure == "UNAVAILABLE: no worker" for outcome in refused.outcomes)
    assert all(outcome.failure for outcome in late.outcomes)


async def test_a_client_that_falls_behind_voids_its_probe(service: tuple[FakeService, str]) -> None:
    """The clock jumps past every due time: each request is sent late, and the probe says so."""
    _, target = service
    loop = asyncio.get_running_loop()
    readings = 0

    def now() -> float:
        nonlocal readings
        readings += 1
        return loop.time() + (5.0 if readings > 1 else 0.0)

    async with GrpcClient(target) as client:
        probe = await run_probe(client, make(spec(5)), path="split", rate_per_s=10.0, deadline_s=10, slo=Slo(1.0, 1.0), now=now)
    assert "fell behind" in probe.void
    assert probe.lag_p99_s > 1


async def test_one_at_a_time_is_unloaded(service: tuple[FakeService, str]) -> None:
    _, target = service
    async with GrpcClient(target) as client:
        outcomes = await run_one_at_a_time(client, make(spec(3)).requests, path="split", deadline_s=10)
    assert [outcome.failure for outcome in outcomes] == ["", "", ""]
    assert all(outcome.ttft_s is not None and outcome.ttft_s >= TTFT_S for outcome in outcomes)


async def test_quick_compares_reports_and_records(service: tuple[FakeService, str], tmp_path: Path) -> None:
    fake, target = service
    path = tmp_path / "records" / "quick.json"
    record = await quick(target, json_path=path, budget_s=8.0)
    assert record.judgement.verdict is Verdict.UNDECIDED
    assert "never decide" in record.judgement.sentence()
    assert record.wall_s < 12
    assert {probe.path for probe in record.probes} == {"split", "colocated"}
    heads = [tuple(request.tokenized.input_ids[:4]) for request, _ in fake.requests]
    assert len(set(heads)) == len(heads), "a prompt was sent twice: prefix caches were not salted"

    written = json.loads(path.read_text())
    assert written["schema_version"] == 1
    assert written["model"] == "fake"
    assert written["judgement"]["verdict"] == "undecided"
    assert {arm["path"] for arm in written["loaded"]} == {"split", "colocated"}
    assert [file.name for file in path.parent.iterdir()] == ["quick.json"]

    console = Console(record=True, width=120, file=io.StringIO())
    show(record, console)
    text = console.export_text()
    for word in ("TTFT", "TPOT", "ITL", "attainment", "prefill queue", "residual", "undecided"):
        assert word in text


async def test_quick_says_which_path_fails(service: tuple[FakeService, str]) -> None:
    fake, target = service
    fake.refuse_path = "split"
    with pytest.raises(ComparisonError, match="split path fails even unloaded: UNAVAILABLE"):
        await quick(target, budget_s=5.0)


async def test_quick_gives_up_on_a_path_that_hangs(service: tuple[FakeService, str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake, target = service
    fake.hang = True
    monkeypatch.setattr("coordinator.compare.run.REQUEST_DEADLINE_S", 0.5)
    with pytest.raises(ComparisonError, match="path fails even unloaded"):
        await quick(target, budget_s=5.0)
    assert len(fake.requests) == 1


async def test_quick_says_that_nobody_answers() -> None:
    with pytest.raises(ComparisonError, match=r"127\.0\.0\.1:1"):
        await quick("127.0.0.1:1")


async def test_the_command(service: tuple[FakeService, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = service
    monkeypatch.setattr("coordinator.compare.run.BUDGET_S", 3.0)
    path = tmp_path / "out.json"
    arguments = ["--quick", "--json", str(path), "--target", target, "--admin", "127.0.0.1:1"]
    assert await asyncio.to_thread(cli.main, arguments) == 0
    assert json.loads(path.read_text())["kind"] == "quick"


async def test_the_command_sends_the_workload_that_is_named(
    service: tuple[FakeService, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, target = service
    monkeypatch.setattr("coordinator.compare.run.BUDGET_S", 3.0)
    workload, path = tmp_path / "w.toml", tmp_path / "out.json"
    workload.write_text(
        'kind = "synthetic"\ninput = {kind = "fixed", tokens = 11}\noutput = {kind = "fixed", tokens = 3}\n'
        'prefix = {kind = "pool", count = 1, tokens = 32}\n'
    )
    arguments = ["--quick", "--json", str(path), "--target", target, "--admin", "127.0.0.1:1", "--workload", str(workload)]
    arguments += ["--set", "input.tokens=9", "--slo", "ttft=20s+1ms/token,tpot=3x"]
    assert await asyncio.to_thread(cli.main, arguments) == 0
    written = json.loads(path.read_text())
    assert (written["slo"]["ttft_s"], written["slo"]["ttft_s_per_token"]) == (20, 0.001)
    assert written["slo_multiples"]["tpot"] == pytest.approx(3)
    assert {outcome["prompt_tokens"] for probe in written["probes"] for outcome in probe["outcomes"]} == {41}
    assert written["source"]["prefix"]["tokens"] == 32
    assert written["lengths"]["input"]["mean"] == 41
    assert written["lengths"]["output"]["max"] == 3
    shapes = read(workload, ["input.tokens=9"]).shapes(1, written["workloads"][0]["requests"])
    assert written["workload_digests"]["1"] == shapes.digest
    assert {len(request.tokenized.input_ids) for request, _ in fake.requests} == {41}
    prefixes = {tuple(request.tokenized.input_ids[:32]) for request, _ in fake.requests}
    # One a probe, and per path one for the warm-up and one for the unloaded requests.
    assert len(prefixes) == len(written["probes"]) + 4


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "--quick" in capsys.readouterr().err
    assert cli.main(["--quick", "--admin", "127.0.0.1:1"]) == 1
    assert "no gateway" in capsys.readouterr().err
    assert cli.main(["--quick", "--workload", "no-such-file.toml"]) == 1
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["--quick", "--slo", "ttft=soon"]) == 2
    assert "--slo" in capsys.readouterr().err
    assert cli.main(["--quick", "--set", "requests=3"]) == 2
    assert "--workload" in capsys.readouterr().err


@pytest.mark.parametrize("gap_s", [0.0, 0.0005, 0.3, 12.0])
async def test_a_long_gap_is_met_on_time_though_the_systems_timers_run_over(
    gap_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is counted: each wait takes a thousandth more than asked, and up to a tick; each look at the clock 10 us."""
    passed_s = 0.0

    def now() -> float:
        nonlocal passed_s
        passed_s += 1e-5
        return passed_s

    async def sleep(wait_s: float) -> None:
        nonlocal passed_s
        passed_s += wait_s * 1.001 + (0.0009 if wait_s else 0.0)

    monkeypatch.setattr("coordinator.compare.load.asyncio.sleep", sleep)
    await load._until(gap_s, now)
    assert gap_s <= passed_s < gap_s + 2e-4
