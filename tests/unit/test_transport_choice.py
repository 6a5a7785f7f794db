"""The order in which transports are asked for."""

from __future__ import annotations

import pytest

from kvtransfer.config import KvTransferSettings
from kvtransfer.transport_choice import Reach, agreed_order, auto_order, openable

UCX = Reach(scheme="ucx", tcp=True, shared_memory=True)
UCX_RDMA = Reach(scheme="ucx", tcp=True, rdma=True)
NIXL = Reach(scheme="nixl", tcp=True)
NIXL_RDMA = Reach(scheme="nixl", tcp=True, rdma=True)
GRPC = Reach(scheme="grpc", tcp=True)


@pytest.mark.parametrize(
    ("reaches", "order"),
    [
        ((GRPC, UCX), ("ucx", "grpc")),
        ((GRPC, NIXL, UCX), ("ucx", "nixl", "grpc")),
        ((UCX, GRPC, NIXL_RDMA), ("nixl", "ucx", "grpc")),
        ((UCX_RDMA, GRPC, NIXL_RDMA), ("ucx", "nixl", "grpc")),
        ((UCX_RDMA, NIXL, GRPC), ("ucx", "nixl", "grpc")),
        ((Reach(scheme="ucx", missing="no ucxx", rdma=True), NIXL, GRPC), ("nixl", "grpc")),
        ((Reach(scheme="inproc"), GRPC), ("grpc", "inproc")),
        ((), ()),
    ],
)
def test_what_reaches_rdma_goes_first(reaches: tuple[Reach, ...], order: tuple[str, ...]) -> None:
    assert auto_order(reaches) == order
    assert auto_order(tuple(reversed(reaches))) == order


@pytest.mark.parametrize(
    ("transports", "default", "facts", "opened"),
    [
        (("ucx", "grpc"), "auto", "", ("ucx", "grpc")),
        (("nixl", "grpc"), "auto", "", ("nixl", "grpc")),
        (("ucx", "nixl", "grpc"), "auto", "i", ("ucx", "grpc")),
        (("ucx", "nixl", "grpc"), "auto", "in", ("nixl", "grpc")),
        (("ucx", "nixl", "grpc"), "auto", "inu", ("ucx", "grpc")),
        (("ucx", "nixl", "grpc"), "grpc", "in", ("nixl", "grpc")),
        (("ucx", "nixl", "grpc"), "ucx", "in", ("ucx", "grpc")),
        (("ucx", "nixl", "grpc"), "nixl", "i", ("nixl", "grpc")),
        (("ucx", "nixl", "grpc"), "nixl", "", ("ucx", "grpc")),
    ],
)
def test_of_ucx_and_nixl_one_is_opened(transports: tuple[str, ...], default: str, facts: str, opened: tuple[str, ...]) -> None:
    """`facts`: i, NIXL is installed; n, it reaches RDMA; u, UCX does."""
    found = openable(transports, default, ucx_rdma="u" in facts, nixl_rdma="n" in facts, nixl_installed="i" in facts)
    assert found == opened


@pytest.mark.parametrize(
    ("advertised", "order"),
    [
        ((), ("ucx", "grpc")),
        ((("grpc", "ucx"),), ("grpc", "ucx")),
        ((("nixl", "ucx", "grpc"), ("nixl", "ucx", "grpc")), ("nixl", "ucx", "grpc")),
        ((("grpc",), ("grpc",)), ("grpc", "ucx")),
        ((("nixl", "grpc"), ("grpc", "nixl")), ("ucx", "grpc")),
        (((), ("grpc",)), ("ucx", "grpc")),
    ],
)
def test_a_fleet_has_the_order_that_all_its_workers_say(advertised: tuple[tuple[str, ...], ...], order: tuple[str, ...]) -> None:
    assert agreed_order(advertised, ("ucx", "grpc")) == order


@pytest.mark.parametrize(
    ("transports", "default", "order"),
    [
        (("ucx", "grpc"), "auto", ("ucx", "grpc")),
        (("grpc", "nixl", "ucx"), "auto", ("ucx", "nixl", "grpc")),
        (("grpc", "nixl", "ucx"), "nixl", ("nixl", "ucx", "grpc")),
        (("ucx", "grpc"), "nixl", ("ucx", "grpc")),
    ],
)
def test_configured_order(transports: tuple[str, ...], default: str, order: tuple[str, ...]) -> None:
    assert KvTransferSettings(transports=transports, default_transport=default).transport_order == order


def test_ways_are_named() -> None:
    assert UCX.ways == ("shared memory", "TCP")
    assert Reach(scheme="grpc", missing="no").ways == ()
