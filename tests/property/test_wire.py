"""Our encoding of `FetchResponse` and the generated one are the same protobuf, both ways."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.wire import Piece, parse_fetch, serialize_fetch
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

headers = st.none() | st.builds(
    pb.ChunkHeader,
    index=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    last=st.booleans(),
    seal=st.none() | st.builds(pb.Seal, token_hash=st.binary(max_size=40)),
)
payloads = st.binary(max_size=300) | st.integers(0, 70_000).map(lambda size: b"\x12" * size)


@given(headers, payloads)
def test_the_generated_parser_reads_a_piece(header: pb.ChunkHeader | None, payload: bytes) -> None:
    data = serialize_fetch(Piece(header, np.frombuffer(payload, np.uint8)))
    assert pb.FetchResponse.FromString(data) == pb.FetchResponse(header=header, payload=payload)


@given(headers, payloads)
def test_a_piece_reads_the_generated_encoding(header: pb.ChunkHeader | None, payload: bytes) -> None:
    piece = parse_fetch(pb.FetchResponse(header=header, payload=payload).SerializeToString())
    assert piece.HasField("header") == (header is not None)
    assert piece.header == (header or pb.ChunkHeader())
    assert bytes(piece.payload) == payload


@given(headers, payloads)
def test_a_later_versions_fields_are_skipped(header: pb.ChunkHeader | None, payload: bytes) -> None:
    message = pb.FetchResponse(header=header, payload=payload).SerializeToString()
    unknown = b"\x1a\x03abc"  # field 3, three bytes
    for data in (unknown + message, message + unknown):
        piece = parse_fetch(data)
        assert piece.header == (header or pb.ChunkHeader())
        assert bytes(piece.payload) == payload


@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_the_generated_parser_reads_them(data: bytes) -> None:
    try:
        expected = pb.FetchResponse.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            parse_fetch(data)
        return
    piece = parse_fetch(data)
    assert piece.header == expected.header
    assert bytes(piece.payload) == expected.payload
