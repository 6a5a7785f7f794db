"""One copy between two processes of one host: the receiver reads the sender's memory itself, by `process_vm_readv`.

This is ours, not UCX's. UCX's own one-copy path (CMA) makes the same system call, but ends the process that reads when the
process that is read is killed; here it is an error like any other.

A process is named by its id *and* a random value in its memory. Every read begins with that value, in the same system call, so
a process id that another process got meanwhile, or one of another id namespace, is noticed and nothing it holds is believed.
A read goes in pieces: between two of them it can be stopped. A piece's CRC32C is computed while it is still in the processor's
cache, where it costs a fraction of what it costs later. So a piece is small enough to fit into a core's own cache together with
what it was copied from, and large enough for the call itself to cost little.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from awscrt.checksums import crc32c

from kvtransfer.memory import as_host
from kvtransfer.transports.base import Memory, TransportError

PIECE_BYTES = 384 * 1024
NONCE_BYTES = 16
_FRAME = struct.Struct(f"<IQ{NONCE_BYTES}s")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the interpreter lock
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Iovec),
        ctypes.c_ulong,
        ctypes.POINTER(_Iovec),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this host. `nonce_address` is where its random value lies in its own memory; pid 0: cannot be read."""

    pid: int = 0
    nonce_address: int = 0
    nonce: bytes = bytes(NONCE_BYTES)

    SIZE = _FRAME.size

    def encode(self) -> bytes:
        return _FRAME.pack(self.pid, self.nonce_address, self.nonce)

    @classmethod
    def decode(cls, framed: bytes) -> ProcessId:
        """The inverse; `framed` has `SIZE` bytes."""
        return cls(*_FRAME.unpack(framed))


NO_PROCESS = ProcessId()


class _Self:
    """This process' random value, at an address that does not move."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(os.urandom(NONCE_BYTES), NONCE_BYTES)
        self.pid = os.getpid()

    def identity(self) -> ProcessId:
        return ProcessId(self.pid, ctypes.addressof(self.buffer), self.buffer.raw)


_self: _Self | None = None


def this_process() -> ProcessId:
    """Who peers read from. The first call, in a process that a Yama kernel protects from its peers, lets any process of the same
    user read this one (`PR_SET_PTRACER`), as UCX does for its own CMA."""
    global _self
    if _self is None or _self.pid != os.getpid():
        if ptrace_scope() == 1:
            _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
        _self = _Self()
    return _self.identity()


def ptrace_scope() -> int:
    """Yama's setting; 0 where the kernel has no Yama."""
    try:
        return int(_YAMA.read_text())
    except OSError:
        return 0


def why_unreadable(peer: ProcessId) -> str:
    """Why this process cannot read from `peer`; "" when it can. Microseconds."""
    if _readv is None:
        return "this system has no process_vm_readv"
    if peer.pid == 0:
        return "the peer does not offer it"
    try:
        read(peer, 0, np.empty(0, np.uint8))
    except TransportError as exc:
        return str(exc)
    return ""


def address_of(payload: Memory) -> int:
    """Where a peer can read this payload; 0 when it is not memory that the kernel lets another process read (a device's)."""
    if _readv is None or (not isinstance(payload, np.ndarray) and payload.device.type != "cpu"):
        return 0
    host = as_host(payload)
    if not host.flags.c_contiguous:
        return 0
    address: int = host.ctypes.data
    try:
        # Memory that a driver mapped may refuse; both ends, since a slot may be of several mappings.
        for place in (address, address + len(host) - 1):
            read(this_process(), place, np.empty(1, np.uint8))
    except TransportError:
        return 0
    return address


class Reads:
    """Reads of one peer. What the system call is told is made once: that costs as much as the call, and every piece is a call."""

    def __init__(self, peer: ProcessId) -> None:
        if _readv is None:
            raise TransportError("refused", "this system has no process_vm_readv")
        self._peer = peer
        self._call = _readv
        self._found = ctypes.create_string_buffer(NONCE_BYTES)
        self._local = (_Iovec * 2)(_Iovec(ctypes.addressof(self._found), NONCE_BYTES), _Iovec())
        self._remote = (_Iovec * 2)(_Iovec(peer.nonce_address, NONCE_BYTES), _Iovec())
        self._to, self._from = self._local[1], self._remote[1]

    def read(self, address: int, to: int, num_bytes: int) -> None:
        """As the function `read`, to an address of this process."""
        peer = self._peer
        self._from.base, self._from.length = address, num_bytes
        self._to.base, self._to.length = to, num_bytes
        count = self._call(peer.pid, self._local, 2, self._remote, 2, 0)
        if count < 0:
            number = ctypes.get_errno()
            reason = "refused" if number in (errno.EPERM, errno.ENOSYS) else "peer_lost"
            raise TransportError(reason, f"process_vm_readv of process {peer.pid}: {os.strerror(number)}")
        # Fewer bytes than the random value has leave an older one there.
        if count < NONCE_BYTES or self._found.raw != peer.nonce:
            raise TransportError("peer_lost", f"process {peer.pid} is not the one that was announced")
        if count != NONCE_BYTES + num_bytes:
            raise TransportError("peer_lost", f"process {peer.pid}: {count - NONCE_BYTES} of {num_bytes} bytes could be read")


def read(peer: ProcessId, address: int, target: np.ndarray) -> None:
    """Copy `len(target)` bytes at `address` of `peer` into `target`, if it is that process. At most one piece is meant.

    Raises:
        TransportError: "refused" when the kernel does not permit it, "peer_lost" when the process or its memory is gone or the
            process is another one. `target` may have been written all the same.
    """
    Reads(peer).read(address, target.ctypes.data, len(target))


def read_all(
    peer: ProcessId, address: int, target: np.ndarray, *, check: bool, stopped: Callable[[], bool], moved: Callable[[], None]
) -> int:
    """`read` in pieces; the CRC32C of what landed in `target` (0 unless `check`). For a thread of its own.

    Raises:
        TransportError: as `read`, or "closed" when `stopped()` said so between two pieces.
    """
    value = 0
    reads = Reads(peer)
    first = target.ctypes.data
    for start in range(0, len(target), PIECE_BYTES):
        if stopped():
            raise TransportError("closed", "given up while it was being read")
        piece = target[start : start + PIECE_BYTES]
        reads.read(address + start, first + start, len(piece))
        if check:
            value = crc32c(piece, value)
        moved()
    return value
