"""Shared-memory segments that the processes of one worker made, and what a killed process leaves of them.

Python's resource tracker unlinks the segments of a process that dies. Ray kills a worker's whole process group, the tracker
with it, so that sometimes nobody is left to do it: hundreds of MB per engine core whose ranks are processes of their own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_FOLDER = "/dev/shm/"
_PYTHON_NAMES = ("psm_", "sem.mp-")
"""What `multiprocessing` names its segments and semaphores. Others (Ray's object store) outlive a worker by design."""


def segments_of(pid: int) -> frozenset[str]:
    """Paths of the segments that a process of this machine has mapped; none when it has ended or is somebody else's."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return frozenset(line.split(maxsplit=5)[5] for line in lines if _FOLDER in line and not line.endswith("(deleted)"))
    return frozenset()


def python_segments_of(pid: int) -> tuple[str, ...]:
    """Those of `segments_of` that `multiprocessing` made, sorted."""
    return tuple(sorted(s for s in segments_of(pid) if s.removeprefix(_FOLDER).startswith(_PYTHON_NAMES)))


def unlink_orphans(segments: Iterable[str]) -> list[str]:
    """Remove those of `segments` that no running process has mapped; returns what was removed."""
    left = {segment for segment in segments if Path(segment).exists()}
    if left:
        for pid in psutil.pids():
            left -= segments_of(pid)
    for segment in left:
        Path(segment).unlink(missing_ok=True)
        log.warning("removed %s, which a killed process left", segment)
    return sorted(left)
