"""Path `auto` against both fixed paths, in virtual time: predictions are off and engines drift.

The unit is the seed: a workload, drifts of both engines, and predictions that are a fifth too low or too high for each path by
itself. The better fixed path is chosen on other seeds. A goodput is the rate at which nine in ten requests meet the objective.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from coordinator.bench.auto_world import ROLES, Drift, RoutedClient, calibrated, scaled
from coordinator.compare.load import Slo, run_probe
from coordinator.compare.proof.engine_experiment import TURN_S
from coordinator.compare.proof.virtual_time import run_virtual
from coordinator.compare.stats import knee, t_interval
from coordinator.compare.workload import TUNING_SEEDS_FROM, PlannedRequest, Workload, WorkloadSpec, make
from coordinator.routing.auto import AUTO, COLOCATED, EXPLORED, SPLIT, AutoPath, AutoSettings, Objective

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
REQUESTS, WARM_UP = 160, 20
DEADLINE_S = 120.0
RATE_STEP, MAX_RATES = 1.14, 14
DONE_BELOW = 0.8
"""An attainment after which no higher rate is tried."""
ERRORS = ((0.8, 0.8), (0.8, 1.2), (1.2, 0.8), (1.2, 1.2))
"""Of the predictions of split and colocated, seed by seed."""
SWING, PERIODS_S = 0.1, (300.0, 370.0)
FIXED = (SPLIT, COLOCATED)
NON_INFERIOR, ABOVE = 0.98, 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests that are alike: ranges of tokens, how fast they come beside others of a workload, and how many before the others'
    turn."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    pace: float = 1.0
    turn: int = 1


SHORT = Kind(prompt_tokens=(8, 24), output_tokens=(4, 8))
PROMPTS = Kind(prompt_tokens=(96, 160), output_tokens=(8, 16))
EVEN = Kind(prompt_tokens=(24, 40), output_tokens=(16, 32))
ANSWERS = Kind(prompt_tokens=(8, 24), output_tokens=(32, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload: its kinds take turns, or with `drawn` are drawn request by request. `start` is the lowest rate.

    `mixed`: `auto` is to be above both paths, not only as good as the better one; None: shown and not judged.
    """

    kinds: tuple[Kind, ...]
    start: float
    drawn: bool = False
    mixed: bool | None = False


CASES = {
    "short": Case(kinds=(SHORT,), start=10.0),
    "long prompts": Case(kinds=(PROMPTS,), start=1.6),
    "even": Case(kinds=(EVEN,), start=3.0),
    "long answers": Case(kinds=(ANSWERS,), start=1.7),
    "mixed, in turns": Case(kinds=(replace(PROMPTS, turn=45), replace(ANSWERS, turn=20, pace=1.5)), start=1.4, mixed=True),
    "mixed, at once": Case(kinds=(SHORT, PROMPTS, EVEN, ANSWERS), start=2.0, drawn=True, mixed=None),
}


def workload(case: Case, seed: int) -> Workload:
    """The requests of a seed; a gap is one on average, times what the kinds' paces make of it."""
    made = [
        make(WorkloadSpec(seed=seed + number, requests=REQUESTS, prompt_tokens=k.prompt_tokens, output_tokens=k.output_tokens))
        for number, k in enumerate(case.kinds)
    ]
    rng = random.Random(seed)
    requests: list[PlannedRequest] = []
    turn = 0
    while len(requests) < REQUESTS:
        which = rng.randrange(len(case.kinds)) if case.drawn else turn % len(case.kinds)
        kind, turn = case.kinds[which], turn + 1
        for _ in range(kind.turn):
            each = made[which].requests[len(requests) % REQUESTS]
            gap = made[0].requests[len(requests) % REQUESTS].gap / kind.pace
            requests.append(replace(each, gap=gap))
            if len(requests) == REQUESTS:
                break
    return replace(made[0], requests=tuple(requests))


def run_arm(name: str, arm: str, seed: int) -> dict[str, Any]:
    """One arm's goodput on one seed, `rate_per_s` None with its `why` where the rates miss it."""
    return run_virtual(_run_arm(name, arm, seed), TURN_S)


async def _run_arm(name: str, arm: str, seed: int) -> dict[str, Any]:
    case = CASES[name]
    errors = dict(zip(FIXED, ERRORS[seed % len(ERRORS)], strict=True))
    auto = AutoPath({path: scaled(times, errors[path]) for path, times in calibrated().items()}, AutoSettings(decisions=1 << 16))
    phases = random.Random(f"{seed}/drift")
    drifts = {
        role: Drift(swing=SWING, period_s=period_s, phase=phases.random())
        for role, period_s in zip(ROLES, PERIODS_S, strict=True)
    }
    sent = workload(case, seed)
    rates, attained = [], []
    async with RoutedClient(drifts, auto, Objective(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s), f"{name}/{seed}") as client:
        for step in range(MAX_RATES):
            rate = case.start * RATE_STEP**step
            probe = await run_probe(
                client,
                sent.salted(f"{step}"),
                path=arm,
                rate_per_s=rate,
                deadline_s=DEADLINE_S,
                now=client.now,
                warm_up=WARM_UP,
            )
            rates.append(rate)
            attained.append(probe.attainment(SLO))
            if attained[-1] < DONE_BELOW:
                break
    found = knee(rates, attained, requests=REQUESTS - WARM_UP)
    return {
        "rate_per_s": found.rate_per_s,
        "why": found.why,
        "attained": [round(each, 3) for each in attained],
        "paths": dict(Counter(decision.path for decision in auto.log)),
        "explored": sum(decision.why == EXPLORED for decision in auto.log),
    }


