"""One stepped engine for the whole tier: it takes seconds to start and is left idle by every test that used it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stepped_engine import SteppedEngine


@pytest.fixture(scope="session")
def _stepped(checkpoint: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(checkpoint)
    yield engine
    engine.close()


@pytest.fixture
def engine(_stepped: SteppedEngine) -> Iterator[SteppedEngine]:
    """Empty caches before, nothing held after."""
    _stepped.forget_prefixes()
    _stepped.runs.clear()
    _stepped.probed.clear()
    yield _stepped
    _stepped.check_idle()
