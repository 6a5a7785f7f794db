"""NIXL's cases, in a process without ucxx: two UCX libraries in one end in a crash (`kvtransfer.transport_choice.openable`)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(320)]


@pytest.mark.parametrize(
    ("cases", "at_least"),
    [
        ("nixl_cases.py", 10),
        ("test_transports.py", 8),
        ("test_rank_maps.py::test_a_share_larger_than_its_room_passes_in_pieces", 2),
    ],
    ids=["between_processes", "contract", "cut_shares"],
)
def test_in_a_process_of_its_own(cases: str, at_least: int) -> None:
    # Only the library's absence is a reason to skip: a fault in our own modules is not.
    if not any(importlib.util.find_spec(wheel) for wheel in ("nixl_cu12", "nixl_cu13")):
        pytest.skip("NIXL is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)]
    environment = {**os.environ, "SPLITPOINT_TEST_SCHEMES": "nixl"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=HERE.parent.parent
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= at_least, done.stdout
    assert "skipped" not in done.stdout, done.stdout