def measure(seeds: int, tuning_seeds: int, names: list[str], processes: int = 1) -> dict[str, Any]:
    """The record: every arm of every seed, and what they come to."""
    jobs = list(_jobs(seeds, tuning_seeds, names))
    with ProcessPoolExecutor(processes) as pool:
        found = dict(zip(jobs, pool.map(run_arm, *zip(*jobs, strict=True)), strict=True))
    rows = []
    for name in names:
        rows.append(_row(name, {key[1:]: value for key, value in found.items() if key[0] == name}, seeds, tuning_seeds))
    return {
        "kind": "auto bench",
        "slo": asdict(SLO),
        "requests": REQUESTS,
        "warm_up": WARM_UP,
        "explore_share": AutoSettings().explore_share,
        "errors": ERRORS,
        "swing": SWING,
        "seeds": seeds,
        "tuning_seeds": tuning_seeds,
        "rows": rows,
    }


def _jobs(seeds: int, tuning_seeds: int, names: list[str]) -> Iterator[tuple[str, str, int]]:
    for name in names:
        for seed in range(tuning_seeds):
            for arm in FIXED:
                yield name, arm, TUNING_SEEDS_FROM + 100 * seed
        for seed in range(seeds):
            for arm in (*FIXED, AUTO):
                yield name, arm, _seed(seed)


def _seed(number: int) -> int:
    """Apart by more than a case has kinds, and every remainder by the number of errors."""
    return 101 * (number + 1)


def _row(name: str, found: dict[tuple[str, int], dict[str, Any]], seeds: int, tuning_seeds: int) -> dict[str, Any]:
    def goodput(arm: str, seed: int) -> float | None:
        rate: float | None = found[arm, seed]["rate_per_s"]
        return rate

    tuned = {arm: [goodput(arm, TUNING_SEEDS_FROM + 100 * n) or 0.0 for n in range(tuning_seeds)] for arm in FIXED}
    better = max(FIXED, key=lambda arm: statistics.fmean(tuned[arm]))
    used = [_seed(number) for number in range(seeds)]
    ratios = {}
    for arm in FIXED:
        pairs = [(goodput(AUTO, seed), goodput(arm, seed)) for seed in used]
        logs = [math.log(a / b) for a, b in pairs if a and b]
        interval = t_interval(logs)
        ratios[arm] = {
            "ratio": math.exp(interval.mean) if interval is not None else None,
            "low": math.exp(interval.low) if interval is not None else None,
            "high": math.exp(interval.high) if interval is not None else None,
            "seeds": len(logs),
        }
    decided = Counter[str]()
    for seed in used:
        decided.update(found[AUTO, seed]["paths"])
    case, lows = CASES[name], [ratios[arm]["low"] for arm in FIXED]
    held: bool | None = None
    if case.mixed is not None:
        low = ratios[better]["low"]
        held = all(each is not None and each > ABOVE for each in lows) if case.mixed else low is not None and low > NON_INFERIOR
    return {
        "workload": name,
        "better": better,
        "target": {True: ABOVE, False: NON_INFERIOR, None: None}[case.mixed],
        "held": held,
        "ratios": ratios,
        "goodput_per_s": {
            arm: statistics.fmean(each) if (each := [g for seed in used if (g := goodput(arm, seed))]) else None
            for arm in (*FIXED, AUTO)
        },
        "split_share": decided[SPLIT] / max(1, decided.total()),
        "explored": sum(found[AUTO, seed]["explored"] for seed in used) / max(1, decided.total()),
        "arms": [{"arm": arm, "seed": seed, **each} for (arm, seed), each in found.items()],
    }


def table(record: dict[str, Any]) -> str:
    """For people."""
    heads = f"{'workload':<17}{'split':>7}{'coloc.':>8}{'auto':>7}   {'auto/split':<27}{'auto/colocated':<27}"
    lines = [
        f"requests/s at {_slo(record)}; ratios: mean and 95 % interval over {record['seeds']} seeds",
        f"{heads}{'better':<11}{'target':<15}{'split taken':>11}{'explored':>9}",
    ]
    for row in record["rows"]:
        widths = ((SPLIT, 7), (COLOCATED, 8), (AUTO, 7))
        rates = "".join(f"{_number(row['goodput_per_s'][arm]):>{width}}" for arm, width in widths)
        shown = "".join(f"{_interval(row['ratios'][arm], record['seeds']):<27}" for arm in FIXED)
        decided = f"{row['split_share']:>11.0%}{row['explored']:>9.1%}"
        lines.append(f"{row['workload']:<17}{rates}   {shown}{row['better']:<11}{_target(row):<15}{decided}")
    return "\n".join(lines)


def _slo(record: dict[str, Any]) -> str:
    return f"TTFT {record['slo']['ttft_s']:g} s, TPOT {record['slo']['tpot_s'] * 1e3:g} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(ratio: dict[str, Any], seeds: int) -> str:
    """Seeds whose knee was missed by one of both arms give no ratio; how many do is said."""
    missing = f" ({ratio['seeds']} of {seeds})" if ratio["seeds"] < seeds else ""
    return f"-{missing}" if ratio["ratio"] is None else f"{ratio['ratio']:.3f} {ratio['low']:.3f}-{ratio['high']:.3f}{missing}"


def _target(row: dict[str, Any]) -> str:
    if row["held"] is None:
        return "none"
    return f"> {row['target']:.2f} {'held' if row['held'] else 'missed'}"
