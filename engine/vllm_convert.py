"""Between Splitpoint's values and vLLM's, both ways. Knows vLLM's field names and imports nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.protocol import EngineOutput, EngineRequest, KvReceive, KvSend, Logprob
from engine.sampling import Constraint
from kvtransfer.connector.parameters import ReceiveParameters, SendParameters

_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
)


def check_prompt(request: EngineRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raises `ValueError`, naming the field, for an empty prompt, one that leaves no room for a token, or an unknown token."""
    tokens = len(request.prompt_token_ids)
    if tokens == 0:
        raise ValueError("prompt_token_ids is empty")
    if tokens >= max_model_len:
        raise ValueError(f"prompt_token_ids has {tokens} tokens; with one more that exceeds max_model_len {max_model_len}")
    for extreme in (min(request.prompt_token_ids), max(request.prompt_token_ids)):
        if not 0 <= extreme < vocab_size:
            raise ValueError(f"prompt_token_ids holds {extreme}; the vocabulary has {vocab_size} tokens")


def sampling_arguments(request: EngineRequest) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`. `structured_outputs` is itself a dict of arguments.

    What the request leaves out stays out, so that vLLM's own default applies.

    Raises:
        ValueError: the request asks for what a decode engine with loaded KV cannot compute.
    """
    params = request.sampling
    if isinstance(request.kv, KvReceive) and params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs cannot be computed from loaded KV: ask the prefill engine for them")
    arguments: dict[str, Any] = {
        "n": 1,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "detokenize": False,
    }
    arguments |= {name: value for name in _OPTIONAL if (value := getattr(params, name)) is not None}
    if params.stop_token_ids:
        arguments["stop_token_ids"] = list(params.stop_token_ids)
    if params.allowed_token_ids:
        arguments["allowed_token_ids"] = list(params.allowed_token_ids)
    if params.bad_words:
        arguments["bad_words"] = list(params.bad_words)
    if params.logit_bias:
        arguments["logit_bias"] = dict(params.logit_bias)
    if params.constraint is not None:
        arguments["structured_outputs"] = _structured_outputs(params.constraint)
    match request.kv:
        case KvSend(transfer_id):
            arguments["extra_args"] = SendParameters(transfer_id).to_extra_args()
        case KvReceive(transfer_id, staged_tokens):
            arguments["extra_args"] = ReceiveParameters(transfer_id, staged_tokens).to_extra_args()
    return arguments


def _structured_outputs(constraint: Constraint) -> dict[str, Any]:
    if constraint.json_object:
        return {"json_object": True}
    if constraint.choice:
        return {"choice": list(constraint.choice)}
    for ours, theirs in (
        ("json_schema", "json"),
        ("regex", "regex"),
        ("grammar", "grammar"),
        ("structural_tag", "structural_tag"),
    ):
        value = getattr(constraint, ours)
        if value is not None:
            return {theirs: value}
    raise ValueError("constraint: none of its kinds is set")


def engine_output(output: Any, *, first: bool, called_s: float, read_s: float) -> EngineOutput:
    """One of vLLM's `RequestOutput`s, made with `RequestOutputKind.DELTA`. `first`: no output of this request came before.

    `called_s` and `read_s`: when the request was given to vLLM and when this output was read, by `time.monotonic`.
    """
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    reason = completion.finish_reason
    matched: int | None = None
    if reason == "stop":
        # vLLM names a stop token that the request gave; the model's own end of sequence it leaves unnamed.
        stop = completion.stop_reason
        matched = stop if isinstance(stop, int) else (token_ids[-1] if stop is None and token_ids else None)
    elif reason == "repetition":
        reason = "stop"
    queued_s, computing_s, decoding_s, returning_s = engine_times(output.metrics, called_s, read_s)
    return EngineOutput(
        token_ids=token_ids,
        logprobs=None if completion.logprobs is None else [_position(p) for p in completion.logprobs],
        prompt_logprobs=None if not output.prompt_logprobs else [_position(p) for p in output.prompt_logprobs],
        finish_reason=reason,
        matched_token_id=matched,
        cached_tokens=output.num_cached_tokens or 0,
        queued_s=queued_s if first else 0.0,
        computing_s=computing_s if first else 0.0,
        decoding_s=decoding_s if reason is not None else 0.0,
        returning_s=returning_s if reason is not None else 0.0,
    )


def engine_times(stamps: Any, called_s: float, read_s: float) -> tuple[float, float, float, float]:
    """Queued, computing, decoding and returning, seconds, from the engine core's monotonic stamps; zeros where there are none.

    The core is this process's child on this host, where the monotonic clock is one for all processes, so the way in and the
    way out can be told apart: a request that comes during a step waits for its end unseen by the core. Stamps out of order
    show a clock that is not shared; then only the core's own durations count, and the ledger's residual shows the rest.
    """
    queued, scheduled, first, last = (
        getattr(stamps, name, 0.0) for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    )
    if not (queued and scheduled and first and last):
        return 0.0, 0.0, 0.0, 0.0
    computing_s, decoding_s = max(0.0, first - scheduled), max(0.0, last - first)
    if called_s <= queued and last <= read_s:
        return scheduled - called_s, computing_s, decoding_s, read_s - last
    return max(0.0, scheduled - queued), computing_s, decoding_s, 0.0


def _position(candidates: Mapping[int, Any] | None) -> list[Logprob]:
    # The first prompt position has none. vLLM puts the chosen token first, then the alternatives by rank.
    if candidates is None:
        return []
    return [Logprob(token, float(entry.logprob), entry.rank or 0) for token, entry in candidates.items()]


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, object]:
    """For the run manifest: values that JSON can hold, everything else as text; tokens are masked."""
    return {name: "***" if name.endswith("token") else _plain(value) for name, value in arguments.items()}


def _plain(value: Any) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return str(value)
