"""Faults of method and of an arm, found in what was measured and named. Pure.

A fault that is `unfit` leaves nothing to judge; the others are true of the arm and stand beside the verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats as scipy_stats

from coordinator.compare.load import PATHS, Probe
from coordinator.compare.stats import t_interval
from coordinator.compare.workload import Workload

LATE_CLIENT, LOSSY, STALL, CARRY_OVER, MISTUNED = "late client", "lossy", "stall", "carry-over", "mistuned"
LOSS_SHARE = 0.005
LOSS_EXPECTED = 0.001
"""Requests that any system may lose."""
CARRIED_SHARE = 0.01
"""Of the prompt tokens more than the workload shares itself."""
HALVES_CONFIDENCE = 0.99
MIN_TRIED = 3
"""Fewer configurations are no tuning."""
SURE = 1e-3
STALL_GAPS = 3.0
"""A gap counts as a stall from this multiple of the median gap on."""
MIN_STALLS = 6
STALL_PERIODS_S = (0.5, 20.0)
STALL_SURE = 1e-6

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` is one of the five above; `text` is for people and names the arm."""

    kind: str
    text: str
    unfit: bool


def late_client(void_probes: int, probes: int) -> Fault | None:
    """Probes are void where the client fell behind; with a tenth of them gone, what is left is no fair sample."""
    if void_probes <= 0.1 * probes:
        return None
    return Fault(LATE_CLIENT, f"the client fell behind: {void_probes} of {probes} probes are void", True)


def lossy(arm: str, failed: int, offered: int) -> Fault | None:
    """An arm that loses requests at rates that it can carry: more than `LOSS_SHARE`, and surely more than `LOSS_EXPECTED`."""
    if not offered or failed / offered <= LOSS_SHARE:
        return None
    if scipy_stats.binomtest(failed, offered, LOSS_EXPECTED, alternative="greater").pvalue >= SURE:
        return None
    return Fault(LOSSY, f"{arm} loses {failed / offered:.1%} of its requests ({failed} of {offered}) below its knee", False)


def carried_over(arm: str, cached_tokens: int, prompt_tokens: int, shared: float) -> Fault | None:
    """Prompts found in a cache although the workload shares only `shared` of them: another probe's KV was there."""
    if not prompt_tokens or cached_tokens / prompt_tokens <= shared + CARRIED_SHARE:
        return None
    found = cached_tokens / prompt_tokens
    text = f"{arm} found {found:.1%} of its prompt tokens in a prefix cache where {shared:.1%} are shared: caches carry over"
    return Fault(CARRY_OVER, text, True)


def second_halves(gains: Sequence[float]) -> Fault | None:
    """`gains`: log of each seed's knee in the second probes of its blocks over that in the first, the arms' mean.

    The arms run in opposite order, so a gain of both is no drift between them: what the first probe left behind helps the second.
    """
    interval = t_interval(gains, HALVES_CONFIDENCE)
    if interval is None or len(gains) < 3 or interval.low <= 0:
        return None
    text = f"second probes of a block serve {math.expm1(interval.mean):.0%} more than first ones: something carries over"
    return Fault(CARRY_OVER, text, True)


def mistuned(arm: str, tried: Mapping[str, Sequence[float]], frozen: str, margin: float) -> Fault | None:
    """`tried`: goodput per tuning seed of each configuration. The frozen one must be among the best, within the margin."""
    if len(tried) < MIN_TRIED or frozen not in tried:
        names = ", ".join(tried) or "none"
        return Fault(MISTUNED, f"{arm} runs {frozen!r}, which was not chosen from {MIN_TRIED} tried ones ({names})", True)
    means = {name: statistics.fmean(found) for name, found in tried.items()}
    best = max(means, key=lambda name: means[name])
    if means[frozen] * (1 + margin) >= means[best]:
        return None
    text = f"{arm} is mistuned: {frozen} served {means[frozen]:.3g} requests/s on the tuning seeds, {best} {means[best]:.3g}"
    return Fault(MISTUNED, text, True)


