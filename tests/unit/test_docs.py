"""Every command and link in the documents exists. Commands are read from fenced `console` and `sh` blocks.

A `console` line that starts with `$ ` is a command; in a `sh` block every line is one. Commands of ours are checked against the
Makefile, the command line's own parser and the files; other programs must be in `FOREIGN`.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from coordinator import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md"), *ROOT.glob("tests/*.md")]
    if path.is_file()
)
FOREIGN = {
    "cd",
    "curl",
    "export",
    "git",
    "grpcurl",
    "kubectl",
    "openssl",
    "pip",
    "python",
    "python3",
    "ray",
    "sysctl",
    "uv",
    "aiperf",
    "guidellm",
    "vllm",
}
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The command lines of a document, continuation lines joined."""
    found = []
    for language, block in FENCE.findall(text):
        joined = block.replace("\\\n", " ")
        if language == "console":
            found += [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
        elif language in ("sh", "bash", "shell"):
            found += [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return found


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    tiers = re.search(r"^TIERS := (.*)$", text, re.MULTILINE)
    assert tiers is not None
    return set(re.findall(r"^([a-z-]+):", text, re.MULTILINE)) | {f"test-{tier}" for tier in tiers[1].split()}


def problem(command: str) -> str:
    """Why a command is not one that works here; "" when it is."""
    words = shlex.split(command, comments=True)
    for cut in ("|", "&&", ";", ">", "&"):
        if cut in words:
            rest = words[words.index(cut) + 1 :]
            words = words[: words.index(cut)]
            if cut in ("&&", ";") and rest:
                later = problem(shlex.join(rest))
                if later:
                    return later
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    if not words:
        return ""
    program, arguments = words[0], words[1:]
    name = program.removeprefix("./").removeprefix(".venv/bin/")
    if name == "make":
        unknown = [word for word in arguments if "=" not in word and word not in make_targets()]
        return f"make has no target {unknown}" if unknown else ""
    if name == "splitpoint":
        return splitpoint_problem(arguments)
    if program.startswith(".venv/bin/"):
        return "" if (Path(sys.executable).parent / name).exists() else f"{program} is not installed"
    if "/" in program:
        return "" if (ROOT / program).is_file() else f"{program} does not exist"
    return "" if program in FOREIGN else f"{program} is not a program this test knows"


def splitpoint_problem(arguments: list[str]) -> str:
    command: Any = typer.main.get_command(cli.app)
    words = list(arguments)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        child = command.commands.get(words[0])
        if child is None:
            return f"splitpoint has no command {words[0]!r}"
        command = child
        words.pop(0)
    if command.context_settings.get("ignore_unknown_options"):
        return ""  # It hands its options on to a parser of its own.
    known = {"--help"} | {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word.partition("=")[0] for word in words if word.startswith("-") and word.partition("=")[0] not in known]
    return f"splitpoint {command.name} has no {unknown}" if unknown else ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_in_a_document_exists(path: Path) -> None:
    faults = {command: problem(command) for command in commands(path.read_text())}
    assert {command: fault for command, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    prose = FENCE.sub("", path.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    broken = [link for link in links if "://" not in link and not (path.parent / link.partition("#")[0]).exists()]
    assert broken == []


def test_the_readme_shows_both_commands() -> None:
    shown = commands((ROOT / "README.md").read_text())
    assert {"make demo", "make test"} <= set(shown)


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("make test-unit", ""),
        ("make no-such-target", "no target"),
        (".venv/bin/splitpoint models fetch smollm2 --force", ""),
        ("splitpoint serve -c FILE --set engine.seed=1", ""),
        ("splitpoint serve --no-such-option", "has no ['--no-such-option']"),
        ("splitpoint no-such-command", "no command 'no-such-command'"),
        ("SPLITPOINT_DEVICE=cpu scripts/setup.sh", ""),
        ("scripts/no-such-file.sh", "does not exist"),
        ("cd x && make no-such-target", "no target"),
        ("rm -rf build", "not a program"),
    ],
)
def test_the_checker_itself(command: str, fault: str) -> None:
    found = problem(command)
    assert (found == "") is (fault == "")
    assert fault in found


def test_commands_are_read_from_both_kinds_of_block() -> None:
    text = "```console\n$ make a \\\n    b\noutput\n```\n```sh\n# no\nmake c\n```\n```python\nmake d\n```\n"
    assert [shlex.split(command) for command in commands(text)] == [["make", "a", "b"], ["make", "c"]]


def test_no_path_of_one_machine_is_in_the_documents() -> None:
    for path in DOCUMENTS:
        assert not re.search(r"(^|[^\w.])/(home|root|work|tmp)/", path.read_text()), path
