"""What this machine's memory allows: one plain operation over the same bytes, by a case's `what`:

`memcpy`: a copy within one process; `crc32c`: a checksum of bytes not in the cache; `memcpy_crc32c`: a copy in pieces as large as
one block of one layer, with the checksum of each while it is in the cache; `readv`: `process_vm_readv` from the other process;
`readv_crc32c`: the same with the checksum of each piece while it is in the cache.

`at once`: the stages of a transfer, each over all the bytes, at the same time and without a word between them: in the sender
`memcpy_crc32c`, in the receiver checksums of what it maps of the sender on one thread and copies in such pieces on another. It
ends with the last of them.
That is what this machine gives these calls, with what its cores share and wherever its kernel puts the threads: a measured rate
with a measured spread, where the bound from single operations is arithmetic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvtransfer.bench.shape import MIB, REAL, Case
from kvtransfer.checksum import crc32c
from kvtransfer.memory import host_memory
from kvtransfer.shared_area import Mapping, SharedArea
from kvtransfer.transports.mapped import check_all
from kvtransfer.transports.same_host import ProcessId, address_of, read_all, this_process
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

HALF_BYTES = 144 * MIB
"""Of each area; the largest transfer fits. What copies and what reads at once do so in halves of their own."""
AREA_BYTES = 2 * HALF_BYTES
AT_ONCE = "at once"


class Half:
    """Both halves: the sender's memory is there to be read and mapped."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._shared = SharedArea(AREA_BYTES)
        self._shared.touch(0, AREA_BYTES)
        self._area = self._shared.memory
        self._target = host_memory(AREA_BYTES)

    def setup(self) -> dict[Any, Any]:
        self._area[:] = np.frombuffer(np.random.default_rng(1).bytes(AREA_BYTES), np.uint8)
        self._target[:] = 0
        announced = self._shared.announcement.SerializeToString()
        return {"process": this_process().encode(), "address": address_of(self._area), "shared": announced}

    def connect(self, facts: dict[str, Any]) -> None:
        self._process, self._address = ProcessId.decode(facts["process"]), facts["address"]
        self._theirs = Mapping(self._process.pid, pb.SharedStaging.FromString(facts["shared"]))

    def _copy(self, offset: int, size: int, *, check: bool) -> None:
        for start in range(offset, offset + size, REAL.piece_bytes):
            end = min(start + REAL.piece_bytes, offset + size)
            self._target[start:end] = self._area[start:end]
            if check:
                crc32c(self._target[start:end])

    def _copies(self, case: Case, *, check: bool) -> None:
        for offset, each in _places(case):
            self._copy(HALF_BYTES + offset, each, check=check)

    def verify(self, case: Case) -> None:
        return

    def close(self) -> None:
        return


class Receiver(Half):
    def run(self, case: Case) -> float | None:
        scatter = threading.Thread(target=lambda: self._copies(case, check=False))
        begun = time.perf_counter()
        if case.what == AT_ONCE:
            scatter.start()
        for offset, each in _places(case):
            if case.what == AT_ONCE:
                check_all(self._theirs.view(offset, each), check=True, stopped=lambda: False, moved=lambda: None)
            else:
                self._once(case.what, offset, each)
        if case.what == AT_ONCE:
            scatter.join()
        return time.perf_counter() - begun

    def _once(self, what: str, offset: int, size: int) -> None:
        source, target = self._area[offset : offset + size], self._target[offset : offset + size]
        if what == "memcpy":
            target[:] = source
        elif what == "crc32c":
            crc32c(source)
        elif what == "memcpy_crc32c":
            self._copy(offset, size, check=True)
        else:
            check = what == "readv_crc32c"
            read_all(self._process, self._address + offset, target, check=check, stopped=lambda: False, moved=lambda: None)


class Sender(Half):
    def run(self, case: Case) -> float | None:
        if case.what != AT_ONCE:
            return None
        begun = time.perf_counter()
        self._copies(case, check=True)
        return time.perf_counter() - begun


def _places(case: Case) -> Iterator[tuple[int, int]]:
    """Where in the area each transfer's bytes lie: offset and length."""
    each = case.total_bytes // case.transfers
    for number in range(case.transfers):
        yield number * each % (HALF_BYTES - each + 1), each


def sender(options: dict[str, Any]) -> Sender:
    return Sender(options)


def receiver(options: dict[str, Any]) -> Receiver:
    return Receiver(options)
