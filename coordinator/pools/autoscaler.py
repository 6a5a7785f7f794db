"""Keeps the targets of autoscaled pools: policies on disk, samples in memory, decisions carried out as an operator's `scale` is.

No Ray, no clock. A coordinator that restarts finds its policies again, and shrinks nothing before it has looked for long enough.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from coordinator.pools.autoscale import Decision, Delays, Outcome, decide
from coordinator.pools.autoscale_gain import Watched
from coordinator.pools.autoscale_messages import gains_of, policy_of, status_of
from coordinator.pools.autoscale_policy import AutoscalePolicy
from coordinator.pools.autoscale_sampler import Heard, Sampler
from coordinator.pools.autoscale_signals import observe
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet
from coordinator.pools.store import Store
from coordinator.routing.views import WorkerState
from protos.errors import Code, SplitpointError, invalid
from protos.splitpoint.v1 import admin_pb2

log = logging.getLogger(__name__)

IDLE_INTERVAL_S = 10.0
"""How often pools are sampled while nobody scales them automatically, so that a dry run has something to go by."""
_IDLE_PERIOD_S = 30.0


class Autoscaler:
    """Belongs to the coordinator's event loop. `silent_s`: who was not heard for so long is missing."""

    def __init__(self, store: Store, pools: DesiredPools, fleet: Fleet, silent_s: float) -> None:
        self._store = store
        self._pools = pools
        self._fleet = fleet
        self._sampler = Sampler(silent_s)
        self._policies = {pool: AutoscalePolicy.model_validate_json(text) for pool, text in store.autoscalers().items()}
        self._budget = store.accelerator_budget()
        self._delays: Mapping[str, Delays] = {}
        self._decisions: dict[str, tuple[float, Decision]] = {}
        self._outcome: Outcome | None = None

    @property
    def interval_s(self) -> float:
        """Seconds until the next pass."""
        return min((policy.metrics_interval_s for policy in self._policies.values()), default=IDLE_INTERVAL_S)

    def run(self, heard: Heard, now_s: float) -> bool:
        """Sample, decide, and give the new targets. True when one has changed."""
        longest_s = max((p.look_back_period_s for p in self._policies.values()), default=_IDLE_PERIOD_S)
        keep_s = max(longest_s, _IDLE_PERIOD_S) + 2 * max(self.interval_s, IDLE_INTERVAL_S)
        self._sampler.take(self._pools.targets, self._fleet, heard, now_s, keep_s)
        outcome = self._decide(self._policies, self._budget, now_s)
        delays, before = dict(outcome.delays), self._pools.present.version
        version = before
        for name, decision in outcome.decisions.items():
            if decision.replicas != decision.current:
                try:
                    self._pools.scale(name, decision.replicas, current=decision.current, expected=version)
                except SplitpointError as error:
                    delays[name] = Delays(target=decision.current)
                    decision = replace(decision, action="refused", replicas=decision.current, reason=error.message)
                else:
                    version = self._pools.present.version
            self._note(decision, now_s)
        self._delays, self._outcome = delays, outcome
        return version != before

    @property
    def policies(self) -> Mapping[str, AutoscalePolicy]:
        """Of the pools whose number of workers it keeps."""
        return self._policies

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Those of the last pass."""
        names = self._outcome.decisions if self._outcome is not None else ()
        return tuple(self._decisions[name][1] for name in names if name in self._decisions)

    @property
    def limited(self) -> bool:
        """Some pool was to grow at the last pass, and the budget had no room for all of it."""
        return any(decision.action == "limited" for decision in self.decisions)

    def set(self, request: admin_pb2.SetAutoscalerRequest, now_s: float) -> admin_pb2.AutoscalerStatus:
        """A policy instead of the pool's present one; on disk when it returns, unless `dry_run`.

        Raises:
            SplitpointError: `NOT_FOUND` unknown pool; `INVALID_VALUE` names the field; `CONFLICT` it may not go to 0.
        """
        policy = policy_of(request.policy)
        target = self._pools.present.target(request.pool)
        if target is None:
            known = ", ".join(t.name for t in self._pools.targets)
            raise SplitpointError(Code.NOT_FOUND, f"no pool {request.pool!r}; pools: {known}", param="pool")
        if problem := policy.misplaced(target.role):
            raise invalid("policy", f"pool {target.name} ({target.role}): {problem}")
        if policy.min_replicas == 0:
            self._pools.scale(target.name, 0, dry_run=True)
        budget = (request.accelerator_budget or None) if request.HasField("accelerator_budget") else self._budget
        if request.dry_run:
            decision = self._decide({**self._policies, target.name: policy}, budget, now_s).decisions[target.name]
            return status_of(target.name, policy, decision, 0.0)
        self._store.put_autoscaler(target.name, policy.model_dump_json())
        if budget != self._budget:
            self._store.put_accelerator_budget(budget)
        self._budget = budget
        self._policies[target.name] = policy
        self._delays = {pool: delays for pool, delays in self._delays.items() if pool != target.name}
        log.info("pool %s is autoscaled, %d to %d workers", target.name, policy.min_replicas, policy.max_replicas)
        return status_of(target.name, policy, None, 0.0)

    def remove(self, pool: str) -> None:
        """The target stays where it is.

        Raises:
            SplitpointError: `NOT_FOUND` the pool is not autoscaled.
        """
        if pool not in self._policies:
            known = ", ".join(self._policies) or "none"
            raise SplitpointError(Code.NOT_FOUND, f"pool {pool!r} is not autoscaled; autoscaled pools: {known}", param="pool")
        self._store.put_autoscaler(pool, None)
        del self._policies[pool]
        self._decisions.pop(pool, None)
        log.info("pool %s is not autoscaled any more", pool)

    def check_operator(self, request: admin_pb2.ScalePoolRequest) -> None:
        """Raises `SplitpointError(CONFLICT)` when the target is not an operator's to give."""
        policy = self._policies.get(request.pool)
        if policy is not None and not request.force:
            limits = f"{policy.min_replicas} to {policy.max_replicas}"
            message = f"pool {request.pool} is autoscaled, {limits} workers: change its limits or turn its autoscaler off first"
            raise SplitpointError(Code.CONFLICT, f"{message}, or force it (the autoscaler goes on from there)", param="replicas")

    def status(self, now_s: float) -> admin_pb2.Autoscaling:
        """Every autoscaler with its last decision; also one whose pool is not there, which does nothing until it is."""
        gains = gains_of(self._outcome.gains) if self._outcome is not None else ()
        reply = admin_pb2.Autoscaling(next=gains, accelerators_taken=self._pools.present.ranks + self._draining())
        if self._budget is not None:
            reply.accelerator_budget = self._budget
        for pool, policy in self._policies.items():
            decided_s, decision = self._decisions.get(pool, (now_s, None))
            there = self._pools.present.target(pool) is not None
            reply.autoscalers.append(status_of(pool, policy, decision if there else None, now_s - decided_s))
        return reply

    def _decide(self, policies: Mapping[str, AutoscalePolicy], budget: int | None, now_s: float) -> Outcome:
        targets = self._pools.targets
        watched = [
            Watched(
                target=target,
                policy=policy,
                observed=observe(
                    self._sampler.samples.get(target.name, ()),
                    now_s,
                    period_s=policy.look_back_period_s,
                    interval_s=policy.metrics_interval_s,
                    aggregation=policy.aggregation_function,
                ),
            )
            for target in targets
            if (policy := policies.get(target.name)) is not None
        ]
        others = sum((t.workers if t.name not in policies else t.workers - t.replicas) * t.ranks for t in targets)
        return decide(watched, self._delays, now_s, other_accelerators=others + self._draining(), budget=budget)

    def _draining(self) -> int:
        """Accelerators of workers that are no part of a target any more and still there."""
        return sum(record.ranks for record in self._fleet.records() if record.state is WorkerState.DRAINING)

    def _note(self, decision: Decision, now_s: float) -> None:
        last = self._decisions.get(decision.pool)
        if decision.replicas != decision.current:
            log.info("autoscaler: pool %s from %d to %d: %s", decision.pool, decision.current, decision.replicas, decision.reason)
        elif decision.action in ("limited", "refused") and (last is None or last[1].action != decision.action):
            log.warning("autoscaler: pool %s stays at %d: %s", decision.pool, decision.current, decision.reason)
        self._decisions[decision.pool] = (now_s, decision)
