"""What a request takes, split and colocated, by a step time and a transfer time. Pure.

A step takes `step_s`, `prompt_token_s` for each prompt token, `decode_token_s` for each decoding request and `context_s` for each
token of context; KV takes `transfer_s` and its bytes over the bandwidth, less what prefill hides. Requests share an engine:
whatever one takes alone is stretched by the share of the engine that all of them keep busy. That is a mean-field model, good for
the place of the break-even and for nothing finer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPLIT, COLOCATED = "split", "colocated"
SATURATED = 0.98
"""Busy beyond this share, an engine has no steady state that could be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """One machine and model. Seconds, seconds per token; `hidden` is the share of the prompt's prefill that transfer overlaps;
    `queueing` scales a first token's wait (1: processor sharing). `link_s_per_byte` is of the measured link, or where its
    bandwidth is unknown what is left of it after overlap; `hidden` is 0 then."""

    step_s: float
    prompt_token_s: float
    decode_token_s: float
    context_s: float
    fixed_s: float
    queueing: float
    transfer_s: float
    link_s_per_byte: float
    hidden: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The engines of both arms on the same `accelerators`. Raises `ValueError` where one phase has none."""

    prefill: int
    decode: int
    colocated: int
    accelerators: int

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.colocated, self.accelerators) < 1:
            raise ValueError("each arm needs an engine for each phase, on one accelerator at least")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What one request of a load asks of its engines, on average: prompt tokens that are computed, tokens decoded (one comes
    from prefill), and the context that those attend to, summed over them."""

    input_tokens: float
    decoded_tokens: float
    attended_tokens: float

    @staticmethod
    def of(input_tokens: float, output_tokens: float) -> Mix:
        """A load of requests that are all alike."""
        decoded = max(0.0, output_tokens - 1)
        return Mix(
            input_tokens=input_tokens,
            decoded_tokens=decoded,
            attended_tokens=decoded * (input_tokens + output_tokens / 2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of one request, seconds. `tpot_s` is None for one token, `wait_s` 0 when colocated; `busy` is the busiest engine's
    share."""

    ttft_s: float
    tpot_s: float | None
    wait_s: float
    busy: float

    @property
    def saturated(self) -> bool:
        return self.busy >= SATURATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Coefficients with what they hold for."""

    coefficients: Coefficients
    layout: Layout
    kv_bytes_per_token: float

    def times(
        self,
        arm: str,
        input_tokens: float,
        output_tokens: float,
        load: float,
        bandwidth_bytes_per_s: float | None = None,
        mix: Mix | None = None,
    ) -> Times:
        """A request of these lengths among a load of `mix`, `load` requests/s and accelerator (all like itself without `mix`).

        Without a bandwidth the link is the one that was measured.
        """
        c, layout = self.coefficients, self.layout
        mix = mix or Mix.of(input_tokens, output_tokens)
        rate = load * layout.accelerators
        alone_s = c.step_s + (c.prompt_token_s + c.context_s) * input_tokens
        prefill_work_s = (c.prompt_token_s + c.context_s) * mix.input_tokens
        decode_work_s = c.decode_token_s * mix.decoded_tokens + c.context_s * mix.attended_tokens
        one_step_s = c.step_s + c.decode_token_s + c.context_s * (input_tokens + output_tokens / 2)
        decoded = output_tokens - 1
        if arm == COLOCATED:
            busy = rate / layout.colocated * (prefill_work_s + decode_work_s)
            ttft_s = c.fixed_s + alone_s * (1 + c.queueing * (_stretch(busy) - 1))
            return Times(ttft_s=ttft_s, tpot_s=one_step_s * _stretch(busy) if decoded > 0 else None, wait_s=0.0, busy=busy)
        # A prefill engine pays its base once a prompt: nothing else shares the step.
        prefill_busy = rate / layout.prefill * (c.step_s + prefill_work_s)
        decode_busy = rate / layout.decode * decode_work_s
        ttft_s = c.fixed_s + alone_s * (1 + c.queueing * (_stretch(prefill_busy) - 1))
        link = c.link_s_per_byte if bandwidth_bytes_per_s is None else 1 / bandwidth_bytes_per_s
        wait_s = max(0.0, c.transfer_s + link * self.kv_bytes_per_token * input_tokens - c.hidden * alone_s)
        tpot_s = one_step_s * _stretch(decode_busy) + wait_s / decoded if decoded > 0 else None
        return Times(ttft_s=ttft_s, tpot_s=tpot_s, wait_s=wait_s, busy=max(prefill_busy, decode_busy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`errors` are standard errors of the fitted coefficients by name; `residual` is the root mean square of the logarithms
    predicted / observed over TTFT and TPOT, `observations` how many means went in."""

    model: Model
    errors: dict[str, float]
    residual: float
    observations: int


def stress(ttft_s: float, tpot_s: float | None, input_tokens: float, slo: Mapping[str, Any]) -> float:
    """How much of the objective a request uses: the larger share of its TTFT and its TPOT; it meets it up to 1."""
    share = float(ttft_s / (slo["ttft_s"] + (slo.get("ttft_s_per_token") or 0.0) * input_tokens))
    return share if tpot_s is None else max(share, float(tpot_s / slo["tpot_s"]))


def _stretch(busy: float) -> float:
    return 1 / (1 - min(busy, SATURATED))
