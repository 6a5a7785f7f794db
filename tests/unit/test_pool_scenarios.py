"""Stories of pools as text: what is asked or happens, and under it what the pure cores answered.

The processes are played by `tests/support/pool_world.py` in given time; table, reconcile, routing and breakers are real.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from coordinator.pools.reconcile import (
    Action,
    DrainWorker,
    FenceWorker,
    ForgetWorker,
    ProbeWorker,
    PromoteWorker,
    RelabelWorker,
    ReservePlace,
    StandByWorker,
    StartWorker,
    StopWorker,
    check_scale,
)
from coordinator.pools.records import PoolTarget, Restart, SpareKind
from coordinator.routing.breaker import PairKey
from coordinator.routing.goals import PairRoute, Refusal, first_goals, workers_of
from coordinator.routing.views import Placement, Role, WorkerState
from protos.errors import SplitpointError
from protos.ids import WorkerId
from tests.support.pool_world import PoolWorld, Process
from tests.support.scenarios import check_scenario, played

FOLDER = Path(__file__).parent / "scenarios" / "pools"
STORIES = (
    "breaker", "drain", "failover", "failover_no_spare_left", "failover_placed", "failover_warm", "placement", "relabel",
    "replace", "scale", "spares", "surge",
)  # fmt: skip


def counted(things: Iterable[str]) -> list[str]:
    """Equal lines once, with their number."""
    return [thing if count == 1 else f"{count} x {thing}" for thing, count in Counter(things).items()]


class Scenario:
    """Runs the commands of one file."""

    def __init__(self) -> None:
        self.world = PoolWorld()

    def run(self, line: str) -> list[str]:
        command, *words = line.split()
        return list(getattr(self, f"do_{command}")(*words))

    def process(self, name: str) -> Process:
        return self.world.processes[WorkerId(name)]

    # What operators do ----------------------------------------------------------------------------------------------------

    def do_pools(self, *pools: str) -> list[str]:
        """`NAME=REPLICAS[+SPARES:KIND][/ENGINE]`, the role is the name's beginning. A pass follows."""
        made = {}
        for pool in pools:
            name, _, size = pool.partition("=")
            counts, _, engine = size.partition("/")
            replicas, _, reserve = counts.partition("+")
            spares, _, kind = reserve.partition(":")
            role = next(role for role in Role if name.startswith(role))
            made[name] = PoolTarget(
                name=name, role=role, replicas=int(replicas), engine=engine, spares=int(spares or 0),
                spare_kind=SpareKind(kind or "warm"),
            )  # fmt: skip
        self.world.targets = made
        return self.do_pass()

    def do_replace(self, how: str, amount: str) -> list[str]:
        """`max_unavailable SHARE` or `surge_ranks N` of the changes that follow."""
        setattr(self.world, how, type(getattr(self.world, how))(amount))
        return []

    def do_scale(self, pool: str, replicas: str, current: str = "") -> list[str]:
        """A new target, with the guard `current`; a pass follows."""
        targets, guard = list(self.world.targets.values()), int(current) if current else None
        try:
            target = check_scale(targets, pool, int(replicas), guard, frozenset({Role.COLOCATED, Role.DECODE}))
        except SplitpointError as error:
            return [f"{error.code}: {error.message}"]
        self.world.targets[pool] = target
        return self.do_pass()

    def do_drain(self, name: str) -> list[str]:
        """One worker is to go; a pass follows."""
        self.world.fleet.drain(WorkerId(name), self.world.now_s + 60.0)
        return self.do_pass()

    def do_restart(self, name: str) -> list[str]:
        """One worker is to be replaced by a fresh one; a pass follows."""
        self.world.fleet.restart(WorkerId(name), Restart.IN_PLACE)
        return self.do_pass()

    def do_cordon(self, name: str) -> list[str]:
        self.world.fleet.cordon(WorkerId(name), True)
        return self.do_pass()

    # What happens ---------------------------------------------------------------------------------------------------------

    def do_pass(self) -> list[str]:
        return counted(map(shown, self.world.reconcile()))

    def do_wait(self, seconds: str) -> list[str]:
        """So many seconds, one pass in each; those with actions are shown."""
        lines = []
        for _ in range(int(seconds)):
            self.world.tick()
            lines += [f"{self.world.now_s:g} s: {action}" for action in self.do_pass()]
        return lines

    def do_ready(self, *names: str) -> list[str]:
        """Their engines serve, and say so."""
        for name in names:
            self.process(name).serves = True
        return self.do_wait("1")

    def do_at(self, place: str, *names: str) -> list[str]:
        """They are on `NODE` or `NODE/RACK`, as their next heartbeat says."""
        for name in names:
            self.process(name).node, _, self.process(name).rack = place.partition("/")
        return []

    def do_place(self, placement: str, imbalance_tokens: str = "0") -> list[str]:
        """Where gateways want the two workers of a pair."""
        self.world.place_pairs(Placement(placement), int(imbalance_tokens))
        return []

    def do_load(self, name: str, tokens: str) -> list[str]:
        """So many tokens more are in flight there."""
        self.world.router.load.charge(self.process(name).incarnation, int(tokens))
        return []

    def do_busy(self, name: str, running: str, leases: str = "0") -> list[str]:
        process = self.process(name)
        process.running, process.leases = int(running), int(leases)
        return []

    def do_signal(self, name: str, what: str) -> list[str]:
        """`stop`, `continue`, `deafen`, `cut` (nothing of its host arrives), `join`, or `kill`, which is known at once."""
        if what == "kill":
            self.world.died(WorkerId(name), "its process ended")
        else:
            self.process(name).stopped = what == "stop"
            self.process(name).deaf = what == "deafen"
            self.process(name).away = what == "cut"
        return []

    def do_fault(self, *names: str) -> list[str]:
        """A fault of one worker, or of two over a transport."""
        opened = self.world.router.breakers.failed(self.key(*names), self.world.now_s)
        return ["its circuit opens"] if opened else []

    def do_success(self, *names: str) -> list[str]:
        return ["its circuit closes"] if self.world.router.breakers.succeeded(self.key(*names)) else []

    def key(self, *names: str) -> Any:
        if len(names) == 1:
            return self.process(names[0]).incarnation
        prefill, decode, transport = names
        return PairKey(self.process(prefill).incarnation, self.process(decode).incarnation, transport)

    # What can be seen -----------------------------------------------------------------------------------------------------

    def do_workers(self) -> list[str]:
        """All that are known, and what each is offered."""
        return [
            f"{view.worker_id}: {view.pool}, {view.role}, {view.state}"
            + (", spare" if view.spare else "")
            + (", cordoned" if view.cordoned else "")
            for view in self.world.fleet.views(self.world.now_s)
        ]

    def do_serving(self) -> list[str]:
        """How many workers of each pool are offered requests, and with which engine arguments."""
        views = [view for view in self.world.fleet.views(self.world.now_s) if view.state is WorkerState.READY]
        found = Counter((view.pool, self.world.processes[view.worker_id].engine) for view in views if not view.cordoned)
        return [f"{pool}: {count} of {engine or 'the first'}" for (pool, engine), count in sorted(found.items())]

    def do_asks(self, count: str, path: str, strict: str = "") -> list[str]:
        """So many requests, each routed, run and over: who got any, and who got one alone."""
        routes = Counter(self.ask(path, strict == "strict") for _ in range(int(count)))
        return sorted(route + (", one" if number == 1 < len(routes) else "") for route, number in routes.items())

    def ask(self, path: str, strict: bool) -> str:
        route = self.world.router.choose(first_goals(path, prompt_tokens=10, transport=None, strict=strict), self.world.now_s)
        if isinstance(route, Refusal):
            return route.message
        names = " -> ".join(view.worker_id for view in workers_of(route))
        over = f" over {route.transport}" if isinstance(route, PairRoute) else ""
        return names + over + (f" ({', '.join(route.notes)})" if route.notes else "")


