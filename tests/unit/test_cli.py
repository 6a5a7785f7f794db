"""The command's own work: options in, calls out, text or JSON, exit statuses. No system behind it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from coordinator import admin_call, cli, pools_cli
from protos.splitpoint.v1 import admin_pb2

WORKER = admin_pb2.WorkerStatus(worker_id="decode-1", pool="decode", role="decode", state="ready", pid=7, kv_usage=0.25)
STATUS = admin_pb2.GetStatusResponse(
    pools=[admin_pb2.PoolStatus(name="decode", role="decode", target=2, ready=1)],
    workers=[WORKER],
    gateways=[admin_pb2.GatewayStatus(gateway_id="gateway/0", http_address="127.0.0.1:8000", admin_address="g:1")],
    model="m",
    version=7,
)
SETTLED = admin_pb2.GetStatusResponse(pools=[admin_pb2.PoolStatus(name="decode", target=2, ready=2)], version=8)
PLAN = [
    admin_pb2.WorkerPlan(action="relabel", worker_id="prefill-2", pool="prefill", new_pool="decode", reason="same engine"),
    admin_pb2.WorkerPlan(action="start", new_pool="decode"),
]
REQUESTS = [
    admin_pb2.RequestStatus(request_id="young", path="split", age_s=1.0, prompt_tokens=3),
    admin_pb2.RequestStatus(request_id="old", path="colocated", decode_worker="decode-1", age_s=5.0, ttft_s=0.25),
]

DECISIONS = admin_pb2.ListDecisionsResponse(
    decisions=[
        admin_pb2.PathDecision(
            request_id="r1", path="split", reason="predicted", prompt_tokens=40, output_tokens=9, slo_ttft_s=1.0, slo_tpot_s=0.05,
            predictions=[
                admin_pb2.PathPrediction(path="split", stress=0.3, ttft_s=0.3, tpot_s=0.01, queued_tokens=70),
                admin_pb2.PathPrediction(
                    path="colocated", stress=0.5, ttft_s=0.5, tpot_s=0.02, running=4, own_misses=0.04, others_misses=1.5
                ),
            ],
            measured=True, ttft_s=0.75, tpot_s=0.01, stress=0.75, lost_by=0.25, objective_source="key batch",
        ),
        admin_pb2.PathDecision(request_id="r2", path="split", reason="explored"),
    ],
    decided=900, remembered=100, lost=1,
    corrections=[admin_pb2.PathCorrection(path="split", ttft_factor=1.25, tpot_factor=0.9, measured=80)],
)  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any, float]]:
    """Every admin call the command makes: address, method, request, time-out."""
    made: list[tuple[str, str, Any, float]] = []
    replies = {
        "GetStatus": STATUS,
        "ScalePool": admin_pb2.ScalePoolResponse(pool=STATUS.pools[0], plan=PLAN, version=8),
        "ApplyPools": admin_pb2.ApplyPoolsResponse(plan=PLAN, version=8),
        "DrainWorker": admin_pb2.DrainWorkerResponse(worker=WORKER),
        "CordonWorker": admin_pb2.CordonWorkerResponse(worker=WORKER),
        "ListRequests": admin_pb2.ListRequestsResponse(requests=REQUESTS),
        "ListDecisions": DECISIONS,
        "ResetPrefixCaches": admin_pb2.ResetPrefixCachesResponse(workers=2),
        "GetManifest": admin_pb2.GetManifestResponse(manifest_json='{"format": 1}'),
    }

    def call(address: str, method: str, request: Any, timeout_s: float = 30.0) -> Any:
        made.append((address, method, request, timeout_s))
        if method == "GetStatus" and len(made) > 3:
            return SETTLED
        return replies[method]

    monkeypatch.setattr(admin_call, "call", call)
    monkeypatch.setattr(pools_cli, "POLL_S", 0.0)
    monkeypatch.delenv("SPLITPOINT_ADMIN", raising=False)
    return made


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200", **environment})


def test_help_names_every_command() -> None:
    text = run("--help").output
    commands = "serve status get scale pools drain cordon uncordon decisions doctor models compare manifest version"
    for command in commands.split():
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
        "engine_json": "", "spares": 0, "spares_ready": 0, "spare_kind": "", "updated": 0,
    }  # fmt: skip
    assert said["workers"][0]["kv_usage"] == 0.25


def test_status_for_people(calls: list[Any]) -> None:
    text = run("status").output
    for word in ("decode-1", "ready", "25%", "127.0.0.1:8000", "target"):
        assert word in text


@pytest.mark.parametrize(
    ("width", "worker", "command"),
    [
        (60, "decode-1", ["status"]),
        (60, "decode-1", ["get", "workers"]),
        (40, "prefill-2", ["scale", "decode", "--replicas", "3", "--dry-run"]),
    ],
)
def test_a_narrow_terminal_cuts_no_cell(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, width: int, worker: str, command: list[str]
) -> None:
    """Not a name, not a reason: what does not fit goes on in the cell's next line."""
    narrow = Console(width=width, force_terminal=True, color_system=None, record=True)
    monkeypatch.setattr(admin_call, "output_console", lambda: narrow)
    assert run(*command, COLUMNS=str(width)).exit_code == 0
    shown = narrow.export_text()
    assert "\u2026" not in shown
    assert worker not in shown, "it does not fit in a line"
    assert max(len(line) for line in shown.splitlines()) <= width
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in shown.splitlines() if "\u2502" in line]
    columns = zip(*(row for row in rows if len(row) == max(map(len, rows))), strict=True)
    assert any(worker in "".join(column) for column in columns)


