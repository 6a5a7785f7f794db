"""Figures of one arm over all its valid probes, for the record and the tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.compare.load import Outcome, Probe, Slo
from coordinator.compare.stats import percentile

STAGES = (
    "gateway_s",
    "prefill_queue_s",
    "prefill_s",
    "transfer_wait_s",
    "decode_queue_s",
    "decode_s",
    "worker_s",
    "retry_s",
    "residual_s",
    "e2e_s",
)
"""Exclusive stages in their order, then their remainder and their sum."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 90th and 99th percentile and maximum, seconds."""

    p50: float
    p90: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """`attainment` is of offered requests, None without an SLO; a spread is None when nothing was measured for it.

    `ledger_s` holds the mean of each stage over requests with a ledger; `residual_share` is the largest |residual| / E2E.
    """

    path: str
    offered: int
    failed: int
    failures: tuple[str, ...]
    attainment: float | None
    ttft: Spread | None
    tpot: Spread | None
    second_token_gap: Spread | None
    itl_p99_s: float | None
    itl_largest_s: float | None
    e2e: Spread | None
    cached_tokens: int
    ledger_s: dict[str, float]
    residual_share: float | None
    transfer_bytes: int
    recomputed: int


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(percentile(values, 0.5), percentile(values, 0.9), percentile(values, 0.99), max(values))


def summarise(path: str, outcomes: Sequence[Outcome], slo: Slo | None) -> ArmSummary:
    """One arm's figures. Requests that failed count in `offered`, `failed` and `attainment`, and in no latency."""
    good = [outcome for outcome in outcomes if not outcome.failure]
    gaps = [gap for outcome in good for gap in outcome.gaps_s]
    ledgers = [outcome.ledger for outcome in good if outcome.ledger]
    return ArmSummary(
        path=path,
        offered=len(outcomes),
        failed=len(outcomes) - len(good),
        failures=tuple(sorted({outcome.failure for outcome in outcomes if outcome.failure}))[:10],
        attainment=statistics.fmean(o.meets(slo) for o in outcomes) if slo and outcomes else None,
        ttft=spread(_known(o.ttft_s for o in good)),
        tpot=spread(_known(o.tpot_s for o in good)),
        second_token_gap=spread([gap for ledger in ledgers if (gap := ledger.get("second_token_gap_s", 0.0)) > 0]),
        itl_p99_s=percentile(gaps, 0.99) if gaps else None,
        itl_largest_s=max([*gaps, *_known(o.itl_largest_s for o in good)], default=None),
        e2e=spread(_known(o.e2e_s for o in good)),
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        ledger_s={stage: statistics.fmean(ledger.get(stage, 0.0) for ledger in ledgers) for stage in STAGES} if ledgers else {},
        residual_share=_residual_share(ledgers),
        transfer_bytes=sum(int(ledger.get("transfer_bytes", 0)) for ledger in ledgers),
        recomputed=sum(bool(ledger.get("recomputed")) for ledger in ledgers),
    )


def arm(path: str, probes: Iterable[Probe], slo: Slo) -> ArmSummary:
    """The path's probes that are not void, together; all of them where every one is, so that something can be looked at."""
    own = [probe for probe in probes if probe.path == path]
    shown = [probe for probe in own if not probe.void] or own
    return summarise(path, [outcome for probe in shown for outcome in probe.judged], slo)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _residual_share(ledgers: Sequence[dict[str, Any]]) -> float | None:
    shares = [abs(ledger["residual_s"]) / ledger["e2e_s"] for ledger in ledgers if ledger.get("e2e_s", 0) > 0]
    return max(shares, default=None)
