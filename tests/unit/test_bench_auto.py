"""`splitpoint bench auto`: its world is the real routing's, and its table says what the arms did."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import cli
from coordinator.bench import auto_bench
from coordinator.bench.auto_bench import CASES, SLO, run_arm, table, workload
from coordinator.bench.auto_world import ROLES, Drift, RoutedClient, calibrated
from coordinator.compare.load import run_probe
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.workload import WorkloadSpec, make
from coordinator.routing.auto import AUTO, COLOCATED, PATHS, SPLIT, AutoPath, AutoSettings, Objective, PathLoad, Work, predict

STILL = {role: Drift(swing=0.0, period_s=1.0, phase=0.0) for role in ROLES}


def probe(path: str, requests: int, rate_per_s: float, **settings: float) -> tuple[Any, RoutedClient]:
    async def run() -> tuple[Any, RoutedClient]:
        auto = AutoPath(calibrated(), AutoSettings(**settings))  # type: ignore[arg-type]
        async with RoutedClient(STILL, auto, Objective(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s), "seed") as client:
            sent = make(WorkloadSpec(seed=1, requests=requests, prompt_tokens=(100, 100), output_tokens=(10, 10)))
            done = await run_probe(client, sent, path=path, rate_per_s=rate_per_s, deadline_s=60.0, now=client.now)
            assert client.chooser.phases.idle
            assert client.chooser.router.load.total_in_flight_tokens() == 0
            return done, client

    return run_virtual(run(), 0.0005)


@pytest.mark.parametrize("path", PATHS)
def test_a_request_alone_takes_what_the_calibration_says(path: str) -> None:
    done, _ = probe(path, 5, 0.05)
    said = predict(calibrated()[path], PathLoad(), Work(prompt_tokens=100, output_tokens=10))
    for outcome in done.outcomes:
        assert outcome.ttft_s == pytest.approx(said.ttft_s, rel=0.2)
        assert outcome.tpot_s == pytest.approx(said.tpot_s, rel=0.2)


def test_auto_decides_and_learns_of_every_request_and_a_fixed_path_of_none() -> None:
    _, client = probe(AUTO, 60, 2.0, explore_share=0.2)
    log = client.chooser.auto.log
    assert len(log) == 60
    assert all(decision.measured is not None for decision in log)
    assert {decision.path for decision in log} == set(PATHS)
    for path in PATHS:
        _, client = probe(path, 5, 2.0)
        assert not client.chooser.auto.log


def test_drift_swings_around_one() -> None:
    drift = Drift(swing=0.1, period_s=100.0, phase=0.0)
    assert drift.at(0.0) == pytest.approx(1.0)
    assert drift.at(25.0) * drift.at(75.0) == pytest.approx(1.0)
    assert max(drift.at(float(t)) for t in range(100)) == pytest.approx(1.105, abs=1e-3)


def test_kinds_take_their_turns_at_their_pace() -> None:
    case = CASES["mixed, in turns"]
    lengths = [len(request.prompt_token_ids) for request in workload(case, 101).requests]
    first, second = case.kinds
    assert all(first.prompt_tokens[0] <= n <= first.prompt_tokens[1] for n in lengths[: first.turn])
    assert all(n <= second.prompt_tokens[1] for n in lengths[first.turn : first.turn + second.turn])
    assert workload(case, 101) == workload(case, 101)
    assert workload(case, 101) != workload(case, 202)


def test_an_arm_is_measured_up_to_its_knee(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_bench, "REQUESTS", 60)
    monkeypatch.setattr(auto_bench, "RATE_STEP", 1.6)
    found = run_arm("long prompts", AUTO, 101)
    assert found == run_arm("long prompts", AUTO, 101), "virtual time repeats"
    assert found["attained"][-1] < auto_bench.DONE_BELOW
    assert found["rate_per_s"] > CASES["long prompts"].start
    assert sum(found["paths"].values()) == 60 * len(found["attained"])


def test_the_row_is_of_the_better_path_of_other_seeds_and_says_what_is_missing() -> None:
    def arm(rate: float | None) -> dict[str, Any]:
        return {"rate_per_s": rate, "why": "", "attained": [], "paths": {SPLIT: 3, COLOCATED: 1}, "explored": 1}

    found = {}
    for number in range(2):
        tuning = auto_bench.TUNING_SEEDS_FROM + 100 * number
        found |= {(SPLIT, tuning): arm(2.0), (COLOCATED, tuning): arm(1.0)}
    for number, auto in enumerate((1.98, 2.0, 2.02, None)):
        seed = auto_bench._seed(number)
        found |= {(SPLIT, seed): arm(2.0), (COLOCATED, seed): arm(1.0), (AUTO, seed): arm(auto)}
    row = auto_bench._row("long prompts", found, 4, 2)
    assert (row["better"], row["split_share"], row["explored"]) == (SPLIT, 0.75, 0.25)
    assert row["ratios"][SPLIT]["seeds"] == 3
    assert row["ratios"][SPLIT]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert row["ratios"][SPLIT]["low"] == pytest.approx(0.9754, abs=1e-3)
    assert row["held"] is False
    mixed = auto_bench._row("mixed, in turns", found, 4, 2)
    assert mixed["held"] is False, "above one path alone is not above both"
    text = table({"slo": {"ttft_s": 1.0, "tpot_s": 0.05}, "seeds": 4, "rows": [row, mixed]})
    assert "> 0.98 missed" in text
    assert "> 1.05 missed" in text
    assert "2 of 4" not in text
    assert "(3 of 4)" in text


def test_an_unknown_workload_is_refused_by_name() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "auto", "--workload", "tea"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "long prompts" in done.output
