"""An engine's processes that let others go first."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from engine.niceness import make_nice

pytestmark = pytest.mark.timeout(60)

TWO_THREADS = """
import os, sys, threading
started, go = threading.Event(), threading.Event()
threading.Thread(target=lambda: (started.set(), go.wait()), daemon=True).start()
started.wait()
print("up", flush=True)
sys.stdin.readline()
later = []
thread = threading.Thread(target=lambda: later.append(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start()
thread.join()
print(later[0], flush=True)
"""


def test_every_thread_is_nice_and_later_ones_are_too() -> None:
    nice = os.getpriority(os.PRIO_PROCESS, 0) + 3
    with subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        process = psutil.Process(child.pid)
        make_nice([process], nice)
        assert {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()} == {nice}
        assert process.num_threads() == 2
        make_nice([process], nice - 1)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == nice, "never back"
        child.stdin.write("go\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) == nice
    make_nice([process], nice)  # it has ended
