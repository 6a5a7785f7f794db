"""The operators' guide names the metrics that a rank has, and its configuration can be loaded."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from coordinator.config import ConfigError, CoordinatorSettings, load
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.path_model import read
from coordinator.pools.config import PlacementSettings
from coordinator.routing.config import AutoPathSettings, RoutingSettings
from coordinator.routing.views import Placement
from kvtransfer.metrics import KvMetrics
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md").read_text()


def test_every_metric_of_a_rank_is_explained_with_its_labels() -> None:
    metrics = KvMetrics()
    metrics.started("ucx")
    metrics.delivered("ucx", 1, 1.0)
    metrics.failed("ucx", "timeout")
    metrics.expired("send")
    metrics.late("complete")
    metrics.staging_waited("send", "granted", 1.0)
    metrics.event("x")
    metrics.watch(lambda: pb.GetNodeStatusResponse(lease_states={"sealed": 1}, session_states={"taken": 1}))
    have = {
        family.name: frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        for family in metrics.registry.collect()
    }
    shown: dict[str, frozenset[str]] = {}
    for names, labels in re.findall(r"^\| (`splitpoint_kv_[^|]*) \| ([^|]*) ?\|", GUIDE, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            shown[name] = frozenset(re.findall(r"\w+", labels))
    assert shown == have


def test_the_configuration_of_tls_loads(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(\[security\].*?)```", GUIDE, re.DOTALL)
    file = tmp_path / "splitpoint.toml"
    file.write_text(block)
    settings = load(file, environment={})
    assert settings.security is not None
    assert settings.security.peer_name == "node.splitpoint.internal"
    assert settings.kvtransfer.transports == ("grpc",)


def test_the_policies_are_those_of_the_settings_and_their_block_loads(tmp_path: Path) -> None:
    (rows,) = re.findall(r"^\| `policy` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    shown = re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    assert sorted(shown) == sorted(get_args(RoutingSettings.model_fields["policy"].annotation))
    policies, placement = re.findall(r"```toml\n(\[gateway.routing\].*?)```", GUIDE, re.DOTALL)
    file = tmp_path / "splitpoint.toml"
    file.write_text(policies)
    assert load(file, environment={}).gateway.routing.policy == "prefix_aware"
    file.write_text(placement)
    routing, defaults = load(file, environment={}).gateway.routing, RoutingSettings()
    assert routing == RoutingSettings(placement=Placement.PREFER_NODE), "the imbalance is the default"
    (rows,) = re.findall(r"^\| `placement` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    named = [name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(Placement)
    for name in ("max_load_ratio", "prefix_hit_weight"):
        assert f"`{name}` ({getattr(defaults, name):g})" in GUIDE


def test_the_configuration_of_several_hosts_loads_and_its_strategies_are_those_of_the_settings(tmp_path: Path) -> None:
    (rows,) = re.findall(r"^\| `strategy` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    shown = re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    assert sorted(shown) == sorted(get_args(PlacementSettings.model_fields["strategy"].annotation))
    (block,) = re.findall(r"```toml\n(\[coordinator\]\nray_address.*?)```", GUIDE, re.DOTALL)
    file = tmp_path / "splitpoint.toml"
    file.write_text(block)
    settings = load(file, environment={})
    assert settings.coordinator.placement.pool_labels == {"prefill": {"splitpoint/pool": "prefill"}}
    assert f"`coordinator.partition_grace_s` ({CoordinatorSettings().partition_grace_s:g} s)" in GUIDE


def test_the_configuration_of_spread_gateways_loads_on_a_joined_ray_alone(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(\[coordinator\]\ngateways.*?)```", GUIDE, re.DOTALL)
    file = tmp_path / "splitpoint.toml"
    file.write_text(block)
    settings = load(file, sets=["coordinator.ray_address=auto"], environment={})
    assert settings.coordinator.placement.gateways == "spread"
    with pytest.raises(ConfigError, match="embedded"):
        load(file, environment={})


@pytest.mark.parametrize("word", ["allow_unencrypted_kv", "worker.metrics_port", "vllm:splitpoint_scheduler_events_total"])
def test_what_it_speaks_of_is_named(word: str) -> None:
    assert word in GUIDE


def test_the_configuration_of_path_auto_loads_with_its_file_and_its_metrics_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```toml\n(\[gateway\]\ndefault_path.*?)```", GUIDE, re.DOTALL)
    (model,) = re.findall(r"```json\n(\{\"kind\": \"step times\".*?)```", GUIDE, re.DOTALL)
    (tmp_path / "splitpoint.toml").write_text(block)
    (tmp_path / "step-times.json").write_text(model)
    monkeypatch.chdir(tmp_path)
    gateway = load(tmp_path / "splitpoint.toml", environment={}).gateway
    assert gateway.default_path == "auto"
    assert gateway.auto == AutoPathSettings(model_file=tmp_path / "step-times.json"), "the defaults are shown"
    assert read(tmp_path / "step-times.json").keys() == {"split", "colocated"}
    rows = dict(re.findall(r"^\| `(splitpoint_auto_\w+)` \| ([^|]*) \|", GUIDE, re.MULTILINE))
    metrics = GatewayMetrics("m")
    metrics.path_decided("split", "held")
    metrics.path_measured("split", ttft_ratio=1.0, tpot_ratio=1.0, lost=True)
    metrics.path_correction("split", ttft=1.0, tpot=1.0)
    have = {
        family.name + ("_total" if family.type == "counter" else ""): {label for s in family.samples for label in s.labels}
        for family in metrics.registry.collect()
        if family.name.startswith("splitpoint_auto_")
    }
    assert {name: set(labels.split(", ")) for name, labels in rows.items()} == {
        name: labels - {"le", "model_name"} for name, labels in have.items()
    }


def test_the_keys_of_path_auto_load_and_the_command_gives_their_hash() -> None:
    (block,) = re.findall(r"```toml\n(\[gateway.auto.keys.*?)```", GUIDE, re.DOTALL)
    (command,) = re.findall(r"^python -c .*hashlib.*$", GUIDE, re.MULTILINE)
    auto = AutoPathSettings(model_file=Path("any.json"), **tomllib.loads(block)["gateway"]["auto"])
    program, key = shlex.split(command, comments=True)[1:], re.findall(r'here "(.*)"$', command)[0]
    told = subprocess.run([sys.executable, *program], input=key + "\n", capture_output=True, text=True, timeout=60, check=True)
    assert auto.key_names == {told.stdout.strip(): "batch"}
