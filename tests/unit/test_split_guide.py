"""'Should I split?' of the guide for researchers: its commands one after the other, as printed, on one folder.

What needs a system is asked of a queue in virtual time instead of the engines; the experiment, the workload and what is made of
the record are the real ones. `make`, `serve` and `compare --quick` are run by the tests that are named here.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator import cli, config
from coordinator.compare import cli as compare_cli
from coordinator.compare import run_cli, tools
from coordinator.compare.load import ArmTarget, Piece
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.workload import PlannedRequest
from scripts.guide import ROOT, console_commands

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

GUIDE = (ROOT / "docs" / "guide-researchers.md").read_text()
CHAPTER = GUIDE[GUIDE.index("## Should I split?") : GUIDE.index("## Before anything runs")]
ELSEWHERE = {
    "splitpoint models fetch": ("tests/unit/test_models.py", "def test_"),
    "splitpoint serve": ("tests/e2e/system.py", '"serve"'),
    "splitpoint compare --quick": ("tests/contract/test_compare.py", "test_the_command_sends_the_workload_that_is_named"),
}
FIRST_S, NEXT_S = 0.05, 0.01
SLOTS = {"colocated": {"128": 2, "256": 4, "1024": 3}, "split": {"128": 3, "256": 5, "1024": 4}}
"""How many requests a path serves at once, by chunk budget: the second is the best of each, split's better by a quarter."""


class Queue:
    """In the place of `ClientProcesses`: each candidate's pools are a queue in front of some servers."""

    def __init__(self, target: str, *, api_key: str = "") -> None:
        self._targets: dict[str, ArmTarget] = {}
        self._slots = {
            (path, chunk): asyncio.Semaphore(count) for path, chunks in SLOTS.items() for chunk, count in chunks.items()
        }

    async def __aenter__(self) -> Queue:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def model(self, timeout_s: float) -> str:
        return "smollm2-135m-instruct"

    def know(self, name: str, target: ArmTarget) -> None:
        self._targets[name] = target

    def notes(self) -> list[str]:
        return []

    async def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        target, output = self._targets[path], request.output_tokens
        prefill_s, decode_s = FIRST_S, NEXT_S * (output - 1)
        loop = asyncio.get_running_loop()
        came = loop.time()
        async with self._slots[target.path, target.pools[0].rpartition("-")[2]]:
            queued_s = loop.time() - came
            await asyncio.sleep(prefill_s)
            yield Piece(1)
            await asyncio.sleep(decode_s)
            whole_s = queued_s + prefill_s + decode_s
            stages = {"prefill_queue_s": queued_s, "prefill_s": prefill_s, "decode_s": decode_s, "e2e_s": whole_s}
            transfer = {"transfer_s": 0.002, "transfer_bytes": 1_000_000} if target.path == "split" else {}
            yield Piece(output - 1, ledger={"path": target.path, "residual_s": 0.0, **stages, **transfer})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository as the commands see it, with a `runs` of its own; no system, and time that is counted."""
    for name in ("deploy", "docs", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coordinator.compare.clients.ClientProcesses", Queue)
    monkeypatch.setattr(run_cli.asyncio, "run", functools.partial(run_virtual, turn_s=1e-4))
    now = lambda: asyncio.get_running_loop().time()  # noqa: E731
    monkeypatch.setattr("coordinator.compare.tools.Tools", functools.partial(tools.Tools, now=now))
    settings = config.load(ROOT / "deploy" / "compare-cpu.toml", [], {}).model_dump(mode="json")
    monkeypatch.setattr(compare_cli, "ask_admin", lambda address, url: ("", {"settings": settings}))

    return tmp_path


def chapter_commands() -> list[str]:
    return console_commands(CHAPTER, "splitpoint")


def run(command: str) -> None:
    """As the shell would, in this process; a system that is served has a gateway. Raises `SystemExit`."""
    words = shlex.split(command)[1:]
    if words[:2] == ["compare", "run"]:
        at = words.index("--serve")
        assert Path(words[at + 1]).is_file()
        words[at : at + 2] = ["--target", "queue:1", "--admin", "queue:2"]
    cli.app(words, prog_name="splitpoint")


def test_every_command_is_run_here_or_there() -> None:
    commands = chapter_commands()
    assert len(commands) >= 8
    for start, (path, words) in ELSEWHERE.items():
        assert any(command.startswith(start) for command in commands), start
        assert words in (ROOT / path).read_text()
    assert console_commands(CHAPTER, "make") == ["make setup", "make demo"]


def test_from_the_workload_to_the_plan(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: dict[str, str] = {}
    for command in chapter_commands():
        if command.startswith(tuple(ELSEWHERE)):
            continue
        with pytest.raises(SystemExit) as ended:
            run(command)
        out, err = capfd.readouterr()
        assert ended.value.code in (0, None), f"{command}\n{out}\n{err}"
        said[command] = out
    record = json.loads((folder / "runs" / "decode-heavy.json").read_text())
    assert record["kind"] == "full"
    assert {arm["name"]: arm["candidate"] for arm in record["arms"]} == {"colocated": "chunk-256", "split": "chunk-256"}
    assert len(record["knees"]) >= 3
    assert record["judgement"]["verdict"] in ("split", "undecided"), "the split queue has a quarter more servers"
    pages = sorted(path.name for path in (folder / "runs").glob("*.html"))
    assert pages == sorted([*re.findall(r"runs/([\w.-]+\.html)", CHAPTER), "map.html"]), "the map's stands beside its JSON"
    assert all("<html" in (folder / "runs" / page).read_text()[:500].lower() for page in pages)
    (plan,) = (text for command, text in said.items() if " plan capacity" in command)
    assert "replicas" in plan
