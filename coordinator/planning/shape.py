"""What a model's KV cache and weights are made of, from numbers or from a checkpoint's `config.json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from coordinator.planning.values import TORCH_FORMATS, RefusedValueError, at_least, format_bytes

OPTION = "--model"
RECURRENT_KEYS = ("ssm_state_size", "mamba_d_state", "mamba_ssm_dtype", "linear_num_value_heads", "layers_block_type")
"""Layers with a state of fixed size beside attention: their bytes do not grow by the token."""
GATED_TYPES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"})
"""Whose parameters can be counted from the configuration: attention, a gated MLP of three matrices or experts of them, norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """One model's attention. `kind` is "heads" (MHA, GQA, MQA: a key and a value per KV head) or "latent" (MLA: one vector).

    For "latent", `kv_heads` is 1 and `head_dim` the length of the vector (latent and rotary part): nothing is left to divide
    among tensor-parallel ranks. `element_bytes` is of the cache's format.
    """

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: Fraction
    kind: str = "heads"

    def __post_init__(self) -> None:
        at_least("--layers", self.layers, 1)
        at_least("--kv-heads", self.kv_heads, 1)
        at_least("--head-dim", self.head_dim, 1)
        if self.element_bytes <= 0:
            raise RefusedValueError("--dtype-bytes", f"must be above 0, got {float(self.element_bytes):g}")

    @property
    def vectors(self) -> int:
        """Per head, layer and token: key and value, or the latent alone."""
        return 1 if self.kind == "latent" else 2

    @property
    def bytes_per_token(self) -> Fraction:
        """Of one copy of the whole model's cache."""
        return self.vectors * self.layers * self.kv_heads * self.head_dim * self.element_bytes


def kv_shape(config: Mapping[str, Any], kv_format: str | None = None) -> KvShape:
    """The cache of the model that this `config.json` describes; its format is the model's own unless `kv_format` names one.

    Raises:
        RefusedValueError: a key is missing, or the model keeps state that this arithmetic does not describe; says which.
    """
    text = config.get("text_config", config)
    for key in RECURRENT_KEYS:
        if key in text:
            raise RefusedValueError(OPTION, f"has recurrent layers ({key}): KV bytes by the token are not all its state")
    if text.get("is_encoder_decoder"):
        raise RefusedValueError(OPTION, "is an encoder-decoder: its cross-attention cache is not described here")
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        raise RefusedValueError(OPTION, "has sliding-window layers (sliding_window): their cache does not grow with every token")
    if text.get("attention_chunk_size"):
        raise RefusedValueError(OPTION, "has chunked attention (attention_chunk_size): its cache does not grow with every token")
    element_bytes = format_bytes("--kv-format", kv_format or model_format(config))
    layers = _whole(text, "num_hidden_layers")
    if text.get("kv_lora_rank"):
        length = _whole(text, "kv_lora_rank") + _whole(text, "qk_rope_head_dim")
        return KvShape(layers=layers, kv_heads=1, head_dim=length, element_bytes=element_bytes, kind="latent")
    heads = _whole(text, "num_attention_heads")
    kv_heads = _whole(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else heads
    head_dim = _head_dim(text, heads)
    return KvShape(layers=layers, kv_heads=kv_heads, head_dim=head_dim, element_bytes=element_bytes)


def model_format(config: Mapping[str, Any]) -> str:
    """The format of the weights as stored, before any quantisation. Raises `RefusedValueError` where it is not named."""
    text = config.get("text_config", config)
    named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    if named not in TORCH_FORMATS:
        raise RefusedValueError(OPTION, f"names no known dtype ({named!r}); give --kv-format and --weight-format")
    return TORCH_FORMATS[named]


def parameter_count(config: Mapping[str, Any]) -> int:
    """Parameters of a model of `GATED_TYPES`. Raises `RefusedValueError` for any other, naming its type."""
    text = config.get("text_config", config)
    kind = text.get("model_type")
    if kind not in GATED_TYPES:
        known = ", ".join(sorted(GATED_TYPES))
        raise RefusedValueError(
            OPTION, f"the parameters of a {kind!r} cannot be counted here (known: {known}); give --parameters"
        )
    hidden, heads, layers = (_whole(text, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = _whole(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else heads
    head_dim = _head_dim(text, heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    if kind in ("qwen2", "qwen2_moe") or text.get("attention_bias"):
        attention += head_dim * (heads + 2 * kv_heads) + (hidden if text.get("attention_bias") else 0)
    if kind in ("qwen3", "qwen3_moe"):
        attention += 2 * head_dim  # norms of query and key
    embeddings = hidden * _whole(text, "vocab_size") * (1 if text.get("tie_word_embeddings") else 2)
    return layers * (attention + _mlp(text, hidden) + 2 * hidden) + embeddings + hidden


def _mlp(text: Mapping[str, Any], hidden: int) -> int:
    kind = text["model_type"]
    if kind == "mixtral":
        experts = _whole(text, "num_local_experts")
        return experts * 3 * hidden * _whole(text, "intermediate_size") + experts * hidden
    if kind in ("qwen2_moe", "qwen3_moe"):
        if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
            raise RefusedValueError(OPTION, "mixes dense and expert layers; give --parameters")
        experts = _whole(text, "num_experts")
        count = experts * 3 * hidden * _whole(text, "moe_intermediate_size") + experts * hidden
        if kind == "qwen2_moe":
            count += 3 * hidden * _whole(text, "shared_expert_intermediate_size") + hidden
        return count
    return 3 * hidden * _whole(text, "intermediate_size")


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    if text.get("head_dim") is not None:
        return _whole(text, "head_dim")
    hidden = _whole(text, "hidden_size")
    if hidden % heads:
        raise RefusedValueError(
            OPTION, f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is missing"
        )
    return hidden // heads


def _whole(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RefusedValueError(OPTION, f"config.json needs {key}, a whole number from 1 up, has {value!r}")
    return value
