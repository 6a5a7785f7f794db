"""The system that a command serves meanwhile ends with the command, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

SYSTEM = """#!{python}
import json, pathlib, signal, sys
here = pathlib.Path(__file__).parent
def end(number, frame):
    (here / "ended").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
ready = pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1])
ready.with_suffix(".part").write_text(json.dumps(dict(model="m", gateways=[dict(http="h", grpc="g", admin="a")])))
ready.with_suffix(".part").rename(ready)
signal.pause()
"""
COMMAND = """
import pathlib, signal, sys
from coordinator import served
served.sys.executable = sys.argv[1]
with served.served([], pathlib.Path(sys.argv[2])) as running:
    print(running.grpc, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_told_to_end_ends_its_system(number: signal.Signals, tmp_path: Path) -> None:
    system = tmp_path / "system"
    system.write_text(SYSTEM.format(python=sys.executable))
    system.chmod(0o755)
    command = [sys.executable, "-c", COMMAND, str(system), str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "g\n"
        process.send_signal(number)
        process.communicate(timeout=30)
    assert (tmp_path / "ended").exists()
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT}[number]
