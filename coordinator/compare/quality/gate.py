"""Whether an arm answers as well as the baseline: limits fixed beforehand, three verdicts. Pure.

A check passes when its whole 95 % interval is within the limit and fails when all of it is beyond; anything else is undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.compare.quality.divergence import Divergence
from coordinator.compare.quality.intervals import questions_needed, share_interval
from coordinator.compare.quality.limits import QualityGate, QualityVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One limit and what was found; `low` and `high` are None where there is no interval."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    limit: float
    verdict: QualityVerdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The same questions in both arms; unanswered ones are in no count. `low` and `high` bound the drop, `mcnemar_p` is exact."""

    both_right: int
    only_baseline: int
    only_arm: int
    both_wrong: int
    drop: float
    low: float
    high: float
    mcnemar_p: float

    @property
    def asked(self) -> int:
        return self.both_right + self.only_baseline + self.only_arm + self.both_wrong


def judge(
    gate: QualityGate,
    paired: Paired | None,
    divergences: Sequence[tuple[str, Divergence, Divergence]],
    *,
    unanswered: int = 0,
) -> tuple[list[Check], QualityVerdict, str]:
    """All checks, the verdict, and the sentence that says why.

    `divergences` are (what was compared, the arm's, the floor's). `unanswered` questions the baseline did answer: with any, an
    arm cannot pass. One failed check fails; one undecided keeps it from passing.
    """
    checks = [_score(gate, paired)]
    for what, arm, floor in divergences:
        checks += _divergence(gate, what, arm, floor)
    failed = [check for check in checks if check.verdict is QualityVerdict.FAIL]
    if failed:
        return checks, QualityVerdict.FAIL, "; ".join(check.why for check in failed)
    reasons = [check.why for check in checks if check.verdict is QualityVerdict.UNDECIDED]
    if unanswered:
        reasons.insert(0, f"{unanswered} requests that the baseline answered failed in this arm")
    if reasons:
        return checks, QualityVerdict.UNDECIDED, "; ".join(reasons)
    return checks, QualityVerdict.PASS, "; ".join(check.why for check in checks)


def _score(gate: QualityGate, paired: Paired | None) -> Check:
    limit = gate.max_score_drop
    if paired is None:
        return _check("score", None, None, None, limit, QualityVerdict.UNDECIDED, "score: no question was answered by both")
    low, high = paired.low, paired.high
    right = paired.both_right + paired.only_baseline
    found = f"score: lost {paired.drop:+.1%} of {paired.asked} questions ({low:+.1%} to {high:+.1%}), allowed {limit:.1%}"
    verdict = _within(low, high, limit)
    if verdict is QualityVerdict.PASS and share_interval(right, paired.asked)[0] <= limit:
        verdict = QualityVerdict.UNDECIDED
        found += f"; the baseline itself is right in {right}, too few for a drop to show"
    elif verdict is QualityVerdict.UNDECIDED and paired.only_baseline == paired.only_arm == 0:
        found += f"; with equal answers {questions_needed(limit)} questions would settle it"
    return _check("score", paired.drop, low, high, limit, verdict, found)


def _divergence(gate: QualityGate, what: str, arm: Divergence, floor: Divergence) -> list[Check]:
    checks = []
    for name, value, low, high, limit, noise in (
        ("mean |delta|", arm.excess, arm.excess_low, arm.excess_high, gate.max_mean_divergence, floor.mean),
        ("p99 |delta|", arm.p99, arm.p99_low, arm.p99_high, gate.max_p99_divergence, floor.p99),
    ):
        label = f"{what}: {name}"
        if value is None or low is None or high is None or noise is None:
            verdict, why = QualityVerdict.UNDECIDED, f"{label}: fewer than two questions to compare"
        else:
            above = " above the floor" if name.startswith("mean") else ""
            why = f"{label} {value:.4f} nats{above} ({low:.4f} to {high:.4f}), allowed {limit:g}, the baseline's own {noise:.4f}"
            verdict = _within(low, high, limit)
            if noise > limit:
                verdict, why = QualityVerdict.UNDECIDED, f"{why}: the rig is noisier than the limit"
        checks.append(_check(label, value, low, high, limit, verdict, why))
    label = f"{what}: top-1 agreement"
    limit = gate.min_top1_agreement
    value, low, high = arm.agreement, arm.agreement_low, arm.agreement_high
    if value is None or low is None or high is None or floor.agreement is None:
        verdict, why = QualityVerdict.UNDECIDED, f"{label}: fewer than two questions to compare"
    else:
        why = f"{label} {value:.2%} ({low:.2%} to {high:.2%}), asked {limit:.0%}, the baseline's own {floor.agreement:.2%}"
        verdict = _within(-high, -low, -limit)
        if floor.agreement < limit:
            verdict, why = QualityVerdict.UNDECIDED, f"{why}: the rig is noisier than the limit"
    checks.append(_check(label, value, low, high, limit, verdict, why))
    return checks


def _within(low: float, high: float, limit: float) -> QualityVerdict:
    if high <= limit:
        return QualityVerdict.PASS
    return QualityVerdict.FAIL if low > limit else QualityVerdict.UNDECIDED


def _check(
    name: str, value: float | None, low: float | None, high: float | None, limit: float, verdict: QualityVerdict, why: str
) -> Check:
    return Check(name=name, value=value, low=low, high=high, limit=limit, verdict=verdict, why=why)
