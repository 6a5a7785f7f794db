"""`splitpoint rollout`, as the guide shows it: what is asked, and how long it waits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import admin_call
from coordinator.cli import app
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import admin_pb2

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide-operators.md"
SHOWN = re.findall(r"^splitpoint (rollout .*)$", GUIDE.read_text(), re.MULTILINE)
RESTARTING = admin_pb2.GetStatusResponse(unsettled=["prefill-1 is to be restarted"])
AWAY = SplitpointError(Code.WORKER_LOST, "connection refused")


class Admin:
    """Answers `GetStatus` with one after the other of `statuses`, the last one for ever."""

    def __init__(self, *statuses: Any) -> None:
        self.statuses = list(statuses)
        self.asked: list[Any] = []

    def ask(self, address: str, method: str, request: Any, timeout_s: float = 30.0) -> Any:
        if method == "GetStatus":
            return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        assert method == "Restart"
        self.asked.append(request)
        return admin_pb2.RestartResponse(workers=["prefill-1"], gateways=["gateway/0"] if request.gateways else [])


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    admin = Admin(RESTARTING, AWAY, admin_pb2.GetStatusResponse())
    monkeypatch.setattr(admin_call, "ask", admin.ask)
    return admin


def test_what_the_guide_shows_is_asked_and_waited_for_while_the_gateway_asked_is_itself_away(admin: Admin) -> None:
    assert len(SHOWN) == 3
    done = [CliRunner().invoke(app, command.split()) for command in SHOWN]
    assert [(d.exit_code, d.stderr) for d in done] == [(0, "")] * 3
    assert admin.asked == [
        admin_pb2.RestartRequest(pools=["prefill", "decode"], gateways=True),
        admin_pb2.RestartRequest(pools=["both"], surge=True),
    ]
    assert len(admin.statuses) == 1, "it waited until nothing was left"
    said = ["restarted: prefill-1, gateway/0", "to be restarted: prefill-1", "everything is as desired"]
    assert [d.stdout.strip() for d in done] == said


@pytest.mark.parametrize(
    ("status", "said"), [(RESTARTING, "prefill-1 is to be restarted"), (AWAY, "worker_lost: connection refused")]
)
def test_when_its_time_is_over_it_says_what_is_missing(admin: Admin, status: Any, said: str) -> None:
    admin.statuses = [status]
    done = CliRunner().invoke(app, ["rollout", "status", "--timeout", "0"])
    assert done.exit_code == 1
    assert f"not done after 0 s: {said}" in done.stderr
