"""Samples of every pool from what the coordinator has heard anyway: heartbeats and reports of gateways. Asks nobody, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.gateway.latencies import added, since
from coordinator.gateway.pool_loads import PoolLoad
from coordinator.pools.autoscale_signals import Sample
from coordinator.pools.fleet import Fleet
from coordinator.pools.records import PoolTarget
from coordinator.pools.reports import GatewayReport
from coordinator.routing.views import Role, WorkerState, WorkerView

_NOTHING = PoolLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The gateways' last reports, by name, and when each came; `expected` names all that there should be."""

    reports: Mapping[str, GatewayReport]
    heard_s: Mapping[str, float]
    expected: tuple[str, ...]


@dataclass(slots=True)
class _Known:
    """What one gateway process had counted when it was sampled last."""

    pid: int
    loads: Mapping[str, PoolLoad] = field(default_factory=dict)
    lacking: Mapping[Role, int] = field(default_factory=dict)


class Sampler:
    """`silent_s`: who was not heard for so long leaves a gap."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._known: dict[str, _Known] = {}
        self._began = False
        self.samples: dict[str, list[Sample]] = {}
        """By pool, in order."""

    def take(self, targets: tuple[PoolTarget, ...], fleet: Fleet, heard: Heard, now_s: float, keep_s: float) -> None:
        """One more sample of each pool; those older than `keep_s`, and of pools that are gone, are forgotten."""
        gaps = self._gateway_gaps(heard, now_s)
        fresh = self._fresh(heard)
        names = {target.name for target in targets}
        views: dict[str, list[WorkerView]] = {name: [] for name in names}
        for view in fleet.views(now_s):
            if not view.spare:
                views.setdefault(view.pool, []).append(view)
        self.samples = {name: kept for name, kept in self.samples.items() if name in names}
        for target in targets:
            kept = [s for s in self.samples.get(target.name, []) if s.at_s > now_s - keep_s]
            self.samples[target.name] = [*kept, self._sample(target, views[target.name], heard, fresh, gaps, now_s)]
        self._began = True

    def _sample(
        self,
        target: PoolTarget,
        views: list[WorkerView],
        heard: Heard,
        fresh: list[_Known],
        gaps: tuple[str, ...],
        now_s: float,
    ) -> Sample:
        ready = [view for view in views if view.state is WorkerState.READY]
        silent = [f"{v.worker_id} is silent for {v.heartbeat_age_s:.0f} s" for v in ready if v.heartbeat_age_s > self._silent_s]
        loads = [known.loads.get(target.name, _NOTHING) for known in fresh]
        return Sample(
            at_s=now_s,
            ready=len(ready),
            starting=sum(view.state is WorkerState.STARTING for view in views),
            running=sum(view.running for view in ready),
            waiting=sum(view.waiting for view in ready),
            kv_used=sum(view.kv_usage for view in ready),
            queued_tokens=sum(r.loads.get(target.name, _NOTHING).queued_tokens for r in heard.reports.values()),
            legs=sum(load.legs for load in loads),
            ttft=added(load.ttft for load in loads),
            tpot=added(load.tpot for load in loads),
            prompt_tokens=sum(load.prompt_tokens for load in loads),
            output_tokens=sum(load.output_tokens for load in loads),
            lacking=0 if ready else sum(known.lacking.get(target.role, 0) for known in fresh),
            gaps=(*gaps, *silent),
        )

    def _gateway_gaps(self, heard: Heard, now_s: float) -> tuple[str, ...]:
        gaps = []
        for name in heard.expected:
            if name not in heard.reports:
                gaps.append(f"{name} does not answer")
            elif (age_s := now_s - heard.heard_s.get(name, now_s)) > self._silent_s:
                gaps.append(f"{name} is silent for {age_s:.0f} s")
        return tuple(gaps)

    def _fresh(self, heard: Heard) -> list[_Known]:
        """What every gateway has counted since the sample before. Of a gateway that has restarted that is all of its counts; of
        one that is seen for the first time by a coordinator that has just begun, nothing is known to be new."""
        fresh = []
        for name, report in heard.reports.items():
            before = self._known.get(name)
            if before is None and not self._began:
                before = _Known(report.pid, report.loads, report.lacking)
            elif before is None or before.pid != report.pid:
                before = _Known(report.pid)
            loads = {pool: _since(load, before.loads.get(pool, _NOTHING)) for pool, load in report.loads.items()}
            lacking = {role: count - before.lacking.get(role, 0) for role, count in report.lacking.items()}
            fresh.append(_Known(report.pid, loads, lacking))
            self._known[name] = _Known(report.pid, report.loads, report.lacking)
        return fresh


def _since(now: PoolLoad, before: PoolLoad) -> PoolLoad:
    return PoolLoad(
        legs=now.legs - before.legs,
        ttft=since(now.ttft, before.ttft),
        tpot=since(now.tpot, before.tpot),
        prompt_tokens=now.prompt_tokens - before.prompt_tokens,
        output_tokens=now.output_tokens - before.output_tokens,
    )
