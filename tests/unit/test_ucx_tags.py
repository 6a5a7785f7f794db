"""Channels of UCX messages: whoever knows one knows nothing of another."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

pytest.importorskip("kvtransfer.transports.ucx_tags", exc_type=ImportError)
from kvtransfer.transports.ucx_tags import ASK_CHANNEL, CHANNEL_BITS, WARM_CHANNEL, Tags


def test_channels_are_drawn_from_all_there_are_and_differ() -> None:
    tags = Tags(Counter())
    channels = [tags.open() for _ in range(1000)]
    assert len(set(channels)) == 1000
    assert not {WARM_CHANNEL, ASK_CHANNEL} & set(channels)
    assert len({b - a for a, b in pairwise(channels)}) > 990, "one does not follow from the one before"
    for bit in range(CHANNEL_BITS):
        assert 300 < sum(channel >> bit & 1 for channel in channels) < 700


def test_a_number_that_is_reserved_or_open_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([5, 5, WARM_CHANNEL, ASK_CHANNEL, 6])
    monkeypatch.setattr("secrets.randbits", lambda bits: next(drawn))
    tags = Tags(Counter())
    assert [tags.open(), tags.open()] == [5, 6]
    assert (tags.close(5), tags.close(5)) == (True, False)
