"""The full comparison: unloaded times, tuning, the search for the rates, then seed after seed until a planned look decides.

It owns no system and no clock: a client, a rig and a time source are given, so the same code judges real engines and, in virtual
time, simulated ones. After every stage the record is handed out; a later run goes on from it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from coordinator.compare import bracket, judged
from coordinator.compare.blocks import Turn, schedule
from coordinator.compare.experiment import Experiment
from coordinator.compare.faults import late_client
from coordinator.compare.goodput import missed, seed_knees
from coordinator.compare.load import Probe
from coordinator.compare.prober import Prober
from coordinator.compare.record import ArmRecord, Record, TuningStep, utc_now
from coordinator.compare.run import ComparisonError, Workloads, calibrate
from coordinator.compare.slo import SloSpec, parse
from coordinator.compare.summary import summarise
from coordinator.compare.tools import Checks, Progress, Tools
from coordinator.compare.verdict import judge
from coordinator.compare.workload import TUNING_SEEDS_FROM
from coordinator.routing.auto import AUTO

TAIL_S = 5.0
"""A probe is expected to end this long after its last arrival, until a seed has been measured."""
FURTHER_RATES = 2
"""A seed has at most so many rates more than were planned, of every arm, where an arm's knee lies beyond those."""
UNLOADED_SHARE = 0.1
"""Of the rate where the search begins by itself."""
OUT_OF_TIME = "out of time"


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

    A candidate is tuned and a seed begun only when it is expected to fit, and counts only whole; what was found on the way to the
    first seed is never measured again.

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
        self._record = before
        self._worked_s = 0.0 if before is None else before.wall_s
        self._usage_before = [] if before is None else list(before.usage)
        self._head = (target, model, digest)
        self._prober = Prober(experiment, workloads, tools, self._arm, lambda: self._whole)

    async def run(self) -> Record:
        if self._record is None:
            self._record = await self._unloaded()
            self._save()
        record = self._record
        self._know(record)
        record.notes = [note for note in record.notes if not note.startswith(OUT_OF_TIME)]
        for name in self._names:
            if not any(step.chosen for step in self._arm(name).tuning):
                if not await self._tune(name):
                    return record
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
            await self._prober.place(arms[0])
        names = self._names[:1] if experiment.takes_turns else self._names
        found = await calibrate(
            self._tools.client,
            self._tools.salt,
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
            unit_gaps=True,
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

    async def _tune(self, name: str) -> bool:
        """Every candidate's knee on the tuning seeds; the best is frozen. The search begins where the last one ended.

        A candidate without a knee counts as one that serves nothing. False when there was no time for all of them.
        """
        experiment, arm, record = self._experiment, self._arm(name), self._whole
        longest_s = 0.0
        for candidate in experiment.arms[name].candidates:
            if candidate in arm.tried:
                continue
            if self._out_of_time(f"{name}, {candidate}, is tuned", longest_s):
                self._save()
                return False
            began = self._tools.now()
            self._choose(arm, candidate)
            await self._prober.warm(arm)
            steps: list[TuningStep] = []
            knees: list[float] = []
            for seed in range(TUNING_SEEDS_FROM, TUNING_SEEDS_FROM + experiment.tuning_seeds):
                found = await self._search(arm, seed, self._start(knees))
                steps += found
                points = {step.rate_per_s: step.attainment for step in found if not step.void}
                knees.append(bracket.found(points, experiment.requests) or 0.0)
                if not knees[-1]:
                    break
            arm.tried[candidate] = knees if all(knees) else [0.0] * experiment.tuning_seeds
            arm.tuning += steps
            self._save()
            longest_s = max(longest_s, self._tools.now() - began)
        best = max(arm.tried, key=lambda candidate: statistics.fmean(arm.tried[candidate]))
        if not any(arm.tried[best]):
            near = max(arm.tuning, key=lambda step: (not step.void, step.attainment))
            late = late_client(sum(bool(step.void) for step in arm.tuning), len(arm.tuning))
            raise ComparisonError(
                f"{name}: no knee within {experiment.search_steps} rates; "
                + (near.void or f"at best {near.attainment:.0%} meet the objective")
                + f", at {near.rate_per_s:.3g} requests/s ({near.candidate}): change the slo or start_rate_per_s"
                + (f"; {late.text}" if late is not None else ""),
                late,
            )
        self._choose(arm, best)
        arm.tuning = [replace(step, chosen=step.candidate == best) for step in arm.tuning]
        record.rates_per_s = []
        return True

    def _start(self, knees: Sequence[float]) -> float:
        """Where a search begins: at the last knee that any found."""
        known = [*(rate for arm in self._whole.arms for tried in arm.tried.values() for rate in tried if rate), *knees]
        return known[-1] if known else self._experiment.start_rate_per_s or self._first_rate()

    async def _search(self, arm: ArmRecord, seed: int, start: float) -> list[TuningStep]:
        """One seed's way to a knee. Where the client cannot keep its schedule, no rate as high is tried again."""
        tried: dict[float, float] = {}
        steps: list[TuningStep] = []
        ceiling = math.inf
        for number in range(self._experiment.search_steps):
            rate = bracket.next_rate(tried, start, self._experiment.requests, ceiling_per_s=ceiling)
            # At so low a rate requests hardly meet each other: what fails there fails at any.
            if rate is None or rate >= ceiling or (steps and rate < UNLOADED_SHARE * self._first_rate()):
                break
            text = f"tuning {arm.name}, {arm.candidate}, {rate:.3g} requests/s, step {number + 1}"
            probe = (await self._prober.send(Turn(seed, rate, arm.name, 0), text, share=0.0, left_s=None))[-1]
            attained = probe.attainment(self._whole.slo)
            steps.append(
                TuningStep(
                    candidate=arm.candidate,
                    seed=seed,
                    rate_per_s=rate,
                    attainment=attained,
                    void=probe.void,
                    requests=len(probe.outcomes),
                )
            )
            if probe.void:
                ceiling = rate
            else:
                tried[rate] = attained
        return steps

    async def _seeds(self) -> None:
        experiment, record = self._experiment, self._whole
        done = {entry["seed"] for entry in record.knees}
        last = experiment.looks[-1]
        # A seed whose rates miss a knee gives no ratio; some more may take the place of such.
        for place in range(experiment.seeds):
            if judged.settled(record.verdicts) or min((found.seeds for found in record.verdicts.values()), default=0) >= last:
                break
            seed = experiment.first_seed + place
            if seed in done:
                await self._go_on(seed, place, last)
                continue
            if self._out_of_time(f"seed {seed}", self._expected_seed_s()):
                break
            await self._seed(seed, place, last)
            done.add(seed)
        self._judge()
        self._save()

    async def _seed(self, seed: int, place: int, of: int) -> None:
        record, experiment = self._whole, self._experiment
        turns = schedule(self._order(place), [seed], record.rates_per_s, by_seed=experiment.takes_turns)
        probes: list[Probe] = []
        for number, turn in enumerate(turns):
            probes += await self._take(turn, place + number / len(turns), of, unsaved=len(probes))
        probes += await self._further(seed, place, of, probes, unsaved=len(probes))
        sent = self._workloads(seed, experiment.requests)
        record.workloads.append(sent.spec)
        record.workload_digests[str(seed)] = sent.source_digest or sent.digest
        self._keep(seed, probes)
        await self._check_parity(seed)

    async def _go_on(self, seed: int, place: int, of: int) -> None:
        """The further rates that an earlier run had no time for, of a seed that is in the record."""
        measured = [probe for probe in self._whole.probes if probe.seed == seed]
        if probes := await self._further(seed, place, of, measured, unsaved=0):
            self._keep(seed, probes)

    async def _further(self, seed: int, place: int, of: int, measured: Sequence[Probe], *, unsaved: int) -> list[Probe]:
        """Probes at rates beyond those that were `measured`, where an arm's knee was missed there."""
        record = self._whole
        fresh: list[Probe] = []
        rates = sorted({probe.rate_per_s for probe in measured})
        while len(rates) < len(record.rates_per_s) + FURTHER_RATES:
            rate = bracket.further_rate(rates, missed([*measured, *fresh], seed, record.slo, self._names))
            if rate is None:
                break
            turns = schedule(self._order(place), [seed], [rate])
            # Far below the planned rates a probe may take longer than all others together.
            if self._out_of_time(f"a further rate of seed {seed}", len(turns) * (self._experiment.requests / rate + TAIL_S)):
                break
            rates.append(rate)
            for turn in turns:
                fresh += await self._take(turn, place + 1, of, unsaved=unsaved + len(fresh))
        return fresh

    async def _take(self, turn: Turn, done: float, of: int, *, unsaved: int) -> list[Probe]:
        """One probe when `done` of `of` seeds are behind; `unsaved` ones before it are not in the record yet."""
        share, left_s = min(1.0, done / of), self._expected_seed_s() * max(0.0, of - done)
        text = f"seed {turn.seed}, {turn.arm} at {turn.rate_per_s:.3g} requests/s"
        return await self._prober.send(turn, text, share=share, left_s=left_s, index=len(self._whole.probes) + unsaved)

    def _keep(self, seed: int, probes: Sequence[Probe]) -> None:
        """Into the record, all at once: a seed that was cut short leaves nothing."""
        record = self._whole
        record.probes += probes
        record.knees = [entry for entry in record.knees if entry["seed"] != seed]
        record.knees.append(seed_knees(record.probes, seed, record.slo, self._names))
        record.knees.sort(key=lambda entry: entry["seed"])
        self._judge()
        for probe in probes:
            probe.thin()
        self._save()

    def _order(self, place: int) -> tuple[str, ...]:
        """The arm that has the fresh machine changes from seed to seed."""
        first = place % len(self._names)
        return self._names[first:] + self._names[:first]

    # Beside speed ---------------------------------------------------------------------------------------------------------

    async def _check_quality(self) -> None:
        record = self._whole
        if self._experiment.quality and not record.quality:
            self._tools.say(Progress("the question set through every arm", 0.0))
            record.quality = await self._checks.quality(self._names, self._prober.cleared)
            self._save()

    async def _check_parity(self, seed: int) -> None:
        if self._experiment.parity_requests:
            self._tools.say(Progress(f"seed {seed}, equal tokens", 0.0))
            sample = await self._checks.parity(self._names, seed, self._experiment.parity_requests, self._prober.cleared)
            self._whole.parity.append(sample)
            self._judge()
            self._save()

    @property
    def _checks(self) -> Checks:
        if self._tools.checks is None:
            raise ComparisonError("parity_requests and quality need the gRPC address of a gateway")
        return self._tools.checks

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
        if target.path == AUTO and self._record is not None:
            target = replace(target, slo=self._record.slo)
        self._tools.know(arm.name, target)

    def _know(self, record: Record) -> None:
        for arm in record.arms:
            self._choose(arm, arm.candidate)

    def _first_rate(self) -> float:
        base = self._whole.unloaded[0].e2e
        assert base is not None  # calibration refuses a baseline without one
        return 2 / base.p50

    def _out_of_time(self, before: str, needed_s: float) -> bool:
        """Whether less is left than `needed_s`; then a note says so."""
        left_s = self._budget_s - (self._tools.now() - self._began)
        if needed_s <= left_s and left_s > 0:
            return False
        note = f"{OUT_OF_TIME} before {before}: it takes about {needed_s:.0f} s, {max(0.0, left_s):.0f} s were left"
        self._whole.notes = [*self._whole.notes, note]
        return True

    def _seed_s(self, seed: int) -> float:
        """How long a measured seed took, in this run or another: each stretch of its probes ran on one clock."""
        own = [probe for probe in self._whole.probes if probe.seed == seed]
        return sum(probe.ended_s - probe.began_s for probe in own)

    def _expected_seed_s(self) -> float:
        """As long as the longest so far; before there is one, what its probes should take."""
        if self._whole.knees:
            return max(self._seed_s(entry["seed"]) for entry in self._whole.knees)
        probes, requests = 2 * len(self._names), self._experiment.requests
        sent = self._workloads(TUNING_SEEDS_FROM, requests)
        rates = self._whole.rates_per_s
        return sum(probes * (self._prober.repeats(sent, rate) * requests / rate + TAIL_S) for rate in rates)

    def _judge(self) -> None:
        record = self._whole
        if record.knees:
            sent = [self._workloads(entry["seed"], self._experiment.requests) for entry in record.knees]
            kept = [note for note in record.notes if note.startswith(OUT_OF_TIME)]
            more = [*self._tools.rig.notes(), *kept]
            if self._prober.short:
                more.append(
                    f"the ends of probes are judged too, where the system fills and empties: it takes {self._prober.short}"
                )
            if self._prober.brief:
                more.append(f"probes end before their load has built up: it takes {self._prober.brief}")
            judged.refresh(record, self._experiment, sent, more_notes=more)

    def _save(self) -> None:
        record = self._whole
        record.wall_s = self._worked_s + self._tools.now() - self._began
        # A seed that was cut short has no probes in the record; neither have its samples, nor those of tuning.
        record.usage = self._usage_before + [each for each in self._tools.rig.usage() if 0 <= each.probe < len(record.probes)]
        self._tools.save(record)
