"""Send staging that peers of this host may map: an anonymous file (`memfd`), which nothing outlives but what still maps it.

The file is staging, then a page with a token, then a mark for each page of staging: the generation of the slot that begins there,
0 where none does. Its owner writes a slot's mark before anybody may write the slot and clears it before its bytes go to anybody
else; so whoever read a slot and finds its mark unchanged afterwards has read what was there before. (Between the two lie a lock's
release and a lock's acquisition on each side, so no processor shows them in another order.)

A peer opens the file by the owner's process id and descriptor. What it opened is believed by the token, which no other file has,
and is mapped read-only. The file is sealed: its length, so that no access to a mapping can fail because the file was cut; and
against every writer but its owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import logging
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtransfer.config import KvTransferSettings
from kvtransfer.memory import host_memory
from kvtransfer.staging import PAGE_BYTES
from kvtransfer.transports.base import Memory, TransportError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
HUGE_BYTES = 2 * 1024 * 1024
_MARK = np.dtype("<u8")
_F_SEAL_FUTURE_WRITE = 0x10  # of Linux 5.1: writing and mapping to write, but not by what is mapped already
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # of Linux 5.14 and 6.1; Python has no names for them

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _ends(num_bytes: int) -> tuple[int, int]:
    """Where in the file the token lies, and how long the file is."""
    token = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    return token, token + PAGE_BYTES + token // PAGE_BYTES * _MARK.itemsize


class SharedArea:
    """This rank's send staging. `memory` lives as long as any view of it, the descriptor until `close` or the end of this."""

    def __init__(self, num_bytes: int) -> None:
        """Zeroed; pages come at first touch.

        Raises:
            OSError: this system has no such files, or no room for one.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        token_at, end = _ends(num_bytes)
        descriptor = os.memfd_create("splitpoint-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, end)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        whole = _map(descriptor, end, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError):  # an older kernel: then a process that may open it may write it
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        token = os.urandom(TOKEN_BYTES)
        whole[token_at : token_at + TOKEN_BYTES] = np.frombuffer(token, np.uint8)
        self.memory: np.ndarray = whole[:num_bytes]
        self._marks: np.ndarray = whole[token_at + PAGE_BYTES :].view(_MARK)
        self._touched = bytearray(num_bytes // HUGE_BYTES)
        self.announcement = pb.SharedStaging(descriptor=descriptor, address=self.memory.ctypes.data, bytes=num_bytes, token=token)

    def touch(self, start: int, num_bytes: int) -> None:
        """These bytes are about to be written: have them lie in huge pages. Kernels that give files none by themselves do so when
        they are told; a page at a time the first write takes ten times as long. One thread at a time.
        """
        for extent in range(start // HUGE_BYTES, min(-(-(start + num_bytes) // HUGE_BYTES), len(self._touched))):
            if self._touched[extent]:
                continue
            self._touched[extent] = 1
            address = self.memory.ctypes.data + extent * HUGE_BYTES
            if _libc.madvise(address, PAGE_BYTES, _MADV_POPULATE_WRITE) or _libc.madvise(address, HUGE_BYTES, _MADV_COLLAPSE):
                self._touched = bytearray()  # small pages then
                return

    def mark(self, page: int, generation: int) -> None:
        """As `Staging` wants it."""
        self._marks[page] = generation

    def close(self) -> None:
        """No peer can open it any more; what is mapped stays. Idempotent."""
        self._close()


class Mapping:
    """A peer's send staging, seen from here, read-only. It is unmapped when nothing refers to it or to a view of it any more."""

    def __init__(self, process_id: int, announced: pb.SharedStaging) -> None:
        """Open and map it. The descriptor is closed again.

        Raises:
            TransportError: "refused", and why: not permitted, gone, or not the file that was announced.
        """
        try:
            whole = self._open(f"/proc/{process_id}/fd/{announced.descriptor}", announced)
        except (OSError, ValueError, OverflowError) as exc:
            raise TransportError("refused", f"staging of process {process_id}: {exc}") from exc
        token_at, _ = _ends(announced.bytes)
        if not hmac.compare_digest(whole[token_at : token_at + TOKEN_BYTES].tobytes(), announced.token):
            raise TransportError("refused", f"staging of process {process_id}: it is not the one that was announced")
        self._address: int = announced.address
        self._memory: np.ndarray = whole[: announced.bytes]
        self._marks: np.ndarray = whole[token_at + PAGE_BYTES :].view(_MARK)

    @staticmethod
    def _open(path: str, announced: pb.SharedStaging) -> np.ndarray:
        # Opening a device or a pipe might do something, or wait.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("no file")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _, end = _ends(announced.bytes)
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not sealed & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size != end:
                raise ValueError("its length is not what was announced, or may change")
            return _map(descriptor, end, mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def offset(self, address: int, num_bytes: int) -> int | None:
        """Where these bytes of the owner's memory lie in the area; None when they are not all in it."""
        offset = address - self._address
        return offset if offset >= 0 and offset + num_bytes <= len(self._memory) else None

    def view(self, offset: int, num_bytes: int) -> np.ndarray:
        """Read-only."""
        return self._memory[offset : offset + num_bytes]

    def holds(self, offset: int, generation: int) -> bool:
        """The slot of this generation begins at `offset`, and its bytes have been nobody else's so far."""
        return offset % PAGE_BYTES == 0 and int(self._marks[offset // PAGE_BYTES]) == generation


def shared_staging(
    settings: KvTransferSettings, memory: Callable[[int], Memory], num_bytes: int, on_event: Callable[[str], None]
) -> SharedArea | None:
    """What a rank with these settings, whose staging `memory` makes, shares with its host; None: nothing, or it cannot, which is
    an event and logged.

    Page-locked and device memory is not shared: a GPU's copies need memory that its driver made.
    """
    if settings.ucx_same_host != "mapped" or "ucx" not in settings.transports or memory is not host_memory:
        return None
    try:
        return SharedArea(num_bytes)
    except OSError as exc:
        on_event("staging_not_shared")
        logger.warning("send staging cannot be shared, peers of this host copy out of it: %s", exc)
        return None


def why_not_here() -> str:
    """Why staging cannot be shared and mapped on this machine, as far as one process can tell; "" when it can."""
    try:
        area = SharedArea(PAGE_BYTES)
        Mapping(os.getpid(), area.announcement)
    except (OSError, TransportError) as exc:
        return str(exc)
    return ""


def _map(descriptor: int, num_bytes: int, protection: int) -> np.ndarray:
    """All of the file, beginning where a huge page may begin, in huge pages where the kernel has them for such files."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    # Address space of Python's, which unmaps it, with the file put over it.
    room: Any = np.frombuffer(mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=flags, prot=protection), np.uint8)
    start = -room.ctypes.data % HUGE_BYTES
    address = room.ctypes.data + start
    fixed = 0x10  # MAP_FIXED
    if _libc.mmap(address, num_bytes, protection, mmap.MAP_SHARED | fixed, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with contextlib.suppress(AttributeError):
        _libc.madvise(address, num_bytes, mmap.MADV_HUGEPAGE)  # where it fails: the same memory in small pages
    whole: np.ndarray = room[start : start + num_bytes]
    return whole