def stalls(arm: str, probes: Sequence[tuple[Floats, Floats]]) -> Fault | None:
    """A regular standstill in the gaps between tokens, (end of the gap in seconds, gap in seconds) of all requests per probe.

    Large gaps alone are no fault, prefills cause them; at equal distances they come from a clock. The large gaps' times are taken
    round every period in turn, weighted by the time that was lost: where they heap up at one phase beyond chance, that is the
    period. Rayleigh's test, over all probes together, for as many periods as were tried.
    """
    frequencies = _frequencies(probes)
    power = np.zeros(len(frequencies))
    used, sizes = 0, []
    for ends, gaps in probes:
        middle = float(np.median(gaps)) if len(gaps) else 0.0
        large = gaps > STALL_GAPS * middle
        events, lost = _events(ends[large], gaps[large] - middle, middle)
        if len(events) < MIN_STALLS or not len(frequencies):
            continue
        turned = np.exp(-2j * np.pi * frequencies[:, None] * events[None, :]) @ lost
        power += 2 * np.abs(turned) ** 2 / float(np.sum(lost**2))
        sizes.append(float(np.quantile(gaps[large], 0.9)) - middle)
        used += 1
    if not used:
        return None
    # A period of half or a third of the true one fits as well; the longest that does is it.
    likely = np.flatnonzero(power >= 0.5 * power.max())
    at = int(likely[np.argmin(frequencies[likely])])
    at = _peak(power, at)
    if min(1.0, float(scipy_stats.chi2.sf(float(power.max()), 2 * used)) * len(frequencies)) >= STALL_SURE:
        return None
    size_ms = statistics.median(sizes) * 1e3
    return Fault(STALL, f"{arm} stands still for about {size_ms:.0f} ms every {1 / float(frequencies[at]):.1f} s", False)


def inspect(probes: Sequence[Probe], workloads: Sequence[Workload], arms: Sequence[str] = PATHS) -> list[Fault]:
    """What these probes show by themselves. `workloads`: what was sent, one per seed; salts do not matter."""
    sent = {workload.spec.seed: workload for workload in workloads}
    shared = statistics.fmean(workload.shared for workload in workloads)
    found: list[Fault | None] = [late_client(sum(bool(probe.void) for probe in probes), len(probes))]
    for path in arms:
        own = [probe for probe in probes if probe.path == path and not probe.void]
        if not own:
            continue
        # Seeds may have further rates of their own.
        lowest: dict[int, float] = {}
        for probe in own:
            lowest[probe.seed] = min(probe.rate_per_s, lowest.get(probe.seed, math.inf))
        calm = [probe for probe in own if probe.rate_per_s == lowest[probe.seed]]
        outcomes = [outcome for probe in calm for outcome in probe.outcomes]
        found.append(lossy(path, sum(bool(outcome.failure) for outcome in outcomes), len(outcomes)))
        answered = [(probe, outcome) for probe in own for outcome in probe.outcomes if not outcome.failure]
        asked = sum(_asked_tokens(sent[probe.seed], outcome.index) for probe, outcome in answered)
        found.append(carried_over(path, sum(outcome.cached_tokens for _, outcome in answered), asked, shared))
        found.append(stalls(path, [_gaps(probe) for probe in own]))
    return [fault for fault in found if fault is not None]


def _asked_tokens(workload: Workload, index: int) -> int:
    """Of a prompt; a probe may have sent the workload several times on end."""
    return len(workload.requests[index % len(workload.requests)].prompt_token_ids)


def _gaps(probe: Probe) -> tuple[Floats, Floats]:
    ends, gaps = [], []
    for outcome in probe.outcomes:
        if outcome.ttft_s is not None and outcome.gaps_s:
            gaps.append(np.asarray(outcome.gaps_s))
            ends.append(outcome.due_s + outcome.ttft_s + np.cumsum(gaps[-1]))
    return (np.concatenate(ends), np.concatenate(gaps)) if gaps else (np.empty(0), np.empty(0))


def _frequencies(probes: Sequence[tuple[Floats, Floats]]) -> Floats:
    """Fine enough that no period is missed over the longest probe."""
    longest_s = max((float(np.ptp(ends)) for ends, _ in probes if len(ends)), default=0.0)
    shortest, longest = STALL_PERIODS_S
    # Six turns at least, or a few large gaps fit some period by chance.
    low = max(1 / longest, MIN_STALLS / longest_s) if longest_s > 0 else math.inf
    return np.arange(low, 1 / shortest, 0.25 / longest_s, dtype=np.float64) if low < 1 / shortest else np.empty(0)


def _events(ends: Floats, lost_s: Floats, middle_s: float) -> tuple[Floats, Floats]:
    """Large gaps that end together, in many requests at once, are one event: when, and the time lost by all."""
    if not len(ends):
        return ends, lost_s
    order = np.argsort(ends)
    ordered = ends[order]
    begins = np.flatnonzero(np.concatenate([[True], np.diff(ordered) > 2 * middle_s]))
    return np.asarray(ordered[begins]), np.add.reduceat(lost_s[order], begins)


def _peak(power: Floats, at: int) -> int:
    """Up the slope from here."""
    while 0 < at < len(power) - 1 and power[at] < max(power[at - 1], power[at + 1]):
        at += 1 if power[at + 1] > power[at - 1] else -1
    return at
