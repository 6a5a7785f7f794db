"""The doctor's UCX probe on this machine's real UCX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtransfer.transports import ucx_probe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Any:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.ucx
def test_shared_memory_carries_a_same_host_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    report = ucx_probe.probe(error_handling=False)
    assert report["large"].partition("/")[0] in ("cma", "sysv", "posix")
    assert report["small"].partition("/")[0] in ("cma", "sysv", "posix")
    assert report["gigabytes_per_s"] > 0


@pytest.mark.ucx
def test_what_is_reported_is_what_is_used_not_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert ucx_probe.probe(error_handling=False)["large"].startswith("tcp/")


@pytest.mark.ucx
def test_peers_that_cannot_reach_each_other_are_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "sysv,self")
    monkeypatch.setenv("UCX_MM_ERROR_HANDLING", "n")
    assert "Unreachable" in ucx_probe.probe(error_handling=True)["error"]


@pytest.mark.ucx
def test_a_process_that_does_not_answer_is_given_up() -> None:
    assert "within 0 s" in ucx_probe.probe(error_handling=False, deadline_s=0.001)["error"]


@pytest.mark.ucx
def test_the_doctor_ends_in_one_json_object() -> None:
    command = [sys.executable, "-m", "coordinator.cli", "doctor", "--json", "--set", "engine.kind=simulated"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    report = json.loads(done.stdout)
    levels = {check["check"]: check["level"] for check in report["checks"]}
    assert levels["UCX"] == "ok"
    assert levels["model"] == "ok"
    assert done.returncode == (1 if report["level"] == "fail" else 0)
