"""Asks the question set through every arm, and the baseline once more, and compares."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.compare.load import RequestFailedError
from coordinator.compare.quality.client import Answer, Arm, Ask, Client
from coordinator.compare.quality.divergence import Deltas, decoded, forced, summarise
from coordinator.compare.quality.gate import Paired, judge
from coordinator.compare.quality.intervals import drop_interval, mcnemar_p, share_interval
from coordinator.compare.quality.limits import QualityGate, QualityVerdict
from coordinator.compare.quality.questions import STOP, TOOL_CALL, Question, QuestionSet, load
from coordinator.compare.quality.report import ArmAnswers, ArmQuality, QualityReport, Score
from coordinator.compare.record import utc_now

CONCURRENCY = 4
CANDIDATES = 20
"""Per position: a gateway's default limit. A token outside of them has a bound instead of a difference."""
READS_PER_KIND = 10
"""Texts read whole. Reading uses no prefix cache, so it is not all of them; 40 that agree bound the agreement at 91 %."""
AGAIN = "again"

Prepare = Callable[[Arm], Awaitable[None]]
Say = Callable[[str, float], None]


class QualityError(Exception):
    """There is nothing to judge; the text says why."""


@dataclass(slots=True)
class _Pass:
    """Every question once through one arm, by question id."""

    arm: Arm
    answered: dict[str, Answer] = field(default_factory=dict)
    read: dict[str, Answer] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


async def measure(
    client: Client,
    arms: Sequence[Arm],
    *,
    gate: QualityGate | None = None,
    questions: QuestionSet | None = None,
    concurrency: int = CONCURRENCY,
    model: str = "",
    prepare: Prepare | None = None,
    say: Say = lambda text, share: None,
) -> QualityReport:
    """The first arm is the baseline. `prepare` is awaited before each pass: it makes the arm stand and its caches empty.

    The baseline's second pass comes last and asks in the opposite order, so that the floor holds drift and other batches.

    Raises:
        QualityError: no two arms, two of one name, or a baseline that answers nothing.
        RequestFailedError: never; failures are counted per arm.
    """
    if len(arms) < 2:
        raise QualityError("a comparison needs a baseline and another arm")
    if len({arm.name for arm in arms} | {AGAIN}) != len(arms) + 1:
        raise QualityError(f"every arm needs a name of its own, and none is called {AGAIN!r}")
    gate, asked = gate or QualityGate(), questions or load()
    began_s, started_at = time.monotonic(), utc_now()
    passes: list[_Pass] = []
    rounds = [*arms, arms[0]]
    for number, arm in enumerate(rounds):
        again = number == len(arms)
        say(f"{arm.name}{' again' if again else ''}", number / len(rounds))
        if prepare is not None:
            await prepare(arm)
        passes.append(await _ask_all(client, arm, asked, concurrency, backwards=again))
        if number == 0 and not passes[0].answered:
            raise QualityError(f"{arm.name} answers nothing: {passes[0].failures[0]}")
    baseline, *others, second = passes
    say("comparing", 1.0)
    floor_read, floor_decoded = _deltas(baseline, second)
    floor = _compare(gate, AGAIN, asked, baseline, second, floor_read, floor_decoded)
    notes = [] if prepare is not None else ["prefix caches were not reset between passes: the floor may be too low"]
    left_out = len(asked.questions) - len(baseline.answered)
    if left_out:
        notes.append(f"{left_out} questions had no answer from the baseline, and are left out: {baseline.failures[0]}")
    return QualityReport(
        model=model,
        baseline=arms[0].name,
        set_version=asked.version,
        set_digest=asked.digest,
        questions=len(baseline.answered),
        left_out=left_out,
        concurrency=concurrency,
        gate=gate,
        arms=[_answers(asked, found) for found in passes[:-1]],
        floor=floor,
        compared=[
            _held_to(floor, _compare(gate, found.arm.name, asked, baseline, found, floor_read, floor_decoded)) for found in others
        ],
        started_at=started_at,
        wall_s=time.monotonic() - began_s,
        notes=notes,
    )


async def _ask_all(client: Client, arm: Arm, asked: QuestionSet, concurrency: int, *, backwards: bool) -> _Pass:
    found = _Pass(arm)
    limit = asyncio.Semaphore(concurrency)

    async def one(question: Question, ask: Ask, into: dict[str, Answer]) -> None:
        async with limit:
            try:
                into[question.id] = await client.ask(ask, arm)
            except RequestFailedError as error:
                found.failures.append(f"{question.id}: {error}")

    wanted = [(question, _to_answer(question), found.answered) for question in asked.questions]
    wanted += [(question, _to_read(question), found.read) for question in asked.first(READS_PER_KIND).questions]
    async with asyncio.TaskGroup() as group:
        for question, ask, into in reversed(wanted) if backwards else wanted:
            group.create_task(one(question, ask, into))
    return found


