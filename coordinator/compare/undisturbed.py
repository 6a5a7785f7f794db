"""A load client that is on time although the system under test keeps every core busy."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLIENT_NICE = -10
"""The client needs little time but at once; both arms are measured by it alike."""


@dataclass(frozen=True, slots=True)
class Priority:
    """What the client was given: its niceness, and whether it runs before every ordinary process (Linux's SCHED_FIFO)."""

    nice: int
    realtime: bool


@contextlib.contextmanager
def prompt_client() -> Iterator[Priority]:
    """Run with priority where that is allowed, and without garbage collection. Gives the priority that was reached.

    Niceness alone does not reach far: Linux weighs it within one session only (autogroups) and lets whoever runs end its tick,
    4 ms of lateness at 250 Hz; a real-time client is up to 0.5 ms late beside six busy loops on two cores. Every thread gets the
    priority, gRPC's too, and those that are started within inherit it. All is as before at the end.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        _set_all(min(before, CLIENT_NICE))
    realtime = _realtime(True)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield Priority(os.getpriority(os.PRIO_PROCESS, 0), realtime)
    finally:
        if collecting:
            gc.enable()
        if realtime:
            _realtime(False)
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


def _realtime(wanted: bool) -> bool:
    """Every thread's policy becomes the lowest real-time one, or the ordinary one again. Gives whether that was allowed."""
    if not hasattr(os, "SCHED_FIFO"):
        return False
    policy, rank = (os.SCHED_FIFO, 1) if wanted else (os.SCHED_OTHER, 0)
    try:
        for thread in threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, policy, os.sched_param(rank))
    except PermissionError:
        return False
    return True
