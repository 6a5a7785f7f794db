"""What is usually so, to stand beside what was measured. Pure.

From queueing models and published comparisons, not from this run: a verdict against them deserves a second look, no more.
"""

from __future__ import annotations

SHORT_OUTPUT_TOKENS = 125
INTEGER_COST = {2: 0.26, 4: 0.12, 8: 0.06, 10: 0.05}
"""Goodput lost on average because prefill and decode units are whole, by how many there are in all."""


def priors(
    *,
    tpot_slo_s: float,
    unloaded_tpot_s: float,
    ttft_slo_s: float,
    unloaded_ttft_s: float,
    mean_output_tokens: float,
    units: int | None = None,
) -> list[str]:
    """One line each, the most telling first. `units` are the workers of both phases together, None when unknown.

    Raises:
        ValueError: a time that is not positive.
    """
    if min(tpot_slo_s, unloaded_tpot_s, ttft_slo_s, unloaded_ttft_s) <= 0:
        raise ValueError("SLOs and unloaded times must be positive")
    tight = tpot_slo_s / unloaded_tpot_s
    lines = [
        f"the TPOT SLO is {tight:.1f} times the unloaded decode step: {_expected(tight)}",
        f"the TTFT SLO is {ttft_slo_s / unloaded_ttft_s:.1f} times the unloaded prefill; a tight one speaks against splitting",
    ]
    if mean_output_tokens < SHORT_OUTPUT_TOKENS:
        lines.append(f"outputs of {mean_output_tokens:.0f} tokens on average are short: splitting has little decoding to protect")
    if units is not None and units >= 2:
        known = max(count for count in INTEGER_COST if count <= units)
        lines.append(f"with {units} workers whole P:D ratios cost the split arm about {INTEGER_COST[known]:.0%}")
    return lines


def _expected(tight: float) -> str:
    if tight >= 3.5:
        return "colocating usually wins (split over colocated 0.8 to 1.0)"
    if tight > 2.5:
        return "colocating is usually as good or a little better"
    if tight >= 2.0:
        return "usually break-even"
    if tight > 1.4:
        return "splitting usually wins a little (1.05 to 1.2 at 1.8)"
    return "splitting usually wins (1.1 to 1.8)"
