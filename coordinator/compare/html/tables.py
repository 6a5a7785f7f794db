"""A comparison's record as sentences and rows. Pure: the record is the mapping that its JSON holds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.compare.html.arms import Arm, Record, arms_of, baseline_of, judged, name_of, samples, summaries, valid, verdicts
from coordinator.compare.html.figures import goodput_interval
from coordinator.compare.html.quality import facts
from coordinator.compare.load import Outcome, Probe, Slo
from coordinator.compare.paired import paired
from coordinator.compare.stats import knee
from coordinator.compare.verdict import what_settles

STRICT_LEVEL = 0.99
STRICT_REQUESTS = 200
MIB = 2**20


def sentences(record: Record) -> list[tuple[str, str]]:
    """(verdict, its sentence) of every arm against the baseline."""
    found = verdicts(record)
    named = len(found) > 1 or bool(record.get("arms"))
    baseline = baseline_of(record).name
    return [
        (judgement["verdict"], (f"{arm.name}: " if named else "") + sentence(judgement, f"{arm.name} over {baseline}"))
        for arm, judgement in found
    ]


def sentence(judgement: Mapping[str, Any], what: str = "split over colocated") -> str:
    """A verdict for people, from its record."""
    text = f"{judgement['verdict']}: {judgement['reason']}"
    if judgement["ratio"] is not None:
        text += f" ({what} {judgement['ratio']:.2f}"
        if judgement["low"] is not None:
            share = judgement.get("confidence", 0.95)
            text += f", {share:.1%} interval {judgement['low']:.2f} to {judgement['high']:.2f}"
        text += ")"
    needed, seeds = judgement.get("seeds_needed"), judgement["seeds"]
    if judgement["verdict"] == "undecided" and needed is not None:
        text += f"; {what_settles(seeds, needed, judgement.get('looks', ()), judgement['reason'])}"
    return text


def latencies(record: Record) -> list[tuple[str, list[str]]]:
    """(figure, a cell per arm) under load."""
    loaded = [summary for _, summary in summaries(record)]

    def cells(pick: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [pick(arm) for arm in loaded]

    return [
        ("TTFT ms, p50 / p90 / p99", cells(lambda arm: _spread(arm["ttft"]))),
        ("TPOT ms, p50 / p90 / p99", cells(lambda arm: _spread(arm["tpot"]))),
        ("gap to 2nd token ms, p50 / p90 / p99", cells(lambda arm: _spread(arm["second_token_gap"]))),
        ("ITL ms, p99 / largest", cells(lambda arm: f"{_ms(arm['itl_p99_s'])} / {_ms(arm['itl_largest_s'])}")),
        ("E2E ms, p50 / p90 / p99", cells(lambda arm: _spread(arm["e2e"]))),
        ("attainment", cells(lambda arm: "-" if arm["attainment"] is None else f"{arm['attainment']:.1%}")),
        ("offered / failed", cells(lambda arm: f"{arm['offered']} / {arm['failed']}")),
        ("KV moved, MiB", cells(lambda arm: f"{arm['transfer_bytes'] / MIB:.1f}")),
        ("recomputed", cells(lambda arm: str(arm["recomputed"]))),
    ]


def void_probes(record: Record) -> list[list[str]]:
    """Arm, seed, rate and reason of each."""
    return [
        [name_of(probe), str(probe["seed"]), f"{probe['rate_per_s']:.3g}", probe["void"]]
        for probe in record["probes"]
        if probe["void"]
    ]


def goodput_head(record: Record) -> list[str]:
    """The columns of `goodputs`."""
    baseline = baseline_of(record).name
    arms = [arm.name for arm in arms_of(record)]
    others = [name for name in arms if name != baseline]
    return ["seed", *arms, *(f"{name} / {baseline}" for name in others)]


def goodputs(record: Record) -> list[list[str]]:
    """Seed, each arm's knee or why there is none, each other arm's ratio to the baseline."""
    arms, baseline = arms_of(record), baseline_of(record).name
    rows = []
    for entry in record["knees"]:
        cells = [_knee(entry.get(arm.name)) for arm in arms]
        under = (entry.get(baseline) or {}).get("rate_per_s")
        over = [(entry.get(arm.name) or {}).get("rate_per_s") for arm in arms if not arm.baseline]
        rows.append([str(entry["seed"]), *cells, *(f"{rate / under:.3f}" if rate and under else "-" for rate in over)])
    return rows


def goodput_means(record: Record) -> list[list[str]]:
    """Arm, its goodput over seeds with interval, and what it serves at 99 % attainment."""
    return [[arm.name, goodput(record, arm), _strict(record, arm)] for arm in arms_of(record)]


def goodput(record: Record, arm: Arm) -> str:
    """Geometric mean over the seeds that have one, and its 95 % interval."""
    rates = [entry[arm.name]["rate_per_s"] for entry in record["knees"] if arm.name in entry]
    logs = [math.log(rate) for rate in rates if rate]
    if not logs:
        return "-"
    interval = goodput_interval(record, arm)
    mean = f"{math.exp(statistics.fmean(logs)):.3g}/s"
    return mean if interval is None else f"{mean} ({math.exp(interval.low):.3g} to {math.exp(interval.high):.3g})"


def losses(record: Record) -> list[tuple[str, list[list[str]]]]:
    """Per arm that was paired with the baseline: a line about all requests, and a row for each of those that lost most."""
    found = []
    for place, arm in enumerate(arm for arm in arms_of(record) if not arm.baseline):
        # The record's own is of the first; the others follow from the probes in the same way.
        pairs = record.get("paired") if place == 0 else _paired(record, arm)
        if pairs:
            found.append(_losses(arm, pairs))
    return found


def _losses(arm: Arm, pairs: Mapping[str, Any]) -> tuple[str, list[list[str]]]:
    who = "Splitting" if arm.name == "split" else arm.name
    line = f"{who} lost for {pairs['lost']} of {pairs['requests']} requests: E2E {_signed(pairs['median_s'])} ms in the median, "
    line += f"{_signed(pairs['p90_s'])} ms at p90."
    return line, [
        [
            f"{loss['seed']} / {loss['rate_per_s']:.3g} / {loss['index']}",
            str(loss["output_tokens"]),
            *(_signed(loss[key]) for key in ("e2e_s", "ttft_s", "tpot_s")),
        ]
        for loss in pairs["worst"]
    ]


def _paired(record: Record, arm: Arm) -> dict[str, Any] | None:
    probes = [
        Probe(
            path=each.name,
            seed=probe["seed"],
            rate_per_s=probe["rate_per_s"],
            workload_digest=probe["workload_digest"],
            outcomes=[Outcome(**outcome) for outcome in judged(probe)],
        )
        for each in (arm, baseline_of(record))
        for probe in valid(record, each)
    ]
    found = paired(probes, arm.name, baseline_of(record).name)
    return None if found is None else dataclasses.asdict(found)


def peaks(record: Record) -> list[list[str]]:
    """A row per arm and worker: the most it held in any probe that is not void."""
    held: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample, _ in samples(record):
        held.setdefault((sample["arm"], sample["worker"]), []).append(sample)

    def top(own: Sequence[Mapping[str, Any]], key: str) -> float:
        return max(float(sample.get(key) or 0) for sample in own)

    return [
        [
            arm,
            worker,
            f"{top(own, 'kv_usage'):.0%}",
            f"{top(own, 'running'):.0f} / {top(own, 'waiting'):.0f}",
            *(_mib(top(own, key)) for key in ("memory_bytes", "device_memory_bytes", "staging_bytes")),
        ]
        for (arm, worker), own in held.items()
    ]


def configurations(record: Record) -> list[dict[str, Any]]:
    """Each named arm: what it is, its engines' arguments by pool, each candidate's goodput, and the path of the search."""
    if not record.get("arms"):
        return []
    return [
        {
            "name": arm.name,
            "style": arm.style,
            "is": _described(arm),
            "arguments": _arguments(record, arm),
            "tried": [
                [name, ", ".join(f"{rate:.3g}/s" for rate in rates), "chosen" if name == arm.candidate else ""]
                for name, rates in arm.tried.items()
            ],
            "tuning": [
                [step["candidate"], str(step["seed"]), f"{step['rate_per_s']:.3g}/s", _attained(step)] for step in arm.tuning
            ],
        }
        for arm in arms_of(record)
    ]


def _attained(step: Record) -> str:
    return f"void: {step['void']}" if step.get("void") else f"{step['attainment']:.1%}"


def _described(arm: Arm) -> str:
    words = [f"path {arm.path}"]
    words += [f"candidate {arm.candidate}"] if arm.candidate else []
    words += [f"pools {', '.join(arm.pools)}"] if arm.pools else []
    words += [f"transport {arm.transport}"] if arm.transport else []
    return ", ".join(words)


def _arguments(record: Record, arm: Arm) -> list[tuple[str, str]]:
    """As the engines were started; where the manifest does not tell, what the experiment asked for.

    What is equal in all pools is said once; what another kind of engine would take is left out.
    """
    plan = (record.get("experiment") or {}).get("arms", {}).get(arm.name, {}).get("candidates", {}).get(arm.candidate, {})
    by_pool = arm.engine or plan.get("apply") or {}
    if not all(isinstance(own, Mapping) for own in by_pool.values()):
        return facts(by_pool)
    used = {
        pool: {key: value for key, value in own.items() if key != "simulated" or own.get("kind") == "simulated"}
        for pool, own in by_pool.items()
    }
    first = next(iter(used.values()), {})
    common = {key: value for key, value in first.items() if all(own.get(key) == value for own in used.values())}
    special = {pool: {key: value for key, value in own.items() if key not in common} for pool, own in used.items()}
    return facts(common) + facts({pool: own for pool, own in special.items() if own})


def _strict(record: Record, arm: Arm) -> str:
    """All seeds together: one probe has too few requests to tell 99 % from 98 %."""
    slo = Slo(**record["slo"])
    met: dict[float, list[bool]] = {}
    for probe in valid(record, arm):
        met.setdefault(probe["rate_per_s"], []).extend(Outcome(**outcome).meets(slo) for outcome in judged(probe))
    requests = min(map(len, met.values()), default=0)
    if requests < STRICT_REQUESTS:
        return f"needs {STRICT_REQUESTS} requests a rate"
    found = knee(list(met), [statistics.fmean(each) for each in met.values()], level=STRICT_LEVEL, requests=requests)
    return found.why if found.rate_per_s is None else f"{found.rate_per_s:.3g}/s"


def _knee(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    return str(found["why"]) if found["rate_per_s"] is None else f"{found['rate_per_s']:.3g}/s"


def _mib(value: float) -> str:
    return f"{value / MIB:,.0f}" if value else "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:+.1f}"


def _spread(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else " / ".join(_ms(found[key]) for key in ("p50", "p90", "p99"))
