"""The quality gate and sampled parity through a real gRPC server: a model of known answers, and simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from pydantic import TypeAdapter
from rich.console import Console

from coordinator.compare import cli
from coordinator.compare.load import ArmTarget
from coordinator.compare.quality.client import Arm, QualityClient
from coordinator.compare.quality.limits import QualityVerdict
from coordinator.compare.quality.measure import QualityError, measure
from coordinator.compare.quality.questions import QuestionSet, load
from coordinator.compare.quality.report import QualityReport
from coordinator.compare.quality.sample import prompts, sample_parity
from coordinator.compare.quality.table import show
from coordinator.gateway.frontend import ServedModel
from coordinator.gateway.grpc_front import build_grpc_server
from coordinator.routing.views import Role
from protos.splitpoint.v1 import admin_pb2, admin_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc
from tests.contract.test_core_workers import view_of
from tests.support.cores import core_over
from tests.support.fabric import Fabric
from tests.support.gateway import MODEL, frontend, tiny_tokenizer
from tests.support.workers import SimWorker, engine_settings, start_worker

pytestmark = pytest.mark.timeout(90)

COLOCATED = Arm("together", ArmTarget("colocated"))
SPLIT = Arm("apart", ArmTarget("split", ("prefill", "decode"), "grpc"))
ARMS = (COLOCATED, SPLIT)


class KnownModel(generation_pb2_grpc.GenerationServiceServicer):
    """A character is a token. It knows two of three answers; log-probabilities follow from the text before.

    Knobs of the split path: `shift` is added to every log-probability; every `wrong`-th question is answered wrong; `typo` is
    said for the first character after a text, with `typo_again_only` when that is asked the second time, which parity does with
    all at once; every `refuse`-th request fails. `tie` is both paths': the second candidate is as good as the first. Of the
    colocated path: when it is asked again it `forgets` every second answer, or `wavers` in the first character.
    """

    def __init__(self) -> None:
        self.shift = 0.0
        self.wrong = 0
        self.typo = ""
        self.typo_again_only = False
        self.tie = False
        self.forgets = False
        self.wavers = False
        self.refuse = 0
        self.recompute = False
        self.other_path = ""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._asked: Counter[tuple[str, str]] = Counter()
        questions = load().questions
        self._answers = {q.prompt: q.answer if i % 3 else "no idea" for i, q in enumerate(questions)}
        self._numbers = {q.prompt: i for i, q in enumerate(questions)}

    async def ListModels(self, request: Any, context: Any) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse(models=[generation_pb2.ModelInfo(id="known")])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        metadata = dict(context.invocation_metadata())
        path = metadata["x-splitpoint-path"]
        self.requests.append((request.text, metadata))
        self._asked[request.text, path] += 1
        split = path == "split"
        if split and self.refuse and len(self.requests) % self.refuse == 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        said = self._says(request, split, again=self._asked[request.text, path] > 1)
        sampling = request.sampling_params
        shift = self.shift if split else 0.0
        complete = generation_pb2.GenerateComplete(
            output_ids=[ord(c) for c in said],
            text=said.partition("\n")[0] if sampling.stop else said,
            metrics=common_pb2.StageLedger(path=self.other_path or path, recomputed=split and self.recompute),
        )
        if sampling.HasField("logprobs"):
            complete.logprobs.extend(self._position(request.text + said[:i], c, shift) for i, c in enumerate(said))
        if sampling.HasField("prompt_logprobs"):
            # The end is enough to tell arms apart, and as quick as a test wants it.
            text = request.text
            complete.prompt_logprobs.append(common_pb2.PositionLogprobs())
            complete.prompt_logprobs.extend(self._position(text[:i], text[i], shift) for i in range(len(text) - 40, len(text)))
        yield generation_pb2.GenerateResponse(complete=complete)

    def _says(self, request: Any, split: bool, *, again: bool) -> str:
        if not request.sampling_params.stop:
            said = "abcdefghijklmnop"[: request.sampling_params.max_tokens]
            if not split and self.wavers and again:
                return "b" + said[1:]
            return self.typo + said[1:] if split and self.typo and (again or not self.typo_again_only) else said
        number = self._numbers[request.text]
        lost = split and self.wrong and number % self.wrong == 0
        lost = lost or (not split and self.forgets and again and number % 2 == 0)
        return f" {'something else' if lost else self._answers[request.text]}\n"

    def _position(self, before: str, token: str, shift: float) -> common_pb2.PositionLogprobs:
        byte = hashlib.blake2b(before[-32:].encode(), digest_size=1).digest()[0]
        best = -0.1 - byte / 1000
        second = best - (0.0 if self.tie else 2.0)
        other = "b" if token != "b" else "a"
        entries = [(ord(token), best + shift, 1), (ord(other), second - shift, 2)]
        return common_pb2.PositionLogprobs(
            entries=[common_pb2.TokenLogprob(token_id=t, logprob=p, rank=r) for t, p, r in entries]
        )


@pytest.fixture
async def known() -> AsyncIterator[tuple[KnownModel, str]]:
    model = KnownModel()
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(model, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield model, f"127.0.0.1:{port}"
    await server.stop(None)


async def measured(target: str, arms: Sequence[Arm] = ARMS, **options: Any) -> QualityReport:
    async with QualityClient(target) as client:
        return await measure(client, arms, model=await client.model(10), **options)


async def test_an_equal_arm_passes(known: tuple[KnownModel, str]) -> None:
    model, target = known
    report = await measured(target)
    [found] = report.compared
    assert (report.verdict, found.verdict) == (QualityVerdict.PASS, QualityVerdict.PASS)
    assert found.paired is not None
    assert (found.paired.both_right, found.paired.only_baseline, found.paired.only_arm, found.paired.both_wrong) == (64, 0, 0, 32)
    assert (found.read.mean, found.decoded.mean, found.decoded.agreement) == (0.0, 0.0, 1.0)
    assert report.floor.read.mean == 0.0
    assert {(arm.name, arm.scores[0].right, arm.scores[0].asked) for arm in report.arms} == {
        ("together", 64, 96),
        ("apart", 64, 96),
    }
    assert [score.kind for score in report.arms[0].scores][1:] == [*load().kinds, "tool_format"]
    # 96 answers and 40 texts read, by both arms and by the baseline again.
    by_path = Counter(metadata["x-splitpoint-path"] for _, metadata in model.requests)
    assert by_path == {"colocated": 2 * 136, "split": 136}
    assert {metadata.get("x-splitpoint-pools") for _, metadata in model.requests} == {None, "prefill,decode"}
    assert report.notes == ["prefix caches were not reset between passes: the floor may be too low"]


async def test_the_report_is_json_with_a_schema_and_a_table(known: tuple[KnownModel, str]) -> None:
    _, target = known
    report = await measured(target, questions=load().first(2))
    text = json.dumps(report.as_dict(), allow_nan=False)
    back = json.loads(text)
    assert back.pop("verdict") == report.verdict
    assert TypeAdapter(QualityReport).validate_json(json.dumps(back)) == report
    assert TypeAdapter(QualityReport).json_schema()["title"] == "QualityReport"
    console = Console(record=True, width=140, file=io.StringIO())
    show(report, console)
    shown = console.export_text()
    for word in ("tool_format", "together again", "apart: undecided", "McNemar", "73 questions", report.set_digest[:12]):
        assert word in shown


async def test_perturbed_logits_fail_with_every_answer_right(known: tuple[KnownModel, str]) -> None:
    model, target = known
    model.shift = -0.3
    [found] = (await measured(target)).compared
    assert found.verdict is QualityVerdict.FAIL
    assert found.paired is not None
    assert found.paired.drop == 0
    assert found.read.mean == pytest.approx(0.3, abs=1e-4)
    assert {check.name for check in found.checks if check.verdict is QualityVerdict.FAIL} == {
        "read: mean |delta|",
        "decoded: mean |delta|",
    }


async def test_wrong_answers_fail(known: tuple[KnownModel, str]) -> None:
    model, target = known
    model.wrong = 2
    [found] = (await measured(target)).compared
    assert found.verdict is QualityVerdict.FAIL
    assert found.paired is not None
    assert (found.paired.only_baseline, found.paired.only_arm) == (32, 0)
    assert found.paired.mcnemar_p == pytest.approx(2 * 0.5**32)
    assert "score: lost +33.3% of 96 questions" in found.why


async def test_requests_that_fail_keep_an_arm_from_passing(known: tuple[KnownModel, str]) -> None:
    model, target = known
    model.refuse = 50
    report = await measured(target)
    [found] = report.compared
    failed = next(arm for arm in report.arms if arm.name == "apart").failed
    assert failed > 0
    assert found.verdict is QualityVerdict.UNDECIDED
    assert found.why.startswith(f"{failed} requests that the baseline answered failed in this arm")


async def test_a_baseline_that_fails_against_itself_judges_nobody(known: tuple[KnownModel, str]) -> None:
    model, target = known
    model.forgets = True
    report = await measured(target)
    assert report.floor.verdict is QualityVerdict.FAIL
    assert report.verdict is QualityVerdict.UNDECIDED
    assert report.compared[0].why.startswith("the baseline fails against itself: score: lost +33.3%")


async def test_an_answer_over_another_path_is_no_answer(known: tuple[KnownModel, str]) -> None:
    model, target = known
    model.other_path = "split"
    with pytest.raises(QualityError, match="together answers nothing: recall-01: the answer took the path 'split'"):
        await measured(target)


async def test_what_cannot_be_compared_is_refused(known: tuple[KnownModel, str]) -> None:
    _, target = known
    for arms in ((COLOCATED,), (COLOCATED, COLOCATED), (COLOCATED, Arm("again", ArmTarget("split")))):
        with pytest.raises(QualityError):
            await measured(target, arms)
    async with QualityClient(target) as client:
        with pytest.raises(QualityError, match="another arm"):
            await sample_parity(client, (COLOCATED,), 1, 3)


async def test_every_pass_is_prepared(known: tuple[KnownModel, str]) -> None:
    model, target = known
    seen: list[tuple[str, int]] = []

    async def prepare(arm: Arm) -> None:
        seen.append((arm.name, len(model.requests)))

    report = await measured(target, questions=load().first(1), prepare=prepare)
    assert seen == [("together", 0), ("apart", 8), ("together", 16)]
    assert report.notes == []


async def test_the_command_and_its_exit_status(
    known: tuple[KnownModel, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, target = known
    path = tmp_path / "quality.json"
    words = [
        "quality",
        "--target",
        target,
        "--arm",
        "together=colocated",
        "--arm",
        "apart=split@grpc:prefill,decode",
        "--json",
        str(path),
    ]

    async def run(*more: str) -> int:
        return await asyncio.to_thread(cli.main, [*words, *more])

    assert await run() == 0
    written = json.loads(path.read_text())
    assert (written["verdict"], written["arms"][1]["pools"]) == ("pass", ["prefill", "decode"])
    marks = {(m.get("x-splitpoint-pools"), m.get("x-splitpoint-transport")) for _, m in model.requests}
    assert marks == {(None, None), ("prefill,decode", "grpc")}
    assert await run("--per-kind", "2") == 3
    model.shift = -0.3
    assert await run("--per-kind", "10") == 1
    assert "apart: fail" in capsys.readouterr().out
    assert await run("--per-kind", "20", "--max-mean-divergence", "0.5") == 0
    assert await run("--admin", "127.0.0.1:1") == 1
    assert "prefix caches were not emptied" in capsys.readouterr().err
    assert await run("--min-top1-agreement", "2") == 2
    assert await run("--arm", "third=sideways") == 2
    assert "NAME=PATH" in capsys.readouterr().err


class TestParity:
    async def sampled(self, target: str, requests: int = 4) -> Any:
        async with QualityClient(target) as client:
            return await sample_parity(client, ARMS, seed=3, requests=requests)

    async def test_equal_tokens(self, known: tuple[KnownModel, str]) -> None:
        _, target = known
        found = await self.sampled(target)
        assert found.verdict == "equal"
        assert (found.floor, found.batched_floor) == (0.0, 0.0)
        assert json.loads(json.dumps(found.as_dict()))["arms"][0]["asked"] == 4

    async def test_one_at_a_time_nothing_may_part_however_near_the_tie(self, known: tuple[KnownModel, str]) -> None:
        model, target = known
        model.typo, model.tie = "b", True
        found = await self.sampled(target)
        assert found.verdict == "differs"
        assert "4 of 4 prompts, asked one at a time, gave other tokens" in found.arms[0].why

    async def test_a_batch_may_part_at_a_tie(self, known: tuple[KnownModel, str]) -> None:
        model, target = known
        model.typo, model.tie, model.typo_again_only = "b", True, True
        found = await self.sampled(target)
        assert found.verdict == "near_ties"
        assert (found.arms[0].divergences, found.arms[0].batched_divergences, found.arms[0].worst_gap) == (0, 4, 0.0)

    async def test_a_batch_may_not_part_where_the_choice_is_clear(self, known: tuple[KnownModel, str]) -> None:
        model, target = known
        model.typo, model.typo_again_only = "b", True
        found = await self.sampled(target)
        assert found.verdict == "differs"
        assert "parts 2.000 nats from a tie" in found.arms[0].why

    async def test_a_baseline_that_wavers_at_a_tie_lets_an_arm_waver_there(self, known: tuple[KnownModel, str]) -> None:
        model, target = known
        model.typo, model.tie, model.wavers = "b", True, True
        assert (await self.sampled(target)).verdict == "near_ties"
        model.wavers = False
        assert (await self.sampled(target)).verdict == "differs"

    async def test_a_baseline_that_wavers_where_the_choice_is_clear_judges_nobody(self, known: tuple[KnownModel, str]) -> None:
        model, target = known
        model.typo, model.wavers = "b", True
        found = await self.sampled(target)
        assert found.verdict == "undecided"
        assert "parts from itself where the choice is clear (4.000 nats)" in found.arms[0].why

    async def test_kv_that_was_not_moved_shows_nothing(self, known: tuple[KnownModel, str]) -> None:
        model, target = known
        model.recompute = True
        found = await self.sampled(target)
        assert found.verdict == "undecided"
        assert "decode computed the prompt itself" in found.arms[0].why

    def test_prompts_are_the_seeds_own_from_their_first_word(self) -> None:
        first, second = prompts(1, 6), prompts(2, 6)
        assert prompts(1, 6) == first
        heads = [ask.text.split()[0] for ask in (*first, *second)]
        assert len(set(heads)) == 12
        assert len(first[0].text) > 40 * 50 > len(first[1].text)


@contextlib.asynccontextmanager
async def simulated(*, seed: int = 0) -> AsyncIterator[tuple[list[SimWorker], str]]:
    """A prefill, a decode and a colocated worker behind one gateway; the colocated engine's weights are those of `seed`."""
    fabric, roles = Fabric(), (Role.PREFILL, Role.DECODE, Role.COLOCATED)
    shape = {"max_model_len": 4096, "max_num_batched_tokens": 1024, "simulated": {"num_kv_blocks": 2048}}
    model = ServedModel(id=MODEL, root=MODEL, max_model_len=4096, vocab_size=tiny_tokenizer().vocab_size, created_s=1)
    workers: list[SimWorker] = []
    try:
        for role in roles:
            settings = engine_settings(**shape, seed=seed if role is Role.COLOCATED else 0)
            workers.append(await start_worker(fabric, role.value, engine=settings, staging_blocks=2048))
        views = [view_of(worker, role) for worker, role in zip(workers, roles, strict=True)]
        async with core_over(views, transports=("grpc",)) as under_test:
            server = build_grpc_server(under_test.core, dataclasses.replace(frontend(), model=model))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            yield workers, f"127.0.0.1:{port}"
            await server.stop(2)
            under_test.assert_idle()
    finally:
        for worker in workers:
            await worker.close()


