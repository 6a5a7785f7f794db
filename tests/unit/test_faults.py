"""Faults of method are found where they are, named, and not found where they are not."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.compare import faults
from coordinator.compare.load import Outcome, Probe
from coordinator.compare.verdict import MARGIN, Verdict, judge
from coordinator.compare.workload import WorkloadSpec, make

WORKLOAD = make(WorkloadSpec(seed=1, requests=200, prompt_tokens=(50, 50), output_tokens=(40, 40)))


def probe(
    path: str,
    *,
    cached: int = 0,
    failures: int = 0,
    stall_every_s: float = 0.0,
    hiccups: int = 0,
    rate: float = 4.0,
    void: str = "",
) -> Probe:
    """200 requests of 40 tokens in steps of 30 ms; the engine halts for 200 ms at each stall and hiccup."""
    generator = np.random.default_rng(len(path) + hiccups)
    halts = list(generator.uniform(0, 50, hiccups))
    halts += list(np.arange(0.3, 60, stall_every_s)) if stall_every_s else []
    outcomes = []
    for index, due in enumerate(WORKLOAD.due_s(rate)):
        at, gaps = due + 0.1, []
        for _ in range(39):
            step = 0.03 * float(np.exp(0.1 * generator.standard_normal()))
            step += sum(0.2 for halt in halts if at <= halt < at + step)
            gaps.append(step)
            at += step
        outcomes.append(
            Outcome(
                index=index,
                due_s=due,
                lag_s=0.0,
                wanted_tokens=40,
                tokens=40,
                ttft_s=0.1,
                e2e_s=at - due,
                gaps_s=gaps,
                cached_tokens=cached,
                failure="UNAVAILABLE" if index < failures else "",
            )
        )
    return Probe(path=path, seed=1, rate_per_s=rate, workload_digest="", outcomes=outcomes, void=void)


def kinds(*probes: Probe) -> list[str]:
    return [fault.kind for fault in faults.inspect(probes, [WORKLOAD])]


class TestInspect:
    def test_a_sound_comparison_has_none(self) -> None:
        assert kinds(probe("split"), probe("colocated", hiccups=20)) == []

    def test_a_stall_is_found_with_its_arm_its_size_and_its_period(self) -> None:
        # Two probes of an arm, as in the shortest comparison: one of 50 s leaves it on the edge of what is sure.
        stalled = [probe("split", hiccups=hiccups, stall_every_s=2.0) for hiccups in (4, 5)]
        probes = [probe("colocated", hiccups=20), *stalled]
        (fault,) = faults.inspect(probes, [WORKLOAD])
        assert fault.kind == faults.STALL
        assert fault.text.startswith("split stands still for about 2")
        assert "every 2.0" in fault.text
        assert not fault.unfit

    def test_losses_count_at_the_calmest_rate(self) -> None:
        assert kinds(probe("split", failures=10), probe("colocated")) == [faults.LOSSY]
        assert kinds(probe("split"), probe("split", failures=50, rate=8.0)) == []

    def test_one_lost_request_is_no_lossy_arm(self) -> None:
        assert kinds(probe("split", failures=1)) == []

    def test_a_cache_that_knows_distinct_prompts_carries_over(self) -> None:
        (fault,) = faults.inspect([probe("split", cached=16), probe("colocated")], [WORKLOAD])
        assert fault.kind == faults.CARRY_OVER
        assert fault.unfit
        assert "32.0%" in fault.text

    def test_void_probes_are_named_and_not_looked_into(self) -> None:
        assert kinds(probe("split", cached=16, void="the client fell behind")) == [faults.LATE_CLIENT]
        assert kinds(*[probe("split")] * 19, probe("split", void="the client fell behind")) == []


TRIED = {"chunk 512": [8.0, 9.0], "chunk 2048": [10.0, 11.0], "chunk 8192": [7.0, 8.0]}


class TestTuning:
    def test_the_best_and_what_is_near_it_pass(self) -> None:
        assert faults.mistuned("colocated", TRIED, "chunk 2048", MARGIN) is None
        assert faults.mistuned("colocated", {**TRIED, "near": [9.8, 10.6]}, "near", MARGIN) is None

    def test_a_frozen_default_is_named_beside_the_best(self) -> None:
        fault = faults.mistuned("colocated", TRIED, "chunk 8192", MARGIN)
        assert fault is not None
        assert fault.unfit
        assert "chunk 8192 served 7.5" in fault.text
        assert "chunk 2048 10.5" in fault.text

    @pytest.mark.parametrize(("tried", "frozen"), [({}, "default"), (TRIED, "default"), ({"a": [1.0], "b": [1.0]}, "a")])
    def test_without_a_search_nothing_is_tuned(self, tried: dict[str, list[float]], frozen: str) -> None:
        fault = faults.mistuned("split", tried, frozen, MARGIN)
        assert fault is not None
        assert "not chosen from 3" in fault.text


class TestHalves:
    def test_a_gain_of_all_second_probes_is_named(self) -> None:
        fault = faults.second_halves([0.15, 0.12, 0.16, 0.14])
        assert fault is not None
        assert "15% more" in fault.text

    @pytest.mark.parametrize("gains", [[], [0.2, 0.2], [0.02, -0.03, 0.01, 0.0], [-0.15, -0.14, -0.16]])
    def test_chance_few_seeds_and_losses_are_not(self, gains: list[float]) -> None:
        assert faults.second_halves(gains) is None


class TestStalls:
    def test_too_few_or_no_gaps_are_nothing(self) -> None:
        empty = np.empty(0)
        assert faults.stalls("split", []) is None
        assert faults.stalls("split", [(empty, empty)]) is None
        assert faults.stalls("split", [(np.array([1.0, 2.0]), np.array([0.1, 5.0]))]) is None

    def test_stalls_at_random_are_not_a_clock(self) -> None:
        alarms = 0
        for seed in range(60):
            generator = np.random.default_rng(seed)
            ends = np.sort(generator.uniform(0, 100, 5000))
            gaps = np.full(5000, 0.03)
            gaps[generator.choice(5000, 60, replace=False)] = 0.2
            alarms += faults.stalls("split", [(ends, gaps)]) is not None
        assert alarms == 0


def test_a_fault_of_method_leaves_nothing_to_judge() -> None:
    clear = [0.3, 0.31, 0.29, 0.3]
    floor = [0.004, -0.004, 0.002, -0.002]
    assert judge(clear, floor).verdict is Verdict.SPLIT
    found = judge(clear, floor, faults=["caches carry over"])
    assert found.verdict is Verdict.UNDECIDED
    assert found.reason == "rig unfit: caches carry over"
    assert found.seeds_needed is None