def _to_answer(question: Question) -> Ask:
    return Ask(text=question.prompt, max_tokens=question.max_tokens, stop=STOP, logprobs=CANDIDATES)


def _to_read(question: Question) -> Ask:
    return Ask(text=question.reference, max_tokens=1, ignore_eos=True, prompt_logprobs=CANDIDATES)


Rows = Mapping[str, Deltas]
_NONE = Deltas((), 0)


def _deltas(baseline: _Pass, other: _Pass) -> tuple[Rows, Rows]:
    """Per question: of what both have read, and of what both have answered."""
    try:
        read = {
            id: forced(a.prompt_logprobs, other.read[id].prompt_logprobs) for id, a in baseline.read.items() if id in other.read
        }
    except ValueError as error:
        raise QualityError(f"{other.arm.name}: {error}") from error
    answered = {id: decoded(a, other.answered[id]) for id, a in baseline.answered.items() if id in other.answered}
    return read, answered


def _compare(
    gate: QualityGate,
    name: str,
    asked: QuestionSet,
    baseline: _Pass,
    other: _Pass,
    floor_read: Rows,
    floor_decoded: Rows,
) -> ArmQuality:
    own_read, own_decoded = _deltas(baseline, other)
    read, read_floor = _both(own_read, floor_read)
    greedy, greedy_floor = _both(own_decoded, floor_decoded)
    arm_read, arm_greedy = summarise(read, read_floor), summarise(greedy, greedy_floor)
    paired = _paired(asked, baseline, other)
    unanswered = len(baseline.answered.keys() - other.answered.keys()) + len(baseline.read.keys() - other.read.keys())
    checks, verdict, why = judge(
        gate,
        paired,
        [("read", arm_read, summarise(read_floor)), ("decoded", arm_greedy, summarise(greedy_floor))],
        unanswered=unanswered,
    )
    return ArmQuality(arm=name, paired=paired, read=arm_read, decoded=arm_greedy, checks=checks, verdict=verdict, why=why)


def _both(own: Rows, floor: Rows) -> tuple[list[Deltas], list[Deltas]]:
    ids = sorted(own)
    return [own[id] for id in ids], [floor.get(id, _NONE) for id in ids]


def _held_to(floor: ArmQuality, found: ArmQuality) -> ArmQuality:
    """A baseline that fails against itself leaves nothing to hold an arm to."""
    if floor.verdict is not QualityVerdict.FAIL:
        return found
    why = f"the baseline fails against itself: {floor.why}"
    return ArmQuality(
        arm=found.arm,
        paired=found.paired,
        read=found.read,
        decoded=found.decoded,
        checks=found.checks,
        verdict=QualityVerdict.UNDECIDED,
        why=why,
    )


def _paired(asked: QuestionSet, baseline: _Pass, other: _Pass) -> Paired | None:
    counts: Counter[tuple[bool, bool]] = Counter()
    for question in asked.questions:
        if question.id in baseline.answered and question.id in other.answered:
            first, second = (asked.is_right(question, found.answered[question.id].text) for found in (baseline, other))
            counts[first, second] += 1
    total = counts.total()
    if not total:
        return None
    only_baseline, only_arm = counts[True, False], counts[False, True]
    low, high = drop_interval(only_baseline, only_arm, total)
    return Paired(
        both_right=counts[True, True],
        only_baseline=only_baseline,
        only_arm=only_arm,
        both_wrong=counts[False, False],
        drop=(only_baseline - only_arm) / total,
        low=low,
        high=high,
        mcnemar_p=mcnemar_p(only_baseline, only_arm),
    )


def _answers(asked: QuestionSet, found: _Pass) -> ArmAnswers:
    answered = [question for question in asked.questions if question.id in found.answered]
    right = {question.id: asked.is_right(question, found.answered[question.id].text) for question in answered}
    scores = [_score("", list(right.values()))]
    scores += [_score(kind, [right[question.id] for question in answered if question.kind == kind]) for kind in asked.kinds]
    calls = [question for question in answered if question.kind == TOOL_CALL]
    if calls:
        scores.append(_score("tool_format", [asked.is_well_formed(found.answered[question.id].text) for question in calls]))
    return ArmAnswers(
        name=found.arm.name,
        path=found.arm.target.path,
        pools=list(found.arm.target.pools),
        transport=found.arm.target.transport,
        scores=scores,
        failed=len(found.failures),
        failures=found.failures[:5],
        recomputed=sum(answer.recomputed for answer in (*found.answered.values(), *found.read.values())),
        answers={id: answer.text for id, answer in found.answered.items()},
    )


def _score(kind: str, right: Sequence[bool]) -> Score:
    low, high = share_interval(sum(right), len(right))
    return Score(
        kind=kind, right=sum(right), asked=len(right), share=sum(right) / len(right) if right else None, low=low, high=high
    )
