"""`quick`: one workload through both paths of a running system, in at most a minute and a half, to a verdict.

The few seeds of it never decide; they show the two paths side by side and exercise the whole method.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize

from coordinator.compare.faults import LATE_CLIENT, Fault, inspect
from coordinator.compare.goodput import floor, ratios, seed_knees
from coordinator.compare.load import (
    PATHS,
    Client,
    Outcome,
    Probe,
    RequestFailedError,
    Slo,
    run_one_at_a_time,
    run_probe,
)
from coordinator.compare.notes import knee_notes, to_settle, void_notes
from coordinator.compare.paired import paired
from coordinator.compare.plan import TAIL_E2ES, QuickPlan, plan_quick
from coordinator.compare.priors import priors
from coordinator.compare.record import Record, utc_now, write
from coordinator.compare.slo import SloError, SloSpec
from coordinator.compare.sources import Material
from coordinator.compare.summary import arm, summarise
from coordinator.compare.target import connect
from coordinator.compare.undisturbed import prompt_client
from coordinator.compare.verdict import MARGIN, judge
from coordinator.compare.workload import PlannedRequest, Workload, WorkloadSpec, lengths, make

BUDGET_S = 78.0
"""The command has 90 s, with its own start and the last request's end."""
PROMPT_TOKENS = (48, 96)
OUTPUT_TOKENS = (8, 12)
BASELINE = "colocated"
CALIBRATION_REQUESTS = 4
CALIBRATION_SEED = 0
REQUEST_DEADLINE_S = 20.0

Workloads = Callable[[int, int], Workload]
"""The workload of a seed and a number of requests, before its salt."""
Say = Callable[[str, float], None]
"""Told what happens now and the share of the whole that is done."""


class ComparisonError(Exception):
    """The system cannot be compared; the text says why. `fault` is what of the method is to blame, where that is known."""

    def __init__(self, text: str, fault: Fault | None = None) -> None:
        super().__init__(text)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Calibration:
    """Unloaded outcomes per path and what follows from the colocated ones."""

    outcomes: dict[str, list[Outcome]]
    slo: Slo
    e2e_s: float
    multiples: dict[str, float]


async def quick(
    target: str,
    *,
    json_path: Path | None = None,
    manifest: dict[str, Any] | None = None,
    budget_s: float | None = None,
    say: Say = lambda text, share: None,
    api_key: str = "",
    material: Material | None = None,
    slo: SloSpec | None = None,
    first_seed: int = 1,
) -> Record:
    """Compare the two paths behind `target` (see `connect`); with `json_path` the record is written too.

    `material` is sent instead of short prompts of `PROMPT_TOKENS`, and `slo` asked instead of the default multiples. `first_seed`
    and those after it are measured, as many as fit. It ends within `budget_s` (default `BUDGET_S`) and one request's time,
    measuring less where the system is slow.

    Raises:
        ComparisonError: the service cannot be reached, or one of the paths serves nothing.
        WorkloadError: `material` makes no workload.
        OSError: the record cannot be written.
    """
    with prompt_client() as priority:
        async with connect(target, api_key=api_key) as client:
            try:
                model = await client.model(5.0)
            except RequestFailedError as error:
                raise ComparisonError(f"{target}: {error}") from error
            workloads = short_prompts if material is None else material.workload
            record = await compare_paths(
                client,
                target=target,
                model=model,
                budget_s=budget_s or BUDGET_S,
                say=say,
                workloads=workloads,
                wanted=slo or SloSpec(),
                first_seed=first_seed,
            )
    record.manifest = manifest or {}
    record.source = {} if material is None else material.source.model_dump(mode="json")
    record.client_nice, record.client_realtime = priority.nice, priority.realtime
    if not priority.realtime and any(probe.void for probe in record.probes):
        text = f"the client may not run before others (niceness {priority.nice}); with that right it would be on time more"
        record.notes.append(text)
    if json_path is not None:
        write(record, json_path)
    return record


async def compare_paths(
    client: Client, *, target: str, model: str, budget_s: float, say: Say, workloads: Workloads, wanted: SloSpec, first_seed: int
) -> Record:
    """The comparison itself, over any client. Raises `ComparisonError`."""
    began, started_at = time.perf_counter(), utc_now()
    # Prefix caches outlive a comparison: this run's prompts must be new to them too.
    run_salt = f"{time.time_ns():x}"
    say("unloaded, one request at a time", 0.0)
    calibration = await calibrate(client, run_salt, workloads, wanted)
    left_s = budget_s - (time.perf_counter() - began)
    plan = plan_quick(calibration.e2e_s, left_s, first_seed)
    probes, notes = await _run_plan(client, plan, calibration, run_salt, began + budget_s, say, workloads)
    notes += void_notes(probes)
    slo = calibration.slo
    knees, differences, itself = goodputs(plan, probes, slo)
    notes += knee_notes(knees) + to_settle(knees, probes)
    sent = [workloads(seed, plan.requests) for seed in plan.seeds]
    # Void probes have their notes already, and their own reason for deciding nothing.
    faults = [fault for fault in inspect(probes, sent) if fault.kind != LATE_CLIENT]
    notes += [fault.text for fault in faults]
    return Record(
        kind="quick",
        unit_gaps=True,
        target=target,
        model=model,
        started_at=started_at,
        wall_s=time.perf_counter() - began,
        workloads=[workload.spec for workload in sent],
        workload_digests={str(workload.spec.seed): workload.source_digest or workload.digest for workload in sent},
        lengths=lengths(sent),
        paired=paired(probes),
        faults=faults,
        priors=_priors(slo, calibration, sent),
        slo=slo,
        slo_multiples=calibration.multiples,
        rates_per_s=list(plan.rates_per_s),
        unloaded=[summarise(path, calibration.outcomes[path], slo) for path in PATHS],
        loaded=[arm(path, probes, slo) for path in PATHS],
        knees=knees,
        probes=probes,
        judgement=judge(differences, itself, MARGIN, faults=[fault.text for fault in faults if fault.unfit]),
        notes=notes,
    )


