"""The full comparison: unloaded times, tuning, the search for the rates, then seed after seed until a planned look decides.

It owns no system and no clock: a client, a rig and a time source are given, so the same code judges real engines and, in virtual
time, simulated ones. After every stage the record is handed out; a later run goes on from it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from coordinator.compare import bracket, judged
from coordinator.compare.blocks import Turn, schedule
from coordinator.compare.experiment import TUNING_SEEDS_FROM, Experiment
from coordinator.compare.goodput import seed_knees
from coordinator.compare.load import Client, Probe, run_probe
from coordinator.compare.record import ArmRecord, Record, TuningStep, utc_now
from coordinator.compare.rig import Rig, StandingRig
from coordinator.compare.run import ComparisonError, Workloads, calibrate
from coordinator.compare.slo import SloSpec, parse
from coordinator.compare.summary import summarise
from coordinator.compare.verdict import judge

Place = Callable[[str], Awaitable[None]]
"""Given an arm's name."""
TAIL_S = 5.0
"""A probe is expected to end this long after its last arrival, until one has ended."""
SPARE_SEEDS_SHARE = 0.25
"""Of the last look's seeds, so many more may be measured where some gave no ratio."""
UNLOADED_SHARE = 0.1
"""Of the rate where the search begins by itself."""
OUT_OF_TIME = "out of time"
VOID_RETRIES = 1
"""A probe whose client fell behind is sent again, in its place, this often."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What happens now, for people. `share` is of the whole, 0 to 1; `left_s` an estimate, None while unknown."""

    text: str
    share: float
    left_s: float | None = None
    done: int = 0
    of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a run works with. `now` is a monotonic clock in seconds; `save` is told of the record after every stage."""

    client: Client
    know: Callable[[str, Any], None]
    rig: Rig = field(default_factory=StandingRig)
    now: Callable[[], float] = time.perf_counter
    say: Callable[[Progress], None] = lambda progress: None
    save: Callable[[Record], None] = lambda record: None
    checks: Checks | None = None
    """Asked where the plan wants parity or quality; without, such a plan is refused."""
    salt: str = field(default_factory=lambda: f"{time.time_ns():x}")
    """Prefix caches outlive a comparison: this run's prompts must be new to them too."""


class Checks(Protocol):
    """What is asked of arms beside speed. `place` is awaited before an arm's turn: it stands then, with empty caches.

    Both raise `ComparisonError` where nothing can be said, and give what belongs into the record.
    """

    async def parity(self, arms: Sequence[str], seed: int, requests: int, place: Place) -> dict[str, Any]: ...

    async def quality(self, arms: Sequence[str], place: Place) -> dict[str, Any]: ...


async def run(
    experiment: Experiment,
    workloads: Workloads,
    tools: Tools,
    *,
    target: str,
    model: str,
    digest: str,
    before: Record | None = None,
    budget_s: float = math.inf,
) -> Record:
    """Run the experiment, or go on from the record `before`, for at most about `budget_s`. Gives the record so far.

    A seed is begun only when it is expected to fit, and counts only whole; what was found on the way to the first seed is never
    measured again.

    Raises:
        ComparisonError: an arm fails unloaded, or attains the objective at no rate; what was measured before is saved.
        RigError: pools or caches could not be put in place.
        WorkloadError: the workload cannot be made.
    """
    return await _Run(experiment, workloads, tools, target, model, digest, before, budget_s).run()


