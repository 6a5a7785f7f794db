"""CRC32C of staged bytes, on the host or where they lie. Bound to a thread by its caller: never to the engine's.

Staging on the host has one CRC32C per message ("crc32c"); a device computes it piece by piece ("crc32c-8k", see
kvtransfer/pieces.py). Either side can check either kind.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Literal

import awscrt.checksums

from kvtransfer import pieces
from kvtransfer.memory import as_host, on_device
from kvtransfer.transports.base import Memory
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

Algorithm = Literal["crc32c", "off"]


def crc32c(memory: Memory, before: int = 0) -> int:
    """CRC32C of all of `memory`, or of it after bytes whose CRC32C is `before`. Other threads run meanwhile."""
    value: int = awscrt.checksums.crc32c(as_host(memory), before)
    return value


def algorithm_for(setting: Algorithm, memory: Memory) -> str:
    """What a sender computes over its staging under this setting."""
    if setting == "off" or not on_device(memory):
        return setting
    return pieces.ALGORITHM


def checksum(algorithm: str, memory: Memory) -> pb.Checksum:
    """The checksum a chunk header carries; "off" has value 0.

    Raises:
        ValueError: no such algorithm.
    """
    if algorithm == "off":
        value = 0
    elif algorithm == "crc32c":
        value = crc32c(memory)
    elif algorithm == pieces.ALGORITHM:
        value = _device().checksum(memory) if on_device(memory) else pieces.checksum(memory)
    else:
        raise ValueError(f"no checksum algorithm {algorithm!r}")
    return pb.Checksum(algorithm=algorithm, value=value)


def gathered(
    parts: Sequence[tuple[int, int, Any]], first_block: int, end_block: int, memory: Memory, algorithm: str
) -> pb.Checksum | None:
    """The checksum of these blocks, staged as `memory`, out of what their gathers computed (as in `pieces.covering`): on a device
    of each piece, on the host of each block. None where that is not all there, or `algorithm` is "off"."""
    if algorithm == "off":
        return None
    block_bytes = len(memory) // (end_block - first_block)
    each = pieces.PIECE_BYTES if algorithm == pieces.ALGORITHM else block_bytes
    crcs = pieces.covering(parts, first_block, end_block, block_bytes, each)
    if crcs is None:
        return None
    if algorithm == pieces.ALGORITHM:
        return pb.Checksum(algorithm=algorithm, value=pieces.combine(crcs))
    value = 0
    for crc in crcs:
        value = awscrt.checksums.combine_crc32c(value, int(crc), block_bytes)
    return pb.Checksum(algorithm=algorithm, value=value)


def start_on_device(algorithm: str, memory: Memory) -> Any:
    """The checksum begun where the bytes lie (kvtransfer/cuda_checksum.py, `Pending`), or None where the host computes it."""
    return _device().start(memory) if algorithm == pieces.ALGORITHM and on_device(memory) else None


def prepare_on_device(algorithm: str, memory: Memory) -> Any:
    """As `start_on_device`, begun by the `start` of what this returns."""
    return _device().Prepared(memory) if algorithm == pieces.ALGORITHM and on_device(memory) else None


def rehearse_on_device(memory: Memory) -> None:
    """Compute a checksum of next to nothing where `memory` lies, for a thread that waits anyhow: what it does next after a long
    sleep takes it three times as long the first time. Nothing on the host."""
    if on_device(memory):
        _device().rehearse(memory.device)


@functools.cache
def _device() -> Any:
    # Triton and torch come only with an engine that has a GPU.
    return importlib.import_module("kvtransfer.cuda_checksum")
