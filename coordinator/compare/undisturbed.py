"""A load client that is on time although the system under test keeps every core busy."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

CLIENT_NICE = -10
"""The client needs little time but at once; both arms are measured by it alike."""


@contextlib.contextmanager
def prompt_client() -> Iterator[int]:
    """Run with priority where that is allowed, and without garbage collection. Gives the niceness that was reached.

    Threads inherit it, so enter before the channel is opened. Both are as before at the end.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before, CLIENT_NICE))
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        if collecting:
            gc.enable()
        os.setpriority(os.PRIO_PROCESS, 0, before)
