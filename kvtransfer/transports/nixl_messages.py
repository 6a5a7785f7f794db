"""What two NIXL transports tell each other: the address of an agent, and notifications about chunks. Pure.

NIXL trusts the metadata that it is given and delivers notifications of anybody who has ours, so both are framed and checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import google_crc32c

_ADDRESS = struct.Struct("<4sHHHI")
_ADDRESS_MAGIC = b"SPX1"
_NOTICE = struct.Struct("<4sBQQQQ")
_NOTICE_MAGIC = b"SPN1"


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """How a peer reaches an agent: its name, which begins with its incarnation, and what NIXL says of it."""

    agent: str
    metadata: bytes
    version: tuple[int, int]
    """Major and minor version of NIXL, whose metadata differs between releases."""

    def encode(self) -> bytes:
        name = self.agent.encode()
        body = name + self.metadata
        return _ADDRESS.pack(_ADDRESS_MAGIC, *self.version, len(name), google_crc32c.value(body)) + body

    @classmethod
    def decode(cls, framed: bytes, *, version: tuple[int, int]) -> AgentAddress:
        """The inverse. Raises `ValueError` for what NIXL should not be given, saying why."""
        if len(framed) <= _ADDRESS.size:
            raise ValueError("the peer has no NIXL address")
        magic, major, minor, name_bytes, crc = _ADDRESS.unpack_from(framed)
        body = framed[_ADDRESS.size :]
        if magic != _ADDRESS_MAGIC or crc != google_crc32c.value(body) or name_bytes >= len(body):
            raise ValueError("the peer's NIXL address is damaged or of another format")
        if (major, minor) != version:
            raise ValueError(f"the peer has NIXL {major}.{minor}, this side {version[0]}.{version[1]}")
        return cls(body[:name_bytes].decode(errors="replace"), body[name_bytes:], version)


class NoticeKind(IntEnum):
    GRANT = 1  # receiver: this chunk may be written, to `address`, `num_bytes` of it
    REVOKE = 2  # receiver: not any more; answer NEVER when nothing is or will be written
    PROGRESS = 3  # sender: `num_bytes` of the chunk are written
    DONE = 4  # sender: all of it is
    NEVER = 5  # sender: no byte of it will be written from now on
    BROKEN = 6  # sender: a write failed half-way; what is on its way may still land for a moment


@dataclass(frozen=True, slots=True)
class Notice:
    """About chunk `chunk` of the receiver's channel `channel`."""

    kind: NoticeKind
    channel: int
    chunk: int
    address: int = 0
    num_bytes: int = 0

    def encode(self) -> bytes:
        return _NOTICE.pack(_NOTICE_MAGIC, self.kind, self.channel, self.chunk, self.address, self.num_bytes)

    @classmethod
    def decode(cls, message: bytes) -> Notice | None:
        """The inverse; None for anything that is not a notice."""
        if len(message) != _NOTICE.size:
            return None
        magic, kind, channel, chunk, address, num_bytes = _NOTICE.unpack(message)
        if magic != _NOTICE_MAGIC or kind not in NoticeKind._value2member_map_:
            return None
        return cls(NoticeKind(kind), channel, chunk, address, num_bytes)
