"""Workers and placement groups that outlive who made them: a Ray that is a table, so that no cluster is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from protos.ids import WorkerId

pytestmark = pytest.mark.timeout(60)


@dataclass
class Table:
    """What of Ray is asked: named actors and placement groups by name."""

    actors: dict[str, object] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)

    def get_actor(self, name: str, namespace: str) -> object:
        if name not in self.actors:
            raise ValueError(name)
        return SimpleNamespace(name=name)

    def kill(self, handle: Any, no_restart: bool) -> None:
        assert no_restart
        del self.actors[handle.name]

    def list_named_actors(self) -> list[str]:
        return list(self.actors)

    def placement_group_table(self) -> dict[str, dict[str, str]]:
        return {f"id-{name}": {"name": name, "state": state} for name, state in self.groups.items()}

    def get_placement_group(self, name: str) -> str:
        if name not in self.groups:
            raise ValueError(name)
        return name

    def remove_placement_group(self, name: str) -> None:
        self.groups[name] = "REMOVED"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    fleet = pytest.importorskip("coordinator.pools.ray_fleet")
    table = Table()
    monkeypatch.setattr(fleet, "ray", SimpleNamespace(get_actor=table.get_actor, kill=table.kill, util=table))
    return table


def test_the_place_of_a_worker_that_died_unseen_is_freed(table: Table) -> None:
    """It died while no coordinator ran: no actor is left to find it by, but its bundles hold an accelerator."""
    from coordinator.pools.ray_fleet import free_places_but

    table.actors = {"worker/decode-1": object(), "coordinator": object()}
    table.groups = {"worker/decode-1": "CREATED", "worker/decode-2": "CREATED", "another": "CREATED", "worker/old-1": "REMOVED"}
    assert free_places_but({WorkerId("decode-1")}) == ["worker/decode-2"]
    assert table.groups == {
        "worker/decode-1": "CREATED",
        "worker/decode-2": "REMOVED",
        "another": "CREATED",
        "worker/old-1": "REMOVED",
    }
    assert set(table.actors) == {"worker/decode-1", "coordinator"}


def test_a_launcher_leaves_no_worker_on_a_cluster_that_it_only_joined(table: Table) -> None:
    from coordinator.pools.ray_fleet import end_workers

    table.actors = {"worker/prefill-1": object(), "worker/decode-1": object(), "somebody's": object()}
    table.groups = {"worker/prefill-1": "CREATED", "worker/decode-1": "CREATED", "worker/decode-0": "CREATED"}
    assert end_workers() == ["prefill-1", "decode-1"]
    assert set(table.actors) == {"somebody's"}
    assert set(table.groups.values()) == {"REMOVED"}
    assert end_workers() == []
