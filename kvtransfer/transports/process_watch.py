"""When a process of this host has ended, by the kernel's word: nothing of it can touch memory any more."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable

from kvtransfer.transports.same_host import ProcessId, why_unreadable


class ProcessWatch:
    """Watches peers by process descriptors. Everything on one event loop; `close` gives the descriptors back."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def watch(self, incarnation: str, process: ProcessId, ended: Callable[[], None]) -> bool:
        """Call `ended` once, on the loop, when this incarnation's process is gone; at once when it is gone already. False when it
        cannot be watched from here: then somebody else has to know."""
        if incarnation in self._descriptors:
            return True
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            loop.call_soon(ended)
            return True
        except OSError:
            return False
        # The descriptor is of the announced process only if that one has the id now and the descriptor's has not ended.
        if why_unreadable(process) or select.select([descriptor], [], [], 0)[0]:
            os.close(descriptor)
            return False

        def gone() -> None:
            self.forget(incarnation)
            ended()

        self._descriptors[incarnation] = descriptor
        loop.add_reader(descriptor, gone)
        return True

    def close(self) -> None:
        for incarnation in list(self._descriptors):
            self.forget(incarnation)

    def forget(self, incarnation: str) -> None:
        """Do not watch it any more. Idempotent."""
        descriptor = self._descriptors.pop(incarnation, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
