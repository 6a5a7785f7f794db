"""Identifiers. Each is its own type so that a checker refuses one where another belongs (rule 7)."""

from __future__ import annotations

import hashlib
import secrets
from typing import NewType

import numpy as np

RequestId = NewType("RequestId", str)
"""The gateway's id of one choice of a public request. A client's own `x-request-id` is carried beside it, never used as a key."""
AttemptId = NewType("AttemptId", str)
"""One try at one leg."""
TransferId = NewType("TransferId", bytes)
"""16 random bytes: one prompt's KV going from one worker to one worker."""
Capability = NewType("Capability", bytes)
"""16 random bytes: the right to fetch one transfer, once."""
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""A worker process's random id, new at every start."""


def new_request_id() -> RequestId:
    return RequestId("req-" + secrets.token_hex(12))


def new_attempt_id() -> AttemptId:
    return AttemptId("att-" + secrets.token_hex(8))


def new_transfer_id() -> TransferId:
    return TransferId(secrets.token_bytes(16))


def new_capability() -> Capability:
    return Capability(secrets.token_bytes(16))


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def token_hash(token_ids: list[int]) -> bytes:
    """SHA-256 of the ids as little-endian uint32: what a seal says it is the KV of."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).digest()
