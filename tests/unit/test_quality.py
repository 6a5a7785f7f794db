"""The question set, divergences, near-ties and the quality gate, on planted answers."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.compare.quality.client import Answer
from coordinator.compare.quality.divergence import Deltas, decoded, forced, summarise
from coordinator.compare.quality.gate import Paired, judge
from coordinator.compare.quality.intervals import drop_interval, mcnemar_p, questions_needed
from coordinator.compare.quality.limits import QualityGate, QualityVerdict
from coordinator.compare.quality.parity import first_divergence, floor_of, gap_noise, top_two_gap
from coordinator.compare.quality.questions import Question, QuestionSet, load, parse

pytestmark = pytest.mark.timeout(30)

DIGEST = "3019a09a7ff429aadc43b5dfce7b3312d507f00cb32786e64228b77fbed3e833"
Row = list[tuple[int, float, int]]


class TestQuestions:
    def test_the_set_is_the_one_that_scores_are_of(self) -> None:
        """A changed question is another set: its version rises with this digest."""
        found = load()
        assert (found.version, found.digest) == (1, DIGEST)
        assert {kind: len([q for q in found.questions if q.kind == kind]) for kind in found.kinds} == {
            "recall": 24,
            "arithmetic": 24,
            "extraction": 24,
            "tool_call": 24,
        }

    def test_every_prompt_is_another_and_the_right_answer_is_right(self) -> None:
        found = load()
        assert len({question.prompt for question in found.questions}) == len(found.questions)
        for question in found.questions:
            assert found.is_right(question, f" {question.answer}"), question.id
            assert "{ask}" not in question.prompt
            assert "{lines}" not in question.prompt
            assert question.reference == f"{question.prompt} {question.answer}\n"

    def test_arithmetic_is_right(self) -> None:
        for question in (q for q in load().questions if q.kind == "arithmetic"):
            left, operator, right = question.prompt.splitlines()[-1].removesuffix(" =").split()
            true = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[operator]
            assert question.answer == str(true)

    def test_what_is_to_be_extracted_is_there_once(self) -> None:
        lengths = []
        for question in (q for q in load().questions if q.kind == "extraction"):
            shelf = question.prompt.splitlines()[-1].removesuffix(" holds")
            assert question.prompt.count(f"{shelf} holds {question.answer},") == 1
            assert question.prompt.count(question.answer) == 1
            lengths.append(len(question.prompt))
        assert (min(lengths), max(lengths)) > (900, 4500), "from a few hundred to more than a thousand tokens"

    def test_a_tool_call_is_judged_as_json(self) -> None:
        found = load()
        question = next(q for q in found.questions if '"on": true' in q.answer)
        swapped = json.dumps(dict(reversed(json.loads(question.answer).items())))
        assert found.is_right(question, swapped), "the order of keys means nothing"
        other = question.answer.replace("true", "false")
        assert found.is_well_formed(other)
        assert not found.is_right(question, other)
        for broken in (
            "",
            "{",
            "[]",
            "7",
            '{"tool": ["set_light"]}',
            question.answer.replace("true", "1"),
            question.answer + " ok",
        ):
            assert not found.is_well_formed(broken), broken
            assert not found.is_right(question, broken)
        extra = question.answer.replace('"on"', '"dim": 3, "on"')
        assert not found.is_well_formed(extra)

    @pytest.mark.parametrize(
        ("text", "right"),
        [
            (" cold", True),
            ("Cold.", True),
            ("cold\nQuestion:", True),
            ("cold, of course", True),
            ("", False),
            ("cold water", False),
            ("not cold", False),
        ],
    )
    def test_text_is_an_exact_match(self, text: str, right: bool) -> None:
        question = Question(id="q", kind="recall", prompt="", answer="cold", max_tokens=1)
        assert load().is_right(question, text) is right

    def test_fewer_are_spread_and_keep_the_digest(self) -> None:
        few = load().first(5)
        assert len({q.answer.partition(",")[0] for q in few.questions if q.kind == "tool_call"}) == 3, "every tool"
        assert len(few.questions) == 20
        assert few.digest == load().digest
        assert load().first(1000).questions == load().questions

    def test_two_questions_of_one_id_are_refused(self) -> None:
        kinds = {"recall": {"max_tokens": 1, "head": "{ask}"}}
        row = {"id": "a", "kind": "recall", "ask": "", "answer": ""}
        with pytest.raises(ValueError, match="one id"):
            parse(json.dumps({"version": 1, "kinds": kinds, "tool_schemas": {}, "lines": [], "questions": [row, row]}))


def rows(tokens: Sequence[int], logprobs: Sequence[float], runner_up: float = -5.0) -> list[Row]:
    return [[(token, logprob, 1), (token + 1, runner_up, 2)] for token, logprob in zip(tokens, logprobs, strict=True)]


def said(tokens: Sequence[int], logprobs: list[Row]) -> Answer:
    return Answer(token_ids=tuple(tokens), text="", logprobs=logprobs)


class TestDivergence:
    def test_forced_compares_every_position_but_the_first(self) -> None:
        reference = [[], *rows([5, 6, 7], [-0.5, -1.0, -0.25])]
        other = [[], *rows([5, 6, 7], [-0.5, -1.5, -0.75])]
        assert forced(reference, other) == Deltas((0.0, 0.5, 0.5), 3)

    def test_the_most_probable_is_compared_not_the_one_that_stands_first(self) -> None:
        reference = [[(9, -3.0, 2), (4, -0.1, 1)]]
        other = [[(9, -2.0, 1), (4, -2.5, 2)]]
        assert forced(reference, other) == Deltas((1.0,), 0)

    def test_other_tokens_are_refused(self) -> None:
        with pytest.raises(ValueError, match="tokenizers differ"):
            forced([[], *rows([5], [-1.0])], [[], *rows([6], [-1.0])])

    def test_decoded_ends_with_the_first_divergence(self) -> None:
        reference = said([1, 5, 9], rows([1, 5, 9], [-0.5, -0.5, -0.5]))
        other = said([1, 6, 7], [rows([1], [-0.75])[0], [(6, -0.7, 1), (5, -1.0, 2)], rows([7], [-9.0])[0]])
        assert decoded(reference, other) == Deltas((0.25, 0.5), 1)

    def test_a_token_that_is_no_candidate_is_bounded_from_below(self) -> None:
        found = decoded(said([3], rows([3], [-0.5])), said([8], rows([8], [-0.1], runner_up=-4.0)))
        assert found == Deltas((3.5,), 0, 1)

    def test_the_impossible_is_far_and_finite(self) -> None:
        infinite = -math.inf
        assert forced(rows([3], [-0.5]), rows([3], [infinite])) == Deltas((1000.0,), 0)
        assert forced([[(3, infinite, 9), (4, 0.0, 1)]], [[(3, infinite, 9), (4, 0.0, 1)]]) == Deltas((0.0,), 1)

    def test_figures_are_over_tokens_and_bounds_over_questions(self) -> None:
        draw = random.Random(4)
        floor = [Deltas(tuple(draw.random() * 0.01 for _ in range(40)), 40) for _ in range(30)]
        arm = [Deltas(tuple(nats + 0.1 for nats in row.nats), 39) for row in floor]
        found = summarise(arm, floor)
        assert (found.questions, found.tokens) == (30, 1200)
        assert found.excess == pytest.approx(0.1)
        assert found.agreement == pytest.approx(39 / 40)
        assert found.excess_low is not None
        assert found.excess_high is not None
        assert found.excess_low <= 0.1 + 1e-9
        assert found.excess_high >= 0.1 - 1e-9
        everything = sorted(nats for row in arm for nats in row.nats)
        assert found.p99 == everything[math.ceil(0.99 * 1200) - 1]

    def test_agreement_never_seen_broken_is_still_not_certain(self) -> None:
        same = [Deltas((0.0,) * 50, 50)] * 10
        found = summarise(same, same)
        assert found.agreement == found.agreement_high == 1.0
        assert found.agreement_low == pytest.approx(0.025 ** (1 / 10))

    def test_nothing_to_compare_has_no_figures(self) -> None:
        assert summarise([Deltas((), 0)]).mean is None
        one = summarise([Deltas((0.5,), 1)], [Deltas((0.0,), 1)])
        assert (one.mean, one.excess_low, one.agreement_low) == (0.5, None, None)
        with pytest.raises(ValueError, match="other questions"):
            summarise([], [Deltas((), 0)])


class TestNearTies:
    def test_the_gap_is_the_references(self) -> None:
        reference = said([1, 5], [rows([1], [-0.1])[0], [(5, -0.70, 1), (6, -0.72, 2)]])
        other = said([1, 6], [rows([1], [-0.1])[0], [(6, -0.69, 1), (5, -0.71, 2)]])
        assert first_divergence(other, reference) == 1
        assert top_two_gap(reference, 1) == pytest.approx(0.02)
        assert gap_noise(other, reference) == pytest.approx(0.04)
        assert floor_of(other, reference) == pytest.approx(0.04)

    def test_a_floor_is_no_less_than_the_gap_at_which_it_parted(self) -> None:
        reference = said([5], [[(5, -0.7, 1), (6, -1.0, 2)]])
        assert floor_of(said([6], [[(6, -0.7, 1), (8, -0.9, 2)]]), reference) == pytest.approx(0.3)

    def test_equal_answers_have_no_floor(self) -> None:
        answer = said([1, 2], rows([1, 2], [-0.5, -0.5]))
        assert first_divergence(answer, answer) is None
        assert floor_of(answer, answer) == 0.0

    def test_an_answer_that_ends_early_is_compared_as_far_as_it_goes(self) -> None:
        whole = said([1, 2], rows([1, 2], [-0.5, -0.5]))
        part = said([1], rows([1], [-0.5]))
        assert floor_of(part, whole) == floor_of(whole, part) == 0.0


def pair(both: int, only_baseline: int, only_arm: int, neither: int) -> Paired:
    asked = both + only_baseline + only_arm + neither
    low, high = drop_interval(only_baseline, only_arm, asked)
    return Paired(
        both_right=both,
        only_baseline=only_baseline,
        only_arm=only_arm,
        both_wrong=neither,
        drop=(only_baseline - only_arm) / asked,
        low=low,
        high=high,
        mcnemar_p=mcnemar_p(only_baseline, only_arm),
    )


SAME = [Deltas((0.0,) * 30, 30)] * 40
GATE = QualityGate()


def verdict(
    paired: Paired | None, arm: Sequence[Deltas] = SAME, floor: Sequence[Deltas] = SAME, unanswered: int = 0
) -> tuple[str, str]:
    _, found, why = judge(GATE, paired, [("read", summarise(arm, floor), summarise(floor))], unanswered=unanswered)
    return found, why


class TestGate:
    def test_an_equal_arm_passes(self) -> None:
        assert verdict(pair(60, 0, 0, 36))[0] == QualityVerdict.PASS

    def test_an_arm_that_answers_worse_fails_though_its_tokens_agree(self) -> None:
        found, why = verdict(pair(30, 30, 0, 36))
        assert found == QualityVerdict.FAIL
        assert "score: lost +31.2% of 96 questions" in why

    def test_a_few_lost_answers_decide_nothing(self) -> None:
        assert verdict(pair(54, 6, 2, 34))[0] == QualityVerdict.UNDECIDED

    def test_few_questions_say_how_many_it_takes(self) -> None:
        found, why = verdict(pair(12, 0, 0, 8))
        assert found == QualityVerdict.UNDECIDED
        assert "73 questions would settle it" in why

    def test_a_baseline_that_knows_nothing_shows_no_drop(self) -> None:
        found, why = verdict(pair(2, 0, 0, 94))
        assert found == QualityVerdict.UNDECIDED
        assert "too few for a drop to show" in why

    def test_perturbed_logits_fail_though_the_answers_are_right(self) -> None:
        found, why = verdict(pair(60, 0, 0, 36), [Deltas((0.2,) * 30, 30)] * 40)
        assert found == QualityVerdict.FAIL
        assert "read: mean |delta| 0.2000 nats" in why

    def test_a_tail_fails_where_the_mean_does_not(self) -> None:
        found, why = verdict(pair(60, 0, 0, 36), [Deltas((0.0,) * 29 + (1.4,), 30)] * 40)
        assert found == QualityVerdict.FAIL
        assert "p99 |delta| 1.4000" in why
        assert "mean" not in why

    def test_other_first_choices_fail(self) -> None:
        found, why = verdict(pair(60, 0, 0, 36), [Deltas((0.0,) * 30, 24)] * 40)
        assert found == QualityVerdict.FAIL
        assert "top-1 agreement 80.00%" in why

    def test_the_floor_is_taken_off_the_mean(self) -> None:
        noisy = [Deltas((0.04,) * 30, 30)] * 40
        assert verdict(pair(60, 0, 0, 36), [Deltas((0.07,) * 30, 30)] * 40, noisy)[0] == QualityVerdict.PASS
        assert verdict(pair(60, 0, 0, 36), [Deltas((0.07,) * 30, 30)] * 40, SAME)[0] == QualityVerdict.FAIL

    @pytest.mark.parametrize(
        "floor", [[Deltas((0.06,) * 30, 30)] * 40, [Deltas((0.0,) * 29 + (1.1,), 30)] * 40, [Deltas((0.0,) * 30, 20)] * 40]
    )
    def test_a_rig_noisier_than_the_limit_decides_nothing(self, floor: list[Deltas]) -> None:
        found, why = verdict(pair(60, 0, 0, 36), floor, floor)
        assert found == QualityVerdict.UNDECIDED
        assert "the rig is noisier than the limit" in why

    def test_unanswered_questions_keep_an_arm_from_passing(self) -> None:
        found, why = verdict(pair(60, 0, 0, 35), unanswered=1)
        assert found == QualityVerdict.UNDECIDED
        assert why == "1 requests that the baseline answered failed in this arm"
        assert verdict(None, [], [])[0] == QualityVerdict.UNDECIDED

    def test_a_failure_outweighs_what_is_undecided(self) -> None:
        assert verdict(pair(10, 10, 0, 0), unanswered=4)[0] == QualityVerdict.FAIL

    @pytest.mark.parametrize(
        "limit",
        [{"max_score_drop": 0.0}, {"min_top1_agreement": 1.0}, {"max_mean_divergence": 0.0}, {"max_p99_divergence": -1.0}],
    )
    def test_limits_that_nothing_can_keep_are_refused(self, limit: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=r"divergences|between"):
            dataclasses.replace(GATE, **limit)


def test_a_set_is_a_value() -> None:
    assert isinstance(load(), QuestionSet)
    assert load() is load()


def test_the_guide_says_the_limits_and_the_numbers() -> None:
    guide = " ".join((Path(__file__).resolve().parents[2] / "docs" / "guide-researchers.md").read_text().split())
    gate, found = QualityGate(), load()
    for said in (
        f"{len(found.questions)} fixed questions",
        f"at most {gate.max_score_drop:.0%} of the questions lost, a mean of {gate.max_mean_divergence:g} nats above the floor, "
        f"a p99 of {gate.max_p99_divergence:g} nat, the same first choice in at least {gate.min_top1_agreement:.0%}",
        f"it takes {questions_needed(gate.max_score_drop)} questions to bound the loss at {gate.max_score_drop:.0%}",
    ):
        assert said in guide
