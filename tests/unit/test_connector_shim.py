"""What the connector accepts of vLLM's releases and of its models' caches, with stand-ins."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


class MLAAttentionSpec(SimpleNamespace): ...


def placed(rank: int, tp: int, pp: int, *, layers: range, spec: Any = None, shared: bool = False, **parallel: int) -> Any:
    """What a rank of a model of 8 layers and 4 KV heads says, on a device."""
    heads = max(1, 4 // tp)
    spec = spec or FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=8)
    shape = (10, spec.num_kv_heads, 16, 16) if spec.num_kv_heads > 1 or type(spec) is FullAttentionSpec else (10, 16, 24)
    made = [torch.zeros(shape) for _ in layers]
    caches_of = {
        f"model.layers.{i}.attn": FakeCache(made[0] if shared else tensor) for i, tensor in zip(layers, made, strict=True)
    }
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=tp, pipeline_parallel_size=pp, **parallel),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4, get_total_num_hidden_layers=lambda: 8),
    )
    return shim.cache_place(config, SimpleNamespace(num_blocks=10), spec, caches_of)


class FakeCache:
    """A tensor that says that it lies on a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.shape, self.device = tensor, tensor.shape, SimpleNamespace(type="cuda")

    def stride(self) -> tuple[int, ...]:
        return self._tensor.stride()

    def data_ptr(self) -> int:
        return self._tensor.data_ptr()


def test_a_rank_says_which_heads_and_layers_it_holds() -> None:
    alone = placed(0, 1, 1, layers=range(8))
    assert (alone.total_kv_heads, alone.first_kv_head, alone.total_layers, alone.first_layer) == (4, 0, 8, 0)
    assert (alone.axes, alone.kernel_block_tokens, alone.packing) == ("head,token", 16, "plain")
    third = placed(3, 2, 2, layers=range(5, 8))
    assert (third.first_kv_head, third.total_layers, third.first_layer) == (2, 8, 5)
    assert placed(7, 8, 1, layers=range(8)).first_kv_head == 3


def test_latent_attention_has_one_head_for_all_ranks() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24)
    place = placed(1, 2, 1, layers=range(8), spec=spec)
    assert (place.total_kv_heads, place.first_kv_head, place.axes) == (1, 0, "token")


def test_what_cannot_be_told_is_not_said() -> None:
    assert placed(0, 1, 1, layers=range(8), shared=True) is None, "layers that share a cache"
    assert placed(0, 1, 2, layers=range(0, 8, 2)) is None, "a stage whose layers do not follow each other"
    assert placed(0, 2, 1, layers=range(8), decode_context_parallel_size=2) is None, "ranks that share a head's tokens"
    odd = SimpleNamespace(block_size=32, num_kv_heads=16, head_size=8)
    assert placed(0, 1, 1, layers=range(8), spec=odd) is None, "a cache of another shape than the spec says"
