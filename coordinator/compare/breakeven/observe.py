"""Records taken apart: what the model is fitted to, and the cells that were measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.compare.breakeven.model import COLOCATED, SPLIT, Layout, Mix, stress
from coordinator.compare.html.arms import Arm, arms_of, judged, valid
from coordinator.compare.stats import percentile, t_interval

MIN_REQUESTS = 10
"""Behind a mean that the model is fitted to."""
MIN_SEEDS = 3
FAILED_STRESS = 10.0
"""A request that fails misses its objective by far; the number bounds what one can do to a mean."""

Outcome = Mapping[str, Any]


class MapError(ValueError):
    """No map can be made of these records; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Mean times of similar requests of one arm at one rate. `load` is requests/s and accelerator; `wait_s` None unless split."""

    arm: str
    input_tokens: float
    output_tokens: float
    load: float
    mix: Mix
    ttft_s: float
    tpot_s: float | None
    wait_s: float | None
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Both arms at one rate, request by request: `ratio` is the colocated share of the objective over the split one, a geometric
    mean over seeds, with the 95 % interval where there are `MIN_SEEDS`; both stresses are geometric means as well."""

    record: str
    input_tokens: float
    output_tokens: float
    load: float
    ratio: float
    low: float | None
    high: float | None
    split_stress: float
    colocated_stress: float
    seeds: int


def pair_of(record: Mapping[str, Any], challenger: str = "") -> tuple[Arm, Arm]:
    """(the split arm, the colocated arm) of a record. Raises `MapError`."""
    arms = arms_of(record)
    split = [arm for arm in arms if arm.path == SPLIT and challenger in ("", arm.name)]
    colocated = [arm for arm in arms if arm.path == COLOCATED]
    if not split or not colocated:
        raise MapError(f"has no pair of a split arm{f' {challenger!r}' if challenger else ''} and a colocated one")
    return split[0], next((arm for arm in colocated if arm.baseline), colocated[0])


def layout_of(record: Mapping[str, Any], split: Arm, colocated: Arm) -> Layout | None:
    """From the pools in the record's manifest, or those that the experiment applied; None where neither tells."""
    settings = record.get("manifest", {}).get("settings", {})
    standing, common = settings.get("pools") or {}, settings.get("engine") or {}

    def pools(arm: Arm, *roles: str) -> list[Mapping[str, Any]]:
        plan = (record.get("experiment") or {}).get("arms", {}).get(arm.name, {}).get("candidates", {}).get(arm.candidate, {})
        found = plan.get("apply") or {name: pool for name, pool in standing.items() if not arm.pools or name in arm.pools}
        return [pool for pool in found.values() if pool.get("role") in roles]

    def size(pool: Mapping[str, Any]) -> int:
        engine = {**common, **(pool.get("engine") or {})}
        return int(engine.get("tensor_parallel_size", 1)) * int(engine.get("pipeline_parallel_size", 1))

    # Where no pool is labelled so, the colocated arm runs on the engines of both phases.
    together = pools(colocated, "colocated") or pools(colocated, "prefill", "decode")
    try:
        return Layout(
            prefill=_replicas(pools(split, "prefill")),
            decode=_replicas(pools(split, "decode")),
            colocated=_replicas(together),
            accelerators=sum(int(pool.get("replicas", 1)) * size(pool) for pool in together),
        )
    except ValueError:
        return None


def _replicas(pools: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(pool.get("replicas", 1)) for pool in pools)


def observations(record: Mapping[str, Any], split: Arm, colocated: Arm, layout: Layout) -> list[Observation]:
    """Per arm, rate and octave of the uncached prompt: the means of `MIN_REQUESTS` answered requests or more."""
    found = []
    for kind, arm in ((SPLIT, split), (COLOCATED, colocated)):
        by_rate: dict[float, list[Outcome]] = {}
        for probe in valid(record, arm):
            by_rate.setdefault(probe["rate_per_s"], []).extend(o for o in judged(probe) if _known(o))
        for rate, outcomes in sorted(by_rate.items()):
            mix = _mix(outcomes)
            buckets: dict[int, list[Outcome]] = {}
            for outcome in outcomes:
                if not outcome["failure"] and outcome["ttft_s"] is not None and outcome["e2e_s"] is not None:
                    buckets.setdefault(int(math.log2(uncached(outcome))), []).append(outcome)
            found += [
                _observation(kind, bucket, rate / layout.accelerators, mix)
                for bucket in buckets.values()
                if len(bucket) >= MIN_REQUESTS
            ]
    return found


