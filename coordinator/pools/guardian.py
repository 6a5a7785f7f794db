"""Ends what a killed launcher leaves: `python -m coordinator.pools.guardian LAUNCHER_PID DIRECTORY`, a process of its own.

It remembers the launcher's descendants while the launcher lives. Its standard input ends when the launcher does; without a
word before that, the launcher was killed: what is left of its family is killed too, and its directory is removed. Ray's own
processes mostly notice by themselves, but some of its agents take a minute.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

LOOK_EVERY_S = 3.0
GRACE_S = 3.0
ORDERLY_END = b"done"


@contextlib.contextmanager
def guarded(directory: Path) -> Iterator[int]:
    """Guard this process for the length of the block. Leaving it, also by an exception, is an orderly end. Yields the
    guardian's pid."""
    command = [sys.executable, "-m", "coordinator.pools.guardian", str(os.getpid()), str(directory)]
    # A session of its own: a Ctrl-C at the terminal is for the launcher.
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert guardian.stdin is not None
    try:
        yield guardian.pid
    finally:
        with contextlib.suppress(BrokenPipeError):
            guardian.stdin.write(ORDERLY_END)
            guardian.stdin.close()
        guardian.wait(10.0)


def main(launcher_pid: int, directory: Path) -> None:
    """Watch until standard input ends."""
    family: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(launcher_pid)
        while True:
            family |= {p.pid: p for p in launcher.children(recursive=True) if p.pid != os.getpid()}
            readable, _, _ = select.select([0], [], [], LOOK_EVERY_S)
            if readable:
                break
    if os.read(0, len(ORDERLY_END)) == ORDERLY_END:
        return
    # Resource trackers get this time too, to unlink the shared memory that their users left.
    _, alive = psutil.wait_procs(list(family.values()), timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
