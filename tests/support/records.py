"""Small comparisons' records, made by hand: three seeds, two rates, one void probe; two paths, or three arms with everything."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from coordinator.compare.load import Outcome, Probe, Slo
from coordinator.compare.paired import paired
from coordinator.compare.priors import priors
from coordinator.compare.record import Record
from coordinator.compare.summary import STAGES, arm
from coordinator.compare.verdict import judge
from coordinator.compare.workload import WorkloadSpec, lengths, make

SLO = Slo(ttft_s=0.5, tpot_s=0.05)
SPEC = WorkloadSpec(seed=1, requests=20, prompt_tokens=(8, 16), output_tokens=(4, 4))
VOID = "the client fell behind: p99 send lag 9.0 ms, allowed 5.0 ms"


def probe(path: str, seed: int, rate: float, late: int, void: str = "") -> Probe:
    """20 requests, the last `late` of them beyond the TTFT SLO."""
    outcomes = []
    for index in range(20):
        ttft_s = 0.1 + 0.01 * index if index < 20 - late else 0.9
        stages = dict.fromkeys(STAGES, 0.0) | {
            "prefill_s": ttft_s,
            "decode_s": 0.06,
            "residual_s": -0.001,
            "e2e_s": ttft_s + 0.06,
        }
        outcomes.append(
            Outcome(
                index=index,
                due_s=index / rate,
                lag_s=0.0,
                wanted_tokens=4,
                tokens=4,
                ttft_s=ttft_s,
                e2e_s=ttft_s + 0.06,
                gaps_s=[0.02, 0.02, 0.02],
                ledger=stages,
            )
        )
    return Probe(path=path, seed=seed, rate_per_s=rate, workload_digest="d", outcomes=outcomes, void=void)


def comparison(**changes: Any) -> Record:
    probes = [
        probe(path, seed, rate, late)
        for seed in (1, 2, 3)
        for rate, lates in ((1.0, (0, 0)), (4.0, (3, 6)))
        for path, late in zip(("split", "colocated"), lates, strict=True)
    ]
    probes.append(probe("split", 3, 4.0, 20, VOID))
    knee = {"rate_per_s": 2.0, "why": ""}
    made = Record(
        kind="quick",
        target="127.0.0.1:1",
        model="m",
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=60.0,
        workloads=[SPEC],
        workload_digests={"1": make(SPEC).digest},
        lengths=lengths([make(SPEC)]),
        paired=paired(probes),
        priors=priors(tpot_slo_s=0.05, unloaded_tpot_s=0.02, ttft_slo_s=0.5, unloaded_ttft_s=0.1, mean_output_tokens=4),
        slo=SLO,
        slo_multiples={"ttft": 4.0, "tpot": 2.5},
        rates_per_s=[1.0, 4.0],
        unloaded=[arm(path, probes[:2], SLO) for path in ("split", "colocated")],
        loaded=[arm(path, probes, SLO) for path in ("split", "colocated")],
        knees=[{"seed": 1, "split": knee, "colocated": {"rate_per_s": None, "why": "above the highest rate tried"}}],
        probes=probes,
        judgement=judge([0.3, 0.31, 0.29], [0.001, -0.001, 0.0]),
        manifest={"versions": {"splitpoint": "0"}},
        notes=["a note"],
    )
    return dataclasses.replace(made, **changes)


ARMS = ("tuned-colocated", "one-to-one", "split-fp8")


def experiment() -> dict[str, Any]:
    """The JSON of a record with three arms, the first one the baseline: tuning, usage, quality and parity are in it."""
    probes = [
        dataclasses.asdict(probe(arm, seed, rate, late))
        for seed in (1, 2, 3)
        for rate, lates in ((1.0, (0, 0, 0)), (4.0, (6, 3, 1)))
        for arm, late in zip(ARMS, lates, strict=True)
    ]
    probes.append(dataclasses.asdict(probe(ARMS[1], 3, 4.0, 20, VOID)))
    base: dict[str, Any] = json.loads(comparison().to_json())
    split, colocated = base["loaded"]
    rates = {ARMS[0]: 2.0, ARMS[1]: 2.6, ARMS[2]: 3.0}
    return base | {
        "kind": "full",
        "arms": [
            {
                "name": arm,
                "path": path,
                "pools": ["colocated"] if path == "colocated" else ["prefill", "decode"],
                "candidate": "chunk-512",
                "transport": "",
                "engine": {"pool-of-" + arm: {"max_num_batched_tokens": 512, "max_num_seqs": 64}},
                "tried": {"chunk-512": [2.1, 2.2], "chunk-8192": [1.4, 1.5]},
                "tuning": [
                    {"candidate": "chunk-512", "seed": 1_000_001, "rate_per_s": 2.0, "attainment": 0.95, "chosen": True},
                    {"candidate": "chunk-8192", "seed": 1_000_001, "rate_per_s": 2.0, "attainment": 0.4, "chosen": False},
                ],
            }
            for arm, path in zip(ARMS, ("colocated", "split", "split"), strict=True)
        ],
        "verdicts": {
            ARMS[1]: json.loads(json.dumps(dataclasses.asdict(judge([0.26, 0.27, 0.26], [0.001, -0.001, 0.0])))),
            ARMS[2]: json.loads(json.dumps(dataclasses.asdict(judge([0.5, 0.1, 0.6], [0.001, -0.001, 0.0])))),
        },
        "knees": [
            {"seed": seed, **{arm: {"rate_per_s": rate * (1 + 0.01 * seed), "why": ""} for arm, rate in rates.items()}}
            for seed in (1, 2, 3)
        ],
        "loaded": [colocated | {"path": ARMS[0]}, split | {"path": ARMS[1]}, split | {"path": ARMS[2]}],
        "probes": probes,
        "usage": [
            {
                "arm": arm, "probe": 3 + place, "t_s": float(at), "worker": f"{arm}-{worker}",
                "kv_usage": 0.1 * at + 0.05 * worker, "running": at, "waiting": 1,
                "memory_bytes": 2**30, "device_memory_bytes": 0, "staging_bytes": 2**20,
            }
            for place, arm in enumerate(ARMS)
            for worker in range(2)
            for at in range(1, 6)
        ],
        "quality": _quality(),
        "parity": [
            {
                "seed": 1, "requests": 4, "floor": 0.01, "batched_floor": 0.02, "verdict": "near_ties",
                "arms": [
                    {"arm": ARMS[1], "asked": 4, "divergences": 0, "batched": 4, "batched_divergences": 1, "worst_gap": 0.004,
                     "verdict": "near_ties", "why": "every divergence is a near-tie"},
                ],
            }
        ],
    }  # fmt: skip


def _quality() -> dict[str, Any]:
    read = {
        "questions": 40, "tokens": 900, "bounded": 0, "mean": 0.02, "p99": 0.3, "p99_low": 0.2, "p99_high": 0.4,
        "agreement": 0.97, "agreement_low": 0.95, "agreement_high": 0.99,
        "excess": 0.0123, "excess_low": 0.01, "excess_high": 0.015,
    }  # fmt: skip
    paired = {"both_right": 30, "only_baseline": 2, "only_arm": 1, "both_wrong": 7, "drop": 0.025, "low": -0.06, "high": 0.11}
    score = {"kind": "", "right": 32, "asked": 40, "share": 0.8, "low": 0.65, "high": 0.9}
    found = {"paired": paired, "read": read, "decoded": read, "checks": []}
    return {
        "baseline": ARMS[0],
        "set_digest": "0123456789abcdef",
        "questions": 40,
        "left_out": 0,
        "arms": [{"name": arm, "scores": [score], "answers": {"q1": "long text"}} for arm in (ARMS[0], ARMS[2])],
        "floor": {**found, "arm": ARMS[0], "paired": None, "verdict": "pass", "why": ""},
        "compared": [{**found, "arm": ARMS[2], "verdict": "undecided", "why": "the drop may exceed 5.0%"}],
        "verdict": "undecided",
    }
