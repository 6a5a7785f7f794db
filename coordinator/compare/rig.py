"""What a comparison needs of the system beside a client: pools put in place, caches emptied, worker figures sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from coordinator.compare.usage import Usage

Pools = Mapping[str, Mapping[str, Any]]


class RigError(Exception):
    """The system did not do what the experiment needs; the text says what."""


class Rig(Protocol):
    """The system under test, as far as it is steered."""

    async def apply(self, pools: Pools) -> None:
        """Exactly these pools, ready, when it returns. Raises `RigError`."""

    async def reset_caches(self) -> None:
        """Empty prefix caches everywhere. Raises `RigError`."""

    def watch(self, arm: str, probe: int, pools: Collection[str]) -> AbstractContextManager[None]:
        """While it is open, samples of these pools' workers (of all, where none is named) belong to the arm's probe."""

    def usage(self) -> list[Usage]:
        """All samples so far."""

    def notes(self) -> list[str]:
        """What a record should say of the rig."""


class StandingRig:
    """A system that stands as it is and is not watched."""

    async def apply(self, pools: Pools) -> None:
        raise RigError("this system's pools cannot be changed from here: no admin address is known")

    async def reset_caches(self) -> None:
        raise RigError("prefix caches cannot be emptied from here: no admin address is known")

    def watch(self, arm: str, probe: int, pools: Collection[str]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def usage(self) -> list[Usage]:
        return []

    def notes(self) -> list[str]:
        return []
