"""Scenario files: commands, and under each, indented, what was answered.

`SPLITPOINT_UPDATE_SCENARIOS=1` rewrites the files with the present answers; review them as a diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def played(text: str, run: Callable[[str], list[str]]) -> str:
    """The file with every answer as it is now. Lines that begin with `#` and empty ones stay; answers are indented."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"    {answer}" for answer in run(line)]
    return "\n".join(lines) + "\n"


def check_scenario(path: Path, run: Callable[[str], list[str]]) -> None:
    """The answers in the file are those of `run`."""
    text = path.read_text()
    now = played(text, run)
    if os.environ.get("SPLITPOINT_UPDATE_SCENARIOS"):
        path.write_text(now)
    else:
        assert now == text
