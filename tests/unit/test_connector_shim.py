"""What the connector accepts of vLLM's releases and of its models' caches, with stand-ins."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.connector import shim


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1", "0.32.0", "0.32.1rc1"])
def test_releases_of_the_range_pass_in_silence(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        shim.check_version(version)
    assert caplog.records == []


@pytest.mark.parametrize("version", ["0.25.9", "0.9.2"])
def test_older_releases_are_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=r"older than 0\.26"):
        shim.check_version(version)


@pytest.mark.parametrize("version", ["0.33.0", "1.0.0"])
def test_newer_releases_are_a_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        shim.check_version(version)
    assert version in caplog.text


def test_a_release_without_the_flag_always_loads_first() -> None:
    assert shim.loads_precede_forward(SimpleNamespace())
    assert shim.loads_precede_forward(SimpleNamespace(has_sync_kv_loads=True))
    assert not shim.loads_precede_forward(SimpleNamespace(has_sync_kv_loads=False))


class FullAttentionSpec(SimpleNamespace): ...


class SlidingWindowSpec(SimpleNamespace): ...


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_one_group_of_full_attention_is_accepted() -> None:
    spec = FullAttentionSpec(block_size=16, sliding_window=None)
    assert shim.require_single_full_attention_group(caches(spec)) is spec


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ((FullAttentionSpec(), SlidingWindowSpec()), "SlidingWindowSpec"),
        ((SlidingWindowSpec(),), "SlidingWindowSpec"),
        ((), r"\[\]"),
        ((FullAttentionSpec(sliding_window=4096),), "sliding_window"),
        ((FullAttentionSpec(attention_chunk_size=8192),), "attention_chunk_size"),
    ],
)
def test_other_caches_are_refused_by_name(specs: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        shim.require_single_full_attention_group(caches(*specs))


def test_the_layouts_name_tells_orders_apart() -> None:
    class Layer:
        device = SimpleNamespace(type="cuda")

        def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
            self.shape, self._strides = shape, strides

        def dim(self) -> int:
            return len(self.shape)

        def stride(self, dim: int) -> int:
            return self._strides[dim]

    config = SimpleNamespace(attention_config=SimpleNamespace(backend=SimpleNamespace(name="FLASH_ATTN")))
    cache = SimpleNamespace(kv_cache_layout="LBNHC")
    tokens_outside = Layer((9, 8, 16, 256), (32768, 256, 2048, 1))
    heads_outside = Layer((9, 8, 16, 256), (32768, 4096, 256, 1))
    assert shim.cache_layout(config, cache, None, tokens_outside) == "FLASH_ATTN:LBNHC:8x16x256:0213"
    assert shim.cache_layout(config, cache, None, heads_outside) == "FLASH_ATTN:LBNHC:8x16x256:0123"
