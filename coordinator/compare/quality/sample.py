"""Token parity sampled during a run: arms that must not change numerics give the baseline's tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.compare.load import RequestFailedError
from coordinator.compare.quality.client import Answer, Arm, Ask, Client
from coordinator.compare.quality.measure import Prepare, QualityError
from coordinator.compare.quality.parity import CLEAR_GAP, first_divergence, floor_of, top_two_gap
from coordinator.compare.quality.questions import load

OUTPUT_TOKENS = 16
CANDIDATES = 5
LINES = (2, 40)
"""Of the question set's list, in each prompt: about 40 to 800 tokens."""

EQUAL, NEAR_TIES, DIFFERS, UNDECIDED = "equal", "near_ties", "differs", "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmParity:
    """One arm. Divergences are counted one at a time and under batching; `worst_gap` is the largest gap, in nats, between the
    baseline's two best candidates at a divergence, 0 without one."""

    arm: str
    asked: int
    divergences: int
    batched: int
    batched_divergences: int
    worst_gap: float
    verdict: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySample:
    """`floor` and `batched_floor` are the baseline against itself, in nats: one at a time, and batched against one at a time.

    `verdict` is the worst of the arms': "differs", "undecided", "near_ties", "equal".
    """

    seed: int
    requests: int
    floor: float
    batched_floor: float
    arms: list[ArmParity]

    @property
    def verdict(self) -> str:
        found = {arm.verdict for arm in self.arms}
        return next((verdict for verdict in (DIFFERS, UNDECIDED, NEAR_TIES) if verdict in found), EQUAL)

    def as_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


async def sample_parity(
    client: Client, arms: Sequence[Arm], seed: int, requests: int, *, prepare: Prepare | None = None
) -> ParitySample:
    """A few greedy prompts through every arm one at a time, and once more all at once. The first arm is the baseline.

    `prepare` is awaited before each turn of an arm; it must empty the prefix caches, or an arm that shares workers with
    another finds that one's KV and moves none of its own. Prompts are drawn by `seed` and begin alike with no other.

    Raises:
        QualityError: no two arms, no requests, or a baseline that does not answer.
    """
    if len(arms) < 2 or requests < 1:
        raise QualityError("parity needs a baseline, another arm and a request")
    asks = prompts(seed, requests)

    async def turn(arm: Arm, *, together: bool) -> list[Answer | str]:
        if prepare is not None:
            await prepare(arm)
        if together:
            return list(await asyncio.gather(*(_one(client, ask, arm) for ask in asks)))
        return [await _one(client, ask, arm) for ask in asks]

    reference = _all(arms[0], await turn(arms[0], together=False))
    batched_reference = _all(arms[0], await turn(arms[0], together=True))
    found = [(arm, await turn(arm, together=False), await turn(arm, together=True)) for arm in arms[1:]]
    repeated = _all(arms[0], await turn(arms[0], together=False))
    floor = _floor(repeated, reference)
    # A batch of one more time: batches are put together by chance, and one alone shows too little of it.
    again = _all(arms[0], await turn(arms[0], together=True))
    batched_floor = max(floor, _floor(batched_reference, reference), _floor(again, reference))
    steady = all(first_divergence(a, b) is None for a, b in zip(repeated, reference, strict=True))
    judged = [_judge(arm, single, batch, reference, None if steady else floor, batched_floor) for arm, single, batch in found]
    return ParitySample(seed=seed, requests=requests, floor=floor, batched_floor=batched_floor, arms=judged)


def prompts(seed: int, count: int) -> list[Ask]:
    """Lists of several lengths, from the first word on unlike any other seed's or number's."""
    lines, asks = load().lines, []
    for number in range(count):
        draw = random.Random(f"parity/{seed}/{number}")
        # The first of them is long and the second short, so that even two cover both.
        span = LINES[1] if number == 0 else LINES[0] if number == 1 else draw.randint(*LINES)
        text = "\n".join([f"{draw.randrange(10**9):09} is the number of this list.", *draw.sample(lines, span), "Shelf"])
        asks.append(Ask(text=text, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=CANDIDATES))
    return asks


async def _one(client: Client, ask: Ask, arm: Arm) -> Answer | str:
    """The answer, or why there is none."""
    try:
        answer = await client.ask(ask, arm)
    except RequestFailedError as error:
        return str(error)
    return "decode computed the prompt itself" if answer.recomputed else answer


def _all(arm: Arm, answers: Sequence[Answer | str]) -> list[Answer]:
    for answer in answers:
        if isinstance(answer, str):
            raise QualityError(f"{arm.name}, the baseline, does not answer: {answer}")
    return [answer for answer in answers if isinstance(answer, Answer)]


def _floor(answers: Sequence[Answer], reference: Sequence[Answer]) -> float:
    return max(floor_of(answer, wanted) for answer, wanted in zip(answers, reference, strict=True))


def _judge(
    arm: Arm,
    single: Sequence[Answer | str],
    batch: Sequence[Answer | str],
    reference: Sequence[Answer],
    single_floor: float | None,
    batched_floor: float,
) -> ArmParity:
    """`single_floor` is None where the baseline repeats itself: then one request at a time may not part at all."""
    alone, together = _gaps(single, reference), _gaps(batch, reference)
    failures = [answer for answer in (*single, *batch) if isinstance(answer, str)]
    verdict, why = EQUAL, f"{len(single)} prompts one at a time and {len(batch)} at once gave the baseline's tokens"
    if any(single_floor is None or gap > single_floor for gap in alone):
        verdict = DIFFERS
        why = f"{len(alone)} of {len(single)} prompts, asked one at a time, gave other tokens than the baseline"
    elif any(gap > batched_floor for gap in together):
        verdict = DIFFERS
        why = f"a batched answer parts {max(together):.3f} nats from a tie; the baseline's own floor is {batched_floor:.3f}"
    elif failures:
        verdict, why = UNDECIDED, f"{len(failures)} of {len(single) + len(batch)} requests failed: {failures[0]}"
    elif (alone or together) and batched_floor > CLEAR_GAP:
        verdict, why = UNDECIDED, f"the baseline parts from itself where the choice is clear ({batched_floor:.3f} nats)"
    elif alone or together:
        verdict, why = NEAR_TIES, f"{len(alone) + len(together)} answers part from the baseline's, all within its own floor"
    return ArmParity(
        arm=arm.name,
        asked=len(single),
        divergences=len(alone),
        batched=len(batch),
        batched_divergences=len(together),
        worst_gap=max([0.0, *alone, *together]),
        verdict=verdict,
        why=why,
    )


def _gaps(answers: Sequence[Answer | str], reference: Sequence[Answer]) -> list[float]:
    """The reference's gap at the first divergence of each answer that has one; a shorter answer parts where it ends."""
    gaps = []
    for answer, wanted in zip(answers, reference, strict=True):
        if isinstance(answer, str):
            continue
        position = first_divergence(answer, wanted)
        if position is not None:
            gaps.append(top_two_gap(wanted, position))
        elif len(answer.token_ids) != len(wanted.token_ids):
            gaps.append(float(CLEAR_GAP * 1000))
    return gaps
