"""Calibration of path `auto`: known costs in virtual time are found again, and what gives none says why."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import cli, path_model
from coordinator.compare import calibrate_cli, run_cli
from coordinator.compare import cli as compare_cli
from coordinator.compare.calibrate_cli import chunk_tokens, in_words
from coordinator.compare.load import Outcome, Piece, RequestFailedError
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.step_times import CalibrationError, Observed, Step, fit, measure, steps_together
from coordinator.compare.workload import PlannedRequest
from coordinator.routing.auto import COLOCATED, PATHS, SPLIT, StepTimes

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]

COSTS = {
    COLOCATED: StepTimes(first_token_s=0.02, prompt_token_s=1e-3, step_s=0.05, running_s=4e-3, chunk_tokens=256),
    SPLIT: StepTimes(
        first_token_s=0.03,
        prompt_token_s=1e-3,
        step_s=0.04,
        running_s=2e-3,
        handover_s=0.01,
        handover_token_s=1e-4,
        chunk_tokens=256,
    ),
}
WORKERS = {SPLIT: 1, COLOCATED: 2}
"""That decode; requests take them in turns."""


class Engines:
    """Prompts take their line, steps grow with the sequences on their worker."""

    def __init__(self, costs: dict[str, StepTimes] = COSTS, broken: str = "") -> None:
        self._costs, self._broken = costs, broken
        self._running: dict[str, int] = {}
        self._turn = itertools.count()
        self.prompts: list[tuple[int, ...]] = []

    async def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        if path == self._broken:
            raise RequestFailedError("UNAVAILABLE: no worker")
        costs, worker = self._costs[path], f"{path}-{next(self._turn) % WORKERS[path]}"
        tokens = len(request.prompt_token_ids)
        self.prompts.append(request.prompt_token_ids)
        steps = -(-tokens // costs.chunk_tokens)
        self._running[worker] = self._running.get(worker, 0) + 1
        await asyncio.sleep(costs.first_token_s + costs.prompt_token_s * tokens + (costs.step_s - costs.running_s) * (steps - 1))
        yield Piece(1)
        await asyncio.sleep(costs.handover_s + costs.handover_token_s * tokens)
        for number in range(1, request.output_tokens):
            await asyncio.sleep(costs.step_s + costs.running_s * (self._running[worker] - 1))
            last = number + 1 == request.output_tokens
            yield Piece(1, ledger={"decode_worker": worker} if last else None)
        self._running[worker] -= 1


def observe(engines: Engines, longest: int = 384) -> dict[str, Observed]:
    async def work() -> dict[str, Observed]:
        return await measure(engines, longest, "salt", now=asyncio.get_running_loop().time)

    return run_virtual(work(), 0.0005)


def test_known_costs_are_found_again() -> None:
    engines = Engines()
    found = fit(observe(engines), 256)
    for path in PATHS:
        for name, value in dataclasses.asdict(COSTS[path]).items():
            assert getattr(found[path], name) == pytest.approx(value, rel=0.06, abs=3e-5), (path, name)
    heads = {prompt[:4] for prompt in engines.prompts}
    assert len(heads) == len(engines.prompts), "a prompt that was cached would take no time"
    assert {len(prompt) for prompt in engines.prompts} == {48, 96, 192, 384}


def test_what_was_found_can_be_served_with(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    found = fit(observe(Engines()), 256)
    file.write_text(path_model.to_json(found))
    assert path_model.read(file) == found
    assert "hand-over" in in_words(SPLIT, found[SPLIT])
    assert "hand-over" not in in_words(COLOCATED, found[COLOCATED])


def test_a_request_that_stood_still_moves_no_line() -> None:
    seen = observe(Engines())
    one = seen[COLOCATED].alone[0]
    one.ttft_s = (one.ttft_s or 0.0) + 30.0
    assert fit(seen, 256)[COLOCATED].first_token_s == pytest.approx(0.02, rel=0.1)


def test_what_gives_no_step_times_says_why() -> None:
    with pytest.raises(CalibrationError, match="split: UNAVAILABLE: no worker"):
        observe(Engines(broken=SPLIT))
    flat = {path: dataclasses.replace(costs, prompt_token_s=0.0) for path, costs in COSTS.items()}
    with pytest.raises(CalibrationError, match="TTFT does not grow with the prompt"):
        fit(observe(Engines(flat), 64), 256)
    with pytest.raises(CalibrationError, match="colocated: no decode step was seen"):
        fit({COLOCATED: Observed(alone=[], together=[])}, 0)


def test_steps_count_only_while_all_decode() -> None:
    def outcome(ttft_s: float, gaps: list[float], worker: str) -> Outcome:
        made = Outcome(index=0, due_s=0.0, lag_s=0.0, wanted_tokens=len(gaps) + 1, gaps_s=gaps, ledger={"decode_worker": worker})
        made.ttft_s, made.e2e_s = ttft_s, ttft_s + sum(gaps)
        return made

    first, second = outcome(0.1, [0.5, 0.2, 0.2, 0.2], "a"), outcome(0.6, [0.3, 0.3, 0.9], "a")
    # Between 0.6, the second's first token, and 1.2, the first's last one.
    assert [(step.beside, pytest.approx(step.seconds)) for step in steps_together([first, second])] == [(1, 0.2), (1, 0.3)]
    assert steps_together([first, outcome(5.0, [0.1], "a")]) == []
    alone = steps_together([first, outcome(0.1, [0.5, 0.2, 0.2, 0.2], "b")])
    assert {step.beside for step in alone} == {0}
    assert isinstance(alone[0], Step)


def test_the_chunk_is_that_of_the_pool_with_the_smallest() -> None:
    engine = {"max_num_batched_tokens": 512}
    assert chunk_tokens({}) == 0
    assert chunk_tokens({"settings": {"engine": engine, "pools": {"a": {"engine": {}}, "b": {}}}}) == 512
    pools = {"a": {"engine": {"max_num_batched_tokens": 64}}, "b": {}}
    assert chunk_tokens({"settings": {"engine": engine, "pools": pools}}) == 64


class TestCommand:
    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["compare", "calibrate", *arguments])

    def test_without_a_system_it_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compare_cli, "ask_admin", lambda address, url: ("", {}))
        result = self.run("--out", str(tmp_path / "x.json"), "--admin", "127.0.0.1:9")
        assert result.exit_code == 1
        assert "no gateway: 127.0.0.1:9" in result.output
        assert not (tmp_path / "x.json").exists()

    def test_it_writes_what_it_measured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = observe(Engines())

        async def measured(*_: Any) -> dict[str, Observed]:
            return seen

        manifest = {"settings": {"engine": {"max_num_batched_tokens": 256}, "pools": {}}}
        monkeypatch.setattr(compare_cli, "ask_admin", lambda address, url: ("g:1", manifest))
        monkeypatch.setattr(calibrate_cli, "_measure", measured)
        result = self.run("--out", str(tmp_path / "x.json"))
        assert result.exit_code == 0, result.output
        assert "colocated, ms: prompt 20" in result.output
        content = json.loads((tmp_path / "x.json").read_text())
        assert content["paths"]["colocated"]["chunk_tokens"] == 256

    def test_options_that_exclude_each_other_are_refused(self) -> None:
        both = self.run("--out", "x", "--serve", "deploy/simulated.toml", "--admin", "h:1")
        assert both.exit_code == 2
        assert "brings a system of its own" in both.output
        assert self.run("--out", "x", "--set", "a=1").exit_code == 2
        assert self.run("--out", "x", "--longest-prompt", "31").exit_code == 2


class TestCompareRun:
    """`compare run --calibrate`: measured on a system of its own where the file is missing, and never again."""

    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """The settings of every system that was served."""
        seen: list[list[str]] = []

        @contextlib.contextmanager
        def system(config: Path | None, sets: list[str], state_dir: Path) -> Iterator[str]:
            seen.append(list(sets))
            yield "admin:1"

        monkeypatch.setattr(run_cli, "system", system)
        # The comparison itself ends at once: nobody is there.
        monkeypatch.setattr(compare_cli, "ask_admin", lambda address, url: ("", {}))
        return seen

    def run(self, tmp_path: Path, *more: str) -> Any:
        plan = ROOT / "deploy" / "experiments" / "auto-cpu.toml"
        arguments = [str(plan), "--record", str(tmp_path / "record.json"), *more]
        return CliRunner().invoke(cli.app, ["compare", "run", *arguments])

    def test_a_missing_file_is_measured_first_with_prompts_as_long_as_the_workloads(
        self, tmp_path: Path, served: list[list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file, asked = tmp_path / "times.json", []

        def write(out: Path, admin: str, longest_prompt: int, **_: Any) -> None:
            asked.append((out, admin, longest_prompt))
            out.write_text("{}")

        monkeypatch.setattr(calibrate_cli, "write_step_times", write)
        serve = ("--serve", str(ROOT / "deploy" / "auto-cpu.toml"), "--set", "engine.nice=0", "--calibrate", str(file))
        for _ in range(2):
            result = self.run(tmp_path, *serve)
            assert "no gateway: admin:1" in result.output
        ((out, admin, longest),) = asked
        assert (out, admin) == (file, "admin:1")
        assert 100 <= longest <= 128
        with_file = ["engine.nice=0", f"gateway.auto.model_file={file}"]
        assert served == [["engine.nice=0"], with_file, with_file]

    def test_a_calibration_that_fails_ends_the_run_with_its_reason(
        self, tmp_path: Path, served: list[list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write(*_: Any, **__: Any) -> None:
            raise CalibrationError("split: no decode step was seen")

        monkeypatch.setattr(calibrate_cli, "write_step_times", write)
        result = self.run(tmp_path, "--serve", "any.toml", "--calibrate", str(tmp_path / "times.json"))
        assert (result.exit_code, len(served)) == (1, 1)
        assert "split: no decode step was seen" in result.output

    def test_a_system_that_stands_has_its_file_already(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, "--calibrate", "times.json")
        assert result.exit_code == 2
        assert "is for a system that --serve brings" in result.output
