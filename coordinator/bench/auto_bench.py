"""Path `auto` against both fixed paths, in virtual time: predictions are off and engines drift.

The unit is the seed: a workload, drifts of both engines, and predictions that are a fifth too low or too high for each path by
itself. The better fixed path is chosen on other seeds. A goodput is the rate at which nine in ten requests meet the objective,
read off probes around it; it is looked for until it is found, so that no seed drops out on one side.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from coordinator.bench.auto_engine import Drift
from coordinator.bench.auto_world import ROLES, World, calibrated, scaled
from coordinator.compare.stats import knee, t_interval
from coordinator.compare.workload import TUNING_SEEDS_FROM, PlannedRequest
from coordinator.routing.auto import AUTO, COLOCATED, EXPLORED, SPLIT, AutoPath, AutoSettings, Objective, Times

OBJECTIVE = Objective(ttft_s=1.0, tpot_s=0.05)
LEVEL = 0.9
PROBE_S, WARM_UP_S, ORDERS = 300.0, 15.0, 2
"""A probe is as long as the longer drift's period: what drifts is the same for every arm and rate, whenever it is probed. Each
rate is probed with so many workloads, the same for all arms and rates but for the pace."""
RATE_STEP, STRIDE = 1.05, 4
"""Rates are steps of a ladder, the same for all arms; the first search goes so many at a time."""
FURTHEST = 60
"""Steps from a case's first rate, a factor of 18: beyond it something else is wrong."""
ERRORS = ((0.8, 0.8), (0.8, 1.2), (1.2, 0.8), (1.2, 1.2))
"""Of the predictions of split and colocated, seed by seed."""
SWING, PERIODS_S = 0.1, (150.0, 300.0)
FIXED = (SPLIT, COLOCATED)
JUDGED_SEEDS_FROM = 27_000
"""Development used 5,000 to 5,099."""
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
    """A workload: its kinds take turns, or with `drawn` are drawn request by request. The search begins at rate `start`.

    `mixed`: `auto` is to be above both paths, not only as good as the better one; None: shown and not judged.
    """

    kinds: tuple[Kind, ...]
    start: float
    drawn: bool = False
    mixed: bool | None = False


CASES = {
    "short": Case(kinds=(SHORT,), start=16.0),
    "long prompts": Case(kinds=(PROMPTS,), start=3.5),
    "even": Case(kinds=(EVEN,), start=5.5),
    "long answers": Case(kinds=(ANSWERS,), start=4.5),
    "mixed, in turns": Case(kinds=(replace(PROMPTS, turn=100), replace(ANSWERS, turn=100)), start=3.0, mixed=True),
    "mixed, at once": Case(kinds=(SHORT, PROMPTS, EVEN, ANSWERS), start=4.0, drawn=True, mixed=None),
}


def workload(case: Case, seed: str, requests: int) -> list[PlannedRequest]:
    """So many requests; a gap is one on average, times what the kinds' paces make of it. A seed's begin alike, however many."""
    rng = random.Random(seed)
    sent: list[PlannedRequest] = []
    turn = 0
    while len(sent) < requests:
        kind = case.kinds[rng.randrange(len(case.kinds)) if case.drawn else turn % len(case.kinds)]
        turn += 1
        for _ in range(min(kind.turn, requests - len(sent))):
            # Prompts share nothing and only their lengths count.
            prompt = (0,) * rng.randint(*kind.prompt_tokens)
            sent.append(PlannedRequest(rng.expovariate(kind.pace), prompt, rng.randint(*kind.output_tokens)))
    return sent


def attainment(world: World, case: Case, arm: str, rate_per_s: float, seed: str) -> float:
    """The share of a rate's requests that meet the objective; those of each probe's first `WARM_UP_S` are not judged."""
    judged: list[Times] = []
    for order in range(ORDERS):
        sent = workload(case, f"{seed}/{order}", math.ceil(PROBE_S * rate_per_s))
        judged += world.send(sent, arm, rate_per_s)[math.ceil(WARM_UP_S * rate_per_s) :]
    return sum(each.against(OBJECTIVE) <= 1.0 for each in judged) / len(judged)


