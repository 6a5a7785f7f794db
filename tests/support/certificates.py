"""Certificates of a test's own authority, made while it runs."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvtransfer.tls import TlsSettings

_numbers = itertools.count(1)


class Authority:
    """Signs certificates and writes them, with their keys, below `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        certificate = self._builder(self._name, self._key, 30).add_extension(constraint, critical=True)
        _write(self.file, certificate.sign(self._key, hashes.SHA256()))

    def tls(self, *names: str, days: int = 30, trusts: Path | None = None, peer_name: str | None = None) -> TlsSettings:
        """A node's settings whose certificate carries `names` (addresses or DNS names; 127.0.0.1 when none) and is valid from
        60 days ago until `days` from now. `trusts` is another authority's file."""
        key = ec.generate_private_key(ec.SECP256R1())
        number = next(_numbers)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"node {number}")])
        alternatives = x509.SubjectAlternativeName([_general(name) for name in names or ("127.0.0.1",)])
        certificate = self._builder(subject, key, days).add_extension(alternatives, critical=False)
        cert_file, key_file = self._folder / f"node{number}.pem", self._folder / f"node{number}.key"
        _write(cert_file, certificate.sign(self._key, hashes.SHA256()))
        key_file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return TlsSettings(cert_file=cert_file, key_file=key_file, ca_file=trusts or self.file, peer_name=peer_name)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=60))
            .not_valid_after(now + datetime.timedelta(days=days))
        )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(file: Path, certificate: x509.Certificate) -> None:
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
