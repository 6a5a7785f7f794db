"""What must be equal on both sides for KV bytes to mean the same, as one canonical hash and one named difference.

A slot is block-major: `slot[block, layer, bytes_of_one_layer_of_one_block]`, uint8. What lies inside one layer of one block
is the engine's own business and is named by `KvCompatibility.layout`.
"""

from __future__ import annotations

import hashlib
import json

from protos.splitpoint.v1 import kv_transfer_pb2 as pb

# Version 1: two-phase handshake, block-major slots, chunk headers in order on `Fetch`, CRC32C per chunk.
PROTOCOL_VERSION = 1

_DOMAIN = "splitpoint kv compatibility"


def canonical(compatibility: pb.KvCompatibility) -> bytes:
    """Every field by name, defaults included, in one order. Protobuf's own bytes are not promised to be canonical."""
    fields = {field.name: getattr(compatibility, field.name) for field in pb.KvCompatibility.DESCRIPTOR.fields}
    return json.dumps([_DOMAIN, fields], sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def fingerprint(compatibility: pb.KvCompatibility) -> bytes:
    """SHA-256 of the canonical form: what a handshake's first phase and every seal carry."""
    return hashlib.sha256(canonical(compatibility)).digest()


def first_difference(mine: pb.KvCompatibility, theirs: pb.KvCompatibility) -> str:
    """The first field that differs, in field order, with both values; "" when all are equal."""
    for field in pb.KvCompatibility.DESCRIPTOR.fields:
        ours, other = getattr(mine, field.name), getattr(theirs, field.name)
        if ours != other:
            return f"{field.name}: {ours!r} here, {other!r} there"
    return ""
