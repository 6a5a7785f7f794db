"""What coordinator and launcher make of failures while the system starts. No Ray cluster: its actors are stand-ins."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from coordinator.config import Settings, load
from coordinator.launch import LaunchError, _taken_up
from coordinator.pools.reports import GatewayReport
from coordinator.pools.store import Store
from protos.ids import WorkerId
from protos.splitpoint.v1 import admin_pb2

pytestmark = pytest.mark.timeout(60)

GATEWAY = WorkerId("gateway/0")


async def test_a_gateway_that_could_not_start_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process lives on, so Ray sees no death: a port that was taken for a moment would keep it down for ever."""
    pytest.importorskip("ray")
    from ray.exceptions import RayTaskError

    from coordinator.pools import ray_gateways

    restarted: list[str] = []
    serves = GatewayReport(
        gateway_id=GATEWAY, http_address="127.0.0.1:1", grpc_address="", admin_address="", in_flight=0, pid=1, tasks=0,
        open_files=0, membership_age_s=0.0, ready=True,
    )  # fmt: skip
    outcomes: list[Exception | GatewayReport] = [RayTaskError("report", "traceback", OSError("address in use")), serves]

    async def report() -> GatewayReport:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def create(*_: object) -> SimpleNamespace:
        return SimpleNamespace(report=SimpleNamespace(remote=report))

    monkeypatch.setattr(ray_gateways, "create_gateway", create)
    monkeypatch.setattr(ray_gateways, "end_gateway", lambda key, *, again: restarted.append(key) if again else None)
    settings = SimpleNamespace(coordinator=SimpleNamespace(gateways=1))
    spec = SimpleNamespace(settings=settings, log_dir=tmp_path)
    store = Store(tmp_path / "state.sqlite3")
    store.begin_run("run", {})
    gateways = ray_gateways.Gateways(spec, store, pause_s=0.0)  # type: ignore[arg-type]
    for faults, reports in (([GATEWAY], {}), ([], {GATEWAY: serves})):
        gateways.keep()
        await asyncio.gather(*gateways._asking.values())
        assert list(gateways.faults) == faults
        assert gateways.reports == reports
        assert gateways._asking == {}
    store.close()
    assert restarted == [GATEWAY]


def test_a_slow_answer_of_the_coordinator_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines that load keep a small machine busy: any single answer may be late."""
    ray = pytest.importorskip("ray")
    from ray.exceptions import GetTimeoutError

    from coordinator import launch

    starting = admin_pb2.GetStatusResponse(pools=[admin_pb2.PoolStatus(name="decode", target=1)])
    ready = admin_pb2.GetStatusResponse(
        pools=[admin_pb2.PoolStatus(name="decode", target=1, ready=1)],
        gateways=[admin_pb2.GatewayStatus(gateway_id="gateway/0", http_address="127.0.0.1:1")],
    )
    statuses = [starting, ready]
    late = iter([True])

    def answer(question: str) -> object:
        if question == "status":
            return statuses.pop(0) if len(statuses) > 1 else statuses[0]
        if next(late, False):
            raise GetTimeoutError("late")
        return []

    def get(questions: str | list[str], timeout: float) -> object:
        return [answer(q) for q in questions] if isinstance(questions, list) else answer(questions)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(launch, "_unready", lambda gateways: "")
    handle = SimpleNamespace(status=SimpleNamespace(remote=lambda: "status"), faults=SimpleNamespace(remote=lambda: "faults"))
    with launch._signals() as stop:
        found = launch._wait_ready(handle, load(environment={}), Console(file=io.StringIO()), stop)
    assert found == ready


class TestTakingUp:
    """A coordinator that outlived its launcher."""

    def take_up(self, monkeypatch: pytest.MonkeyPatch, theirs: Settings | Exception, said: io.StringIO) -> object:
        import ray

        def get(question: str, timeout: float) -> Settings:
            assert question == "settings"
            if isinstance(theirs, Exception):
                raise theirs
            return theirs

        monkeypatch.setattr(ray, "get", get)
        handle = SimpleNamespace(settings=SimpleNamespace(remote=lambda: "settings"))
        return _taken_up(handle, load(environment={}), Console(file=said)) is handle

    def test_one_with_the_same_configuration_is_taken_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said = io.StringIO()
        assert self.take_up(monkeypatch, load(environment={}), said)
        assert "taking up" in said.getvalue()

    def test_one_with_another_configuration_is_left_alone_and_the_difference_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        theirs = load(sets=["gateway.http_port=1", "engine.max_num_seqs=7"], environment={})
        with pytest.raises(LaunchError, match=r"another configuration \(engine, gateway\)"):
            self.take_up(monkeypatch, theirs, io.StringIO())

    def test_one_that_does_not_answer_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ray.exceptions import GetTimeoutError

        with pytest.raises(LaunchError, match="does not answer"):
            self.take_up(monkeypatch, GetTimeoutError("late"), io.StringIO())
