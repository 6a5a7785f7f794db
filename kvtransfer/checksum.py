"""CRC32C of staged bytes. Bound to a thread by its caller: never to the engine's."""

from __future__ import annotations

from typing import Literal

import google_crc32c

from kvtransfer.memory import as_host
from kvtransfer.transports.base import Memory
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

Algorithm = Literal["crc32c", "off"]

_PIECE_BYTES = 1024 * 1024
"""The extension holds the interpreter lock while it computes: in pieces, other threads wait 0.15 ms, not the whole slot."""


def crc32c(memory: Memory) -> int:
    """CRC32C of all of `memory`."""
    array = as_host(memory)
    value = 0
    for start in range(0, len(array), _PIECE_BYTES):
        value = google_crc32c.extend(value, array[start : start + _PIECE_BYTES])
    return value


def checksum(algorithm: Algorithm, memory: Memory) -> pb.Checksum:
    """The checksum a chunk header carries; "off" has value 0."""
    return pb.Checksum(algorithm=algorithm, value=crc32c(memory) if algorithm == "crc32c" else 0)
