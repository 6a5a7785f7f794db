"""Path `auto` over a router: loads of both paths, exploration by id, and what a gateway remembers of its legs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.auto import (
    COLOCATED,
    PATHS,
    SPLIT,
    AutoPath,
    AutoSettings,
    Neighbour,
    Objective,
    PathLoad,
    StepTimes,
    Times,
    Work,
)
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import PairRoute, SoloGoal, SoloRoute
from coordinator.routing.path_choice import PathChooser, draw_of
from coordinator.routing.phases import NEIGHBOURS, WINDOW_S, Answer, PhaseBook
from coordinator.routing.policies import Ask
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerState, WorkerView
from tests.support.views import worker_view

TIMES = {
    SPLIT: StepTimes(first_token_s=0.01, prompt_token_s=1e-3, step_s=0.01, running_s=1e-3, handover_s=0.05),
    COLOCATED: StepTimes(first_token_s=0.01, prompt_token_s=1e-3, step_s=0.01, running_s=1e-3),
}
OBJECTIVE = Objective(ttft_s=1.0, tpot_s=0.05)
P, D = worker_view("p"), worker_view("d", Role.DECODE)
ASK = Ask(tokens=100)


def chooser(*views: WorkerView, **settings: float) -> PathChooser:
    router = Router(RoutingSettings(), random.Random(1), transports=("ucx",))
    router.update(views or (P, D))
    return PathChooser(router, AutoPath(TIMES, AutoSettings(**{"explore_share": 0.0, **settings})))  # type: ignore[arg-type]


def decide(made: PathChooser, request_id: str = "r", max_tokens: int = 51, **options: object) -> str | None:
    found = made.decide(request_id, ASK, OBJECTIVE, max_tokens=max_tokens, now_s=1.0, **options)  # type: ignore[arg-type]
    return found.path if found is not None else None


def test_an_idle_system_computes_whole_and_a_busy_decode_worker_sends_prompts_away() -> None:
    made = chooser()
    assert decide(made) == COLOCATED
    for number in range(20):
        made.phases.prompt_sent(f"{number}", D.incarnation, 100, decodes=True)
        made.router.load.charge(D.incarnation, 100)
        made.phases.prompt_sent(f"p{number}", P.incarnation, 10, decodes=False)
        made.router.load.charge(P.incarnation, 200)
    decide(made)
    assert made.auto.log[-1].solo_role is Role.PREFILL, "the other has two seconds of prompts before it"
    for number in range(45):
        made.phases.decode_sent(f"d{number}", P.incarnation)
    assert decide(made) == SPLIT, "as a whole it would miss its TPOT there and its TTFT here"
    assert made.auto.log[-1].solo_role is None


def test_a_whole_request_goes_where_it_meets_its_objective_and_not_where_the_tokens_are_fewer() -> None:
    made = chooser()
    for number in range(4):
        # Four seconds of prompts wait at the prefill worker; ten short answers under way weigh more tokens at the other.
        made.phases.prompt_sent(f"p{number}", P.incarnation, 1000, decodes=False)
        made.router.load.charge(P.incarnation, 1000)
    for number in range(10):
        made.phases.decode_sent(f"d{number}", D.incarnation)
        made.router.load.charge(D.incarnation, 500)
    fewest = made.router.choose((SoloGoal(),), 1.0, ASK)
    assert isinstance(fewest, SoloRoute)
    assert fewest.worker == P
    assert decide(made) == COLOCATED
    decision = made.auto.log[-1]
    assert decision.solo_role is Role.DECODE
    assert decision.loads[COLOCATED].queued_tokens == 0
    assert decision.predicted[SPLIT].ttft_s > 4.0 > 1.0 > decision.predicted[COLOCATED].ttft_s


def test_of_two_places_that_add_no_miss_the_one_with_fewer_tokens_is_taken() -> None:
    made = chooser()
    made.phases.prompt_sent("a", D.incarnation, 200, decodes=True)
    made.router.load.charge(D.incarnation, 1)
    made.router.load.charge(P.incarnation, 2)
    decide(made)
    assert made.auto.log[-1].loads[COLOCATED].queued_tokens == 200, "a fifth of a second of prompts is no miss"


def test_only_what_can_be_taken_is_decided_on() -> None:
    assert decide(chooser(P)) == COLOCATED
    assert decide(chooser(worker_view("p", state=WorkerState.DRAINING))) is None
    assert decide(chooser(), pools=frozenset({"prefill"})) == COLOCATED
    assert decide(chooser(), pools=frozenset({"nobody"})) is None
    log = chooser()
    decide(log, transport="nixl")
    assert (log.auto.log[0].why, set(log.auto.log[0].loads)) == ("only_path", {COLOCATED})


@pytest.mark.parametrize("silent", [P, D])
def test_what_is_silent_is_not_predicted_with_while_another_is_not(silent: WorkerView) -> None:
    other = D if silent is P else P
    made = chooser(*(replace(each, silent=each is silent) for each in (P, D)), explore_share=1.0)
    for number in range(20):
        made.phases.prompt_sent(f"{number}", other.incarnation, 300, decodes=True)
        made.router.load.charge(other.incarnation, 300)
    assert decide(made) == COLOCATED
    decision = made.auto.log[-1]
    assert (decision.why, decision.solo_role, set(decision.loads)) == ("only_path", other.role, {COLOCATED})


def test_what_is_silent_is_predicted_with_where_nothing_else_is_there() -> None:
    made = chooser(replace(P, silent=True), replace(D, silent=True))
    decide(made)
    assert set(made.auto.log[-1].loads) == {SPLIT, COLOCATED}
    alone = chooser(replace(P, silent=True), D, replace(worker_view("c", Role.COLOCATED), silent=True))
    assert decide(alone) == COLOCATED
    assert alone.auto.log[-1].solo_role is Role.DECODE, "in whatever tier"


def test_whether_a_request_explores_is_told_by_its_id() -> None:
    made = chooser(explore_share=0.02)
    ids = [f"request-{number}" for number in range(5000)]
    explored = [each for each in ids if draw_of(each) < 0.02]
    assert 70 <= len(explored) <= 130
    for each in ids[:300] + explored[:3]:
        decide(made, each)
    assert [d.request_id for d in made.auto.log if d.why == "explored"] == [
        each for each in ids[:300] + explored[:3] if draw_of(each) < 0.02
    ]
    assert all(0 <= draw_of(each) < 1 for each in ids)


def test_answers_are_expected_as_long_as_they_were() -> None:
    made = chooser()
    for _ in range(400):
        decide(made, max_tokens=1000)
        made.answered(made.auto.log[-1], Times(0.1, 0.01), max_tokens=1000, output_tokens=20)
    decide(made, max_tokens=1000)
    assert made.auto.log[-1].work.output_tokens == 20
    decide(made, max_tokens=60)
    assert made.auto.log[-1].work.output_tokens == 60, "nothing is known of answers to such limits"


def test_a_preview_takes_nothing() -> None:
    made = chooser()
    for _ in range(50):
        decide(made)
    assert made.router.load.total_in_flight_tokens() == 0


# The book of phases -------------------------------------------------------------------------------------------------------


PAIR = PairRoute(prefill=P, decode=D, transport="ucx", expected_cached_tokens=16)
SOLO = SoloRoute(worker=D)


def test_a_prompt_waits_until_its_first_token_and_decodes_until_its_leg_is_over() -> None:
    book = PhaseBook()
    book.prompt_sent("a", P.incarnation, 300, decodes=False)
    book.prompt_sent("b", D.incarnation, 200, decodes=True)
    book.prepare_sent("a/d", D.incarnation)
    # Whoever waits for a prompt or for its KV is going to decode as well.
    assert book.load(PAIR, 0.0, 1.0) == PathLoad(queued_tokens=300, running=2, cached_tokens=16, decodes_apart=True)
    assert book.load(SOLO, 0.0, 1.0) == PathLoad(queued_tokens=200, running=2)
    book.computed("a", 1.0)
    book.over("a")
    book.over("a/d")
    book.decode_sent("c", D.incarnation)
    book.computed("b", 1.0)
    book.computed("b", 2.0)
    assert book.load(PAIR, 0.0, 1.0) == PathLoad(running=2, cached_tokens=16, decodes_apart=True)
    assert book.load(SOLO, 0.0, 1.0) == PathLoad(running=2, beside=2)
    book.over("b")
    book.over("b")
    book.over("c")
    assert book.idle


def test_neighbours_have_what_is_left_of_their_time() -> None:
    book = PhaseBook()
    whole, handed = Answer(tokens=11, tpot_s=0.05), Answer(tokens=21, tpot_s=0.05)
    book.prompt_sent("a", D.incarnation, 200, decodes=True, answer=whole)
    book.prompt_sent("b", P.incarnation, 300, decodes=False)
    book.prepare_sent("b/d", D.incarnation, handed)
    assert book.load(SOLO, 0.0, 1.0).neighbours == (
        Neighbour(10, pytest.approx(0.5), started=False),
        Neighbour(20, pytest.approx(1.0), started=False),
    )
    book.computed("a", 2.0)
    whole.came(2.0, 1)
    whole.came(2.1, 3)
    handed.came(2.0, 1)
    book.over("b")
    book.over("b/d")
    book.decode_sent("b/d2", D.incarnation, handed)
    # Seven are left of the first and have 0.5 s from 2.0 on.
    expected = (Neighbour(7, pytest.approx(0.3)), Neighbour(20, pytest.approx(0.8)))
    assert book.load(SOLO, 0.0, 2.2).neighbours == expected
    assert book.load(PAIR, 0.0, 2.2).decode_neighbours == expected
    assert book.load(PAIR, 0.0, 2.2).neighbours == ()
    whole.came(2.3, 30)
    assert book.load(SOLO, 0.0, 2.3).neighbours[0].left_tokens == 1, "longer than expected, and not over"
    book.over("a")
    book.over("b/d2")
    assert book.load(SOLO, 0.0, 2.2).neighbours == ()
    assert book.idle


def test_of_many_neighbours_some_stand_for_all() -> None:
    book = PhaseBook()
    for number in range(300):
        book.decode_sent(f"{number}", D.incarnation, Answer(tokens=number + 2, tpot_s=0.05, got_tokens=1, first_s=0.0))
    found = book.load(SOLO, 0.0, 1.0).neighbours
    assert len(found) <= NEIGHBOURS
    assert sum(each.stands_for for each in found) == pytest.approx(300)
    assert max(each.left_tokens for each in found) > 250
    for number in range(300):
        book.over(f"{number}")
    assert book.idle


def test_an_answer_is_due_as_fast_as_its_own_objective() -> None:
    made = chooser()
    assert made.answer(Objective(ttft_s=1.0, tpot_s=0.02), max_tokens=30) == Answer(tokens=30, tpot_s=0.02)


def test_the_share_of_prompts_is_that_of_the_last_seconds() -> None:
    book = PhaseBook()
    now_s = 0.0
    for number in range(2000):
        book.prompt_sent(f"{number}", D.incarnation, 100, decodes=True)
        book.computed(f"{number}", now_s)
        book.over(f"{number}")
        now_s += 0.1
    # 1,000 tokens a second of 0.4 ms each.
    assert book.load(SOLO, 4e-4, now_s).prompt_share == pytest.approx(0.4, rel=0.05)
    assert book.load(PAIR, 4e-4, now_s).prompt_share == pytest.approx(0.4, rel=0.05)
    assert book.load(SOLO, 4e-4, now_s + 5 * WINDOW_S).prompt_share < 0.01
    book.forget(frozenset({P.incarnation}))
    assert book.load(SOLO, 4e-4, now_s).prompt_share == 0


def test_other_gateways_show_by_heartbeats() -> None:
    book = PhaseBook()
    book.prompt_sent("a", P.incarnation, 300, decodes=False)
    busy_p, busy_d = worker_view("p", waiting=3), worker_view("d", Role.DECODE, running=7)
    load = book.load(PairRoute(prefill=busy_p, decode=busy_d, transport="ucx"), 0.0, 1.0)
    assert load == PathLoad(queued_tokens=900, running=7, decodes_apart=True)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["prompt", "solo", "prepare", "decode", "computed", "over"]))))
def test_whatever_is_told_nothing_is_left_when_all_is_over(told: list[tuple[int, str]]) -> None:
    book, sent = PhaseBook(), set()
    for number, (attempt, what) in enumerate(told):
        name = f"{attempt}"
        if what == "computed":
            book.computed(name, float(number))
        elif what == "over":
            book.over(name)
        elif name not in sent:
            sent.add(name)
            if what == "decode":
                book.decode_sent(name, D.incarnation)
            elif what == "prepare":
                book.prepare_sent(name, D.incarnation)
            else:
                book.prompt_sent(name, D.incarnation, 10, decodes=what == "solo")
        load = book.load(SOLO, 0.0, float(number))
        assert min(load.queued_tokens, load.running) >= 0
    for attempt in range(6):
        book.over(f"{attempt}")
    assert book.idle


def test_a_seldom_taken_path_is_corrected_as_fast_as_the_other() -> None:
    auto = AutoPath(TIMES, AutoSettings(explore_share=0.02))
    rng = random.Random(5)
    loads = {path: PathLoad() for path in PATHS}
    for number in range(1500):
        decided = auto.decide(
            Work(prompt_tokens=100, output_tokens=50), OBJECTIVE, loads, draw=0.0 if number % 50 == 0 else 0.5, hint=COLOCATED
        )
        raw = auto.predicted(decided.path, loads[decided.path], decided.work)
        factor = auto.correction(decided.path)
        truth = 1.3 if decided.path == SPLIT else 1.0
        noise = rng.lognormvariate(0, 0.05)
        auto.measured(decided, Times(raw.ttft_s / factor.ttft_s * truth * noise, raw.tpot_s / factor.tpot_s * truth * noise))
    assert auto.seen(SPLIT) == 30
    assert auto.correction(SPLIT).ttft_s == pytest.approx(1.3, rel=0.08)
    assert auto.correction(COLOCATED).ttft_s == pytest.approx(1.0, rel=0.03)
