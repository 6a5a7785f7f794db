"""How far two arms' log-probabilities of the same tokens are apart. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from coordinator.compare.quality.intervals import bootstrap, share_interval
from coordinator.compare.quality.parity import Entry, Logprobs, Said, first_divergence

TAIL = 0.99


@dataclass(frozen=True, slots=True)
class Deltas:
    """One question: |log-probability in the arm - in the baseline| of each of the baseline's tokens, in nats.

    `agreed` counts positions with the same most probable token. `bounded` counts those whose token is not among the arm's
    candidates: there the delta is what it is at least.
    """

    nats: tuple[float, ...]
    agreed: int
    bounded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Over all questions, in nats per token. `low` and `high` of each figure are bounds over questions, 95 %.

    `excess` is the mean less the floor's, on the same questions. Figures are None without tokens, bounds None
    below two questions.
    """

    questions: int
    tokens: int
    bounded: int
    mean: float | None = None
    p99: float | None = None
    p99_low: float | None = None
    p99_high: float | None = None
    agreement: float | None = None
    agreement_low: float | None = None
    agreement_high: float | None = None
    excess: float | None = None
    excess_low: float | None = None
    excess_high: float | None = None


def forced(reference: Logprobs, other: Logprobs) -> Deltas:
    """Of one text that both arms have read: position by position, those left out that nothing predicts.

    Raises:
        ValueError: the two are not of the same tokens.
    """
    if [row[0][0] for row in reference if row] != [row[0][0] for row in other if row]:
        raise ValueError("the two arms have read different tokens: their tokenizers differ")
    return _deltas([(ours, theirs) for ours, theirs in zip(reference, other, strict=True) if ours and theirs])


def decoded(reference: Said, other: Said) -> Deltas:
    """Of two greedy answers, up to and including the first divergence: until there both had the same input."""
    end = first_divergence(other, reference)
    shared = min(len(reference.logprobs), len(other.logprobs))
    length = shared if end is None else min(shared, end + 1)
    return _deltas(list(zip(reference.logprobs[:length], other.logprobs[:length], strict=True)))


def _deltas(pairs: Sequence[tuple[Sequence[Entry], Sequence[Entry]]]) -> Deltas:
    nats, agreed, bounded = [], 0, 0
    for reference, other in pairs:
        token, expected, _ = reference[0]
        seen = {candidate: logprob for candidate, logprob, _ in other}
        found = seen.get(token)
        if found is None:
            bounded += 1
            nats.append(_finite(max(0.0, expected - min(seen.values()))))
        else:
            nats.append(0.0 if found == expected else _finite(abs(found - expected)))
        agreed += _top(reference) == _top(other)
    return Deltas(tuple(nats), agreed, bounded)


def _top(row: Sequence[Entry]) -> int:
    return max(row, key=lambda entry: entry[1])[0]


def _finite(nats: float) -> float:
    """A token that one arm holds impossible is infinitely far; a thousand nats says so and can be added up."""
    return nats if nats < 1000.0 else 1000.0


def summarise(rows: Sequence[Deltas], floor: Sequence[Deltas] | None = None) -> Divergence:
    """All questions together; `floor` has the same questions in the same order. A floor itself has none, and gets no bounds.

    Raises:
        ValueError: `floor` is of another number of questions.
    """
    if floor is not None and len(floor) != len(rows):
        raise ValueError("the floor is of other questions")
    own = _Sums(rows)
    below = own if floor is None else _Sums(floor)
    used = [i for i in range(len(rows)) if own.tokens[i] and below.tokens[i]]
    tokens, bounded = int(own.tokens.sum()), sum(row.bounded for row in rows)
    if not used:
        return Divergence(questions=0, tokens=0, bounded=bounded)
    everything = np.asarray(used, dtype=np.intp)

    def excess(drawn: npt.NDArray[np.intp]) -> float:
        return own.mean(drawn) - below.mean(drawn)

    figures = Divergence(
        questions=len(used),
        tokens=tokens,
        bounded=bounded,
        mean=own.mean(everything),
        p99=own.tail(everything),
        agreement=own.agreement(everything),
        excess=excess(everything),
    )
    if floor is None:
        return figures
    p99_low, p99_high = bootstrap(used, own.tail)
    agreement_low, agreement_high = bootstrap(used, own.agreement)
    if len(used) > 1 and figures.agreement == 1.0:
        # Resampling cannot show what has not been seen once: the bound is that of so many questions without one.
        agreement_low = share_interval(len(used), len(used))[0]
    excess_low, excess_high = bootstrap(used, excess)
    return replace(
        figures,
        p99_low=_known(p99_low),
        p99_high=_known(p99_high),
        agreement_low=_known(agreement_low),
        agreement_high=_known(agreement_high),
        excess_low=_known(excess_low),
        excess_high=_known(excess_high),
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


class _Sums:
    """What a resample adds up, per question."""

    def __init__(self, rows: Sequence[Deltas]) -> None:
        self.tokens = np.asarray([len(row.nats) for row in rows], dtype=np.float64)
        self._nats = [np.asarray(row.nats, dtype=np.float64) for row in rows]
        self._totals = np.asarray([nats.sum() for nats in self._nats], dtype=np.float64)
        self._agreed = np.asarray([row.agreed for row in rows], dtype=np.float64)

    def mean(self, drawn: npt.NDArray[np.intp]) -> float:
        return float(self._totals[drawn].sum() / self.tokens[drawn].sum())

    def agreement(self, drawn: npt.NDArray[np.intp]) -> float:
        return float(self._agreed[drawn].sum() / self.tokens[drawn].sum())

    def tail(self, drawn: npt.NDArray[np.intp]) -> float:
        values = np.concatenate([self._nats[i] for i in drawn])
        rank = max(0, math.ceil(TAIL * len(values) - 1e-9) - 1)
        return float(np.partition(values, rank)[rank])
