"""`FetchResponse` on the wire without the copies that generated code makes of a payload: one copy out of the slot, one into it.

The bytes are plain protobuf: any build of the generated classes reads what `Piece` writes, and the other way round.
"""

from __future__ import annotations

from typing import Any

from protos.splitpoint.v1 import kv_transfer_pb2 as pb

SERVICE = "splitpoint.v1.KvTransferService"
FETCH_METHOD = f"/{SERVICE}/Fetch"

_HEADER_TAG = b"\x0a"  # field 1, length-delimited
_PAYLOAD_TAG = b"\x12"  # field 2, length-delimited


class Piece:
    """Stands for a `FetchResponse` whose payload is a view of memory. The view is read when the piece is serialised."""

    __slots__ = ("_header", "payload")

    def __init__(self, header: pb.ChunkHeader | None, payload: Any) -> None:
        self._header = header
        self.payload = payload

    @property
    def header(self) -> pb.ChunkHeader:
        """As a message field: an empty one when there is none."""
        return pb.ChunkHeader() if self._header is None else self._header

    def HasField(self, name: str) -> bool:  # noqa: N802 - protobuf's name
        return name == "header" and self._header is not None

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        parts: list[Any] = []
        if self._header is not None:
            header = self._header.SerializeToString()
            parts += (_HEADER_TAG, _varint(len(header)), header)
        if len(self.payload):
            parts += (_PAYLOAD_TAG, _varint(len(self.payload)), self.payload)
        return b"".join(parts)


def serialize_fetch(message: Any) -> bytes:
    """gRPC's serializer of `Fetch`: a `Piece` or a `FetchResponse`."""
    data: bytes = message.SerializeToString()
    return data


def parse_fetch(data: bytes) -> Any:
    """gRPC's deserializer of `Fetch`: a `Piece` that views `data`.

    A message in another field order, or with fields of a later version, takes the generated parser; so does a malformed one,
    which raises `google.protobuf.message.DecodeError` there.
    """
    header: pb.ChunkHeader | None = None
    payload: Any = b""
    place = 0
    if data[place : place + 1] == _HEADER_TAG:
        start, place = _field(data, place + 1)
        if place <= len(data):
            header = pb.ChunkHeader.FromString(data[start:place])
    if data[place : place + 1] == _PAYLOAD_TAG:
        start, place = _field(data, place + 1)
        payload = memoryview(data)[start:place]
    if place != len(data):
        message = pb.FetchResponse.FromString(data)
        return Piece(message.header if message.HasField("header") else None, message.payload)
    return Piece(header, payload)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(data: bytes, place: int) -> tuple[int, int]:
    """Start and end of the length-delimited field whose length stands at `place`. An end beyond `data` says that it is not
    whole or its length is written in more bytes than any of ours."""
    length = 0
    for shift in range(0, 35, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return place, place + length
    return place, len(data) + 1
