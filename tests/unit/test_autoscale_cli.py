"""`splitpoint autoscale` and `get autoscalers`: options in, calls out, text or data; and the operators' guide about them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coordinator import admin_call, cli
from coordinator.pools.autoscale_messages import policy_of
from coordinator.pools.autoscale_policy import AutoscalePolicy
from protos.splitpoint.v1 import admin_pb2

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md").read_text()
DECISION = admin_pb2.AutoscaleDecision(
    action="up",
    current_replicas=1,
    replicas=3,
    wanted_replicas=3,
    reason="queued_tokens 2900 (target 1000) wants 3",
    signals=[admin_pb2.AutoscaleSignal(name="target_queued_tokens", value=2900, target=1000, wanted_replicas=3, samples=3)],
)
SCALED = admin_pb2.AutoscalerStatus(
    pool="prefill", policy=admin_pb2.AutoscalePolicy(min_replicas=1, max_replicas=4), decision=DECISION
)
RESTING = admin_pb2.AutoscalerStatus(pool="gone", policy=admin_pb2.AutoscalePolicy(min_replicas=2, max_replicas=5))
GAIN = admin_pb2.AcceleratorGain(
    pool="decode", goodput_per_s=0.5, workers=2, accelerators=1, legs_per_s=5, share_now=0.8, share_more=1.0, partner_share=0.5,
    basis="latency",
)  # fmt: skip
STATUS = admin_pb2.GetStatusResponse(
    pools=[admin_pb2.PoolStatus(name="prefill", target=3), admin_pb2.PoolStatus(name="decode", target=2)],
    version=7,
    autoscaling=admin_pb2.Autoscaling(
        autoscalers=[SCALED, RESTING], next=[GAIN], accelerators_taken=5, accelerator_budget=6
    ),
)  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every admin call that is made: method, request."""
    made: list[tuple[str, Any]] = []
    replies = {
        "GetStatus": STATUS,
        "SetAutoscaler": admin_pb2.SetAutoscalerResponse(autoscaler=SCALED),
        "RemoveAutoscaler": admin_pb2.RemoveAutoscalerResponse(),
        "ApplyPools": admin_pb2.ApplyPoolsResponse(),
        "ScalePool": admin_pb2.ScalePoolResponse(pool=STATUS.pools[0]),
    }

    def call(address: str, method: str, request: Any, timeout_s: float = 30.0) -> Any:
        made.append((method, request))
        return replies[method]

    monkeypatch.setattr(admin_call, "call", call)
    return made


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "300"})


def test_only_what_is_given_is_sent(calls: list[Any]) -> None:
    done = run("autoscale", "prefill", "--min", "1", "--max", "4", "--target-queued-tokens", "1000", "--budget", "6")
    assert done.exit_code == 0, done.output
    [(method, request)] = calls
    assert method == "SetAutoscaler"
    policy = admin_pb2.AutoscalePolicy(min_replicas=1, max_replicas=4, target_queued_tokens=1000)
    assert request == admin_pb2.SetAutoscalerRequest(pool="prefill", policy=policy, accelerator_budget=6)
    assert "prefill: 1 to 4 workers" in done.output
    assert "up 1 to 3: queued_tokens 2900 (target 1000) wants 3" in done.output
    assert "target_queued_tokens: 2900 (target 1000) of 3 samples wants 3" in done.output


def test_every_field_of_the_policy_has_its_option_and_its_field_on_the_wire(calls: list[Any]) -> None:
    values = {name: field.default for name, field in AutoscalePolicy.model_fields.items()} | {"max_replicas": 3}
    values = {name: 1 if value is None else value for name, value in values.items()}
    options = []
    for name, value in values.items():
        option = {"min_replicas": "min", "max_replicas": "max"}.get(name, name.replace("_", "-"))
        options += [f"--{option}", str(value)]
    assert run("autoscale", "both", *options, "--dry-run").exit_code == 0
    [(_, request)] = calls
    assert request.dry_run
    assert not request.HasField("accelerator_budget")
    assert policy_of(request.policy) == AutoscalePolicy.model_validate(values)
    fields = {field.name for field in admin_pb2.AutoscalePolicy.DESCRIPTOR.fields}
    assert fields == set(AutoscalePolicy.model_fields)


