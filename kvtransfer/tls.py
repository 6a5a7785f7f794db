"""Mutual TLS of every gRPC connection inside the system: gateway to worker, actor to rank, rank to rank, coordinator's probes.

With settings, a server takes only clients whose certificate the CA has signed, and a client speaks only to servers that prove
the same; there is no way from here to a plaintext port. Without settings everything is plaintext.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

if TYPE_CHECKING:
    import grpc.aio

IN_TLS = frozenset({"grpc", "inproc"})
"""Transports whose payload stays inside a TLS stream, or inside a process. Others move it beside the stream, unencrypted."""


class TlsSettings(BaseModel):
    """PEM files, at the same place on every node; each node has its own certificate and key. Read when a server or a channel is
    made. A certificate serves as server's and as client's, so it needs both extended key usages where it names any."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert_file: Path = Field(description="This node's certificate, then intermediates; names its advertised address as SAN.")
    key_file: Path
    ca_file: Path = Field(description="Who signs the nodes' certificates. Nobody else's are accepted, on either side.")
    peer_name: str | None = Field(
        None, min_length=1, description="The DNS name that every node's certificate carries; None: the address that is dialled."
    )
    allow_unencrypted_kv: bool = Field(
        False, description="Accept transports that move KV outside of TLS: ucx and nixl encrypt nothing."
    )

    @field_validator("cert_file", "key_file", "ca_file")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    def check(self) -> None:
        """Read the files as TLS will.

        Raises:
            ValueError: one cannot be read or is not what it should be, or key and certificate do not belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"cert_file {self.cert_file} with key_file {self.key_file}: {error}") from error
        try:
            context.load_verify_locations(self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"ca_file {self.ca_file}: {error}") from error


def require_encrypted(transports: Iterable[str], tls: TlsSettings | None) -> None:
    """Raises `ValueError` naming the transports that would move KV in the clear although TLS was asked for."""
    if tls is None or tls.allow_unencrypted_kv:
        return
    clear = [scheme for scheme in transports if scheme not in IN_TLS]
    if clear:
        raise ValueError(
            f"{' and '.join(clear)} would move KV unencrypted beside TLS: set kvtransfer.transports to ['grpc'], "
            "or security.allow_unencrypted_kv to true where that network is trusted"
        )


def bind(server: grpc.aio.Server, address: str, tls: TlsSettings | None) -> int:
    """Open `address` (host:port) on a server that is not started; the port.

    Raises:
        RuntimeError: it cannot be bound.
        ValueError: the TLS files are not usable.
    """
    if tls is None:
        return int(server.add_insecure_port(address))
    import grpc  # settings are read by commands that dial nobody

    tls.check()
    pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], root_certificates=tls.ca_file.read_bytes(), require_client_auth=True)
    return int(server.add_secure_port(address, credentials))


def channel(address: str, tls: TlsSettings | None, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """A channel to `address`; it connects when it is used. Raises `OSError` when the TLS files cannot be read."""
    import grpc
    import grpc.aio

    if tls is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca_file.read_bytes(),
        private_key=tls.key_file.read_bytes(),
        certificate_chain=tls.cert_file.read_bytes(),
    )
    named = [*options, ("grpc.ssl_target_name_override", tls.peer_name)] if tls.peer_name else list(options)
    return grpc.aio.secure_channel(address, credentials, options=named)


def _no_password() -> str:
    """A key that needs a password is refused: without this OpenSSL would ask on the terminal."""
    raise ssl.SSLError("the key is encrypted")
