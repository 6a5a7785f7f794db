"""What the operators' API decides by itself: whom a call concerns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import PoolSettings, Settings, load_pools
from coordinator.pools.admin import pool_specs, pools_of, ready_of, strategy_of
from coordinator.pools.desired import Strategy
from coordinator.pools.records import PoolTarget
from coordinator.routing.views import Role, WorkerState
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import admin_pb2
from tests.support.views import worker_view

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md"
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


def test_a_set_of_pools_travels_both_ways() -> None:
    pools = {
        "both": PoolSettings(role=Role.COLOCATED, replicas=0),
        "decode": PoolSettings(role=Role.DECODE, replicas=3, engine={"max_num_seqs": 4, "simulated": {"num_kv_blocks": 9}}),
    }
    sent = pool_specs(pools)
    assert pools_of(sent) == pools
    assert list(pools_of(sent)) == ["both", "decode"]


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([], "pools is empty"),
        ([{"name": "a", "role": "decode"}, {"name": "a", "role": "decode"}], "'a' is there twice"),
        ([{"name": "a", "role": "decod"}], "pools.a.role"),
        ([{"name": "a", "role": "decode", "replicas": 5000}], "pools.a.replicas must be 0 to 4096"),
        ([{"name": "a", "role": "decode", "engine_json": "{"}], "pools.a.engine is not JSON"),
        ([{"name": "a", "role": "decode", "engine_json": "[1]"}], "pools.a.engine"),
    ],
)
def test_a_bad_set_is_refused_by_name(specs: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(SplitpointError) as caught:
        pools_of(admin_pb2.PoolSpec(**spec) for spec in specs)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_VALUE, "pools")
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("fields", "strategy"),
    [
        ({}, None),
        ({"max_unavailable": 0.0}, Strategy(max_unavailable=0.0)),
        ({"max_unavailable": 1.0}, Strategy(max_unavailable=1.0)),
        ({"surge": True}, Strategy(surge=True)),
        ({"surge": True, "max_unavailable": 0.0}, Strategy(max_unavailable=0.0, surge=True)),
    ],
)
def test_how_workers_are_replaced_is_as_asked(fields: dict[str, Any], strategy: Strategy | None) -> None:
    assert strategy_of(admin_pb2.ApplyPoolsRequest(**fields)) == strategy


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_unavailable": -0.1}, "must be 0 to 1, a share of a pool, got -0.1"),
        ({"max_unavailable": 2.0}, "must be 0 to 1, a share of a pool, got 2"),
        ({"max_unavailable": float("nan")}, "must be 0 to 1, a share of a pool, got nan"),
        ({"max_unavailable": 0.5, "surge": True}, "must be 0 or unset with surge"),
    ],
)
def test_a_share_that_is_none_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SplitpointError, match=f"max_unavailable {said}") as caught:
        strategy_of(admin_pb2.ApplyPoolsRequest(**fields))
    assert (caught.value.code, caught.value.param) == (Code.INVALID_VALUE, "max_unavailable")


def test_the_pools_of_the_guide_can_be_applied(tmp_path: Path) -> None:
    block = re.findall(r"```toml\n(\[pools\..*?)```", GUIDE.read_text(), re.DOTALL)[-1]
    file = tmp_path / "pools.toml"
    file.write_text(block)
    pools, others = load_pools(file)
    assert others == []
    assert Settings().with_pools(pools).engine_of("both").max_num_seqs == 32