def test_the_admin_address_option_beats_the_environment_beats_the_default(calls: list[Any]) -> None:
    run("status")
    run("status", SPLITPOINT_ADMIN="a:1")
    run("status", "--admin", "b:2", SPLITPOINT_ADMIN="a:1")
    assert [call[0] for call in calls] == [admin_call.DEFAULT_ADMIN, "a:1", "b:2"]


def test_scale_passes_the_guard_only_when_given(calls: list[Any]) -> None:
    assert run("scale", "decode", "--replicas", "3").exit_code == 0
    assert run("scale", "decode", "--replicas", "0", "--current-replicas", "3").exit_code == 0
    first, second = (call[2] for call in calls)
    assert (first.pool, first.replicas, first.HasField("current_replicas")) == ("decode", 3, False)
    assert (second.replicas, second.current_replicas) == (0, 3)


def test_scale_waits_until_the_pool_is_as_it_shall_be(calls: list[Any]) -> None:
    done = run("scale", "decode", "--replicas", "2", "--wait")
    assert done.exit_code == 0
    assert "target 2, ready 2" in done.output
    assert [call[1] for call in calls] == ["ScalePool", "GetStatus", "GetStatus", "GetStatus"]


def test_scale_says_what_is_missing_when_it_has_waited_long_enough(calls: list[Any]) -> None:
    done = run("scale", "decode", "--replicas", "2", "--wait", "--timeout", "0")
    assert done.exit_code == 1
    assert "pool decode: 1 ready, 0 starting, 0 draining of 2" in done.output


def test_scale_dry_run_shows_the_plan_and_waits_for_nothing(calls: list[Any]) -> None:
    done = run("scale", "decode", "--replicas", "3", "--dry-run", "--wait", "--expected-version", "7")
    [(_, _, request, _)] = calls
    assert (request.dry_run, request.expected_version) == (True, 7)
    for word in ("relabel", "prefill-2", "same engine", "start"):
        assert word in done.output


