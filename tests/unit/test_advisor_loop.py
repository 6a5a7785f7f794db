"""The advisor beside workers in virtual time: what it changes gains, noise does not make it flap, a wrong belief is undone."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from coordinator.pools.advisor_config import AdvisorSettings
from coordinator.routing.auto import Objective, StepTimes
from coordinator.routing.views import Role
from tests.support.phase_world import PhaseWorld, Traffic

GOAL = Objective(ttft_s=1.5, tpot_s=0.05)
TIMES = StepTimes(first_token_s=0.02, prompt_token_s=0.0002, step_s=0.02, running_s=0.0005)
LONG_PROMPTS = Traffic(rate_per_s=5.0, prompt_tokens=2400, output_tokens=60)
LONG_ANSWERS = Traffic(rate_per_s=5.0, prompt_tokens=300, output_tokens=500)
EVEN = Traffic(rate_per_s=4.0, prompt_tokens=1200, output_tokens=200)
ADVISOR = AdvisorSettings(enabled=True, apply=True, interval_s=10, window_s=60, dwell_s=300, horizon_s=1200)
HOUR_S = 3600.0


def shifting(now_s: float) -> Traffic:
    """Prompts are long for an hour, answers for the next."""
    return LONG_PROMPTS if int(now_s / HOUR_S) % 2 == 0 else LONG_ANSWERS


def world(traffic: object, seed: int, *, believed: StepTimes | None = None) -> PhaseWorld:
    return PhaseWorld(TIMES, GOAL, traffic, prefill=2, decode=2, seed=seed, believed=believed)  # type: ignore[arg-type]


@pytest.mark.parametrize("believed", [None, TIMES], ids=["measured", "model"])
def test_where_the_work_moves_between_the_phases_workers_follow_it_and_more_is_in_time(believed: StepTimes | None) -> None:
    fixed, moved = world(shifting, 1), world(shifting, 1, believed=believed)
    fixed.run(2 * HOUR_S, None)
    moved.run(2 * HOUR_S, ADVISOR)
    assert moved.came == fixed.came, "the same requests"
    assert moved.good / moved.came > fixed.good / fixed.came + 0.2, (moved.good, fixed.good, moved.came, moved.changes)
    assert [action for _, action in moved.changes].count("roll_back") == 0, moved.changes
    assert 2 <= len(moved.changes) <= 4, moved.changes


def noisy(seed: int) -> object:
    """Another rate and another mix each minute, around what every layout but the extremes serves well."""
    rng = random.Random(seed)
    minutes = [
        replace(
            EVEN,
            rate_per_s=EVEN.rate_per_s * math.exp(rng.gauss(0, 0.3)),
            prompt_tokens=round(EVEN.prompt_tokens * math.exp(rng.gauss(0, 0.4))),
            output_tokens=round(EVEN.output_tokens * math.exp(rng.gauss(0, 0.4))),
        )
        for _ in range(600)
    ]
    return lambda now_s: minutes[int(now_s / 60)]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("believed", [None, TIMES], ids=["measured", "model"])
def test_noise_does_not_make_it_flap_and_costs_nothing(believed: StepTimes | None, seed: int) -> None:
    fixed, moved = world(noisy(seed), seed), world(noisy(seed), seed, believed=believed)
    fixed.run(2 * HOUR_S, None)
    moved.run(2 * HOUR_S, ADVISOR)
    assert len(moved.changes) <= 2, moved.changes
    assert moved.good / moved.came > fixed.good / fixed.came - 0.02, (moved.good, fixed.good, moved.came, moved.changes)


def test_what_a_wrong_belief_has_made_worse_is_undone_and_not_tried_again_before_the_back_off() -> None:
    """Decode is believed to take a third of what it does: it takes a worker away that decode needs."""
    wrong = replace(TIMES, step_s=TIMES.step_s / 3, running_s=TIMES.running_s / 3)
    traffic = Traffic(rate_per_s=4.5, prompt_tokens=2000, output_tokens=300)
    fixed, moved = world(lambda _: traffic, 5), world(lambda _: traffic, 5, believed=wrong)
    fixed.run(2 * HOUR_S, None)
    moved.run(2 * HOUR_S, ADVISOR.model_copy(update={"backoff_s": HOUR_S}))
    done = [action for _, action in moved.changes]
    assert done[:2] == ["apply", "roll_back"], moved.changes
    assert all(later_s - moved.changes[1][0] >= HOUR_S for later_s, _ in moved.changes[2:]), moved.changes
    assert moved.workers == {Role.PREFILL: 2, Role.DECODE: 2, Role.COLOCATED: 0}
    assert moved.good / moved.came > fixed.good / fixed.came - 0.1, (moved.good, fixed.good, moved.came)
