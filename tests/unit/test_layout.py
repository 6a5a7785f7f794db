"""The fingerprint tells apart whatever would make KV bytes mean something else, and the difference is named."""

from __future__ import annotations

import pytest

from kvtransfer.layout import PROTOCOL_VERSION, canonical, fingerprint, first_difference
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

FIELDS = [field.name for field in pb.KvCompatibility.DESCRIPTOR.fields]


def base() -> pb.KvCompatibility:
    return pb.KvCompatibility(protocol_version=PROTOCOL_VERSION, model="m", layout="plain", block_tokens=16, num_layers=2)


def changed(name: str) -> pb.KvCompatibility:
    other = base()
    setattr(other, name, getattr(other, name) + (1 if isinstance(getattr(other, name), int) else "x"))
    return other


def test_equal_values_have_equal_fingerprints() -> None:
    assert fingerprint(base()) == fingerprint(base())
    assert len(fingerprint(base())) == 32
    assert first_difference(base(), base()) == ""


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_counts_and_is_named(name: str) -> None:
    assert fingerprint(changed(name)) != fingerprint(base())
    assert first_difference(base(), changed(name)).startswith(f"{name}: ")


def test_all_fields_differ_pairwise() -> None:
    assert len({fingerprint(changed(name)) for name in FIELDS}) == len(FIELDS)


def test_the_difference_shows_both_values() -> None:
    assert first_difference(base(), changed("model")) == "model: 'm' here, 'mx' there"


def test_the_first_of_several_differences_in_field_order() -> None:
    other = changed("model")
    other.engine = "other"
    assert first_difference(base(), other).startswith("model: ")


def test_the_canonical_form_does_not_confuse_neighbours() -> None:
    left, right = pb.KvCompatibility(model="ab", model_revision="c"), pb.KvCompatibility(model="a", model_revision="bc")
    assert canonical(left) != canonical(right)


def test_the_fingerprint_is_stable_across_builds() -> None:
    # Two builds that agree on the protocol must agree on this, or their handshake refuses without a difference.
    assert fingerprint(base()).hex() == fingerprint(pb.KvCompatibility.FromString(base().SerializeToString())).hex()
    assert canonical(pb.KvCompatibility()).startswith(b'["splitpoint kv compatibility",{"axes":"","block_bytes_per_layer":0,')
