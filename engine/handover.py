"""How a request's sampling parameters are divided between the prefill leg and the decode leg. Pure.

Source of the table: trials of vLLM 0.32 against a colocated run on the same engine (docs/decisions/0005-first-token.md).
"""

from __future__ import annotations

from dataclasses import replace

from engine.sampling import SamplingParams


def forwarding_refusal(params: SamplingParams) -> str | None:
    """Why prefill's first token must not be forwarded, or None when it may.

    A decode engine that gets prompt + first token as its prompt counts that token as prompt. Whatever depends on "this is
    output token k", or on a generator's or grammar's state, then differs from the colocated run.
    """
    if params.constraint is not None:
        return "structured output"
    if params.presence_penalty:
        return "presence_penalty"
    if params.frequency_penalty:
        return "frequency_penalty"
    if params.bad_words:
        # One-token words would be safe, but only a tokenizer can tell; correctness first.
        return "bad_words"
    if params.seed is not None and (params.temperature is None or params.temperature > 0):
        return "seeded sampling"
    return None


def prefill_params(params: SamplingParams) -> SamplingParams:
    """What the prefill engine sees: a whitelist, one token (rule 6)."""
    return SamplingParams(
        max_tokens=1,
        min_tokens=min(1, params.min_tokens),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        seed=params.seed,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        skip_special_tokens=params.skip_special_tokens,
        constraint=params.constraint,
    )


def decode_params(params: SamplingParams, *, forwarded_tokens: int) -> SamplingParams:
    """What the decode engine sees after `forwarded_tokens` tokens already went to the client.

    Prompt log-probabilities stay with prefill: a decode engine with loaded KV cannot compute them.
    """
    return replace(
        params,
        max_tokens=params.max_tokens - forwarded_tokens,
        min_tokens=max(0, params.min_tokens - forwarded_tokens),
        prompt_logprobs=None,
    )
