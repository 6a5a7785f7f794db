"""Standard clients as processes: run, and what they leave when they fail."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path

from scripts.guide import ROOT

TIMEOUT_S = 300.0


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a client offline, past any proxy, with these variables too. One that is not done in time has failed."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"}
    environment = {
        **os.environ,
        **offline,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    } | variables
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        return subprocess.CompletedProcess(command, 124, _text(exc.stdout), f"{_text(exc.stderr)}\nnot done in {TIMEOUT_S:g} s")


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what it said, and its status."""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return f"exit status {done.returncode}: " + "\n".join(lines[-15:])


def version(python: Path, distribution: str) -> str:
    """Of a distribution in another environment; "" when it is not there."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return run([str(python), "-c", code]).stdout.strip()


def version_here(distribution: str) -> str:
    """Of a distribution of ours, with its name."""
    return f"{distribution} {importlib.metadata.version(distribution)}"


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
