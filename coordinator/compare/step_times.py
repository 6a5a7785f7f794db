"""Step times of both paths, measured on the system that serves: what path `auto` predicts from.

Prompts of several lengths one at a time give the prompt's line, the lone decode step and the hand-over; several at once give what
each further sequence adds to a step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from coordinator.compare.load import PATHS, Client, Outcome, Sending, run_one_at_a_time, send
from coordinator.compare.workload import SALT_TOKENS, PlannedRequest, WorkloadSpec, make
from coordinator.routing.auto import SPLIT, StepTimes

LENGTHS = 4
"""Prompts of so many lengths, each twice as long as the one before."""
SHORTEST_LONGEST = SALT_TOKENS << (LENGTHS - 1)
REPEATS = 3
ALONE_OUTPUT, TOGETHER_OUTPUT = 10, 24
TOGETHER = (4, 8)
"""So many requests at once."""
DEADLINE_S = 120.0


class CalibrationError(Exception):
    """What was measured gives no step times; the text says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step as a request saw it: `beside` other sequences decoded on the same worker."""

    beside: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was measured of one path: answers to lone requests, and steps of requests that ran together."""

    alone: Sequence[Outcome]
    together: Sequence[Step]


async def measure(
    client: Client,
    longest_prompt: int,
    salt: str,
    *,
    say: Callable[[str], None] = lambda text: None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Observed]:
    """Send everything and wait for it, paths in turns. `salt` keeps this run's prompts apart from all before.

    Raises:
        CalibrationError: a request failed.
    """
    alone: dict[str, list[Outcome]] = {path: [] for path in PATHS}
    together: dict[str, list[Step]] = {path: [] for path in PATHS}
    prompts = _prompts(salt)
    lengths = [longest_prompt >> place for place in reversed(range(LENGTHS))]
    for path in PATHS:
        # Whoever comes first finds engines and connections cold.
        _checked(path, await run_one_at_a_time(client, [prompts(longest_prompt, 2)], path=path, deadline_s=DEADLINE_S, now=now))
    for repeat, length, path in itertools.product(range(REPEATS), lengths, PATHS):
        say(f"alone, {path}, {length} tokens, {repeat + 1} of {REPEATS}")
        request = prompts(length, ALONE_OUTPUT)
        found = await run_one_at_a_time(client, [request], path=path, deadline_s=DEADLINE_S, now=now)
        alone[path] += _checked(path, found)
    for repeat, count, path in itertools.product(range(REPEATS), TOGETHER, PATHS):
        say(f"{count} at once, {path}, {repeat + 1} of {REPEATS}")
        sendings = [Sending(index, 0.0, prompts(lengths[0], TOGETHER_OUTPUT)) for index in range(count)]
        _, found = await send(client, sendings, path, DEADLINE_S, now=now)
        together[path] += steps_together(_checked(path, found))
    return {path: Observed(alone=alone[path], together=together[path]) for path in PATHS}


def steps_together(outcomes: Sequence[Outcome]) -> list[Step]:
    """The mean step of each request while all of them decoded; nothing where they never did."""
    began_s = max(outcome.ttft_s or 0.0 for outcome in outcomes)
    ended_s = min(outcome.e2e_s or 0.0 for outcome in outcomes)
    workers = Counter(_decoded_by(outcome) for outcome in outcomes)
    found = []
    for outcome in outcomes:
        ends = list(itertools.accumulate(outcome.gaps_s, initial=outcome.ttft_s or 0.0))
        within = [b - a for a, b in itertools.pairwise(ends) if a >= began_s and b <= ended_s]
        if within:
            found.append(Step(workers[_decoded_by(outcome)] - 1, statistics.fmean(within)))
    return found


def fit(observed: Mapping[str, Observed], chunk_tokens: int) -> dict[str, StepTimes]:
    """Each path's step times. `chunk_tokens` of prompts are computed in one step at most; 0: all in one.

    Raises:
        CalibrationError: nothing grows with the prompt, or no decode step was seen.
    """
    return {path: _fit(path, seen, chunk_tokens) for path, seen in observed.items()}


def _fit(path: str, seen: Observed, chunk_tokens: int) -> StepTimes:
    # The first gap holds the hand-over.
    lone = [gap for outcome in seen.alone for gap in outcome.gaps_s[1:]]
    if not lone:
        raise CalibrationError(f"{path}: no decode step was seen")
    alone_s = statistics.median(lone)
    step_s, running_s = _line([(0, alone_s), *((step.beside, step.seconds) for step in seen.together)])
    if step_s <= 0:
        raise CalibrationError(f"{path}: decode steps take no time of their own; measure again on a quiet machine")
    between_s = max(0.0, step_s - running_s)

    def computing_s(outcome: Outcome) -> float:
        steps = -(-outcome.prompt_tokens // chunk_tokens) if chunk_tokens else 1
        return (outcome.ttft_s or 0.0) - between_s * (steps - 1)

    first_token_s, prompt_token_s = _line([(outcome.prompt_tokens, computing_s(outcome)) for outcome in seen.alone])
    if prompt_token_s <= 0:
        raise CalibrationError(f"{path}: TTFT does not grow with the prompt; longer prompts or a quiet machine would show it")
    handover_s = handover_token_s = 0.0
    if path == SPLIT:
        handover_s, handover_token_s = _line([(outcome.prompt_tokens, outcome.gaps_s[0] - alone_s) for outcome in seen.alone])
    return StepTimes(
        first_token_s=first_token_s,
        prompt_token_s=prompt_token_s,
        step_s=step_s,
        running_s=running_s,
        handover_s=handover_s,
        handover_token_s=handover_token_s,
        chunk_tokens=chunk_tokens,
    )


def _line(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Fixed part and slope, neither below 0, by least squares over the medians at each place: one request that stood still
    moves no line."""
    by_place: dict[int, list[float]] = {}
    for place, value in points:
        by_place.setdefault(place, []).append(value)
    rows = np.array([[1.0, place] for place in by_place])
    middles = np.array([statistics.median(values) for values in by_place.values()])
    (fixed, slope), _ = optimize.nnls(rows, middles)
    return float(fixed), float(slope)


def _decoded_by(outcome: Outcome) -> str:
    return str((outcome.ledger or {}).get("decode_worker", ""))


def _checked(path: str, outcomes: list[Outcome]) -> list[Outcome]:
    for outcome in outcomes:
        if outcome.failure:
            raise CalibrationError(f"{path}: {outcome.failure}")
    return outcomes


def _prompts(salt: str) -> Callable[[int, int], PlannedRequest]:
    """Requests of given lengths, no two with a beginning in common."""
    numbers = itertools.count()

    def one(prompt_tokens: int, output_tokens: int) -> PlannedRequest:
        number = next(numbers)
        prompt, output = (prompt_tokens, prompt_tokens), (output_tokens, output_tokens)
        made = make(WorkloadSpec(seed=number, requests=1, prompt_tokens=prompt, output_tokens=output))
        return made.salted(f"{salt}/{number}").requests[0]

    return one
