"""Settings of KV transfer, frozen."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from kvtransfer.addresses import require_reachable
from kvtransfer.tls import TlsSettings, require_encrypted
from kvtransfer.transport_choice import STATIC_ORDER

MIB = 1024 * 1024


class KvTransferSettings(BaseModel):
    """One rank's staging and transports. Send and receive pools are separate: one pool could deadlock two workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transports: tuple[Literal["ucx", "nixl", "grpc"], ...] = Field(
        ("ucx", "grpc"), min_length=1, description="nixl needs the extra of that name."
    )
    default_transport: Literal["auto", "ucx", "nixl", "grpc"] = Field(
        "auto",
        description="Asked for first, where it is one of `transports`. auto: by what the hosts have, see `splitpoint doctor`.",
    )
    send_staging_bytes: PositiveInt = 256 * MIB
    receive_staging_bytes: PositiveInt = 256 * MIB
    pack_staging_bytes: PositiveInt = Field(
        64 * MIB, description="Beside send staging: where a share for a rank of another shape is cut together."
    )
    staging_memory: Literal["auto", "host", "device"] = Field(
        "auto",
        description="Where staging lies. auto: on the GPU if the engine's cache is there, and then outside the engine's share.",
    )
    checksum: Literal["crc32c", "off"] = "crc32c"
    ucx_same_host: Literal["mapped", "one_copy", "contained", "direct"] = Field(
        "mapped",
        description="ucx inside one host. mapped: the receiver maps the sender's staging in host memory and scatters out of it; "
        "one_copy: Splitpoint itself reads host memory (process_vm_readv), as `mapped` does where it cannot map; contained: "
        "UCX, two copies; direct: UCX, one copy, and a peer that is killed while it is read ends this process.",
    )
    bind_host: str = "127.0.0.1"
    advertise_host: str = Field("127.0.0.1", description="The address peers dial; checked by dialling it at start.")
    handshake_timeout_s: float = Field(5.0, gt=0)
    progress_timeout_s: float = Field(10.0, gt=0, description="No byte for this long after the sender had data: the pull fails.")
    peer_heartbeat_s: float = Field(2.0, gt=0, description="Between ranks with a transfer under way.")
    peer_missed_heartbeats: PositiveInt = Field(
        3, description="Missed in a row before the transfers with that peer end; their slots stay until nothing can touch them."
    )
    lease_grace_s: float = Field(5.0, gt=0, description="Kept beyond the request's deadline, for a release that is on its way.")
    grpc_message_bytes: PositiveInt = Field(1 * MIB, description="Payload per gRPC message; 0.5 to 4 MiB measured best.")
    chunk_bytes: PositiveInt = Field(
        16 * MIB, description="Staged blocks are sent in chunks of at most this, each with a checksum."
    )
    device_chunk_bytes: PositiveInt = Field(
        256 * MIB, description="The same where staging lies on a GPU: a message costs more there, and bytes cost nearly nothing."
    )
    leaked_attachments: PositiveInt = Field(
        64,
        description="Segments of killed peers that UCX may keep attached, two each; beyond it a worker drains and is replaced.",
    )
    max_pending_fetches: PositiveInt = 1024
    fetch_wait_s: float = Field(
        30.0, gt=0, description="How long a peer's fetch waits for its reservation, whatever deadline it names."
    )
    tls: TlsSettings | None = Field(None, description="Filled from `[security]`.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_reachable(self.bind_host, self.advertise_host)
        require_encrypted(self.transports, self.tls)
        return self

    @property
    def transport_order(self) -> tuple[str, ...]:
        """What a gateway asks for when the client does not say: the default, then the others in their static order. With
        "auto" the workers may advertise a better one."""
        return tuple(sorted(self.transports, key=lambda name: (name != self.default_transport, STATIC_ORDER.index(name))))
