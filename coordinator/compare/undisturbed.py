"""A load client that is on time although the system under test keeps every core busy."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

CLIENT_NICE = -10
"""The client needs little time but at once; both arms are measured by it alike."""


@contextlib.contextmanager
def prompt_client() -> Iterator[int]:
    """Run with priority where that is allowed, and without garbage collection. Gives the niceness that was reached.

    Every thread gets the priority, gRPC's too, and those that are started within inherit it. Both are as before at the end.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        _set_all(min(before, CLIENT_NICE))
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        if collecting:
            gc.enable()
        _set_all(before)


def threads() -> list[int]:
    """This process's threads, as the system numbers them; 0 is the calling one."""
    tasks = Path("/proc/self/task")
    return [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]


def _set_all(nice: int) -> None:
    # On Linux a priority belongs to a thread. One may end meanwhile.
    for thread in threads():
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