class _Run:
    """One run's state: the record and what is derived from it. Single use."""

    def __init__(
        self,
        experiment: Experiment,
        workloads: Workloads,
        tools: Tools,
        target: str,
        model: str,
        digest: str,
        before: Record | None,
        budget_s: float,
    ) -> None:
        self._experiment = experiment
        self._workloads = workloads
        self._tools = tools
        self._names = tuple(experiment.arms)
        self._began = tools.now()
        self._budget_s = budget_s
        self._salt = tools.salt
        self._applied: str | None = None
        self._probes_sent = 0
        self._record = before
        self._worked_s = 0.0 if before is None else before.wall_s
        self._usage_before = [] if before is None else list(before.usage)
        self._head = (target, model, digest)

    async def run(self) -> Record:
        if self._record is None:
            self._record = await self._unloaded()
            self._save()
        record = self._record
        self._know(record)
        for name in self._names:
            if not self._arm(name).tuning:
                await self._tune(name)
                self._save()
        if not record.rates_per_s:
            chosen = [statistics.fmean(self._arm(name).tried[self._arm(name).candidate]) for name in self._names]
            record.rates_per_s = list(bracket.rates_around(chosen, self._experiment.rates, self._experiment.spread))
            self._save()
        await self._check_quality()
        await self._seeds()
        return record

    # Stages ---------------------------------------------------------------------------------------------------------------

    async def _unloaded(self) -> Record:
        experiment, (target, model, digest) = self._experiment, self._head
        arms = [
            ArmRecord(name=name, path=arm.path, candidate=next(iter(arm.candidates))) for name, arm in experiment.arms.items()
        ]
        for arm in arms:
            self._choose(arm, arm.candidate)
        self._tools.say(Progress("unloaded, one request at a time", 0.0))
        if experiment.takes_turns:
            # Arms that cannot stand beside each other are not asked in turns either; the baseline's times set the objective.
            await self._place(arms[0])
        names = self._names[:1] if experiment.takes_turns else self._names
        found = await calibrate(
            self._tools.client,
            self._salt,
            self._workloads,
            parse(experiment.slo) if experiment.slo else SloSpec(),
            arms=names,
            baseline=experiment.baseline,
            requests=experiment.unloaded_requests,
            deadline_s=experiment.deadline_s,
            now=self._tools.now,
        )
        unloaded = [summarise(name, found.outcomes[name], found.slo) for name in names]
        return Record(
            kind="full",
            target=target,
            model=model,
            started_at=utc_now(),
            wall_s=0.0,
            workloads=[],
            workload_digests={},
            slo=found.slo,
            slo_multiples=found.multiples,
            rates_per_s=[],
            unloaded=unloaded,
            loaded=[],
            knees=[],
            probes=[],
            judgement=judge([], [], experiment.margin, bootstrap=False),
            experiment=experiment.as_dict(),
            experiment_digest=digest,
            arms=arms,
        )

    async def _tune(self, name: str) -> None:
        """Every candidate's knee on the tuning seeds; the best is frozen. The search begins where the last one ended."""
        experiment, arm, record = self._experiment, self._arm(name), self._whole
        others = [steps for other in record.arms for steps in other.tuning]
        start = others[-1].rate_per_s if others else experiment.start_rate_per_s or self._first_rate()
        steps: list[TuningStep] = []
        tried: dict[str, list[float]] = {}
        for candidate in experiment.arms[name].candidates:
            self._choose(arm, candidate)
            for seed in range(TUNING_SEEDS_FROM, TUNING_SEEDS_FROM + experiment.tuning_seeds):
                points = await self._search(arm, seed, start)
                steps += [TuningStep(candidate=candidate, seed=seed, rate_per_s=r, attainment=a) for r, a in points.items()]
                found = bracket.found(points, experiment.requests - experiment.warm_up)
                if found is None:
                    break
                tried.setdefault(candidate, []).append(found)
                start = found
        whole = {candidate: found for candidate, found in tried.items() if len(found) == experiment.tuning_seeds}
        if not whole:
            best = max(steps, key=lambda step: step.attainment)
            raise ComparisonError(
                f"{name}: no knee within {experiment.search_steps} rates; at best {best.attainment:.0%} meet the objective, "
                f"at {best.rate_per_s:.3g} requests/s ({best.candidate}): change the slo or start_rate_per_s"
            )
        best_candidate = max(whole, key=lambda candidate: statistics.fmean(whole[candidate]))
        self._choose(arm, best_candidate)
        arm.tried = whole
        arm.tuning = [replace(step, chosen=step.candidate == best_candidate) for step in steps]

    async def _search(self, arm: ArmRecord, seed: int, start: float) -> dict[float, float]:
        tried: dict[float, float] = {}
        for number in range(self._experiment.search_steps):
            rate = bracket.next_rate(tried, start)
            # At so low a rate requests hardly meet each other: what fails there fails at any.
            if rate is None or (tried and rate < UNLOADED_SHARE * self._first_rate()):
                break
            text = f"tuning {arm.name}, {arm.candidate}, {rate:.3g} requests/s, step {number + 1}"
            probe = await self._probe(Turn(seed, rate, arm.name, 0), text, share=0.0, left_s=None)
            tried[rate] = probe.attainment(self._whole.slo)
        return tried

    async def _seeds(self) -> None:
        experiment, record = self._experiment, self._whole
        done = {entry["seed"] for entry in record.knees}
        last = experiment.looks[-1]
        spent_s: list[float] = []
        record.notes = [note for note in record.notes if not note.startswith(OUT_OF_TIME)]
        # A seed whose rates miss a knee gives no ratio; some more may take the place of such.
        for place in range(last + math.ceil(last * SPARE_SEEDS_SHARE)):
            if judged.settled(record.verdicts) or min((found.seeds for found in record.verdicts.values()), default=0) >= last:
                break
            seed = experiment.first_seed + place
            if seed in done:
                continue
            expected_s = max(spent_s, default=self._expected_seed_s())
            left_s = self._budget_s - (self._tools.now() - self._began)
            if expected_s > left_s:
                note = f"{OUT_OF_TIME} before seed {seed}: it takes about {expected_s:.0f} s, {max(0.0, left_s):.0f} s were left"
                record.notes = [*record.notes, note]
                break
            began = self._tools.now()
            await self._seed(seed, place, last, expected_s)
            spent_s.append(self._tools.now() - began)
        self._judge()
        self._save()

    async def _seed(self, seed: int, place: int, of: int, expected_s: float) -> None:
        record, experiment = self._whole, self._experiment
        # The arm that has the fresh machine changes from seed to seed.
        first = place % len(self._names)
        order = self._names[first:] + self._names[:first]
        turns = schedule(order, [seed], record.rates_per_s, by_seed=experiment.takes_turns)
        probes: list[Probe] = []
        for number, turn in enumerate(turns):
            share = min(1.0, (place + number / len(turns)) / of)
            left_s = expected_s * max(0.0, of - place - number / len(turns))
            text = f"seed {seed}, {turn.arm} at {turn.rate_per_s:.3g} requests/s"
            for retry in range(VOID_RETRIES + 1):
                probe = await self._probe(turn, text, share=share, left_s=left_s, index=len(record.probes) + len(probes))
                probes.append(probe)
                if not probe.void or retry == VOID_RETRIES:
                    break
        # All at once: a seed that was cut short leaves nothing.
        record.probes += probes
        sent = self._workloads(seed, experiment.requests)
        record.workloads.append(sent.spec)
        record.workload_digests[str(seed)] = sent.source_digest or sent.digest
        await self._check_parity(seed)
        record.knees.append(seed_knees(record.probes, seed, record.slo, self._names))
        self._judge()
        for probe in probes:
            probe.thin()
        self._save()

    # Beside speed ---------------------------------------------------------------------------------------------------------

    async def _check_quality(self) -> None:
        record = self._whole
        if self._experiment.quality and not record.quality:
            self._tools.say(Progress("the question set through every arm", 0.0))
            record.quality = await self._checks.quality(self._names, self._cleared)
            self._save()

    async def _check_parity(self, seed: int) -> None:
        if self._experiment.parity_requests:
            self._tools.say(Progress(f"seed {seed}, equal tokens", 0.0))
            sample = await self._checks.parity(self._names, seed, self._experiment.parity_requests, self._cleared)
            self._whole.parity.append(sample)

    async def _cleared(self, name: str) -> None:
        """The arm stands, and nothing is cached: arms that share workers must not find each other's KV."""
        await self._place(self._arm(name))
        await self._tools.rig.reset_caches()

    @property
    def _checks(self) -> Checks:
        if self._tools.checks is None:
            raise ComparisonError("parity_requests and quality need the gRPC address of a gateway")
        return self._tools.checks

    # One probe ------------------------------------------------------------------------------------------------------------

    async def _probe(self, turn: Turn, text: str, *, share: float, left_s: float | None, index: int = -1) -> Probe:
        experiment, tools, record = self._experiment, self._tools, self._whole
        arm = self._arm(turn.arm)
        await self._place(arm)
        if experiment.reset_caches:
            await tools.rig.reset_caches()
        self._probes_sent += 1
        workload = self._workloads(turn.seed, experiment.requests).salted(f"{self._salt}/{self._probes_sent}")
        # The tightest objective of the workload is the one that a late client spoils.
        shortest = min(len(request.prompt_token_ids) for request in workload.requests)
        done = 0

        def on_done() -> None:
            nonlocal done
            done += 1
            tools.say(Progress(text, share, left_s, done, len(workload.requests)))

        tools.say(Progress(text, share, left_s, 0, len(workload.requests)))
        with tools.rig.watch(turn.arm, index, arm.pools):
            return await run_probe(
                tools.client,
                workload,
                path=turn.arm,
                rate_per_s=turn.rate_per_s,
                deadline_s=experiment.deadline_s,
                ttft_slo_s=record.slo.ttft_s + record.slo.ttft_s_per_token * shortest,
                now=tools.now,
                on_done=on_done,
                warm_up=min(experiment.warm_up, len(workload.requests) - 1),
                half=turn.half,
            )

    async def _place(self, arm: ArmRecord) -> None:
        """The arm's pools, where it brings its own."""
        pools = self._experiment.arms[arm.name].candidates[arm.candidate].apply
        key = f"{arm.name}/{arm.candidate}"
        if pools and self._applied != key:
            self._tools.say(Progress(f"putting {', '.join(pools)} in place for {arm.name}", 0.0))
            await self._tools.rig.apply(pools)
            self._applied = key

    # The record -----------------------------------------------------------------------------------------------------------

    @property
    def _whole(self) -> Record:
        assert self._record is not None
        return self._record

    def _arm(self, name: str) -> ArmRecord:
        return next(arm for arm in self._whole.arms if arm.name == name)

    def _choose(self, arm: ArmRecord, candidate: str) -> None:
        target = self._experiment.arms[arm.name].target(candidate)
        arm.candidate, arm.pools, arm.transport = candidate, target.pools, target.transport
        self._tools.know(arm.name, target)

    def _know(self, record: Record) -> None:
        for arm in record.arms:
            self._choose(arm, arm.candidate)

    def _first_rate(self) -> float:
        base = self._whole.unloaded[0].e2e
        assert base is not None  # calibration refuses a baseline without one
        return 2 / base.p50

    def _expected_seed_s(self) -> float:
        probes = 2 * len(self._names)
        return sum(probes * (self._experiment.requests / rate + TAIL_S) for rate in self._whole.rates_per_s)

    def _judge(self) -> None:
        record = self._whole
        if record.knees:
            sent = [self._workloads(entry["seed"], self._experiment.requests) for entry in record.knees]
            kept = [note for note in record.notes if note.startswith(OUT_OF_TIME)]
            judged.refresh(record, self._experiment, sent, more_notes=[*self._tools.rig.notes(), *kept])

    def _save(self) -> None:
        record = self._whole
        record.wall_s = self._worked_s + self._tools.now() - self._began
        # A seed that was cut short has no probes in the record; neither have its samples, nor those of tuning.
        record.usage = self._usage_before + [each for each in self._tools.rig.usage() if 0 <= each.probe < len(record.probes)]
        self._tools.save(record)
