"""What each transport can use on this host, from the facts of the doctor's probes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.transport_choice import Reach, auto_order, openable

RDMA_COMPONENTS = ("ib", "rc", "ud", "dc", "rdmacm", "gga", "mlx5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nixl:
    """What `kvtransfer.transports.nixl_probe` reported; `error` when it could not. `missing`: it is not installed."""

    version: str = ""
    verbs: bool = False
    cuda: bool = False
    error: str = "not asked"
    missing: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ucx:
    """What `kvtransfer.transports.ucx_probe` reported; `error` when it could not."""

    version: str = ""
    components: tuple[str, ...] = ()
    same_host_small: str = ""
    same_host_large: str = ""
    same_host_gigabytes_per_s: float = 0.0
    direct_copy_large: str = ""
    across_hosts_large: str = ""
    error: str = ""

    @property
    def rdma(self) -> bool:
        """Built with InfiniBand or RoCE, whether or not there is a device."""
        return any(name.startswith(RDMA_COMPONENTS) for name in self.components)


def reaches(ucx: Ucx, nixl: Nixl, *, rdma_devices: Sequence[str], gpus: Sequence[str]) -> list[Reach]:
    """Of `ucx`, `nixl` and `grpc`."""
    cma = ucx.direct_copy_large.startswith("cma")
    return [
        Reach(
            scheme="ucx",
            missing=ucx.error,
            shared_memory=bool(ucx.same_host_large) and not ucx.same_host_large.startswith("tcp"),
            cma=cma,
            tcp=ucx.across_hosts_large.startswith("tcp") or "tcp" in ucx.components,
            rdma=ucx.rdma and bool(rdma_devices),
            cuda_ipc="cuda_ipc" in ucx.components and bool(gpus),
        ),
        Reach(
            scheme="nixl",
            missing=nixl.error,
            shared_memory=True,
            cma=cma,
            tcp=True,
            rdma=nixl.verbs and bool(rdma_devices),
            cuda_ipc=nixl.cuda and bool(gpus),
        ),
        Reach(scheme="grpc", tcp=True),
    ]


def order(found: Sequence[Reach], transports: Sequence[str], default_transport: str) -> tuple[str, ...]:
    """The configured and usable ones as a gateway asks for them."""
    by_scheme = {reach.scheme: reach for reach in found}
    opened = openable(
        transports,
        default_transport,
        ucx_rdma=by_scheme["ucx"].rdma,
        nixl_rdma=by_scheme["nixl"].rdma,
        nixl_installed=not by_scheme["nixl"].missing,
    )
    usable = auto_order([reach for reach in found if reach.scheme in opened])
    return usable if default_transport == "auto" else tuple(sorted(usable, key=lambda scheme: scheme != default_transport))
