"""Bytes of staging: where they come from and how they are viewed and copied. Arrays are one-dimensional uint8, numpy on the
host or torch on host or device; torch is used only through the tensors that a caller brings."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable
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


def pinned_memory(num_bytes: int) -> Memory:
    """Page-locked host memory, numpy: what a GPU copies to and from without its engine waiting. Needs torch with CUDA."""
    return _torch().empty(num_bytes, dtype=_torch().uint8, pin_memory=True).numpy()


def device_memory(device: Any) -> Callable[[int], Memory]:
    """Makes memory on `device` (a torch device), not zeroed. What it makes is one allocation that peers of the host can map.

    The function raises `MemoryError`, naming what to change, when the device has no room.
    """

    def allocate(num_bytes: int) -> Memory:
        torch = _torch()
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as exc:
            free_bytes, _ = torch.cuda.mem_get_info(device)
            raise MemoryError(
                f"no {num_bytes} bytes of staging on {device}, {free_bytes} are free: lower the engine's share of it "
                "(engine.kv_cache_bytes, or gpu_memory_utilization in engine.extra_arguments), "
                'kvtransfer.send_staging_bytes and receive_staging_bytes, or set kvtransfer.staging_memory = "host"'
            ) from exc

    return allocate


def on_device(memory: Memory) -> bool:
    """Whether the bytes lie on a GPU; None has none."""
    return memory is not None and not isinstance(memory, np.ndarray) and memory.device.type != "cpu"


def use_device_of(memory: Memory) -> None:
    """Make the calling thread work on the GPU where `memory` lies; nothing for host memory.

    A thread that has not been told works on GPU 0, and its first call takes half a gigabyte there.
    """
    if on_device(memory):
        _torch().cuda.set_device(memory.device)


def reserved_on_devices() -> int:
    """Bytes that torch has reserved on this process's GPUs; 0 where nothing here has used one.

    CUDA's own context and what other libraries allocate are not in it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(int(torch.cuda.memory_reserved(device)) for device in range(torch.cuda.device_count()))


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
        source = _torch().from_numpy(source)
    target.copy_(source)


def _torch() -> Any:
    # Only ever called by somebody who has a tensor or a CUDA device already.
    return sys.modules["torch"]
