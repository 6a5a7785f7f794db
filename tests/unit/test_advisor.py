"""The advisor's decisions: scenarios as text in and out, and the parts they are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.gateway.latencies import FAILED, added, bucket_of
from coordinator.pools.advisor_config import AdvisorSettings
from coordinator.pools.advisor_decide import Advice, Memory, advise, carried_out
from coordinator.pools.advisor_layouts import PHASES, Pool, Situation
from coordinator.pools.advisor_phases import Phase, load_of
from coordinator.routing.auto import COLOCATED, SPLIT, Objective, StepTimes
from coordinator.routing.views import Role
from tests.support.scenarios import check_scenario

FOLDER = Path(__file__).parent / "scenarios" / "advisor"
GOAL = Objective(ttft_s=1.0, tpot_s=0.05)
TIMES = StepTimes(first_token_s=0.02, prompt_token_s=0.0002, step_s=0.02, running_s=0.0005)
MODEL = {SPLIT: replace(TIMES, handover_s=0.01), COLOCATED: TIMES}


class Story:
    """Plays one scenario.

    set FIELD=VALUE...                             of `[advisor]`
    model                                          calibrated step times, and requests that follow
    pool NAME ROLE REPLICAS [engine=E] [ranks=R] [low=N] [high=N] [fixed=TEXT_WITHOUT_BLANKS]
    load ROLE FIELD=VALUE...                       a phase's window from now on; ttft=SECONDSxCOUNT,...; gap=TEXT
    unsettled [TEXT]                               what is not as desired
    refuse [TEXT]                                  why pools refuse to change
    operator NAME N                                somebody else sets a target
    took HOW SECONDS                               a change of that kind has taken so long
    look T                                         a look; what it carries out is taken over
    """

    def __init__(self) -> None:
        self.settings = AdvisorSettings(enabled=True, interval_s=10, window_s=60, hold_s=0, dwell_s=600)
        self.pools: list[Pool] = []
        self.phases: dict[Role, dict[str, Any]] = {role: {} for role in PHASES}
        self.memory = Memory()
        self.unsettled = self.refusal = ""
        self.model: dict[str, StepTimes] | None = None

    def run(self, line: str) -> list[str]:
        command, *words = line.split()
        return list(getattr(self, f"do_{command}")(*words) or ())

    def do_set(self, *pairs: str) -> None:
        self.settings = AdvisorSettings.model_validate({**self.settings.model_dump(), **dict(p.split("=") for p in pairs)})

    def do_model(self) -> None:
        self.model = MODEL

    def do_pool(self, name: str, role: str, replicas: str, *pairs: str) -> None:
        known: dict[str, Any] = {k: int(v) if v.isdigit() else v.replace("_", " ") for k, v in (p.split("=") for p in pairs)}
        self.pools.append(Pool(name=name, role=Role(role), replicas=int(replicas), **known))

    def do_load(self, role: str, *pairs: str) -> None:
        known: dict[str, Any] = {"span_s": self.settings.window_s}
        for key, value in (pair.split("=") for pair in pairs):
            if key in ("ttft", "tpot"):
                parts = [part.split("x") for part in value.split(",")]
                known[key] = added({FAILED if s == "never" else bucket_of(float(s)): int(n)} for s, n in parts)
            elif key == "gap":
                known["gaps"] = (value.replace("_", " "),)
            else:
                known[key] = float(value) if "." in value or key.endswith("_s") else int(value)
        self.phases[Role(role)] = known

    def do_unsettled(self, *words: str) -> None:
        self.unsettled = " ".join(words)

    def do_refuse(self, *words: str) -> None:
        self.refusal = " ".join(words)

    def do_operator(self, name: str, replicas: str) -> None:
        self.pools = [replace(pool, replicas=int(replicas)) if pool.name == name else pool for pool in self.pools]

    def do_took(self, how: str, seconds: str) -> None:
        self.memory = self.memory.with_cost(how, float(seconds))

    def do_look(self, now_s: str) -> list[str]:
        situation = self.situation()
        advice, memory = advise(situation, self.memory, self.settings, float(now_s), unsettled=self.unsettled)
        shown = [f"{advice.action}: {advice.reason}"]
        if advice.action in ("apply", "roll_back"):
            if self.refusal:
                shown.append(f"refused: {self.refusal}")
            else:
                memory = carried_out(advice, memory, self.settings, float(now_s))
                for name, replicas in advice.counts.items():
                    self.do_operator(name, str(replicas))
                shown.append(", ".join(f"{name} {replicas}" for name, replicas in advice.counts.items()))
        self.memory = memory
        return shown + self.figures(advice)

    @staticmethod
    def figures(advice: Advice) -> list[str]:
        p = advice.proposal
        if p is None:
            return []
        costs = f"{p.cost_requests:.4g} requests lost in {p.cost_s:g} s ({p.measured_costs} measured)"
        rates = f"{p.baseline_per_s:.4g}/s, then {p.then.goodput_per_s:.4g}/s by {', '.join(sorted(set(p.then.bases.values())))}"
        return [f"{rates}; {costs}, {p.gain_requests:.4g} gained"]

    def situation(self) -> Situation:
        ready = {role: sum(pool.replicas for pool in self.pools if pool.role is role) for role in PHASES}
        phases = {role: Phase(role=role, workers=ready[role], **self.phases[role]) for role in PHASES}
        return Situation(
            pools=self.pools,
            phases=phases,
            load=load_of(phases),
            goal=GOAL,
            times=self.model,
            auto=self.model is not None,
            whole_roles=frozenset({Role.COLOCATED, Role.DECODE}),
        )


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_scenario(name: str) -> None:
    check_scenario(FOLDER / f"{name}.txt", Story().run)
