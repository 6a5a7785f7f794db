"""Processes that let others go first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import psutil


def make_nice(processes: Iterable[psutil.Process], nice: int) -> None:
    """Raise the niceness of every thread of these processes to `nice`; those they start later inherit it.

    A thread that is nicer stays so, since going back takes privileges; one that has ended is passed over.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            # On Linux a priority belongs to a thread, not to its process.
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread.id, max(nice, os.getpriority(os.PRIO_PROCESS, thread.id)))
