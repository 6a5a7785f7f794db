"""What changes pools by itself, beside the reconcile loop: the autoscaler, the advisor, and their metrics. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from coordinator import path_model
from coordinator.config import Settings, served_model_name
from coordinator.pools.advisor import Advisor
from coordinator.pools.autoscale_sampler import Heard
from coordinator.pools.autoscaler import Autoscaler
from coordinator.pools.desired_pools import DesiredPools
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.scaling_metrics import ScalingMetrics
from coordinator.pools.store import Store
from coordinator.routing.auto import StepTimes
from protos.splitpoint.v1 import admin_pb2

log = logging.getLogger(__name__)


class Scaling:
    """Belongs to the coordinator's event loop. It goes by what was heard anyway and calls nobody."""

    def __init__(self, settings: Settings, store: Store, pools: DesiredPools, fleet: Fleet) -> None:
        rules = rules_of(settings)
        silent_s = 2 * rules.heartbeat_limit_s
        self._settings = settings
        self._pools = pools
        self.autoscaler = Autoscaler(store, pools, fleet, silent_s)
        times, no_model = _step_times(settings)
        self.advisor = Advisor(
            settings,
            store,
            pools,
            fleet,
            self.autoscaler,
            silent_s,
            whole_roles=rules.whole_roles,
            times=times,
            no_model=no_model,
        )
        self.metrics = ScalingMetrics(served_model_name(settings))
        self.policy_set = asyncio.Event()
        """Set it where an autoscaler has another policy: it is looked at without delay."""
        self._counts = self._now()

    def serve_metrics(self) -> int | None:
        """Where `coordinator.metrics_port` says so; the port. One that is taken is an error in the log: pools are scaled all the
        same."""
        coordinator = self._settings.coordinator
        if coordinator.metrics_port is None:
            return None
        try:
            return self.metrics.serve(coordinator.metrics_host, coordinator.metrics_port)
        except OSError as error:
            log.error("coordinator.metrics_port: no metrics of pools: %s", error)
            return None

    async def run(
        self,
        heard: Callable[[], Heard],
        describe: Callable[[], Sequence[admin_pb2.PoolStatus]],
        ending: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        """Until it is cancelled. `changed` is called when the desired pools are others than before; nothing is done while the
        system is `ending`."""

        async def look_again(
            look: Callable[[Heard, float, float], bool], interval_s: Callable[[], float], sooner: asyncio.Event
        ) -> None:
            while True:
                sooner.clear()
                if not ending():
                    if look(heard(), time.monotonic(), time.time()):
                        changed()
                    self.metrics.shown(self._snapshot(describe()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s()):
                        await sooner.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(look_again(self.look_autoscaler, lambda: self.autoscaler.interval_s, self.policy_set))
            if self._settings.advisor.enabled:
                interval_s = self._settings.advisor.interval_s
                group.create_task(look_again(self.look_advisor, lambda: interval_s, asyncio.Event()))

    def look_autoscaler(self, heard: Heard, now_s: float, wall_s: float) -> bool:
        """One pass. True when the desired pools have changed."""
        self._count("operator")
        changed = self.autoscaler.run(heard, now_s)
        self._count("autoscaler")
        for decision in self.autoscaler.decisions:
            self.metrics.autoscaled(decision.pool, decision.action)
        return changed

    def look_advisor(self, heard: Heard, now_s: float, wall_s: float) -> bool:
        """The same of the advisor."""
        self._count("operator")
        changed = self.advisor.run(heard, now_s, wall_s)
        self._count("advisor")
        if self.advisor.advice is not None:
            self.metrics.advised(self.advisor.advice.action)
        return changed

    def _count(self, source: str) -> None:
        """Changes of targets since the last time are those of `source`."""
        now = self._now()
        if now != self._counts:
            self.metrics.scaled(source, self._counts, now)
            self._counts = now

    def _now(self) -> dict[str, int]:
        return {target.name: target.replicas for target in self._pools.targets}

    def _snapshot(self, pools: Sequence[admin_pb2.PoolStatus]) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(
            pools=pools, autoscaling=self.autoscaler.status(time.monotonic()), advisor=self.advisor.status(time.time())
        )


def _step_times(settings: Settings) -> tuple[dict[str, StepTimes] | None, str]:
    """What the advisor is to predict from, or why it goes by what is measured alone. It was read when the system was started; a
    file that has gone since then does not keep the coordinator from coming back."""
    file = settings.gateway.auto.model_file
    if not settings.advisor.enabled or file is None:
        return None, "gateway.auto.model_file is not set"
    try:
        return path_model.read(file), ""
    except path_model.PathModelError as error:
        log.error("the advisor goes by what is measured alone: %s", error)
        return None, str(error)
