"""Samples of a pool's load, and what a window of them says. Pure: time is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from coordinator.gateway.latencies import Counts, added

_AGGREGATE: dict[str, Callable[[list[float]], float]] = {"mean": lambda values: sum(values) / len(values), "max": max, "min": min}
_SLACK = 1.5
"""Of an interval: a sample may come that late before it is missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One pool at one moment, `at_s` on the coordinator's monotonic clock.

    Levels: workers that are `ready` and `starting`, what the ready ones run and let wait, the sum of their shares of KV in use,
    prompt tokens whose first token is awaited. Counts since the sample before: legs sent, latencies and the tokens of their
    requests, choices that found no worker for this pool's leg. `gaps` say what could not be heard; the rest is then a lower
    bound.
    """

    at_s: float
    ready: int
    starting: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    queued_tokens: int = 0
    legs: int = 0
    ttft: Counts = field(default_factory=dict)
    tpot: Counts = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    lacking: int = 0
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A pool over its look-back period. `loads` are the pool's totals by the name of the target that each is held against."""

    samples: int
    span_s: float
    ready: int
    starting: int
    loads: Mapping[str, float]
    legs_per_s: float
    ttft: Counts
    tpot: Counts
    lacking: int
    gaps: tuple[str, ...]

    @property
    def idle(self) -> bool:
        """Nothing ran, waited or was asked for."""
        ongoing = ("target_ongoing_requests", "target_queued_tokens", "target_decode_batch")
        return not (self.legs_per_s or self.lacking or any(self.loads[name] for name in ongoing))


def observe(samples: Sequence[Sample], now_s: float, *, period_s: float, interval_s: float, aggregation: str) -> Observed:
    """The last `period_s` of `samples`, which are in order and `interval_s` apart when all is well. Levels are put together by
    `aggregation`, counts are added."""
    from_s = now_s - period_s + 1e-9
    seen = [sample for sample in samples if sample.at_s > from_s]
    # The first sample's counts reach back to the one before it.
    before = [sample for sample in samples if sample.at_s <= from_s][-1:]
    start_s = (before or seen)[0].at_s if seen else now_s
    span_s = seen[-1].at_s - start_s if seen else 0.0
    put = _AGGREGATE[aggregation]

    def level(values: list[float]) -> float:
        return float(put(values)) if values else 0.0

    legs = sum(s.legs for s in seen)
    return Observed(
        samples=len(seen),
        span_s=span_s,
        ready=seen[-1].ready if seen else 0,
        starting=seen[-1].starting if seen else 0,
        loads={
            "target_ongoing_requests": level([s.running + s.waiting for s in seen]),
            "target_queued_tokens": level([s.queued_tokens for s in seen]),
            "target_kv_usage": level([s.kv_used for s in seen]),
            "target_decode_batch": level([s.running for s in seen]),
        },
        legs_per_s=legs / span_s if span_s > 0 else 0.0,
        ttft=added(s.ttft for s in seen),
        tpot=added(s.tpot for s in seen),
        lacking=sum(s.lacking for s in seen),
        gaps=_gaps(before, seen, now_s, period_s, interval_s),
    )


def _gaps(before: Sequence[Sample], seen: Sequence[Sample], now_s: float, period_s: float, interval_s: float) -> tuple[str, ...]:
    if not seen:
        return (f"no sample for {period_s:g} s",)
    gaps = list(dict.fromkeys(gap for sample in seen for gap in sample.gaps))
    if (age_s := now_s - seen[-1].at_s) > _SLACK * interval_s:
        gaps.append(f"the last sample is {age_s:.1f} s old")
    whole = [*before, *seen]
    if (span_s := whole[-1].at_s - whole[0].at_s) < period_s - _SLACK * interval_s:
        gaps.append(f"only {span_s:.0f} of {period_s:g} s are observed")
    longest_s = max((later.at_s - earlier.at_s for earlier, later in pairwise(whole)), default=0.0)
    if longest_s > 2 * interval_s:
        gaps.append(f"no sample for {longest_s:.1f} s")
    return tuple(gaps)