async def calibrate(
    client: Client,
    run_salt: str,
    workloads: Workloads,
    wanted: SloSpec,
    *,
    arms: Sequence[str] = PATHS,
    baseline: str = BASELINE,
    requests: int = CALIBRATION_REQUESTS,
    deadline_s: float = REQUEST_DEADLINE_S,
    now: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """A warm-up and a few requests per arm, one at a time, arms alternating. Raises `ComparisonError`."""
    workload = workloads(CALIBRATION_SEED, requests)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in arms}

    async def unloaded(request: PlannedRequest, name: str) -> Outcome:
        (outcome,) = await run_one_at_a_time(client, [request], path=name, deadline_s=deadline_s, now=now)
        if outcome.failure:
            raise ComparisonError(f"the {name} path fails even unloaded: {outcome.failure}")
        return outcome

    for name in arms:
        await unloaded(workload.salted(f"{run_salt}/warm/{name}").requests[0], name)
    for index in range(requests):
        for name in arms:
            request = workload.salted(f"{run_salt}/unloaded/{name}").requests[index % len(workload.requests)]
            outcomes[name].append(await unloaded(request, name))
    base = summarise(baseline, outcomes[baseline], None)
    if base.ttft is None or base.tpot is None or base.e2e is None or base.e2e.p50 <= 0:
        raise ComparisonError(f"the {baseline} path answered without a measurable latency")
    try:
        slo = wanted.resolve(
            unloaded_ttft_s=base.ttft.p50, unloaded_tpot_s=base.tpot.p50, ttft_line=ttft_line(outcomes[baseline])
        )
    except SloError as error:
        raise ComparisonError(str(error)) from error
    middle_tokens = statistics.median(outcome.prompt_tokens for outcome in outcomes[baseline])
    ttft_s = slo.ttft_for_s(round(middle_tokens))
    multiples = {"ttft": ttft_s / base.ttft.p50, "tpot": slo.tpot_s / base.tpot.p50}
    return Calibration(outcomes, slo, base.e2e.p50, multiples)


def ttft_line(outcomes: Sequence[Outcome]) -> tuple[float, float] | None:
    """TTFT as seconds and seconds a prompt token, both at least 0, by least squares; None for fewer than three lengths."""
    answered = [outcome for outcome in outcomes if outcome.ttft_s is not None]
    if len({outcome.prompt_tokens for outcome in answered}) < 3:
        return None
    rows = np.array([[1.0, outcome.prompt_tokens] for outcome in answered])
    (base_s, per_token_s), _ = optimize.nnls(rows, np.array([outcome.ttft_s for outcome in answered], dtype=float))
    return float(base_s), float(per_token_s)


def goodputs(plan: QuickPlan, probes: Sequence[Probe], slo: Slo) -> tuple[list[dict[str, Any]], list[float], list[float]]:
    """Per seed the knees of each arm; log ratios split over colocated; log ratios of colocated over itself.

    A seed without a bracketed knee in both arms gives no ratio: a bound is not a measurement.
    """
    # Probes are in the plan's order; a run that was cut has fewer.
    for step, probe in zip(plan.steps, probes, strict=False):
        probe.half = step.half
    knees = [seed_knees(probes, seed, slo, PATHS) for seed in plan.seeds]
    return knees, ratios(knees, "split", BASELINE), floor(knees, BASELINE)


async def _run_plan(
    client: Client, plan: QuickPlan, calibration: Calibration, run_salt: str, end_at: float, say: Say, workloads: Workloads
) -> tuple[list[Probe], list[str]]:
    """Every step, until the next would end after `end_at` (perf_counter)."""
    probes: list[Probe] = []
    for number, step in enumerate(plan.steps):
        expected_s = plan.requests / step.rate_per_s + TAIL_E2ES * calibration.e2e_s
        if time.perf_counter() + expected_s > end_at:
            return probes, [f"out of time after {number} of {len(plan.steps)} probes"]
        say(f"{step.path} at {step.rate_per_s:.2f} requests/s, seed {step.seed}", number / len(plan.steps))
        workload = workloads(step.seed, plan.requests).salted(f"{run_salt}/{number}")
        deadline_s = min(REQUEST_DEADLINE_S, max(1.0, end_at - time.perf_counter()))
        probe = await run_probe(
            client,
            workload,
            path=step.path,
            rate_per_s=step.rate_per_s,
            deadline_s=deadline_s,
            slo=calibration.slo,
        )
        probes.append(probe)
    say("done", 1.0)
    return probes, []


def _priors(slo: Slo, calibration: Calibration, sent: Sequence[Workload]) -> list[str]:
    base = summarise("colocated", calibration.outcomes["colocated"], None)
    if base.ttft is None or base.tpot is None or min(base.ttft.p50, base.tpot.p50) <= 0:
        return []
    return priors(
        tpot_slo_s=slo.tpot_s,
        unloaded_tpot_s=base.tpot.p50,
        ttft_slo_s=calibration.multiples["ttft"] * base.ttft.p50,
        unloaded_ttft_s=base.ttft.p50,
        mean_output_tokens=lengths(sent)["output"]["mean"],
    )


def short_prompts(seed: int, requests: int) -> Workload:
    """The workload of a comparison that names none."""
    return make(WorkloadSpec(seed=seed, requests=requests, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS))
