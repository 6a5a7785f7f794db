"""Addresses that lead nowhere are told with worker, address and interface, by who cannot reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from coordinator.pools import reach
from coordinator.pools.reach import HERE, Reach, interfaces, loopback_settings
from coordinator.pools.reports import Beat
from coordinator.routing.views import RankView, Role
from protos.ids import WorkerId
from tests.support.views import worker_view


def beat(name: str, node: str, address: str) -> Beat:
    rank = RankView(rank=0, address=f"{address}:2", host_id=node, ucx_worker_address=b"")
    view = replace(worker_view(WorkerId(name), Role.DECODE), address=f"{address}:1", ranks=(rank,))
    return Beat(
        view=view, slot=0, node_id=node, processes=(), refusing=False, uptime_s=1.0,
        interfaces={f"{address}:1": "eth0", f"{address}:2": "eth0"},
    )  # fmt: skip


P, D = beat("prefill-1", "a", "10.0.0.1"), beat("decode-1", "b", "10.0.0.2")


class Network:
    """Which addresses lead nowhere; who dialled what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead: set[str] = set()
        self.away: set[str] = set()
        self.dialled: list[tuple[str, str]] = []
        monkeypatch.setattr(reach, "dial_all", lambda addresses: self.ask(WorkerId("here"), addresses))

    async def ask(self, worker_id: WorkerId, addresses: Sequence[str]) -> Mapping[str, str]:
        if worker_id in self.away:
            raise ConnectionError("away")
        self.dialled += [(worker_id, address) for address in addresses]
        return {address: "no route to host" for address in addresses if address in self.dead}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


async def settle(checker: Reach, beats: Sequence[Beat]) -> None:
    checker.keep(beats)
    async with asyncio.timeout(5):
        while checker._tasks:
            await asyncio.gather(*checker._tasks.values())


async def test_each_address_is_dialled_from_where_it_is_needed_and_once(network: Network) -> None:
    checker = Reach(network.ask, "a", pause_s=0.001)
    await settle(checker, [P, D])
    wanted = {("here", "10.0.0.2:1"), ("prefill-1", "10.0.0.2:2"), ("decode-1", "10.0.0.1:2")}
    assert set(network.dialled) == wanted
    count = len(network.dialled)
    await settle(checker, [P, D])
    assert len(network.dialled) == count
    assert checker.faults == {}


async def test_workers_of_one_node_are_not_dialled(network: Network) -> None:
    await settle(Reach(network.ask, "a", pause_s=0.001), [P, replace(D, node_id="a")])
    assert network.dialled == []


async def test_a_fault_names_worker_address_and_interface_and_lasts_after_some_looks(network: Network) -> None:
    network.dead = {"10.0.0.2:2"}
    checker = Reach(network.ask, "a", pause_s=0.001)
    await settle(checker, [P, D])
    (fault,) = checker.faults.values()
    for part in ("decode-1", "10.0.0.2:2", "eth0", "prefill-1", "no route to host"):
        assert part in fault
    assert list(checker.faults) == ["decode-1"]
    for _ in range(reach.LASTING):
        await settle(checker, [P, D])
    assert checker.lasting() == [fault]
    network.dead = set()
    await settle(checker, [P, D])
    assert checker.faults == {}
    assert checker.lasting() == []


async def test_the_gateways_node_cannot_reach_a_worker(network: Network) -> None:
    network.dead = {"10.0.0.2:1"}
    checker = Reach(network.ask, "a", pause_s=0.001)
    await settle(checker, [P, D])
    assert HERE in checker.faults[WorkerId("decode-1")]


async def test_a_loopback_address_is_not_even_dialled(network: Network) -> None:
    checker = Reach(network.ask, "a", pause_s=0.001)
    await settle(checker, [P, beat("decode-1", "b", "127.0.0.1")])
    assert "loopback" in checker.faults[WorkerId("decode-1")]
    assert not [address for _, address in network.dialled if address.startswith("127.")]


async def test_a_worker_that_is_away_is_no_fault_of_the_address(network: Network) -> None:
    network.away = {"prefill-1"}
    checker = Reach(network.ask, "a", pause_s=0.001)
    await settle(checker, [P, D])
    assert checker.faults == {}
    network.away = set()
    await settle(checker, [P, D])
    assert ("prefill-1", "10.0.0.2:2") in network.dialled


async def test_faults_of_workers_that_are_gone_are_forgotten(network: Network) -> None:
    network.dead = {"10.0.0.2:2"}
    checker = Reach(network.ask, "a", pause_s=0.001)
    await settle(checker, [P, D])
    await settle(checker, [P])
    assert checker.faults == {}


def test_the_interface_of_an_address() -> None:
    assert interfaces(["127.0.0.1:80", "192.0.2.1:80"]) == {"127.0.0.1:80": "lo", "192.0.2.1:80": ""}


def test_loopback_settings_are_named() -> None:
    found = loopback_settings({"worker.advertise_host": "127.0.0.1", "kvtransfer.advertise_host": "auto"})
    assert len(found) == 1
    assert "worker.advertise_host" in found[0]
    assert '"auto"' in found[0]