class TestPools:
    FILE = """
[pools.prefill]
role = "prefill"
[pools.decode]
role = "decode"
replicas = 2
engine = { kv_cache_bytes = "64MiB" }
"""

    def apply(self, folder: Path, text: str, *options: str) -> Any:
        file = folder / "pools.toml"
        file.write_text(text)
        return run("pools", "apply", str(file), *options)

    def test_apply_sends_the_whole_set(self, calls: list[Any], tmp_path: Path) -> None:
        done = self.apply(tmp_path, self.FILE)
        [(_, method, request, _)] = calls
        assert (done.exit_code, method) == (0, "ApplyPools")
        assert [(p.name, p.role, p.replicas, p.engine_json) for p in request.pools] == [
            ("prefill", "prefill", 1, ""),
            ("decode", "decode", 2, '{"kv_cache_bytes": 67108864}'),
        ]
        assert (request.dry_run, request.HasField("expected_version")) == (False, False)
        assert "relabel" in done.output

    def test_apply_waits_until_nothing_is_unsettled(self, calls: list[Any], tmp_path: Path) -> None:
        done = self.apply(tmp_path, self.FILE, "--wait")
        assert done.exit_code == 0
        assert [call[1] for call in calls] == ["ApplyPools", "GetStatus"]
        assert re.fullmatch(r"version 8, as desired after \d+\.\d s", done.output.splitlines()[-1])

    @pytest.mark.parametrize(
        ("options", "share", "surge"),
        [([], None, False), (["--max-unavailable", "0.5"], 0.5, False), (["--surge"], None, True)],
    )
    def test_apply_says_how_workers_are_replaced(
        self, calls: list[Any], tmp_path: Path, options: list[str], share: float | None, surge: bool
    ) -> None:
        assert self.apply(tmp_path, self.FILE, *options).exit_code == 0
        [(_, _, request, _)] = calls
        assert (request.max_unavailable if request.HasField("max_unavailable") else None, request.surge) == (share, surge)

    def test_a_share_beyond_the_whole_is_refused_with_its_limit(self, calls: list[Any], tmp_path: Path) -> None:
        done = self.apply(tmp_path, self.FILE, "--max-unavailable", "2")
        assert (done.exit_code, calls) == (2, [])
        assert "--max-unavailable" in done.output

    def test_tables_that_are_not_applied_are_named(self, calls: list[Any], tmp_path: Path) -> None:
        done = self.apply(tmp_path, "[engine]\nmax_num_seqs = 4\n" + self.FILE, "--dry-run")
        assert "[engine] would need a restart" in done.output
        assert calls[0][2].dry_run

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "no pools"),
            ("[engine]", "no pools"),
            ("[pools.decode]\nrole = 'decod'", "pools.decode.role"),
            ("[pools.decode]\nrole = 'decode'\nreplica = 2", "did you mean 'replicas'"),
            ("[pools", "not TOML"),
        ],
    )
    def test_a_bad_file_is_refused_by_name_and_nothing_is_sent(
        self, calls: list[Any], tmp_path: Path, text: str, said: str
    ) -> None:
        done = self.apply(tmp_path, text)
        assert done.exit_code == 1
        assert said in done.output
        assert calls == []

    def test_reset_caches_names_the_pools(self, calls: list[Any]) -> None:
        assert "2 workers" in run("pools", "reset-caches", "prefill", "decode").output
        assert list(calls[0][2].pools) == ["prefill", "decode"]


