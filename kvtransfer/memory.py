"""Bytes of staging: where they come from and how they are viewed and copied. Arrays are one-dimensional uint8, numpy on the
host or torch on host or device; torch is used only through the tensors that a caller brings."""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import numpy as np

from kvtransfer.transports.base import Memory


def host_memory(num_bytes: int) -> Memory:
    """Page-aligned zeroed host memory, in huge pages where the kernel has them. It lives as long as any view of it.

    Pages come at first touch: a rank that moves little takes little.
    """
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: the same memory in small pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, dtype=np.uint8)


def as_host(memory: Memory) -> np.ndarray:
    """The same bytes as numpy: without a copy where they are on the host, a copy where they are on a device."""
    if isinstance(memory, np.ndarray):
        return memory
    if memory.device.type != "cpu":
        memory = memory.cpu()
    array: np.ndarray = memory.numpy()
    return array


def copy_into(target: Memory, source: Any) -> None:
    """`target[:] = source`, both of equal length; `source` may also be bytes or a memoryview.

    Returns when the bytes have landed.
    """
    if not isinstance(source, np.ndarray) and not hasattr(source, "device"):
        source = np.frombuffer(source, dtype=np.uint8)
    if len(source) != len(target):
        raise ValueError(f"{len(source)} bytes into {len(target)}")
    if isinstance(target, np.ndarray):
        target[:] = as_host(source)
        return
    if isinstance(source, np.ndarray):
        if target.device.type == "cpu":
            target.numpy()[:] = source
            return
        source = sys.modules["torch"].from_numpy(source)
    target.copy_(source)
