"""Which transports a host can use for what, and the order in which `default_transport = "auto"` asks for them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STATIC_ORDER = ("ucx", "nixl", "grpc")
"""Where nothing speaks for another order. UCX through messages before NIXL's one-sided writes: a receiver of the former opens
no memory to its peers. gRPC, which works everywhere and copies most, last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one transport can use here. `missing` says why it cannot be used at all; empty when it can."""

    scheme: str
    missing: str = ""
    shared_memory: bool = False
    cma: bool = False
    tcp: bool = False
    rdma: bool = False
    """It is built for InfiniBand or RoCE *and* this host has a device."""
    cuda_ipc: bool = False

    @property
    def ways(self) -> tuple[str, ...]:
        """What it can use, in words."""
        named = (
            ("shared memory", self.shared_memory),
            ("CMA", self.cma),
            ("CUDA IPC", self.cuda_ipc),
            ("RDMA", self.rdma),
            ("TCP", self.tcp),
        )
        return tuple(name for name, able in named if able)


def openable(
    transports: Sequence[str], default_transport: str, *, ucx_rdma: bool, nixl_rdma: bool, nixl_installed: bool
) -> tuple[str, ...]:
    """What one rank opens of the configured ones: of `ucx` and `nixl` only one. NIXL brings a UCX of its own, and a process that
    has loaded both crashes when UCX closes a connection on which something is outstanding.

    `ucx_rdma`, `nixl_rdma`: built with InfiniBand or RoCE, and the host has a device.
    """
    if not {"ucx", "nixl"} <= set(transports):
        return tuple(transports)
    wanted = default_transport == "nixl" or (default_transport != "ucx" and nixl_rdma and not ucx_rdma)
    left_out = "ucx" if wanted and nixl_installed else "nixl"
    return tuple(scheme for scheme in transports if scheme != left_out)


def auto_order(reaches: Sequence[Reach]) -> tuple[str, ...]:
    """Usable schemes, the one to ask for first at the front.

    What reaches an RDMA device goes before what does not, because that decides between hosts; otherwise `STATIC_ORDER`.
    """
    usable = [reach for reach in reaches if not reach.missing]
    return tuple(reach.scheme for reach in sorted(usable, key=lambda reach: (not reach.rdma, _static(reach.scheme))))


def agreed_order(advertised: Sequence[Sequence[str]], fallback: Sequence[str]) -> tuple[str, ...]:
    """The order of a fleet whose workers each advertise theirs: the one that all of them say, else `fallback`.

    What `fallback` has and nobody advertises comes last.
    """
    first = next(iter(advertised), ())
    if first and all(tuple(order) == tuple(first) for order in advertised):
        return (*first, *(scheme for scheme in fallback if scheme not in first))
    return tuple(fallback)


def _static(scheme: str) -> int:
    return STATIC_ORDER.index(scheme) if scheme in STATIC_ORDER else len(STATIC_ORDER)
