"""`splitpoint bench auto`: its world is the real routing's, its engines are the simulated ones, its table says what was done."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import cli
from coordinator.bench import auto_bench
from coordinator.bench.auto_bench import CASES, LEVEL, OBJECTIVE, run_arm, search, table, workload
from coordinator.bench.auto_engine import Drift, Sequence, StepEngine
from coordinator.bench.auto_world import ROLES, World, calibrated
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.workload import PlannedRequest
from coordinator.routing.auto import AUTO, COLOCATED, PATHS, SPLIT, AutoPath, AutoSettings, PathLoad, Times, Work, predict
from engine.config import EngineSettings, SimulatedSettings
from engine.protocol import EngineRequest
from engine.sampling import SamplingParams
from engine.simulated import SimulatedEngine

STILL = {role: Drift(swing=0.0, period_s=1.0, phase=0.0) for role in ROLES}


def world(**settings: float) -> World:
    return World(STILL, AutoPath(calibrated(), AutoSettings(**settings)), OBJECTIVE, "seed")  # type: ignore[arg-type]


def send(made: World, path: str, requests: int, rate_per_s: float) -> list[Times]:
    rng = random.Random(1)
    sent = [PlannedRequest(rng.expovariate(1.0), (0,) * 100, 10) for _ in range(requests)]
    times = made.send(sent, path, rate_per_s)
    assert made.chooser.phases.idle
    assert made.chooser.router.load.total_in_flight_tokens() == 0
    return times


@pytest.mark.parametrize("path", PATHS)
def test_a_request_alone_takes_what_the_calibration_says(path: str) -> None:
    said = predict(calibrated()[path], PathLoad(), Work(prompt_tokens=100, output_tokens=10))
    for times in send(world(), path, 5, 0.05):
        assert times.ttft_s == pytest.approx(said.ttft_s, rel=0.2)
        assert times.tpot_s == pytest.approx(said.tpot_s, rel=0.2)


def test_auto_decides_and_learns_of_every_request_and_a_fixed_path_of_none() -> None:
    made = world(explore_share=0.2)
    send(made, AUTO, 60, 2.0)
    log = made.chooser.auto.log
    assert len(log) == 60
    assert all(decision.measured is not None for decision in log)
    assert {decision.path for decision in log} == set(PATHS)
    for path in PATHS:
        made = world()
        send(made, path, 5, 2.0)
        assert not made.chooser.auto.log


COSTS = SimulatedSettings(
    step_base_s=0.03, prefill_token_s=0.001, decode_sequence_s=0.002, context_token_s=4e-6, num_kv_blocks=1024, eos_token_id=None
)


def test_the_engine_is_the_simulated_one_step_by_step() -> None:
    """Sixty requests that come in bunches: when each token came, by both."""
    rng = random.Random(7)
    arrivals = [(round(rng.uniform(0.0, 3.0), 3), rng.randint(2, 150), rng.randint(1, 30)) for _ in range(60)]
    arrivals.sort()
    assert simulated(arrivals) == pytest.approx(stepped(arrivals), abs=0.02), "a turn of the loop now and then"


def stepped(arrivals: list[tuple[float, int, int]]) -> list[float]:
    engine = StepEngine(COSTS, chunk_tokens=64, max_seqs=16, drift=STILL[ROLES[0]], rng=random.Random(1), jitter=0.0)
    waiting, now_s, last_s = list(enumerate(arrivals)), 0.0, [0.0] * len(arrivals)
    while True:
        while waiting and waiting[0][1][0] <= now_s:
            number, (_, prompt_tokens, output_tokens) = waiting.pop(0)
            engine.add(Sequence(f"{number}", prompt_tokens, output_tokens))
        seconds = engine.begin(now_s)
        if seconds is None:
            if not waiting:
                break
            now_s = waiting[0][1][0]
            continue
        now_s += seconds
        for sequence in engine.end():
            last_s[int(sequence.name)] = now_s
    return last_s


def simulated(arrivals: list[tuple[float, int, int]]) -> list[float]:
    settings = EngineSettings(
        kind="simulated",
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        block_tokens=16,
        enable_prefix_caching=False,
        simulated=COSTS,
    )

    class LoopClock:
        def now(self) -> float:
            return asyncio.get_running_loop().time()

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    async def run() -> list[float]:
        engine, loop = SimulatedEngine(settings, clock=LoopClock()), asyncio.get_running_loop()
        await engine.start()
        began_s = loop.time()

        async def one(number: int, due_s: float, prompt_tokens: int, output_tokens: int) -> float:
            await asyncio.sleep(began_s + due_s - loop.time())
            sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
            request = EngineRequest(request_id=f"{number}", prompt_token_ids=[1000] * prompt_tokens, sampling=sampling)
            async for _ in engine.generate(request):
                last_s = loop.time()
            return last_s - began_s

        found = await asyncio.gather(*(one(number, *each) for number, each in enumerate(arrivals)))
        await engine.stop()
        return list(found)

    return run_virtual(run())


def test_drift_swings_around_one() -> None:
    drift = Drift(swing=0.1, period_s=100.0, phase=0.0)
    assert drift.at(0.0) == pytest.approx(1.0)
    assert drift.at(25.0) * drift.at(75.0) == pytest.approx(1.0)
    assert max(drift.at(float(t)) for t in range(100)) == pytest.approx(1.105, abs=1e-3)


def test_kinds_take_their_turns() -> None:
    case = CASES["mixed, in turns"]
    sent = workload(case, "1", 250)
    lengths = [len(request.prompt_token_ids) for request in sent]
    first, second = case.kinds
    assert len(sent) == 250
    assert all(first.prompt_tokens[0] <= n <= first.prompt_tokens[1] for n in lengths[: first.turn])
    assert all(n <= second.prompt_tokens[1] for n in lengths[first.turn : first.turn + second.turn])
    assert workload(case, "1", 300)[:250] == sent, "a rate's are the first of a higher one's"
    assert workload(case, "2", 250) != sent


@pytest.mark.parametrize("knee", [0.5, 3.0, 9.5, -4.5, -17.0])
def test_the_level_is_looked_for_on_either_side_until_it_is_crossed(knee: float) -> None:
    asked: list[int] = []

    def attained(step: int) -> float:
        asked.append(step)
        return LEVEL + 0.01 * (knee - step)

    found = search(attained)
    assert len(asked) == len(set(asked)), "no rate is probed twice"
    assert list(found) == sorted(found)
    below = max(step for step, each in found.items() if each >= LEVEL)
    assert below in (int(knee // 1), int(knee))
    assert found.keys() >= {below - 1, below, below + 1, below + 2}


def test_a_level_that_is_never_crossed_is_an_error_and_chance_at_an_end_is_not() -> None:
    with pytest.raises(RuntimeError, match="not crossed"):
        search(lambda step: 1.0)
    uneven = {-2: 0.95, -1: 0.89, 0: 0.91, 1: 0.88, 2: 0.92, 3: 0.85}
    found = search(lambda step: uneven.get(step, 1.0 if step < 0 else 0.0))
    assert found[min(found)] >= LEVEL > found[max(found)]


def test_an_arm_is_measured_around_its_knee(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_bench, "PROBE_S", 40.0)
    monkeypatch.setattr(auto_bench, "RATE_STEP", 1.3)
    found = run_arm("long prompts", AUTO, 5000)
    assert found == run_arm("long prompts", AUTO, 5000), "virtual time repeats"
    rates = [float(rate) for rate in found["probes"]]
    assert min(rates) < found["rate_per_s"] < max(rates)
    sent = sum(
        auto_bench.ORDERS * len(workload(CASES["long prompts"], "", -(-40 * round(1e6 * rate) // 10**6))) for rate in rates
    )
    assert sum(found["paths"].values()) == pytest.approx(sent, abs=auto_bench.ORDERS * len(rates))


def test_the_row_is_of_the_better_path_of_other_seeds_and_says_what_is_missing() -> None:
    def arm(rate: float | None) -> dict[str, Any]:
        return {"rate_per_s": rate, "probes": {}, "paths": {SPLIT: 3, COLOCATED: 1}, "explored": 1}

    found = {}
    for number in range(2):
        tuning = auto_bench._tuning_seed(number)
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


def test_judged_seeds_are_those_of_nothing_else() -> None:
    judged = {auto_bench._seed(number) for number in range(64)}
    assert not judged & {auto_bench._tuning_seed(number) for number in range(64)}
    assert not judged & set(range(5000, 5100)), "on which the policy was developed"
    assert {seed % len(auto_bench.ERRORS) for seed in judged} == set(range(len(auto_bench.ERRORS)))


def test_an_unknown_workload_is_refused_by_name() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "auto", "--workload", "tea"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "long prompts" in done.output
