"""What every actor process of ours does first: its own log file, logging, threads and cores. No Ray."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import psutil

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to(path: Path, log_format: Literal["text", "json"]) -> None:
    """Send everything this process and its children write to `path`, and configure logging. Call once, early."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def open_files(pids: Iterable[int]) -> int:
    """File descriptors of these processes together; one that is gone has none."""
    count = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            count += psutil.Process(pid).num_fds()
    return count


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together, pages that several share counted in each; one that is gone has none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total


def use_cores(slot: int, threads: int, *, pin: bool) -> list[int]:
    """Give a CPU engine its own cores, before its libraries are loaded: the `slot`-th group of `threads`, going round when
    there are more engines than cores. Returns the cores; an operator's own `VLLM_CPU_OMP_THREADS_BIND` is left alone."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    usable = sorted(os.sched_getaffinity(0))
    cores = [usable[(slot * threads + i) % len(usable)] for i in range(min(threads, len(usable)))]
    if pin:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(str(core) for core in sorted(set(cores))))
    return cores
