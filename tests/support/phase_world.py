"""Prefill and decode workers in virtual time: one queue of prompts, answers that share their workers' steps, an advisor."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.gateway.latencies import bucket_of
from coordinator.pools.advisor_config import AdvisorSettings
from coordinator.pools.advisor_decide import Memory, advise, carried_out
from coordinator.pools.advisor_layouts import PHASES, Pool, Situation
from coordinator.pools.advisor_phases import load_of, phase_of
from coordinator.pools.autoscale_signals import Sample
from coordinator.routing.auto import Objective, StepTimes
from coordinator.routing.views import Role

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests/s that come independently of each other, and what each asks for."""

    rate_per_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Counted:
    """Since the last sample."""

    legs: int = 0
    ended: int = 0
    ttft: dict[int, int] = field(default_factory=dict)
    tpot: dict[int, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0


class PhaseWorld:
    """`times` are the workers' true ones; `traffic` says what comes at a time. `good` are requests that kept both goals."""

    def __init__(
        self,
        times: StepTimes,
        goal: Objective,
        traffic: Callable[[float], Traffic],
        *,
        prefill: int,
        decode: int,
        seed: int,
        believed: StepTimes | None = None,
    ) -> None:
        self.times, self.goal, self.traffic = times, goal, traffic
        self.believed = believed
        self.workers = {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: 0}
        self.now_s = 0.0
        self.good = self.came = 0
        self.changes: list[tuple[float, str]] = []
        self.samples: dict[Role, list[Sample]] = {role: [] for role in PHASES}
        self.memory = Memory()
        self._rng = random.Random(seed)
        self._next_s = 0.0
        self._queue: deque[tuple[float, Traffic]] = deque()
        self._prompts: list[tuple[float, float, Traffic]] = []
        self._answers: list[tuple[float, int, float, float, Traffic]] = []
        self._progress = 0.0
        self._counted = Counted()

    def run(self, until_s: float, settings: AdvisorSettings | None) -> None:
        """With an advisor that looks by `settings`; None: without."""
        looks_s = self.now_s
        while self.now_s < until_s:
            self._tick()
            if settings is not None and self.now_s >= looks_s - 1e-9:
                self._sample()
                self._look(settings)
                looks_s += settings.interval_s

    def _tick(self) -> None:
        self.now_s += TICK_S
        while self._next_s <= self.now_s:
            traffic = self.traffic(self._next_s)
            self._queue.append((self._next_s, traffic))
            self._counted.legs += 1
            self.came += 1
            self._next_s += self._rng.expovariate(traffic.rate_per_s)
        while self._prompts and self._prompts[0][0] <= self.now_s:
            self._computed(*heapq.heappop(self._prompts))
        while self._queue and len(self._prompts) < self.workers[Role.PREFILL]:
            came_s, traffic = self._queue.popleft()
            took_s = self.times.first_token_s + self.times.prompt_token_s * traffic.prompt_tokens
            heapq.heappush(self._prompts, (max(came_s, self.now_s - TICK_S) + took_s, came_s, traffic))
        batch = len(self._answers) / self.workers[Role.DECODE]
        self._progress += TICK_S / (self.times.step_s + self.times.running_s * batch)
        while self._answers and self._answers[0][0] <= self._progress:
            _, _, came_s, first_s, traffic = heapq.heappop(self._answers)
            self._answered(came_s, first_s, traffic)

    def _computed(self, first_s: float, came_s: float, traffic: Traffic) -> None:
        bucket = bucket_of(first_s - came_s)
        self._counted.ttft[bucket] = self._counted.ttft.get(bucket, 0) + 1
        self._counted.prompt_tokens += traffic.prompt_tokens
        self._counted.ended += 1
        heapq.heappush(self._answers, (self._progress + traffic.output_tokens, self.came, came_s, first_s, traffic))

    def _answered(self, came_s: float, first_s: float, traffic: Traffic) -> None:
        tpot_s = (self.now_s - first_s) / (traffic.output_tokens - 1)
        bucket = bucket_of(tpot_s)
        self._counted.tpot[bucket] = self._counted.tpot.get(bucket, 0) + 1
        self._counted.output_tokens += traffic.output_tokens
        self.good += first_s - came_s <= self.goal.ttft_s and tpot_s <= self.goal.tpot_s

    def _sample(self) -> None:
        counted, self._counted = self._counted, Counted()
        waiting = [traffic for _, traffic in self._queue] + [traffic for _, _, traffic in self._prompts]
        self.samples[Role.PREFILL].append(
            Sample(
                at_s=self.now_s,
                ready=self.workers[Role.PREFILL],
                queued_tokens=sum(traffic.prompt_tokens for traffic in waiting),
                legs=counted.legs,
                ttft=counted.ttft,
                prompt_tokens=counted.prompt_tokens,
            )
        )
        self.samples[Role.DECODE].append(
            Sample(
                at_s=self.now_s,
                ready=self.workers[Role.DECODE],
                running=len(self._answers),
                legs=counted.ended,
                tpot=counted.tpot,
                output_tokens=counted.output_tokens,
            )
        )

    def _look(self, settings: AdvisorSettings) -> None:
        phases = {}
        for role in PHASES:
            kept = self.samples[role] = self.samples[role][-int(settings.window_s / settings.interval_s) - 4 :]
            phases[role] = phase_of(
                role, [kept] if kept else [], self.now_s, period_s=settings.window_s, interval_s=settings.interval_s
            )
        pools = [Pool(name=role.value, role=role, replicas=self.workers[role]) for role in (Role.PREFILL, Role.DECODE)]
        situation = Situation(
            pools=pools,
            phases=phases,
            load=load_of(phases),
            goal=self.goal,
            times={"split": self.believed, "colocated": self.believed} if self.believed is not None else None,
        )
        advice, self.memory = advise(situation, self.memory, settings, self.now_s, unsettled="")
        if advice.action in ("apply", "roll_back"):
            self.memory = carried_out(advice, self.memory, settings, self.now_s)
            self.changes.append((self.now_s, advice.action))
            for role in (Role.PREFILL, Role.DECODE):
                self.workers[role] = advice.counts[role.value]