def search(attained: Callable[[int], float]) -> dict[int, float]:
    """What is attained at the steps of the ladder around the level: in strides until it is crossed, then by halves, and one step
    more on either side.

    Raises:
        RuntimeError: it is not crossed within `FURTHEST` steps.
    """
    found: dict[int, float] = {}

    def holds(step: int) -> bool:
        if step not in found:
            if abs(step) > FURTHEST:
                raise RuntimeError(f"{FURTHEST} steps from the first rate the attainment has not crossed {LEVEL}")
            found[step] = attained(step)
        return found[step] >= LEVEL

    high = low = 0
    if holds(0):
        while holds(high):
            low, high = high, high + STRIDE
    else:
        while not holds(low):
            low, high = low - STRIDE, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    # Chance may have a rate attain less than a higher one: the ends lie on their sides of the level all the same.
    low, high = low - 1, high + 1
    while not holds(low):
        low -= 1
    while holds(high):
        high += 1
    return dict(sorted(found.items()))


def run_arm(name: str, arm: str, seed: int) -> dict[str, Any]:
    """One arm's goodput on one seed, and the attainment of each rate that was probed."""
    case = CASES[name]
    errors = dict(zip(FIXED, ERRORS[seed % len(ERRORS)], strict=True))
    auto = AutoPath({path: scaled(times, errors[path]) for path, times in calibrated().items()}, AutoSettings(decisions=1 << 18))
    phases = random.Random(f"{seed}/drift")
    drifts = {
        role: Drift(swing=SWING, period_s=period_s, phase=phases.random())
        for role, period_s in zip(ROLES, PERIODS_S, strict=True)
    }
    world = World(drifts, auto, OBJECTIVE, f"{name}/{seed}")
    found = search(lambda step: attainment(world, case, arm, _rate(case, step), f"{name}/{seed}"))
    rates = [_rate(case, step) for step in found]
    requests = math.floor(ORDERS * (PROBE_S - WARM_UP_S) * min(rates))
    return {
        "rate_per_s": knee(rates, list(found.values()), LEVEL, requests).rate_per_s,
        "probes": {f"{rate:.4g}": round(each, 4) for rate, each in zip(rates, found.values(), strict=True)},
        "paths": dict(Counter(decision.path for decision in auto.log)),
        "explored": sum(decision.why == EXPLORED for decision in auto.log),
    }


def _rate(case: Case, step: int) -> float:
    return case.start * RATE_STEP**step


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
        "slo": asdict(OBJECTIVE),
        "probe_s": PROBE_S,
        "warm_up_s": WARM_UP_S,
        "orders": ORDERS,
        "rate_step": RATE_STEP,
        "explore_share": AutoSettings().explore_share,
        "errors": ERRORS,
        "swing": SWING,
        "periods_s": PERIODS_S,
        "seeds": seeds,
        "tuning_seeds": tuning_seeds,
        "rows": rows,
    }


def _jobs(seeds: int, tuning_seeds: int, names: list[str]) -> Iterator[tuple[str, str, int]]:
    for name in names:
        for seed in range(tuning_seeds):
            for arm in FIXED:
                yield name, arm, _tuning_seed(seed)
        for seed in range(seeds):
            for arm in (*FIXED, AUTO):
                yield name, arm, _seed(seed)


def _seed(number: int) -> int:
    """Those that are judged, and were seen by nobody before; numbers in a row have every pair of errors."""
    return JUDGED_SEEDS_FROM + number


def _tuning_seed(number: int) -> int:
    return TUNING_SEEDS_FROM + number


def _row(name: str, found: dict[tuple[str, int], dict[str, Any]], seeds: int, tuning_seeds: int) -> dict[str, Any]:
    def goodput(arm: str, seed: int) -> float | None:
        """None where attainment does not fall: one step holds all and the next none."""
        rate: float | None = found[arm, seed]["rate_per_s"]
        return rate

    tuned = {arm: [goodput(arm, _tuning_seed(n)) or 0.0 for n in range(tuning_seeds)] for arm in FIXED}
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
