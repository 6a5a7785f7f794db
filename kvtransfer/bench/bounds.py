"""What this machine's memory allows: one plain operation over the same bytes, by a case's `what`:

`memcpy`: a copy within one process; `crc32c`: a checksum of bytes not in the cache; `readv`: `process_vm_readv` from the other
process; `readv_crc32c`: the same with the checksum of each piece while it is in the cache.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvtransfer.bench.shape import MIB, Case
from kvtransfer.checksum import crc32c
from kvtransfer.memory import host_memory
from kvtransfer.transports.same_host import ProcessId, address_of, read_all, this_process

AREA_BYTES = 256 * MIB


class Half:
    """Both halves: the sender's memory is there to be read."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._area = host_memory(AREA_BYTES)
        self._target = host_memory(AREA_BYTES)

    def setup(self) -> dict[Any, Any]:
        self._area[:] = np.frombuffer(np.random.default_rng(1).bytes(AREA_BYTES), np.uint8)
        self._target[:] = 0
        return {"process": this_process().encode(), "address": address_of(self._area)}

    def connect(self, facts: dict[str, Any]) -> None:
        self._process, self._address = ProcessId.decode(facts["process"]), facts["address"]

    def verify(self, case: Case) -> None:
        return

    def close(self) -> None:
        return


class Receiver(Half):
    def run(self, case: Case) -> float | None:
        each = case.total_bytes // case.transfers
        begun = time.perf_counter()
        for number in range(case.transfers):
            offset = number * each % (AREA_BYTES - each + 1)
            self._once(case.what, offset, each)
        return time.perf_counter() - begun

    def _once(self, what: str, offset: int, size: int) -> None:
        source, target = self._area[offset : offset + size], self._target[offset : offset + size]
        if what == "memcpy":
            target[:] = source
        elif what == "crc32c":
            crc32c(source)
        else:
            check = what == "readv_crc32c"
            read_all(self._process, self._address + offset, target, check=check, stopped=lambda: False, moved=lambda: None)


class Sender(Half):
    def run(self, case: Case) -> float | None:
        return None


def sender(options: dict[str, Any]) -> Sender:
    return Sender(options)


def receiver(options: dict[str, Any]) -> Receiver:
    return Receiver(options)
