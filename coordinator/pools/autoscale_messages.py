"""The autoscaler's values as messages of `AdminService`, and a policy back from one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from google.protobuf.json_format import MessageToDict
from pydantic import ValidationError

from coordinator.pools.autoscale import Decision
from coordinator.pools.autoscale_gain import Gain
from coordinator.pools.autoscale_policy import AutoscalePolicy
from protos.errors import invalid
from protos.splitpoint.v1 import admin_pb2


def policy_of(message: admin_pb2.AutoscalePolicy) -> AutoscalePolicy:
    """Raises `SplitpointError(INVALID_VALUE)` that names the field and its limit."""
    try:
        return AutoscalePolicy.model_validate(MessageToDict(message, preserving_proto_field_name=True))
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0]) if fault["loc"] else "policy"
        text = fault["msg"].removeprefix("Value error, ")
        shown = "" if fault["type"] in ("missing", "value_error") else f", got {fault['input']!r}"
        raise invalid(name, f"{name}: {text}{shown}" if fault["loc"] else text) from error


def status_of(pool: str, policy: AutoscalePolicy, decision: Decision | None, age_s: float) -> admin_pb2.AutoscalerStatus:
    """One autoscaler. `age_s` is the decision's."""
    return admin_pb2.AutoscalerStatus(
        pool=pool,
        policy=admin_pb2.AutoscalePolicy(**policy.model_dump(exclude_none=True)),
        decision=_decision(decision, age_s) if decision is not None else None,
    )


def _decision(decision: Decision, age_s: float) -> admin_pb2.AutoscaleDecision:
    return admin_pb2.AutoscaleDecision(
        action=decision.action,
        current_replicas=decision.current,
        replicas=decision.replicas,
        wanted_replicas=decision.wanted,
        reason=decision.reason,
        signals=[admin_pb2.AutoscaleSignal(**asdict(signal)) for signal in decision.signals],
        age_s=age_s,
    )


def gains_of(gains: Iterable[Gain]) -> list[admin_pb2.AcceleratorGain]:
    """The first is the next accelerator's."""
    return [admin_pb2.AcceleratorGain(**asdict(gain), goodput_per_s=gain.goodput_per_s) for gain in gains]
