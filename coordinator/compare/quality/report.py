"""What the quality gate found, as one JSON object."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from coordinator.compare.quality.divergence import Divergence
from coordinator.compare.quality.gate import Check, Paired
from coordinator.compare.quality.limits import QualityGate, QualityVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Right answers of one kind of question, or of all (`kind` ""), with the 95 % interval of the share."""

    kind: str
    right: int
    asked: int
    share: float | None
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmAnswers:
    """One arm's answers. `scores` begin with all kinds together; `tool_format` is no part of that: calls that parse and keep
    their schema. `answers` holds the text per question id. `recomputed`: answers whose KV decode computed itself."""

    name: str
    path: str
    pools: list[str]
    transport: str
    scores: list[Score]
    failed: int
    failures: list[str]
    recomputed: int
    answers: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmQuality:
    """One arm against the baseline: `read` compares a text that both have read, `decoded` greedy answers until they part."""

    arm: str
    paired: Paired | None
    read: Divergence
    decoded: Divergence
    checks: list[Check]
    verdict: QualityVerdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """`floor` is the baseline asked a second time, against the first. `left_out` questions the baseline could not answer.

    `concurrency` requests were in flight at once. `wall_s` covers all passes.
    """

    model: str
    baseline: str
    set_version: int
    set_digest: str
    questions: int
    left_out: int
    concurrency: int
    gate: QualityGate
    arms: list[ArmAnswers]
    floor: ArmQuality
    compared: list[ArmQuality]
    started_at: str
    wall_s: float
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> QualityVerdict:
        """The worst of all arms: fail, else undecided, else pass."""
        found = {arm.verdict for arm in self.compared}
        order = (QualityVerdict.FAIL, QualityVerdict.UNDECIDED)
        return next((verdict for verdict in order if verdict in found), QualityVerdict.PASS)

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, no infinities; `verdict` is that of all arms."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}
