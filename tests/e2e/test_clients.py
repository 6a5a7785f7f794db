"""Clients as their users have them: the `openai` package, and what docs/guide-clients.md shows. Under a minute.

Load generators need an environment of their own: `make check-clients`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from scripts.guide import CLIENTS, console_commands, localise, programs
from tests.e2e.system import ROOT, Served

pytestmark = pytest.mark.timeout(180)

GUIDE = CLIENTS.read_text()
OUTPUT = {
    "ask_openai.py": "24 tokens, split path",
    "ask_grpc.py": "length",
    "ask_by_reflection.py": "",
    "careful_grpc.py": "INVALID_ARGUMENT invalid_value sampling_params.temperature",
}
"""What each program prints, whatever the tokens are."""


def here(served: Served, text: str) -> str:
    return localise(text, http=served.http, grpc=served.grpc, model=served.model)


def ran(command: list[str]) -> str:
    """Its output; fails unless it ends with status 0 and nothing on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "*", "NO_PROXY": "*"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def check_openai(served: Served, *options: str) -> None:
    """Failures are shown whole."""
    command = [sys.executable, str(ROOT / "scripts" / "check_openai.py"), served.http, served.model, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert said["failures"] == []
    assert said["requests"] > 30


def test_the_openai_package(system: Served) -> None:
    check_openai(system)


@pytest.mark.vllm
@pytest.mark.timeout(420)
def test_the_openai_package_on_the_real_model(real: Served) -> None:
    """The only one here that may have to start the real engines, which the other files share."""
    check_openai(real, "--structured")
    assert "Paris" in ran([sys.executable, "-c", here(real, programs(GUIDE)["ask_grpc.py"])]).replace("\n", "")


@pytest.mark.parametrize("name", programs(GUIDE))
def test_a_program_of_the_guide(system: Served, name: str) -> None:
    said = ran([sys.executable, "-c", here(system, programs(GUIDE)[name])])
    assert said.strip()
    assert OUTPUT[name] in said


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_curl_commands_of_the_guide_and_the_readme(system: Served) -> None:
    commands = console_commands(GUIDE, "curl") + console_commands((ROOT / "README.md").read_text(), "curl")
    replies = [json.loads(ran(["bash", "-c", here(system, command)])) for command in commands]
    assert [reply["object"] for reply in replies] == ["chat.completion", "text_completion", "list", "chat.completion"]
    assert replies[1]["metrics"]["path"] == "colocated"
    assert len(replies[1]["choices"][0]["token_ids"]) == 8


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="no grpcurl on this machine")
def test_the_grpcurl_command_of_the_guide(system: Served) -> None:
    (command,) = console_commands(GUIDE, "grpcurl")
    assert json.loads(ran(["bash", "-c", here(system, command)]))["complete"]["completion_tokens"] == 8
