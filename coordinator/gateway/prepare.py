"""From a checked request to its choices: tokenise, fit the context, fix one deadline and the ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.gateway.api import Submission
from coordinator.gateway.choice import Choice, TextOptions
from coordinator.gateway.config import GatewaySettings
from coordinator.gateway.frontend import FrontEnd
from coordinator.gateway.validate import Metadata, Sampling, choice_seed, fit_context
from protos.errors import Code, SplitpointError
from protos.ids import new_request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, text or token ids, under the name that errors call it by."""

    field: str
    content: str | list[int]
    add_special_tokens: bool = True


def allowed_time_s(metadata: Metadata, settings: GatewaySettings) -> float:
    """How long the whole request may take, from its arrival."""
    return min(metadata.deadline_s or settings.default_deadline_s, settings.max_deadline_s)


async def prepare_choices(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    metadata: Metadata,
    frontend: FrontEnd,
    *,
    client_request_id: str,
    received_s: float,
    default_max_tokens: int | None,
) -> list[Choice]:
    """Every choice of the request, in the order of their indexes: `n` for the first prompt, then for the next.

    `received_s` is `time.monotonic()` at arrival. Raises `SplitpointError` when a prompt does not fit, before anything was
    submitted.
    """
    tokenizer, limits = frontend.tokenizer, frontend.limits
    options = TextOptions(stop=sampling.stop, include_stop_str_in_output=sampling.include_stop_str_in_output)
    prepared: list[tuple[list[int], int]] = []
    for prompt in prompts:
        if isinstance(prompt.content, str):
            least = tokenizer.least_tokens(prompt.content)
            if least >= limits.max_model_len:
                # Megabytes of text: the answer is known without tokenising them.
                fit_context(
                    least, sampling, limits, default_max_tokens=default_max_tokens, prompt_field=prompt.field, lower_bound=True
                )
            ids = await tokenizer.encode(prompt.content, add_special_tokens=prompt.add_special_tokens)
        else:
            ids = prompt.content
        room = fit_context(len(ids), sampling, limits, default_max_tokens=default_max_tokens, prompt_field=prompt.field)
        prepared.append((ids, room))
    allowed_s = allowed_time_s(metadata, frontend.settings)
    left_s = allowed_s - (time.monotonic() - received_s)
    if left_s <= 0:
        raise SplitpointError(Code.DEADLINE_EXCEEDED, f"the deadline of {allowed_s:g} s passed before the request was submitted")
    return [
        Choice(
            position * sampling.n + i,
            Submission(
                request_id=new_request_id(),
                client_request_id=client_request_id,
                prompt_token_ids=ids,
                sampling=replace(sampling.params, max_tokens=max_tokens, seed=choice_seed(sampling.params.seed, i)),
                received_s=received_s,
                deadline_s=left_s,
                path=metadata.path,
                transport=metadata.transport,
                pools=metadata.pools,
                session=metadata.session,
                slo_ttft_s=metadata.slo_ttft_s,
                slo_tpot_s=metadata.slo_tpot_s,
                key_name=metadata.key_name,
            ),
            options,
            tokenizer,
        )
        for position, (ids, max_tokens) in enumerate(prepared)
        for i in range(sampling.n)
    ]