def measurements(
    name: str, record: Mapping[str, Any], split: Arm, colocated: Arm, layout: Layout, slo: Mapping[str, Any]
) -> list[Measurement]:
    """One cell per rate that both arms were offered, under `slo`."""
    used: dict[float, dict[int, dict[int, dict[str, list[float]]]]] = {}  # by rate, seed, request and arm
    shapes: dict[float, list[tuple[float, int]]] = {}
    for kind, arm in ((SPLIT, split), (COLOCATED, colocated)):
        for probe in valid(record, arm):
            rate = probe["rate_per_s"]
            for outcome in judged(probe):
                if not _known(outcome):
                    continue
                shapes.setdefault(rate, []).append((uncached(outcome), outcome["wanted_tokens"]))
                requests = used.setdefault(rate, {}).setdefault(probe["seed"], {})
                requests.setdefault(outcome["index"], {}).setdefault(kind, []).append(_stress(outcome, slo))
    cells = []
    for rate, seeds in sorted(used.items()):
        pairs = [_pairs(by_arm.values()) for by_arm in seeds.values()]
        whole = [pair for pair in pairs if pair]
        if not whole:
            continue
        logs = [statistics.fmean(math.log(c / s) for s, c in pair) for pair in whole]
        interval = t_interval(logs) if len(logs) >= MIN_SEEDS else None
        cells.append(
            Measurement(
                record=name,
                input_tokens=statistics.fmean(n for n, _ in shapes[rate]),
                output_tokens=statistics.fmean(m for _, m in shapes[rate]),
                load=rate / layout.accelerators,
                ratio=math.exp(statistics.fmean(logs)),
                low=None if interval is None else math.exp(interval.low),
                high=None if interval is None else math.exp(interval.high),
                split_stress=math.exp(statistics.fmean(math.log(s) for pair in whole for s, _ in pair)),
                colocated_stress=math.exp(statistics.fmean(math.log(c) for pair in whole for _, c in pair)),
                seeds=len(logs),
            )
        )
    return cells


def kv_bytes_per_token(records: Iterable[tuple[Mapping[str, Any], Arm]]) -> float | None:
    """From what split requests moved, the median over requests; None where nothing tells."""
    found = [
        outcome["ledger"]["transfer_bytes"] / outcome["prompt_tokens"]
        for record, arm in records
        for probe in valid(record, arm)
        for outcome in judged(probe)
        if outcome.get("prompt_tokens") and (outcome["ledger"] or {}).get("transfer_bytes")
    ]
    return statistics.median(found) if found else None


def bandwidth(records: Iterable[tuple[Mapping[str, Any], Arm]]) -> float | None:
    """Of the link, bytes/s, by the fastest tenth of the transfers: slower ones waited for prefill on the way."""
    found = [
        ledger["transfer_bytes"] / ledger["transfer_s"]
        for record, arm in records
        for probe in valid(record, arm)
        for outcome in judged(probe)
        if (ledger := outcome["ledger"] or {}).get("transfer_bytes") and ledger.get("transfer_s", 0) > 0
    ]
    return percentile(found, 0.9) if len(found) >= MIN_REQUESTS else None


def uncached(outcome: Outcome) -> float:
    """Prompt tokens that had to be computed; one at least, or nothing comes out."""
    return float(max(1, outcome["prompt_tokens"] - outcome["cached_tokens"]))


def _known(outcome: Outcome) -> bool:
    # Records of before prompts were counted have none.
    return bool(outcome.get("prompt_tokens"))


def _mix(outcomes: Sequence[Outcome]) -> Mix:
    mixes = [Mix.of(uncached(o), o["wanted_tokens"]) for o in outcomes]
    return Mix(
        input_tokens=statistics.fmean(mix.input_tokens for mix in mixes),
        decoded_tokens=statistics.fmean(mix.decoded_tokens for mix in mixes),
        attended_tokens=statistics.fmean(mix.attended_tokens for mix in mixes),
    )


def _observation(kind: str, outcomes: Sequence[Outcome], load: float, mix: Mix) -> Observation:
    tpots = [tpot for outcome in outcomes if (tpot := _tpot(outcome)) is not None]
    waits = [float(o["ledger"].get("transfer_wait_s", 0.0)) for o in outcomes if o["ledger"]] if kind == SPLIT else []
    return Observation(
        arm=kind,
        input_tokens=statistics.fmean(uncached(o) for o in outcomes),
        output_tokens=statistics.fmean(o["wanted_tokens"] for o in outcomes),
        load=load,
        mix=mix,
        ttft_s=statistics.fmean(o["ttft_s"] for o in outcomes),
        tpot_s=statistics.fmean(tpots) if tpots else None,
        wait_s=statistics.fmean(waits) if waits else None,
        requests=len(outcomes),
    )


def _stress(outcome: Outcome, slo: Mapping[str, Any]) -> float:
    if outcome["failure"] or outcome["ttft_s"] is None or outcome["e2e_s"] is None:
        return FAILED_STRESS
    return min(FAILED_STRESS, stress(outcome["ttft_s"], _tpot(outcome), outcome["prompt_tokens"], slo))


def _pairs(requests: Iterable[Mapping[str, Sequence[float]]]) -> list[tuple[float, float]]:
    return [
        (statistics.fmean(arms[SPLIT]), statistics.fmean(arms[COLOCATED]))
        for arms in requests
        if SPLIT in arms and COLOCATED in arms
    ]


def _tpot(outcome: Outcome) -> float | None:
    if outcome["tokens"] < 2 or outcome["ttft_s"] is None or outcome["e2e_s"] is None:
        return None
    return float((outcome["e2e_s"] - outcome["ttft_s"]) / (outcome["tokens"] - 1))
