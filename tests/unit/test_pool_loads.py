"""A gateway's counts of each pool's load, and the leg that a refusal names."""

from __future__ import annotations

import random

import pytest

from coordinator.gateway.latencies import FAILED, bucket_of
from coordinator.gateway.pool_loads import PoolLoad, PoolLoads
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import Refusal, first_goals
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerView
from protos.splitpoint.v1 import common_pb2
from tests.support.views import worker_view

LEDGER = common_pb2.StageLedger(e2e_s=1.4, ttft_s=0.4)


def test_ttft_belongs_to_the_pool_of_the_prompt_and_tpot_to_that_of_the_output() -> None:
    loads = PoolLoads()
    loads.sent("p")
    loads.sent("d")
    loads.ended("p", "d", LEDGER, "ok", prompt_tokens=30, output_tokens=11)
    loads.ended("p", "d", LEDGER, "ok", prompt_tokens=9, output_tokens=1)
    assert loads.snapshot([("p", 30), ("p", 12)]) == {
        "p": PoolLoad(queued_tokens=42, legs=1, ttft={bucket_of(0.4): 2}, prompt_tokens=39),
        "d": PoolLoad(legs=1, tpot={bucket_of(0.1): 1}, output_tokens=11),
    }


@pytest.mark.parametrize(
    ("pools", "status", "tokens", "ttft", "tpot"),
    [
        (("p", "d"), "error", 0, {FAILED: 1}, {FAILED: 1}),
        (("p", "d"), "error", 5, {bucket_of(0.4): 1}, {FAILED: 1}),
        (("p", ""), "error", 0, {FAILED: 1}, {}),
        (("p", "d"), "cancelled", 0, {}, {}),
        (("p", "d"), "cancelled", 11, {bucket_of(0.4): 1}, {bucket_of(0.1): 1}),
        (("", ""), "error", 0, {}, {}),
    ],
)
def test_what_failed_kept_no_goal_and_what_a_client_ended_says_only_what_it_had(
    pools: tuple[str, str], status: str, tokens: int, ttft: dict[int, int], tpot: dict[int, int]
) -> None:
    loads = PoolLoads()
    loads.sent("p")
    loads.sent("d")
    loads.ended(*pools, LEDGER, status, prompt_tokens=7, output_tokens=tokens)
    found = loads.snapshot([])
    assert (found["p"].ttft, found["d"].tpot) == (ttft, tpot)


@pytest.mark.parametrize(
    ("views", "path", "lacking"),
    [
        ([worker_view("d1", Role.DECODE)], "split", ["prefill"]),
        ([worker_view("p1")], "split", ["decode"]),
        ([], "split", ["prefill", "decode"]),
        ([], "colocated", ["colocated"]),
        ([worker_view("p1"), worker_view("d1", Role.DECODE)], "split", []),
    ],
)
def test_a_refusal_names_the_leg_that_nobody_serves(views: list[WorkerView], path: str, lacking: list[str]) -> None:
    router = Router(RoutingSettings(colocated_roles=[["colocated"]]), random.Random(1), transports=("grpc",))
    router.update(views)
    goals = first_goals(path, prompt_tokens=8, transport=None, strict=True)
    assert list(router.lacking(goals)) == lacking
    if lacking:
        refusal = router.choose(goals, 0.0)
        assert isinstance(refusal, Refusal)
        for leg in lacking:
            assert f"no worker for the {leg} leg" in refusal.to_error().message
