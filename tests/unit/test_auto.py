"""The choice of a path: predictions, hysteresis, exploration, and what is learned from mistakes."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
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
    disturbed,
    miss_chance,
    predict,
    waiting_behind,
)

TIMES = {
    SPLIT: StepTimes(
        first_token_s=0.02, prompt_token_s=1e-4, step_s=0.01, running_s=1e-4, handover_s=0.03, handover_token_s=1e-5
    ),
    COLOCATED: StepTimes(first_token_s=0.02, prompt_token_s=1e-4, step_s=0.01, running_s=1e-4),
}
OBJECTIVE = Objective(ttft_s=1.0, tpot_s=0.05)
IDLE = {path: PathLoad() for path in PATHS}
CALM = AutoSettings(explore_share=0.0)
WORK = Work(prompt_tokens=1000, output_tokens=101)


def crowded(share: float) -> dict[str, PathLoad]:
    """Prompts take this share of the colocated engine's time."""
    return {SPLIT: PathLoad(), COLOCATED: PathLoad(prompt_share=share)}


def test_predictions_are_a_queue_and_steps() -> None:
    load = PathLoad(queued_tokens=4000, running=10, prompt_share=0.5)
    assert predict(TIMES[COLOCATED], load, WORK) == Times(pytest.approx(0.52), pytest.approx(0.022))  # type: ignore[arg-type]
    assert predict(TIMES[SPLIT], PathLoad(), WORK).tpot_s == pytest.approx(0.01 + 0.04 / 100)
    assert math.isfinite(predict(TIMES[COLOCATED], PathLoad(prompt_share=1.0), WORK).tpot_s)


def test_decode_that_prompts_disturb_goes_apart() -> None:
    auto = AutoPath(TIMES, CALM)
    decided = auto.decide(WORK, OBJECTIVE, crowded(0.8), draw=0.5)
    assert (decided.path, decided.why) == (SPLIT, "predicted")
    short = Work(prompt_tokens=100, output_tokens=2)
    assert auto.decide(short, OBJECTIVE, IDLE, draw=0.5).path == COLOCATED, "nothing pays for the hand-over"


def test_a_prompt_in_chunks_waits_for_every_step_and_holds_up_no_step_by_more_than_a_chunk() -> None:
    times = replace(TIMES[COLOCATED], chunk_tokens=250)
    load = PathLoad(queued_tokens=500, running=10, beside=10, prompt_share=0.9)
    found = predict(times, load, WORK)
    # Six steps of 250 tokens: each has the sequences, five of them a step's own time again.
    assert found.ttft_s == pytest.approx(0.02 + 1500 * 1e-4 + 5 * (0.01 - 1e-4) + 6 * 10 * 1e-4)
    assert found.tpot_s == pytest.approx(0.01 + 10 * 1e-4 + 250 * 1e-4)


def test_a_request_does_not_take_a_path_on_which_it_spoils_others() -> None:
    """Alone it would be served well by either, and better colocated."""
    tight, prompt = Objective(ttft_s=10.0, tpot_s=0.0155), Work(prompt_tokens=1000, output_tokens=11)
    alone = {SPLIT: PathLoad(), COLOCATED: PathLoad(running=4)}
    assert AutoPath(TIMES, CALM).decide(prompt, tight, alone, draw=0.5).path == COLOCATED
    # Each of four has ten tokens to come, in half as much time again as they take when nobody disturbs them.
    beside = PathLoad(running=4, beside=4, neighbours=(Neighbour(10, 0.156),) * 4)
    decided = AutoPath(TIMES, CALM).decide(prompt, tight, {SPLIT: PathLoad(), COLOCATED: beside}, draw=0.5)
    assert decided.path == SPLIT
    assert decided.misses[COLOCATED].own < 0.2
    assert decided.misses[COLOCATED].others > 1.0
    assert decided.misses[SPLIT].others == 0
    assert not decided.loads[COLOCATED].neighbours, "what is remembered is small"


