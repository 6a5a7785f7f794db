"""What the coordinator makes of a gateway whose start has failed. No Ray cluster: its actors are stand-ins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from protos.ids import WorkerId

pytestmark = pytest.mark.timeout(60)

GATEWAY = WorkerId("gateway/0")


async def test_a_gateway_that_could_not_start_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives on, so Ray sees no death: a port that was taken for a moment would keep it down for ever."""
    module = pytest.importorskip("coordinator.pools.ray_coordinator")
    from ray.exceptions import RayTaskError

    restarted: list[str] = []
    outcomes: list[Exception | str] = [RayTaskError("report", "traceback", OSError("address in use")), "serves"]

    async def report() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def create(*_: object) -> SimpleNamespace:
        return SimpleNamespace(report=SimpleNamespace(remote=report))

    monkeypatch.setattr(module, "create_gateway", create)
    monkeypatch.setattr(module, "restart_gateway", restarted.append)
    coordinator = object.__new__(module.CoordinatorActor)
    coordinator._spec = SimpleNamespace(settings=None, log_dir=Path("."))
    coordinator._rules = SimpleNamespace(heartbeat_interval_s=0.0)
    coordinator._gateways, coordinator._gateway_faults = {}, {}
    for faults, gateways in (([GATEWAY], {}), ([], {GATEWAY: "serves"})):
        coordinator._busy = {GATEWAY: asyncio.current_task()}
        await coordinator._ask_gateway(GATEWAY, 0)
        assert list(coordinator._gateway_faults) == faults
        assert coordinator._gateways == gateways
        assert coordinator._busy == {}
    assert restarted == [GATEWAY]