SIM_ARMS = (Arm("together", ArmTarget("colocated", ("colocated",))), SPLIT)


def short(per_kind: int) -> QuestionSet:
    """Without the long prompts."""
    return dataclasses.replace(load(), questions=tuple(q for q in load().questions if q.kind != "extraction")).first(per_kind)


async def test_simulated_engines_split_and_colocated_are_equal_token_by_token() -> None:
    async with simulated() as (workers, target), QualityClient(target) as client:

        async def prepare(_: Any) -> None:
            for worker in workers:
                assert await worker.engine.reset_prefix_cache()

        found = await sample_parity(client, SIM_ARMS, seed=1, requests=4, prepare=prepare)
        assert (found.verdict, found.floor, found.batched_floor) == ("equal", 0.0, 0.0)
        report = await measure(client, SIM_ARMS, questions=short(3), prepare=prepare)
        [arm] = report.compared
        assert arm.read.tokens > 1000
        assert arm.decoded.tokens > 100
        assert (arm.read.mean, arm.decoded.mean, arm.decoded.agreement, report.floor.decoded.mean) == (0.0, 0.0, 1.0, 0.0)
        # Tokens without a meaning answer nothing, and that is said instead of called equal.
        assert report.arms[0].scores[0].right == 0
        assert arm.verdict is QualityVerdict.UNDECIDED
        assert "too few for a drop to show" in arm.why or "questions would settle it" in arm.why