def test_neighbours_are_disturbed_for_as_long_as_they_are_there() -> None:
    times, work = replace(TIMES[COLOCATED], chunk_tokens=250), Work(prompt_tokens=1000, output_tokens=11)

    def by(*neighbours: Neighbour, **load: Any) -> float:
        return disturbed(times, PathLoad(beside=1, neighbours=neighbours, **load), work, 1.0, 0.1)

    # Four steps of 250 tokens, 25 ms each, are in the way of ten tokens of 10.1 ms.
    assert by(Neighbour(10, 0.15)) > 0.95
    assert by(Neighbour(10, 0.30)) < 0.05, "it can wait"
    assert by(Neighbour(10, 0.05)) < 0.05, "it misses without this one"
    assert by(Neighbour(2, 0.061)) > by(Neighbour(1, 0.061)), "the second of them is after it"
    assert by(Neighbour(10, 0.45), queued_tokens=2500) < 1e-6, "gone before the prompt's turn"
    assert by(Neighbour(10, 0.15, started=False), queued_tokens=2500) > 0.95, "begins just before it"
    assert by(Neighbour(10, 0.15, stands_for=3.0)) == pytest.approx(3 * by(Neighbour(10, 0.15)))
    apart = PathLoad(running=1, decodes_apart=True, decode_neighbours=(Neighbour(10, 0.1015),))
    # Each of ten steps takes a sequence more.
    assert 0.01 < disturbed(times, apart, work, 1.0, 0.1) < 0.1
    assert disturbed(times, replace(apart, decode_neighbours=()), work, 1.0, 0.1) == 0


def test_a_late_prompt_makes_more_late_the_busier_its_engine_is() -> None:
    times = TIMES[COLOCATED]
    assert waiting_behind(times, PathLoad(), 1.0) == 0
    assert waiting_behind(times, PathLoad(beside_share=0.5), 1.0) == pytest.approx(1.0)
    assert waiting_behind(times, PathLoad(beside_share=0.5), 1.5) == pytest.approx(3.0)
    assert waiting_behind(times, PathLoad(beside_share=2.0), 1.0) == pytest.approx(4.0), "no more than four"
    chunked = replace(times, chunk_tokens=100)
    assert waiting_behind(chunked, PathLoad(beside_share=0.3), 1.0) == pytest.approx(0.6 / 0.4), "a step's own time comes with it"


def test_a_request_that_is_late_anyway_leaves_the_queue_to_others() -> None:
    """It misses on either path, and is not worse off on the split one."""
    loads = {SPLIT: PathLoad(queued_tokens=12_000), COLOCATED: PathLoad(queued_tokens=13_000)}
    assert AutoPath(TIMES, CALM).decide(WORK, OBJECTIVE, loads, draw=0.5).path == SPLIT
    busy = {**loads, SPLIT: PathLoad(queued_tokens=12_000, beside_share=0.7)}
    decided = AutoPath(TIMES, CALM).decide(WORK, OBJECTIVE, busy, draw=0.5)
    assert (decided.path, decided.why) == (COLOCATED, "predicted")
    assert decided.misses[SPLIT].others > 1.5


@pytest.mark.parametrize(
    ("expected_s", "spread", "chance"), [(1.0, 0.1, 0.5), (0.9, 0.1, 0.146), (0.9, 0.5, 0.417), (9.0, 0.1, 1.0)]
)
def test_how_likely_a_limit_is_missed(expected_s: float, spread: float, chance: float) -> None:
    assert miss_chance(expected_s, 1.0, spread) == pytest.approx(chance, abs=1e-3)
    assert (miss_chance(expected_s, 0.0, spread), miss_chance(0.0, 1.0, spread)) == (1.0, 0.0)


def test_the_objective_that_is_further_from_being_met_decides() -> None:
    loads = {SPLIT: PathLoad(queued_tokens=8000), COLOCATED: PathLoad(prompt_share=0.7)}
    tight_ttft, tight_tpot = Objective(ttft_s=0.5, tpot_s=1.0), Objective(ttft_s=10.0, tpot_s=0.02)
    assert AutoPath(TIMES, CALM).decide(WORK, tight_ttft, loads, draw=0.5).path == COLOCATED
    assert AutoPath(TIMES, CALM).decide(WORK, tight_tpot, loads, draw=0.5).path == SPLIT


