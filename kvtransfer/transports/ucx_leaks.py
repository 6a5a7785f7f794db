"""Shared memory of dead peers that UCX keeps attached.

UCX attaches two SysV segments of a peer in the same host, and keeps them when that peer is killed: neither closing its endpoint
nor its context's end in that process detaches them, and their memory lives as long as this process. It can only be counted,
and the worker be replaced when it has become too much (`kvtransfer.leaked_attachments`).
"""

from __future__ import annotations

import os
from pathlib import Path


def attached_segments(maps: str) -> set[int]:
    """Ids of the SysV segments in `/proc/PID/maps`. Pure. The kernel shows the id where a file's inode number stands."""
    rows = (line.split() for line in maps.splitlines() if "/SYSV" in line)
    return {int(row[4]) for row in rows}


def creators(table: str) -> dict[int, int]:
    """Segment id to the process that made it, of `/proc/sysvipc/shm`. Pure."""
    rows = [line.split() for line in table.splitlines()]
    if not rows:
        return {}
    shmid, cpid = rows[0].index("shmid"), rows[0].index("cpid")
    return {int(row[shmid]): int(row[cpid]) for row in rows[1:]}


def leaked_attachments() -> int:
    """Segments that this process has attached and whose makers are gone. 0 where the kernel does not say."""
    try:
        attached = attached_segments(Path("/proc/self/maps").read_text())
        made_by = creators(Path("/proc/sysvipc/shm").read_text()) if attached else {}
    except OSError:
        return 0
    return sum(1 for segment in attached if segment in made_by and not _alive(made_by[segment]))


def _alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
