"""A small comparison's record, made by hand: three seeds, two rates, both paths, one void probe."""

from __future__ import annotations

import dataclasses
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