async def test_an_engine_with_other_weights_is_found_out() -> None:
    async with simulated(seed=1) as (_, target), QualityClient(target) as client:
        found = await sample_parity(client, SIM_ARMS, seed=1, requests=3)
        assert found.verdict == "differs"
        report = await measure(client, SIM_ARMS, questions=short(2))
        assert report.verdict is QualityVerdict.FAIL
        failed = {check.name for check in report.compared[0].checks if check.verdict is QualityVerdict.FAIL}
        assert "decoded: top-1 agreement" in failed


async def test_the_command_resets_the_caches_through_the_admin(known: tuple[KnownModel, str], tmp_path: Path) -> None:
    """Blocks are in use once: it waits and asks again."""

    class Admin(admin_pb2_grpc.AdminServiceServicer):
        asked = 0

        async def ResetPrefixCaches(self, request: Any, context: Any) -> admin_pb2.ResetPrefixCachesResponse:
            self.asked += 1
            if self.asked == 2:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "blocks are in use")
            return admin_pb2.ResetPrefixCachesResponse(workers=2)

    admin, server = Admin(), grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    path = tmp_path / "quality.json"
    words = ["quality", "--target", known[1], "--arm", "a=colocated", "--arm", "b=split", "--admin", f"127.0.0.1:{port}"]
    assert await asyncio.to_thread(cli.main, [*words, "--json", str(path)]) == 0
    await server.stop(None)
    assert admin.asked == 4
    assert json.loads(path.read_text())["notes"] == []
