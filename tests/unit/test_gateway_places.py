"""Gateways on several nodes: where each goes, what is found of its addresses, and what becomes of one whose node is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from coordinator.config import ConfigError, load
from coordinator.pools import ray_gateways
from coordinator.pools.placement import Node, choose_gateway
from coordinator.pools.ray_gateways import Gateways
from coordinator.pools.reports import CoordinatorSpec, GatewayReport
from coordinator.pools.store import Store

SPREAD = ["coordinator.ray_address=auto", "coordinator.placement.gateways=spread", "coordinator.gateways=2"]
AUTO = [f"gateway.{name}_host=auto" for name in ("http", "grpc", "admin")]


def node(name: str) -> Node:
    return Node(node_id=name, address=f"10.0.0.{ord(name[0]) % 10}")


class TestChoice:
    def test_the_head_first_then_one_node_after_the_other(self) -> None:
        nodes, taken = [node("b"), node("head"), node("c")], []
        for _ in range(5):
            chosen = choose_gateway(nodes, taken, silent=(), here="head")
            assert chosen is not None
            taken.append(chosen.node_id)
        assert taken == ["head", "b", "c", "head", "b"]

    def test_a_silent_node_gets_none(self) -> None:
        chosen = choose_gateway([node("head"), node("b")], ["head"], silent={"b"}, here="head")
        assert chosen is not None
        assert chosen.node_id == "head"
        assert choose_gateway([], [], silent=(), here="head") is None


class TestSettings:
    def test_spread_needs_hosts_that_every_node_has(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load(sets=[*SPREAD, "gateway.http_host=10.0.0.1", "gateway.grpc_host=0.0.0.0"], environment={})
        text = str(caught.value)
        assert "gateway.http_host is 10.0.0.1" in text
        assert "gateway.admin_host is 127.0.0.1" in text, "a loopback address leads others to themselves"
        assert "gateway.grpc_host is" not in text
        assert "admin_http" not in text, "there is no such port"
        assert load(sets=[*SPREAD, *AUTO], environment={}).coordinator.placement.gateways == "spread"

    def test_an_embedded_ray_has_one_node(self) -> None:
        with pytest.raises(ConfigError, match="embedded"):
            load(sets=[*SPREAD, *AUTO, "coordinator.ray_address=embedded"], environment={})


class Cluster:
    """Two nodes and the gateways on them; `silent` ones answer nothing, not even that they are there."""

    def __init__(self) -> None:
        self.nodes = {"head", "other"}
        self.silent: set[str] = set()
        self.silence: Exception = TimeoutError()
        self.doors: dict[str, OSError] = {}
        self.actors: dict[str, str] = {}
        self.pid = 0
        self.ended: list[tuple[str, bool]] = []

    def living_nodes(self) -> list[Node]:
        return [node(name) for name in sorted(self.nodes)]

    def create(self, key: str, index: int, settings: object, log_dir: Path, where: Any) -> Any:
        if key not in self.actors:
            self.actors[key] = where()
            self.pid += 1
        return Handle(self, key, self.actors[key], self.pid)

    def end(self, key: str, *, again: bool) -> None:
        self.ended.append((key, again))
        if not again:
            del self.actors[key]

    async def dial(self, address: str, timeout_s: float) -> OSError | None:
        home = address.rpartition(":")[0]
        return TimeoutError() if home in self.silent else None

    async def dial_all(self, addresses: Any) -> dict[str, str]:
        return {a: str(self.doors[a]) for a in addresses if a in self.doors}


class Handle:
    def __init__(self, cluster: Cluster, key: str, home: str, pid: int) -> None:
        self._cluster, self._key, self._home, self._pid = cluster, key, home, pid
        self.report = self

    def remote(self) -> Any:
        return self._answer()

    async def _answer(self) -> GatewayReport:
        if self._home not in self._cluster.nodes:
            self._cluster.actors.pop(self._key, None)
            raise ActorDiedError
        if self._home in self._cluster.silent:
            raise self._cluster.silence
        return GatewayReport(
            gateway_id=self._key, http_address=f"{self._home}:80", grpc_address=f"{self._home}:81",
            admin_address=f"{self._home}:82", in_flight=0, pid=self._pid, tasks=0, open_files=0, membership_age_s=0.0, ready=True,
            node_id=self._home,
        )  # fmt: skip


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    for name, fake in {
        "create_gateway": made.create,
        "end_gateway": made.end,
        "living_nodes": made.living_nodes,
        "dial": made.dial,
        "dial_all": made.dial_all,
    }.items():
        monkeypatch.setattr(ray_gateways, name, fake)
    return made


@pytest.fixture
def gateways(tmp_path: Path, cluster: Cluster) -> Iterator[Gateways]:
    settings = load(sets=[*SPREAD, *AUTO, f"coordinator.state_dir={tmp_path}"], environment={})
    store = Store(tmp_path / "state.sqlite3")
    store.begin_run("run", settings.pools)
    spec = CoordinatorSpec(run_id="run", settings=settings, num_gpus=0, manifest=None)  # type: ignore[arg-type]
    yield Gateways(spec, store, pause_s=0.0, here="head")
    store.close()


async def looked(gateways: Gateways, times: int = 1) -> dict[str, str]:
    """Where each gateway that answers is, after so many rounds."""
    for _ in range(times):
        gateways.keep()
        await asyncio.gather(*gateways._asking.values())
    return {key: report.node_id for key, report in sorted(gateways.reports.items())}


def homes(cluster: Cluster) -> list[str]:
    return sorted(cluster.actors.values())


async def test_they_are_spread_and_stay_where_they_are(cluster: Cluster, gateways: Gateways) -> None:
    first = await looked(gateways)
    assert sorted(first.values()) == ["head", "other"]
    assert await looked(gateways, 3) == first


async def test_they_are_told_of_in_their_order_whichever_answers_first(cluster: Cluster, gateways: Gateways) -> None:
    cluster.actors.update({"gateway/0": "head", "gateway/1": "other"})
    cluster.silent.add("head")
    await looked(gateways)
    assert list(gateways.reports) == ["gateway/1"]
    cluster.silent.clear()
    await looked(gateways)
    assert list(gateways.reports) == ["gateway/0", "gateway/1"], "the first is the one beside the coordinator"


async def test_one_that_outlived_the_coordinator_is_taken_where_it_is(cluster: Cluster, gateways: Gateways) -> None:
    cluster.actors["gateway/0"] = "other"
    await looked(gateways)
    again = await looked(gateways)
    assert again["gateway/0"] == "other"


async def test_with_its_node_a_gateway_dies_and_is_made_on_another_one(cluster: Cluster, gateways: Gateways) -> None:
    await looked(gateways)
    cluster.nodes.remove("other")
    assert set((await looked(gateways, 2)).values()) == {"head"}
    assert homes(cluster) == ["head", "head"]
    cluster.nodes.add("other")
    assert set((await looked(gateways, 2)).values()) == {"head"}, "clients know it there"


@pytest.mark.parametrize("silence", [TimeoutError(), ActorUnavailableError("away", bytes(16))])
async def test_one_whose_host_is_silent_is_given_up_after_the_grace_time_alone(
    cluster: Cluster, gateways: Gateways, monkeypatch: pytest.MonkeyPatch, silence: Exception
) -> None:
    cluster.silence = silence
    await looked(gateways)
    now_s = time.monotonic()
    monkeypatch.setattr(ray_gateways.time, "monotonic", lambda: now_s)
    cluster.silent.add("other")
    assert list((await looked(gateways, 3)).values()) == ["head"]
    assert not cluster.ended
    now_s += gateways._spec.settings.coordinator.partition_grace_s + 1
    assert set((await looked(gateways, 2)).values()) == {"head"}
    assert [again for _, again in cluster.ended] == [False]
    assert homes(cluster) == ["head", "head"], "not to the silent node, which Ray may still hold for well"


async def test_one_that_is_slow_on_a_host_that_answers_is_left_to_ray(
    cluster: Cluster, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    await looked(gateways)
    now_s = time.monotonic()
    monkeypatch.setattr(ray_gateways.time, "monotonic", lambda: now_s)

    async def refused(address: str, timeout_s: float) -> OSError:
        return ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(ray_gateways, "dial", refused)
    cluster.silent.add("other")
    await looked(gateways)
    now_s += 1000
    await looked(gateways, 2)
    assert not cluster.ended


async def test_an_address_that_leads_nowhere_is_said_until_it_leads_somewhere(cluster: Cluster, gateways: Gateways) -> None:
    cluster.doors["other:81"] = OSError("no route")
    await looked(gateways)
    (fault,) = [report.detail for report in gateways.reports.values() if report.node_id == "other"]
    assert "other:81" in fault
    assert "no route" in fault
    cluster.doors.clear()
    await looked(gateways)
    assert not any(report.detail for report in gateways.reports.values())
