"""What an arm may cost, and the three words that answer it. Pure; without the statistics, so that a command line can show it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class QualityVerdict(enum.StrEnum):
    """What a check, or all of them, come to."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityGate:
    """What an arm may cost. `max_score_drop` is a share of the questions; divergences are in nats per token, the mean counted
    above what the baseline differs from itself."""

    max_score_drop: float = 0.05
    max_mean_divergence: float = 0.05
    max_p99_divergence: float = 1.0
    min_top1_agreement: float = 0.9

    def __post_init__(self) -> None:
        """Raises `ValueError` for limits that nothing can keep or break."""
        if not (0 < self.max_score_drop < 1 and 0 < self.min_top1_agreement < 1):
            raise ValueError("max_score_drop and min_top1_agreement lie between 0 and 1")
        if not (self.max_mean_divergence > 0 and self.max_p99_divergence > 0):
            raise ValueError("divergences allowed are above 0")