class TestGet:
    def test_pools_as_data_carry_their_version(self, calls: list[Any]) -> None:
        said = json.loads(run("get", "pools", "-o", "json").output)
        assert said["version"] == "7"
        assert said["pools"][0]["name"] == "decode"

    def test_pools_show_how_far_a_replacement_is(self, calls: list[Any]) -> None:
        text = run("get", "pools", COLUMNS="200").output
        (header,) = [line for line in text.splitlines() if "target" in line]
        columns = header.replace("┃", " ").split()
        assert columns.index("updated") == columns.index("ready") + 1

    def test_yaml_says_what_json_says(self, calls: list[Any]) -> None:
        as_yaml, as_json = (run("get", "workers", "-o", form).output for form in ("yaml", "json"))
        assert yaml.safe_load(as_yaml) == json.loads(as_json)
        assert json.loads(as_json)[0]["worker_id"] == "decode-1"

    @pytest.mark.parametrize("what", ["pools", "workers", "requests"])
    def test_wide_has_more_columns(self, calls: list[Any], what: str) -> None:
        narrow, wide = (run("get", what, *more, COLUMNS="400").output for more in ([], ["-o", "wide"]))
        assert len(wide.splitlines()[0]) > len(narrow.splitlines()[0])

    def test_what_is_piped_is_not_cut_to_a_width(self, calls: list[Any]) -> None:
        for arguments in (["get", "workers", "-o", "wide"], ["get", "pools", "-o", "wide"], ["status"]):
            text = run(*arguments, COLUMNS="20").output
            assert "decode" in text
            assert "\u2026" not in text
            rows = [line for line in text.splitlines() if line.startswith("│")]
            assert rows
            assert all(row.split("│")[1].strip() for row in rows), "a row is a line"

    def test_workers_of_one_pool(self, calls: list[Any]) -> None:
        assert "decode-1" in run("get", "workers", "--pool", "decode").output
        assert "decode-1" not in run("get", "workers", "--pool", "prefill").output

    def test_requests_are_asked_of_every_gateway_and_the_oldest_comes_first(self, calls: list[Any]) -> None:
        said = json.loads(run("get", "requests", "-o", "json").output)
        assert [(r["gateway_id"], r["request_id"]) for r in said] == [("gateway/0", "old"), ("gateway/0", "young")]
        assert [call[:2] for call in calls][1] == ("g:1", "ListRequests")


class TestDecisions:
    def test_those_that_lost_are_shown_with_how_much_and_what_was_predicted(self, calls: list[Any]) -> None:
        text = run("decisions").output
        for word in (
            "r1",
            "25.0%",
            "75.0%",
            "split 30.0%, colocated 50.0%",
            "900 decided, 1 of the last 100 lost",
            "TTFT x 1.25",
            "key batch",
        ):
            assert word in text
        assert [call[:2] for call in calls] == [(admin_call.DEFAULT_ADMIN, "GetStatus"), ("g:1", "ListDecisions")]
        assert (calls[1][2].lost_only, calls[1][2].limit) == (True, 20)

    def test_all_of_them_and_wide(self, calls: list[Any]) -> None:
        text = run("decisions", "--all", "--limit", "0", "-o", "wide", COLUMNS="400").output
        assert (calls[1][2].lost_only, calls[1][2].limit) == (False, 0)
        for word in ("r2", "explored", "750.0 of 1000 ms", "10.00 of 50 ms", "split 70", "colocated 4", "colocated 0.04+1.50"):
            assert word in text

    def test_json_and_yaml_have_every_field(self, calls: list[Any]) -> None:
        as_json, as_yaml = (run("decisions", "-o", form).output for form in ("json", "yaml"))
        (said,) = json.loads(as_json)
        assert yaml.safe_load(as_yaml) == [said]
        assert (said["gateway_id"], said["decisions"][0]["lost_by"]) == ("gateway/0", 0.25)
        assert said["decisions"][0]["predictions"][1]["running"] == 4

    def test_a_gateway_without_path_auto_says_so(self, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        reply = {"GetStatus": STATUS, "ListDecisions": admin_pb2.ListDecisionsResponse()}
        monkeypatch.setattr(admin_call, "call", lambda address, method, request, timeout_s=30.0: reply[method])
        assert "no path auto (gateway.auto.model_file)" in run("decisions").output


def test_cordon_and_uncordon(calls: list[Any]) -> None:
    run("cordon", "decode-1")
    run("uncordon", "decode-1")
    assert [(c[1], c[2].worker_id, c[2].cordoned) for c in calls] == [
        ("CordonWorker", "decode-1", True),
        ("CordonWorker", "decode-1", False),
    ]


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