def test_help_states_the_defaults_that_hold() -> None:
    text = " ".join(re.sub(r"[^\w.()-]+", " ", run("autoscale", "--help").output).split())
    for name, field in AutoscalePolicy.model_fields.items():
        if isinstance(field.default, int | float | str):
            shown = f"{field.default:g}" if isinstance(field.default, int | float) else field.default
            option = "min" if name == "min_replicas" else name.replace("_", "-")
            assert re.search(rf"--{option} [^-].*?\(default {re.escape(shown)}\)", text), name


def test_off_gives_the_pool_back(calls: list[Any]) -> None:
    assert "not autoscaled any more" in run("autoscale", "prefill", "--off").output
    assert calls == [("RemoveAutoscaler", admin_pb2.RemoveAutoscalerRequest(pool="prefill"))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--min", "1"], "--max is missing"),
        (["--off", "--max", "3"], "--off stands alone"),
        (["--off", "--budget", "0"], "--off stands alone"),
    ],
)
def test_half_a_request_is_refused_before_it_is_sent(calls: list[Any], arguments: list[str], said: str) -> None:
    done = run("autoscale", "prefill", *arguments)
    assert (done.exit_code, calls) == (1, [])
    assert said in done.output


def test_scale_forces_only_when_it_is_told_to(calls: list[Any]) -> None:
    run("scale", "prefill", "--replicas", "2")
    run("scale", "prefill", "--replicas", "2", "--force")
    assert [request.force for _, request in calls] == [False, True]


def test_an_autoscaler_in_a_file_that_is_applied_is_named_and_left_out(calls: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "pools.toml"
    file.write_text('[pools.both]\nrole = "colocated"\nautoscaling_config = { max_replicas = 2 }\n')
    done = run("pools", "apply", str(file))
    assert done.exit_code == 0
    assert "autoscaling_config of both is for `serve`: it is not applied" in done.output
    assert [method for method, _ in calls] == ["ApplyPools"]


def test_autoscalers_with_their_last_decision_and_who_is_next(calls: list[Any]) -> None:
    text = run("get", "autoscalers").output
    for said in ("1 to 4", "up 1 to 3", "2 to 5", "nothing decided yet", "accelerators taken: 5 of 6"):
        assert said in text
    assert "the next one: decode, +0.5 requests/s in time for each accelerator = 5/s x (1 with 3 - 0.8 with 2) x 0.5" in text
    assert "of 3 samples" not in text
    assert "of 3 samples wants 3" in run("get", "autoscalers", "-o", "wide").output
    as_yaml, as_json = (run("get", "autoscalers", "-o", form).output for form in ("yaml", "json"))
    assert yaml.safe_load(as_yaml) == json.loads(as_json)
    assert json.loads(as_json)["autoscalers"][0]["decision"]["signals"][0]["value"] == 2900


def test_pools_show_who_scales_them(calls: list[Any]) -> None:
    assert "1 to 4, up 1 to 3" in run("get", "pools", "-o", "wide").output
    said = json.loads(run("get", "pools", "-o", "json").output)
    assert [a["pool"] for a in said["autoscaling"]["autoscalers"]] == ["prefill", "gone"]


def test_the_commands_of_the_guide_are_understood(calls: list[Any]) -> None:
    shown = [line for line in GUIDE.splitlines() if line.startswith(("splitpoint autoscale", "splitpoint get autoscalers"))]
    assert len(shown) >= 5
    for line in shown:
        done = run(*shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, (line, done.output)
    for method, request in calls:
        if method == "SetAutoscaler":
            policy_of(request.policy)
    for name in AutoscalePolicy.model_fields:
        assert f"`{name}`" in GUIDE
