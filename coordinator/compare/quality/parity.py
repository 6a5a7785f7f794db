"""How far two greedy answers to one prompt agree, and when a difference is a near-tie. Pure.

One request at a time, tokens are equal. Under batching the shape of a batch may turn a choice between two candidates that nearly
tie, so there the first divergence must be one; how near is measured, the baseline against itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Entry = tuple[int, float, int]
"""Token, log-probability, rank."""
Logprobs = Sequence[Sequence[Entry]]
"""Per position: the chosen token first, then the alternatives. A position that nothing predicts is empty."""
CLEAR_GAP = 1.0
"""Nats between the two best candidates beyond which a choice is clear: a floor above it explains anything."""


class Said(Protocol):
    """What one answer holds."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Logprobs: ...


def first_divergence(answer: Said, reference: Said) -> int | None:
    """The first position whose tokens differ; None when one is a beginning of the other, or they are equal."""
    pairs = zip(answer.token_ids, reference.token_ids, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def top_two_gap(reference: Said, position: int) -> float:
    """How far apart, in nats, the reference's two best candidates were. Needs at least two at that position."""
    best = sorted((logprob for _, logprob, _ in reference.logprobs[position]), reverse=True)
    return best[0] - best[1]


def gap_noise(answer: Said, reference: Said) -> float:
    """How much the gap between the reference's two best candidates moved in `answer`, at most, up to and including the first
    divergence: until there both had the same input."""
    end = first_divergence(answer, reference)
    shared = min(len(answer.logprobs), len(reference.logprobs))
    worst = 0.0
    for position in range(shared if end is None else end + 1):
        first, second = sorted(reference.logprobs[position], key=lambda e: -e[1])[:2]
        seen = {token: logprob for token, logprob, _ in answer.logprobs[position]}
        if first[0] in seen and second[0] in seen:
            worst = max(worst, abs((first[1] - second[1]) - (seen[first[0]] - seen[second[0]])))
    return worst


def floor_of(answer: Said, reference: Said) -> float:
    """What one repetition of the baseline says about its own noise, in nats: `gap_noise`, and the gap at which the two parted."""
    position = first_divergence(answer, reference)
    return max(gap_noise(answer, reference), 0.0 if position is None else top_two_gap(reference, position))