def test_requests_of_a_kind_stay_until_the_other_path_is_clearly_better() -> None:
    auto = AutoPath(TIMES, CALM)
    assert auto.decide(WORK, OBJECTIVE, crowded(0.8), draw=0.5).path == SPLIT
    easy = Objective(ttft_s=100.0, tpot_s=0.1)
    decided = auto.decide(WORK, easy, {SPLIT: PathLoad(prompt_share=0.05), COLOCATED: PathLoad()}, draw=0.5)
    assert (decided.path, decided.why) == (SPLIT, "held")
    decided = auto.decide(WORK, easy, {SPLIT: PathLoad(prompt_share=0.5), COLOCATED: PathLoad()}, draw=0.5)
    assert (decided.path, decided.why) == (COLOCATED, "predicted")


def test_a_miss_more_is_not_held_on_to() -> None:
    """The path that a kind was on may use little more of the objective: what that adds in misses counts."""
    auto, tight = AutoPath(TIMES, CALM), Objective(ttft_s=100.0, tpot_s=0.0104)
    assert auto.decide(WORK, OBJECTIVE, crowded(0.8), draw=0.5).path == SPLIT
    decided = auto.decide(WORK, tight, {SPLIT: PathLoad(prompt_share=0.05), COLOCATED: PathLoad()}, draw=0.5)
    assert (decided.path, decided.why) == (COLOCATED, "predicted")
    assert decided.predicted[SPLIT].tpot_s < 1.11 * decided.predicted[COLOCATED].tpot_s


def test_the_map_says_where_a_kind_begins_and_no_more() -> None:
    auto = AutoPath(TIMES, CALM)
    assert auto.decide(WORK, OBJECTIVE, IDLE, draw=0.5, hint=SPLIT).why == "held"
    busy = {SPLIT: PathLoad(queued_tokens=50_000), COLOCATED: PathLoad()}
    assert auto.decide(WORK, OBJECTIVE, busy, draw=0.5, hint=SPLIT).path == COLOCATED


def test_a_path_that_cannot_be_taken_is_not_explored() -> None:
    auto = AutoPath(TIMES, AutoSettings(explore_share=1.0))
    decided = auto.decide(WORK, OBJECTIVE, {SPLIT: PathLoad()}, draw=0.0)
    assert (decided.path, decided.why) == (SPLIT, "only_path")


def test_a_small_share_goes_the_other_way_and_changes_nothing_for_the_next() -> None:
    auto, rng = AutoPath(TIMES), random.Random(1)
    why = Counter(auto.decide(WORK, OBJECTIVE, crowded(0.5), draw=rng.random()).why for _ in range(5000))
    assert set(why) == {"predicted", "explored"}
    assert 70 <= why["explored"] <= 130


def test_exploration_waits_for_a_request_that_it_costs_little() -> None:
    """It is drawn for a tenth of the requests, of which every second would miss its objective on the other path."""
    auto, rng = AutoPath(TIMES, AutoSettings(explore_share=0.1)), random.Random(4)
    costly = {SPLIT: PathLoad(), COLOCATED: PathLoad(queued_tokens=50_000)}
    made: list[tuple[bool, str]] = []
    for number in range(2000):
        cheap = number % 2 == 0
        decided = auto.decide(WORK, OBJECTIVE, crowded(0.5) if cheap else costly, draw=rng.random())
        made.append((cheap, decided.why))
    explored = [cheap for cheap, why in made if why == "explored"]
    assert all(explored)
    assert 160 <= len(explored) <= 240


def test_an_exploration_that_always_costs_is_made_once_in_a_while() -> None:
    auto = AutoPath(TIMES, AutoSettings(explore_share=1.0))
    costly = {SPLIT: PathLoad(), COLOCATED: PathLoad(queued_tokens=50_000)}
    why = [auto.decide(WORK, OBJECTIVE, costly, draw=0.0).why for _ in range(44)]
    assert [number for number, each in enumerate(why) if each == "explored"] == [10, 21, 32, 43]


