"""The command's own work: options in, calls out, text or JSON, exit statuses. No system behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import cli
from protos.splitpoint.v1 import admin_pb2

WORKER = admin_pb2.WorkerStatus(worker_id="decode-1", pool="decode", role="decode", state="ready", pid=7, kv_usage=0.25)
STATUS = admin_pb2.GetStatusResponse(
    pools=[admin_pb2.PoolStatus(name="decode", role="decode", target=2, ready=1)],
    workers=[WORKER],
    gateways=[admin_pb2.GatewayStatus(gateway_id="gateway/0", http_address="127.0.0.1:8000")],
    model="m",
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any, float]]:
    """Every admin call the command makes: address, method, request, time-out."""
    made: list[tuple[str, str, Any, float]] = []
    replies = {
        "GetStatus": STATUS,
        "ScalePool": admin_pb2.ScalePoolResponse(pool=STATUS.pools[0]),
        "DrainWorker": admin_pb2.DrainWorkerResponse(worker=WORKER),
        "GetManifest": admin_pb2.GetManifestResponse(manifest_json='{"format": 1}'),
    }

    def call(address: str, method: str, request: Any, timeout_s: float = 30.0) -> Any:
        made.append((address, method, request, timeout_s))
        return replies[method]

    monkeypatch.setattr(cli, "_call", call)
    monkeypatch.delenv("SPLITPOINT_ADMIN", raising=False)
    return made


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200", **environment})


def test_help_names_every_command() -> None:
    text = run("--help").output
    for command in ("serve", "status", "scale", "drain", "doctor", "models", "compare", "manifest", "version"):
        assert command in text


def test_help_loads_nothing_heavy() -> None:
    heavy = ("ray", "vllm", "torch", "grpc", "transformers", "ucxx", "numpy", "scipy", "uvicorn")
    code = f"import sys, coordinator.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "[]"


def test_status_as_json_has_every_field(calls: list[Any]) -> None:
    done = run("status", "--json")
    assert done.exit_code == 0
    said = json.loads(done.output)
    assert said["pools"][0] == {
        "name": "decode", "role": "decode", "target": 2, "ready": 1, "starting": 0, "draining": 0, "failures": 0, "detail": "",
        "engine_json": "",
    }  # fmt: skip
    assert said["workers"][0]["kv_usage"] == 0.25


def test_status_for_people(calls: list[Any]) -> None:
    text = run("status").output
    for word in ("decode-1", "ready", "25%", "127.0.0.1:8000", "target"):
        assert word in text


def test_the_admin_address_option_beats_the_environment_beats_the_default(calls: list[Any]) -> None:
    run("status")
    run("status", SPLITPOINT_ADMIN="a:1")
    run("status", "--admin", "b:2", SPLITPOINT_ADMIN="a:1")
    assert [call[0] for call in calls] == [cli.DEFAULT_ADMIN, "a:1", "b:2"]


def test_scale_passes_the_guard_only_when_given(calls: list[Any]) -> None:
    assert run("scale", "decode", "--replicas", "3").exit_code == 0
    assert run("scale", "decode", "--replicas", "0", "--current-replicas", "3").exit_code == 0
    first, second = (call[2] for call in calls)
    assert (first.pool, first.replicas, first.HasField("current_replicas")) == ("decode", 3, False)
    assert (second.replicas, second.current_replicas) == (0, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ["scale", "decode"],
        ["scale", "decode", "--replicas", "-1"],
        ["scale", "decode", "--replicas", "x"],
        ["scale"],
        ["drain"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_status_2(calls: list[Any], arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2
    assert calls == []


def test_drain_waits_longer_than_the_drain_itself(calls: list[Any]) -> None:
    run("drain", "decode-1", "--timeout", "100")
    [(_, method, request, timeout_s)] = calls
    assert (method, request.worker_id, request.timeout_s) == ("DrainWorker", "decode-1", 100.0)
    assert timeout_s > 100


def test_manifest_is_printed_as_it_is(calls: list[Any]) -> None:
    assert json.loads(run("manifest").output) == {"format": 1}


def test_serve_refuses_a_bad_setting_by_name() -> None:
    done = run("serve", "--set", "engine.max_num_seq=3")
    assert done.exit_code == 1
    assert "engine.max_num_seq" in done.output
    assert "max_num_seqs" in done.output


def test_serve_prints_the_resolved_configuration_without_starting() -> None:
    done = run("serve", "--set", "kvtransfer.send_staging_bytes=1MiB", "--print-config")
    assert done.exit_code == 0
    assert json.loads(done.output)["kvtransfer"]["send_staging_bytes"] == 1 << 20


def test_serve_says_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from coordinator import launch

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise launch.LaunchError("no model at /nowhere")

    monkeypatch.setattr(launch, "serve", refuse)
    done = run("serve")
    assert done.exit_code == 1
    assert "no model at /nowhere" in done.output


def test_version_as_json() -> None:
    assert {"splitpoint", "python", "ray"} <= set(json.loads(run("version", "--json").output))