def shown(action: Action) -> str:
    match action:
        case StartWorker():
            return f"start a {'spare' if action.spare else 'worker'} of {action.pool}"
        case PromoteWorker():
            return f"promote {action.worker_id}: {action.reason}"
        case StandByWorker():
            return f"stand by {action.worker_id}: {action.reason}"
        case ReservePlace():
            return f"reserve the place of {action.worker_id}"
        case DrainWorker():
            return f"drain {action.worker_id}: {action.reason}"
        case RelabelWorker():
            return f"relabel {action.worker_id}: {action.reason}"
        case ProbeWorker():
            return f"probe {action.worker_id}"
        case StopWorker():
            late = " although it is not idle" if action.timed_out else ""
            return f"stop {action.worker_id}{late}: {action.reason}"
        case FenceWorker():
            return f"fence {action.worker_id}: {action.reason}"
        case ForgetWorker():
            return f"forget {action.worker_id}: {action.reason}"


@pytest.mark.parametrize("name", STORIES)
async def test_scenario(name: str) -> None:
    check_scenario(FOLDER / f"{name}.txt", Scenario().run)


def test_there_is_no_other_file() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == list(STORIES)


def test_an_answer_that_changes_is_seen() -> None:
    text = (FOLDER / "scale.txt").read_text()
    scenario = Scenario()

    def one_fewer(line: str) -> list[str]:
        return scenario.run(line)[:-1]

    assert played(text, one_fewer) != text