def test_how_much_is_missed_by_widens_what_is_expected() -> None:
    """Two gateways see the same mean, one of them scattered."""
    chances = []
    for spread in (0.02, 0.5):
        auto, rng = AutoPath(TIMES, CALM), random.Random(2)
        for _ in range(400):
            decided = auto.decide(WORK, OBJECTIVE, {SPLIT: PathLoad()}, draw=0.5)
            raw = predict(TIMES[SPLIT], PathLoad(), WORK)
            off = math.exp(rng.gauss(0, spread))
            auto.measured(decided, Times(raw.ttft_s * off, raw.tpot_s * off))
        half_used = {SPLIT: PathLoad(queued_tokens=5000)}
        chances.append(auto.decide(WORK, OBJECTIVE, half_used, draw=0.5).misses[SPLIT].own)
    assert chances[0] < 0.001
    assert 0.02 < chances[1] < 0.3


def test_what_was_lost_is_told_the_worst_first() -> None:
    auto = AutoPath(TIMES, CALM)
    fine, bad, worse = (auto.decide(WORK, OBJECTIVE, crowded(0.8), draw=0.5) for _ in range(3))
    auto.measured(fine, Times(0.1, 0.01))
    auto.measured(bad, Times(2.0, 0.01))
    auto.measured(worse, Times(3.0, 0.01))
    assert auto.lost() == [worse, bad]
    other = bad.predicted[COLOCATED].against(OBJECTIVE)
    assert bad.lost_by() == pytest.approx(2.0 - other)


def test_only_so_many_decisions_are_remembered() -> None:
    auto = AutoPath(TIMES, AutoSettings(decisions=10))
    for _ in range(50):
        auto.decide(WORK, OBJECTIVE, IDLE, draw=0.5)
    assert len(auto.log) == 10


@pytest.mark.parametrize("error", [0.8, 1.2])
@pytest.mark.parametrize("drift", [0.8, 1.25])
def test_a_calibration_that_is_off_and_drifts_is_corrected(error: float, drift: float) -> None:
    """The split path truly takes `error` times its calibration, from half-way on `drift` times that; nine in ten choices are
    within a tenth of the better path, once a drift has been seen."""
    rng = random.Random(3)
    auto = AutoPath(TIMES, AutoSettings(hysteresis=0.05))
    right = counted = 0
    for number in range(4000):
        factor = error * (drift if number >= 2000 else 1.0)
        truth = {SPLIT: scaled(TIMES[SPLIT], factor), COLOCATED: TIMES[COLOCATED]}
        prompt_tokens = rng.choice((200, 1000, 4000))
        work = Work(prompt_tokens=prompt_tokens, output_tokens=rng.choice((20, 200)))
        loads = {
            SPLIT: PathLoad(queued_tokens=rng.randrange(4000)),
            COLOCATED: PathLoad(queued_tokens=rng.randrange(4000), prompt_share=rng.random() * 0.8),
        }
        decided = auto.decide(work, OBJECTIVE, loads, draw=rng.random())
        real = {path: predict(truth[path], loads[path], work) for path in PATHS}
        auto.measured(decided, noisy(real[decided.path], rng))
        if decided.why == "explored" or number % 2000 < 300:
            continue
        counted += 1
        scores = {path: real[path].against(OBJECTIVE) for path in PATHS}
        right += scores[decided.path] <= 1.1 * min(scores.values())
    assert right >= 0.9 * counted


def scaled(times: StepTimes, factor: float) -> StepTimes:
    return replace(times, **{name: getattr(times, name) * factor for name in StepTimes.__slots__})


def noisy(times: Times, rng: random.Random) -> Times:
    return Times(times.ttft_s * math.exp(rng.gauss(0, 0.1)), times.tpot_s * math.exp(rng.gauss(0, 0.1)))


@settings(max_examples=100, deadline=None)
@given(
    draws=st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 10**6), st.integers(1, 10**4), st.floats(0, 1)), max_size=30),
    measured=st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), max_size=30),
)
def test_whatever_is_measured_a_decision_is_one_of_the_paths_and_finite(
    draws: list[tuple[float, int, int, float]], measured: list[tuple[float, float]]
) -> None:
    auto = AutoPath(TIMES)
    for number, (draw, prompt_tokens, output_tokens, share) in enumerate(draws):
        work = Work(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        decided = auto.decide(work, OBJECTIVE, crowded(share), draw=draw)
        assert decided.path in PATHS
        assert all(math.isfinite(t.ttft_s) and math.isfinite(t.tpot_s) for t in decided.predicted.values())
        if number < len(measured):
            auto.measured(decided, Times(*measured[number]))
