"""One probe of one arm: its pools in place, its prompts new, its ends left out, sent again where the client was late."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from coordinator.compare.blocks import Turn
from coordinator.compare.experiment import MIN_JUDGED, Experiment
from coordinator.compare.load import Probe, run_one_at_a_time, run_probe
from coordinator.compare.record import ArmRecord, Record
from coordinator.compare.run import ComparisonError, Workloads
from coordinator.compare.tools import Progress, Tools
from coordinator.compare.workload import TUNING_SEEDS_FROM, Workload

TUNING = -1
"""In place of a probe's place in the record: it is in none."""
MOST_REPEATS = 8
"""A sequence is sent so often on end at most; what is still too short says so."""
VOID_RETRIES = 1
"""A probe whose client fell behind is sent again, in its place, this often."""


class Prober:
    """Sends probes for one run. `arm_of` gives an arm as it is configured at the time; `record` the record, once there is one.

    `short` says what a probe would need for its ends to be left out whole, `brief` for its load to build up; "" while every probe
    has it.
    """

    def __init__(
        self,
        experiment: Experiment,
        workloads: Workloads,
        tools: Tools,
        arm_of: Callable[[str], ArmRecord],
        record: Callable[[], Record],
    ) -> None:
        self._experiment = experiment
        self._workloads = workloads
        self._tools = tools
        self._arm_of = arm_of
        self._record = record
        self._applied = ""
        self._count = 0
        self.short = ""
        self.brief = ""

    async def send(self, turn: Turn, text: str, *, share: float, left_s: float | None, index: int = TUNING) -> list[Probe]:
        """The probe, and where it is void the one that was sent again in its place; `index` is its place in the record.

        Raises `ComparisonError` when not one request of it was answered.
        """
        probes: list[Probe] = []
        while not probes or (probes[-1].void and len(probes) <= VOID_RETRIES):
            place = index if index == TUNING else index + len(probes)
            probes.append(await self._probe(turn, text, share=share, left_s=left_s, index=place))
        return probes

    async def place(self, arm: ArmRecord) -> None:
        """The arm's pools, where it brings its own."""
        pools = self._experiment.arms[arm.name].candidates[arm.candidate].apply
        key = f"{arm.name}/{arm.candidate}"
        if pools and self._applied != key:
            self._tools.say(Progress(f"putting {', '.join(pools)} in place for {arm.name}", 0.0))
            await self._tools.rig.apply(pools)
            self._applied = key

    async def cleared(self, name: str) -> None:
        """The arm stands, and nothing is cached: arms that share workers must not find each other's KV."""
        await self.place(self._arm_of(name))
        await self._tools.rig.reset_caches()

    async def warm(self, arm: ArmRecord) -> None:
        """One request, not measured: arms may share engines, and whoever comes first would find them cold.

        Raises `ComparisonError` when it fails.
        """
        await self.place(arm)
        workload = self._workloads(TUNING_SEEDS_FROM, 1).salted(f"{self._tools.salt}/warm/{arm.name}/{arm.candidate}")
        (outcome,) = await run_one_at_a_time(
            self._tools.client,
            workload.requests[:1],
            path=arm.name,
            deadline_s=self._experiment.deadline_s,
            now=self._tools.now,
        )
        if outcome.failure:
            raise ComparisonError(f"{arm.name}, {arm.candidate}, fails even unloaded: {outcome.failure}")

    async def _probe(self, turn: Turn, text: str, *, share: float, left_s: float | None, index: int) -> Probe:
        experiment, tools = self._experiment, self._tools
        arm = self._arm_of(turn.arm)
        await self.place(arm)
        if experiment.reset_caches:
            await tools.rig.reset_caches()
        self._count += 1
        workload = self._workloads(turn.seed, experiment.requests)
        workload = workload.repeated(self.repeats(workload, turn.rate_per_s)).salted(f"{tools.salt}/{self._count}")
        done = 0

        def on_done() -> None:
            nonlocal done
            done += 1
            tools.say(Progress(text, share, left_s, done, len(workload.requests)))

        tools.say(Progress(text, share, left_s, 0, len(workload.requests)))
        edge = self._edge(workload, turn.rate_per_s)
        with tools.rig.watch(turn.arm, index, arm.pools):
            probe = await run_probe(
                tools.client,
                workload,
                path=turn.arm,
                rate_per_s=turn.rate_per_s,
                deadline_s=experiment.deadline_s,
                slo=self._record().slo,
                now=tools.now,
                on_done=on_done,
                warm_up=edge,
                cool_down=edge,
                half=turn.half,
            )
        if all(outcome.failure for outcome in probe.outcomes):
            # Nothing was measured: the system is gone, or was never there.
            raise ComparisonError(f"{text}: every request failed: {probe.outcomes[0].failure}")
        return probe

    def repeats(self, workload: Workload, rate_per_s: float) -> int:
        """How often the sequence is sent on end, so that the probe lasts long enough for its load to build up.

        With requests that may take as long as the probe itself, a rate far above what the arm can carry still attains: the queue
        is not there yet when the last one is sent.
        """
        slo = self._record().slo
        allowed_s = statistics.fmean(slo.allows_s(len(each.prompt_token_ids), each.output_tokens) for each in workload.requests)
        wanted = max(1, math.ceil(self._experiment.load_spans * allowed_s * rate_per_s / len(workload.requests)))
        if wanted > MOST_REPEATS:
            self.brief = f"{wanted * len(workload.requests)} requests a probe at {rate_per_s:.3g}/s"
        return min(wanted, MOST_REPEATS)

    def _edge(self, workload: Workload, rate_per_s: float) -> int:
        """How many requests at either end of a probe are not judged: those that find the system filling or emptying."""
        slowest_s = max(arm.e2e.p50 for arm in self._record().unloaded if arm.e2e is not None)
        wanted = math.ceil(self._experiment.edge_e2es * slowest_s * rate_per_s)
        most = max(0, (len(workload.requests) - MIN_JUDGED) // 2)
        if wanted > most:
            self.short = f"{wanted * 2 + MIN_JUDGED} requests a probe at {rate_per_s:.3g}/s"
        return min(wanted, most)
