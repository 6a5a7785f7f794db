"""What the operators' API decides by itself: whom a call concerns."""

from __future__ import annotations

import pytest

from coordinator.pools.admin import ready_of
from coordinator.pools.records import PoolTarget
from coordinator.routing.views import Role, WorkerState
from protos.errors import Code, SplitpointError
from tests.support.views import worker_view

TARGETS = [PoolTarget(name="prefill", role=Role.PREFILL, replicas=2), PoolTarget(name="decode", role=Role.DECODE, replicas=1)]
VIEWS = [
    worker_view("prefill-1"),
    worker_view("prefill-2", state=WorkerState.DRAINING),
    worker_view("decode-1", Role.DECODE),
]


@pytest.mark.parametrize(
    ("pools", "chosen"),
    [
        ([], ["prefill-1", "decode-1"]),
        (["prefill"], ["prefill-1"]),
        (["decode", "prefill"], ["prefill-1", "decode-1"]),
        (["decode", "decode"], ["decode-1"]),
    ],
)
def test_only_ready_workers_of_the_named_pools_are_asked(pools: list[str], chosen: list[str]) -> None:
    assert ready_of(pools, TARGETS, VIEWS) == chosen


def test_an_unknown_pool_is_named_and_nobody_is_asked() -> None:
    with pytest.raises(SplitpointError) as caught:
        ready_of(["prefill", "decod"], TARGETS, VIEWS)
    assert (caught.value.code, caught.value.param) == (Code.NOT_FOUND, "pools")
    assert "'decod'" in str(caught.value)
    assert "prefill, decode" in str(caught.value)
