"""Moves workers between the phases, or proposes it: what was heard in, `pools apply` as an operator's out, memory on disk.

No Ray, no clock. The number of an autoscaled pool is its autoscaler's: the advisor touches it only while the budget keeps the
autoscaler from growing, within the pool's limits, and never changes how many accelerators all pools take together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from pydantic import TypeAdapter

from coordinator.config import Settings
from coordinator.pools.advisor_decide import Advice, Memory, advise, carried_out
from coordinator.pools.advisor_layouts import PHASES, Pool, Situation
from coordinator.pools.advisor_messages import status_of
from coordinator.pools.advisor_phases import load_of, phase_of
from coordinator.pools.autoscale_sampler import Heard, Sampler
from coordinator.pools.autoscaler import Autoscaler
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet
from coordinator.pools.store import Store
from coordinator.routing.auto import AUTO, Objective, StepTimes
from coordinator.routing.views import Role
from protos.errors import SplitpointError
from protos.splitpoint.v1 import admin_pb2

log = logging.getLogger(__name__)

_MEMORY = TypeAdapter(Memory)


class Advisor:
    """Belongs to the coordinator's event loop. `silent_s`: who was not heard for so long is missing. `times`: calibrated step
    times by path; without them, for the reason `no_model`, it goes by what is measured and leaves the mode as it is."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        pools: DesiredPools,
        fleet: Fleet,
        autoscaler: Autoscaler,
        silent_s: float,
        *,
        whole_roles: frozenset[Role],
        times: Mapping[str, StepTimes] | None = None,
        no_model: str = "",
    ) -> None:
        self.settings = settings.advisor
        auto = settings.gateway.auto
        self._goal = Objective(
            ttft_s=self.settings.ttft_goal_s or auto.slo_ttft_s, tpot_s=self.settings.tpot_goal_s or auto.slo_tpot_s
        )
        self._auto = settings.gateway.default_path == AUTO
        self._whole_roles = whole_roles
        self._times = times
        self._no_model = no_model
        self._store = store
        self._pools = pools
        self._fleet = fleet
        self._autoscaler = autoscaler
        self._sampler = Sampler(silent_s)
        kept = store.advisor()
        self._written = kept
        self._memory = _MEMORY.validate_json(kept) if kept is not None else Memory()
        self._version = pools.present.version
        self._timed: tuple[str, float] | None = None
        self._looked_s: float | None = None
        self._situation: Situation | None = None
        self.advice: Advice | None = None
        """The last one; None before the first look, and where `advisor.enabled` is not set."""

    def run(self, heard: Heard, now_s: float, wall_s: float) -> bool:
        """Look, decide, and change the pools where that is to be done. `now_s` is monotonic, `wall_s` a wall clock. True when the
        pools have changed."""
        if not self.settings.enabled:
            return False
        window_s, interval_s = self.settings.window_s, self.settings.interval_s
        self._sampler.take(self._pools.targets, self._fleet, heard, now_s, window_s + 4 * interval_s)
        unsettled = next(iter(self._pools.unsettled(heard.reports.values())), "")
        self._time(unsettled, wall_s, since_s=wall_s if self._looked_s is None else self._looked_s)
        situation = self._situation = self._look(now_s)
        advice, memory = advise(situation, self._memory, self.settings, wall_s, unsettled=unsettled)
        changed = False
        if advice.action in ("apply", "roll_back"):
            refusal = self._apply(advice.counts)
            if refusal:
                # What was remembered stands: the next look decides on what is then.
                advice = replace(advice, action="refused", reason=f"{advice.reason}; {refusal}")
            else:
                memory, changed = carried_out(advice, memory, self.settings, wall_s), True
                self._time(unsettled, wall_s, since_s=wall_s)
        self._note(advice)
        self.advice, self._looked_s = advice, wall_s
        self._remember(memory)
        return changed

    def status(self, wall_s: float) -> admin_pb2.AdvisorStatus:
        """What it advises, and what that rests on."""
        age_s = wall_s - self._looked_s if self._looked_s is not None else 0.0
        return status_of(self.settings, self._situation, self.advice, self._memory, wall_s, age_s=age_s)

    def _look(self, now_s: float) -> Situation:
        targets, samples = self._pools.targets, self._sampler.samples
        settings = self.settings
        phases = {
            role: phase_of(
                role,
                [samples[target.name] for target in targets if target.role is role],
                now_s,
                period_s=settings.window_s,
                interval_s=settings.interval_s,
            )
            for role in PHASES
        }
        return Situation(
            pools=self._owned(),
            phases=phases,
            load=load_of(phases),
            goal=self._goal,
            times=self._times,
            no_model=self._no_model,
            auto=self._auto and self._times is not None,
            whole_roles=self._whole_roles,
        )

    def _owned(self) -> list[Pool]:
        """The pools with who keeps their number."""
        policies, limited = self._autoscaler.policies, self._autoscaler.limited
        pools = []
        for target in self._pools.targets:
            policy = policies.get(target.name)
            fixed = "" if policy is None or limited else "its autoscaler keeps its number and has room in the budget"
            pools.append(
                Pool(
                    name=target.name,
                    role=target.role,
                    replicas=target.replicas,
                    ranks=target.ranks,
                    engine=target.engine,
                    low=0 if policy is None else policy.min_replicas,
                    high=4096 if policy is None else policy.max_replicas,
                    fixed=fixed,
                )
            )
        return pools

    def _apply(self, counts: Mapping[str, int]) -> str:
        """Why it was refused; "" when it was not."""
        present = self._pools.present
        pools = {name: pool.model_copy(update={"replicas": counts[name]}) for name, pool in present.settings.pools.items()}
        try:
            self._pools.apply(pools, expected=present.version)
        except SplitpointError as error:
            return error.message
        return ""

    def _time(self, unsettled: str, wall_s: float, *, since_s: float) -> None:
        """Measures what changes take, whoever makes them. A new one was made at `since_s` at the earliest."""
        if self._pools.present.version != self._version:
            self._version = self._pools.present.version
            actions = {step.action for step in self._pools.steps}
            how = "restart" if "restart" in actions else "relabel" if "relabel" in actions else None
            self._timed = (how, since_s) if how is not None else None
        elif self._timed is not None and not unsettled:
            how, began_s = self._timed
            self._timed = None
            self._memory = self._memory.with_cost(how, max(0.0, wall_s - began_s))
            log.info("advisor: a change by %s took %.1f s", how, wall_s - began_s)

    def _note(self, advice: Advice) -> None:
        last = self.advice
        if advice.action == "apply":
            log.info("advisor: %s", advice.reason)
        elif advice.action in ("roll_back", "refused"):
            log.warning("advisor: %s: %s", advice.action, advice.reason)
        elif last is None or last.action != advice.action:
            log.info("advisor: %s: %s", advice.action, advice.reason)

    def _remember(self, memory: Memory) -> None:
        self._memory = memory
        # What layouts have come to changes with every look, and begins anew with the next coordinator.
        text = _MEMORY.dump_json(replace(memory, looked_s=None, forgone={})).decode()
        if text != self._written:
            self._store.put_advisor(text)
            self._written = text
