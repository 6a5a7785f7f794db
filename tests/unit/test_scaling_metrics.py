"""The coordinator's own series: what the operators' guide names, from a status, over HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.pools.scaling_metrics import ScalingMetrics
from protos.splitpoint.v1 import admin_pb2

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md").read_text()
MOVES = [admin_pb2.AdvisorMove(pool="decode", current_replicas=3, replicas=2)]
STATUS = admin_pb2.GetStatusResponse(
    pools=[admin_pb2.PoolStatus(name="decode", role="decode", target=3, ready=2, starting=1)],
    autoscaling=admin_pb2.Autoscaling(
        autoscalers=[
            admin_pb2.AutoscalerStatus(
                pool="decode",
                decision=admin_pb2.AutoscaleDecision(
                    wanted_replicas=4, signals=[admin_pb2.AutoscaleSignal(name="target_kv_usage", value=0.7)]
                ),
            )
        ],
        next=[admin_pb2.AcceleratorGain(pool="decode", goodput_per_s=0.5)],
        accelerators_taken=5,
        accelerator_budget=6,
    ),
    advisor=admin_pb2.AdvisorStatus(
        enabled=True,
        goodput_per_s=2.0,
        phases=[admin_pb2.AdvisorPhase(role="decode", attainment=0.9)],
        proposal=admin_pb2.AdvisorProposal(
            pools=MOVES, goodput_now_per_s=2.5, goodput_then_per_s=3.0, cost_requests=5, gain_requests=70
        ),
        pending=MOVES,
        costs=[admin_pb2.AdvisorCost(how="relabel", cost_s=1.5)],
        dwell_left_s=30,
    ),
)


@pytest.fixture
def metrics() -> ScalingMetrics:
    made = ScalingMetrics("m")
    made.scaled("advisor", {"prefill": 1, "decode": 3}, {"prefill": 2, "decode": 2})
    made.autoscaled("decode", "limited")
    made.advised("apply")
    made.shown(STATUS)
    return made


def test_every_metric_is_explained_with_its_labels(metrics: ScalingMetrics) -> None:
    have = {
        family.name + ("_total" if family.type == "counter" else ""): frozenset(
            label for sample in family.samples for label in sample.labels
        )
        - {"model_name"}
        for family in metrics.registry.collect()
    }
    shown: dict[str, frozenset[str]] = {}
    for name, labels in re.findall(
        r"^\| `(splitpoint_(?:pool_|scale_|autoscaler_|accelerators|advisor_|slo_)\w*)` \| ([^|]*) ?\|", GUIDE, re.MULTILINE
    ):
        shown[name] = frozenset(re.findall(r"\w+", labels))
    assert shown == have
    assert all("model_name" in sample.labels for family in metrics.registry.collect() for sample in family.samples)


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("pool_replicas", {"pool": "decode", "role": "decode", "state": "starting"}, 1),
        ("scale_events_total", {"source": "advisor", "pool": "prefill", "direction": "up"}, 1),
        ("scale_events_total", {"source": "advisor", "pool": "decode", "direction": "down"}, 1),
        ("autoscaler_decisions_total", {"pool": "decode", "action": "limited"}, 1),
        ("autoscaler_wanted_replicas", {"pool": "decode"}, 4),
        ("autoscaler_signal", {"pool": "decode", "signal": "target_kv_usage"}, 0.7),
        ("autoscaler_marginal_goodput", {"pool": "decode"}, 0.5),
        ("accelerators", {"state": "taken"}, 5),
        ("accelerators", {"state": "budget"}, 6),
        ("slo_attainment", {"phase": "decode"}, 0.9),
        ("advisor_goodput", {"basis": "predicted_then"}, 3.0),
        ("advisor_proposal_requests", {"kind": "gain"}, 70),
        ("advisor_change_seconds", {"how": "relabel"}, 1.5),
        ("advisor_wait_seconds", {"why": "dwell"}, 30),
        ("advisor_pending", {}, 1),
    ],
)
def test_what_they_say(metrics: ScalingMetrics, name: str, labels: dict[str, Any], value: float) -> None:
    assert metrics.registry.get_sample_value(f"splitpoint_{name}", {"model_name": "m", **labels}) == value


def test_a_pool_that_is_gone_and_an_advisor_that_is_off_have_no_gauges(metrics: ScalingMetrics) -> None:
    metrics.shown(admin_pb2.GetStatusResponse())
    names = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    assert "splitpoint_pool_replicas" not in names
    assert not any(
        name.startswith("splitpoint_advisor_") and not name.startswith("splitpoint_advisor_decisions") for name in names
    )
