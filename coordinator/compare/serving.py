"""A system that is served for as long as a command needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def system(config: Path | None, sets: Sequence[str], state_dir: Path) -> Iterator[str]:
    """The admin address of a system of this configuration; "" where none is asked for. Raises `ServeError`."""
    if config is None:
        yield ""
        return
    from coordinator.served import served

    with served(["-c", str(config), *(f"--set={item}" for item in sets)], state_dir) as running:
        yield running.admin
