"""Names of OpenAI's and vLLM's request fields that this gateway refuses. Pure.

A known field whose value would change the result is refused by name; with null or its default it is accepted. Fields that
carry a KV hand-over are never a client's to set. Names found in neither list nor served are ignored, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.gateway.fields import shown
from protos.errors import Code, SplitpointError

FORBIDDEN = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "disaggregated_params",
        "do_remote_prefill",
        "do_remote_decode",
        "remote_engine_id",
        "remote_block_ids",
        "remote_host",
        "remote_port",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "transfer_id",
        "capability",
        "data_parallel_rank",
    }
)
"""Transfer fields and worker addresses (rule 6 of docs/architecture.md). Null is the same as absent."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # vLLM
    "cache_salt": (None,),
    "chat_template": (None,),
    "detokenize": (None, True),
    "documents": (None, []),
    "early_stopping": (None, False),
    "guided_whitespace_pattern": (None,),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "lora_name": (None, ""),
    "lora_path": (None, ""),
    "lora_request": (None,),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "priority": (None, 0),
    "prompt_embeds": (None, []),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "spaces_between_special_tokens": (None, True),
    "thinking_token_budget": (None, -1),
    "trace_decode_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "watermarking": (None, False),
}
"""Known fields that are not supported, and the values that change nothing."""


def refuse_known(body: Mapping[str, Any]) -> None:
    """Raises for the first field that a client may not set, or that is not supported with the value it has."""
    for name, value in body.items():
        if value is None:
            continue
        if name in FORBIDDEN:
            raise SplitpointError(Code.FORBIDDEN_FIELD, f"{name} may not be set by clients", param=name)
        harmless = UNSUPPORTED.get(name)
        if harmless is not None and not any(type(value) is type(h) and value == h for h in harmless):
            allowed = " or ".join(shown(h) for h in harmless)
            raise SplitpointError(
                Code.UNSUPPORTED_FIELD, f"{name} is not supported: must be absent or {allowed}, got {shown(value)}", param=name
            )
