"""What each load tool means by TTFT, TPOT, ITL and throughput, and whether its figures are ours. Pure.

Where a tool means something else, our own time stamps are taken by its definition too: a difference that vanishes then is one of
words, not of measuring.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.compare.load import Outcome

TOLERANCE = 0.03
METRICS = ("TTFT ms", "TPOT ms", "ITL ms", "output tokens/s")

Figures = Mapping[str, float]
"""A value for each of `METRICS`; latencies are medians."""
Definition = tuple[str, Callable[[Sequence[Outcome]], float]]
"""In words, and as a function of our outcomes."""


def _ttft_from_due(outcomes: Sequence[Outcome]) -> float:
    return 1e3 * statistics.median(_ttft_s(o) for o in outcomes)


def _ttft_from_send(outcomes: Sequence[Outcome]) -> float:
    return 1e3 * statistics.median(_ttft_s(o) - o.lag_s for o in outcomes)


def _tpot(outcomes: Sequence[Outcome]) -> float:
    return 1e3 * statistics.median(o.tpot_s or 0.0 for o in outcomes)


def _tpot_with_the_first(outcomes: Sequence[Outcome]) -> float:
    return 1e3 * statistics.median((_e2e_s(o) - o.lag_s) / o.tokens for o in outcomes)


def _gaps(outcomes: Sequence[Outcome]) -> float:
    return 1e3 * statistics.median(gap for o in outcomes for gap in o.gaps_s)


def _rate_from_first_due(outcomes: Sequence[Outcome]) -> float:
    return sum(o.tokens for o in outcomes) / (_last_s(outcomes) - min(o.due_s for o in outcomes))


def _rate_from_start(outcomes: Sequence[Outcome]) -> float:
    return sum(o.tokens for o in outcomes) / _last_s(outcomes)


def _last_s(outcomes: Sequence[Outcome]) -> float:
    return max(o.due_s + _e2e_s(o) for o in outcomes)


def _ttft_s(outcome: Outcome) -> float:
    assert outcome.ttft_s is not None, "only whole answers are measured"
    return outcome.ttft_s


def _e2e_s(outcome: Outcome) -> float:
    assert outcome.e2e_s is not None, "only whole answers are measured"
    return outcome.e2e_s


OURS: Mapping[str, Definition] = {
    "TTFT ms": ("from due to the first token", _ttft_from_due),
    "TPOT ms": ("(last token - first token) / (tokens - 1), per request", _tpot),
    "ITL ms": ("each gap between tokens, of all requests", _gaps),
    "output tokens/s": ("from the first due to the last token", _rate_from_first_due),
}
DEFINITIONS: Mapping[str, Mapping[str, Definition]] = {
    "guidellm": {
        "TTFT ms": ("from the request's first byte to the first chunk with text", _ttft_from_send),
        "TPOT ms": ("(last token - send) / tokens: the first token's time counts", _tpot_with_the_first),
        "ITL ms": ("(last token - first token) / (tokens - 1), per request: our TPOT", _tpot),
        "output tokens/s": ("from the first send to the last answer's end", _rate_from_first_due),
    },
    "vllm bench serve": {
        "TTFT ms": ("from send, connecting included, to the first chunk", _ttft_from_send),
        "TPOT ms": ("as ours", _tpot),
        "ITL ms": ("each gap between chunks, of all requests", _gaps),
        "output tokens/s": ("the wait before the first request counts", _rate_from_start),
    },
    "ours, gRPC": OURS,
}


def figures(definitions: Mapping[str, Definition], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Our outcomes by somebody's definitions. Every outcome must be whole."""
    return {metric: definitions[metric][1](outcomes) for metric in METRICS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of one tool beside ours, and beside ours by the tool's definition. Differences are shares of ours."""

    tool: str
    metric: str
    ours: float
    theirs: float
    ours_by_theirs: float

    @property
    def difference(self) -> float:
        return self.theirs / self.ours - 1

    @property
    def difference_by_definition(self) -> float:
        return self.theirs / self.ours_by_theirs - 1

    @property
    def verdict(self) -> str:
        """ "agrees", "by definition" or "differs"."""
        if abs(self.difference) <= TOLERANCE:
            return "agrees"
        return "by definition" if abs(self.difference_by_definition) <= TOLERANCE else "differs"


def cells(tool: str, theirs: Sequence[Figures], ours: Sequence[Sequence[Outcome]]) -> list[Cell]:
    """A tool's blocks against ours: the mean of each side's blocks."""
    own = [figures(OURS, outcomes) for outcomes in ours]
    by_theirs = [figures(DEFINITIONS[tool], outcomes) for outcomes in ours]
    return [
        Cell(
            tool=tool,
            metric=metric,
            ours=_mean(own, metric),
            theirs=_mean(theirs, metric),
            ours_by_theirs=_mean(by_theirs, metric),
        )
        for metric in METRICS
    ]


def spreads(blocks: Sequence[Figures]) -> dict[str, float]:
    """How far a tool's own blocks lie apart, as a share of their mean: no difference below it means anything."""
    return {m: (max(b[m] for b in blocks) - min(b[m] for b in blocks)) / _mean(blocks, m) for m in METRICS}


def _mean(blocks: Sequence[Figures], metric: str) -> float:
    return statistics.fmean(block[metric] for block in blocks)
