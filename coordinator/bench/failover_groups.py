"""Groups in virtual time under the real table of workers, reconcile, router and retry budget: `splitpoint bench failover`.

A group computes prompts one after the other; decoding takes its share of that time, and each sequence so long per token. A
process that is lost breaks its streams at once, and its death is known. A node that is lost says nothing: gateways notice by
their keep-alive, the coordinator by heartbeats, probes and the grace time of a partition. Requests without a token are sent
again, those with some go on from there on another group, as a gateway does it.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.bench.failover_spec import FailoverSpec, Loss
from coordinator.compare.traces import Row
from coordinator.config import Settings
from coordinator.pools.fleet import Fleet, rules_of
from coordinator.pools.reconcile import (
    Action,
    Actual,
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
    reconcile,
)
from coordinator.pools.records import PoolTarget, SpareKind
from coordinator.pools.reports import Beat
from coordinator.routing.goals import Refusal, SoloGoal, SoloRoute
from coordinator.routing.policies import Ask
from coordinator.routing.retry_budget import RetryBudget
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerState, WorkerView
from protos.ids import Incarnation, WorkerId

POOL = "groups"
DRAIN_S = 120.0
"""After the last arrival: what is not answered by then is late anyway."""


@dataclass(slots=True, eq=False)
class Request:
    """One request's life. Times are seconds of the run; `first_s` and `last_s` are None until the client has the first and the
    last token."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    attempts: int = 0
    sent_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    failed: bool = False
    exclude: frozenset[Incarnation] = frozenset()

    def kept(self, spec: FailoverSpec) -> bool:
        """Within the objectives."""
        if self.failed or self.first_s is None or self.last_s is None:
            return False
        per_token_s = (self.last_s - self.first_s) / max(1, self.output_tokens - 1)
        return self.first_s - self.arrival_s <= spec.ttft_s and per_token_s <= spec.tpot_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests, how many groups served from when on, and when one was lost."""

    requests: Sequence[Request]
    serving: Sequence[tuple[float, int]]
    lost_s: float


@dataclass(slots=True, eq=False)
class _Leg:
    """One attempt on one group. `first_s` and `last_s` are when it computes its first and last token."""

    request: Request
    tokens: int
    first_s: float
    last_s: float


@dataclass(slots=True, eq=False)
class _Group:
    """One worker's process and its queue."""

    worker_id: WorkerId
    place: int
    free_s: float = 0.0
    ready: bool = False
    legs: list[_Leg] = field(default_factory=list)

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.worker_id}-i")


class Groups:
    """One run. Places are accelerators: as many as there are groups and spares; a lost node's is away for `repair_s`. The group
    is lost at `lost_s`, or when the seed says."""

    def __init__(
        self,
        spec: FailoverSpec,
        groups: int,
        spares: int,
        kind: SpareKind,
        loss: Loss,
        seed: int,
        *,
        lost_s: float | None = None,
    ) -> None:
        settings = Settings()
        self._lost_s = spec.lost_s(seed) if lost_s is None else lost_s
        self._spec, self._loss = spec, loss
        self._rules = rules_of(settings)
        self._probe_timeout_s = settings.coordinator.probe_timeout_s
        client = settings.gateway.worker_client
        self._notice_s = 0.0 if loss == "process" else client.keepalive_time_s + client.keepalive_timeout_s
        self._target = PoolTarget(
            name=POOL, role=Role.COLOCATED, replicas=groups, spares=spares, spare_kind=kind, start_timeout_s=10 * spec.start_s
        )
        self._fleet = Fleet(self._rules)
        self._router = Router(settings.gateway.routing, random.Random(f"router/{seed}"), transports=("ucx",))
        self._retries = settings.gateway.retry_budget
        self._budget = RetryBudget(share=settings.gateway.retry_share, reserve=settings.gateway.retry_reserve)
        self._random = random.Random(f"loss/{seed}")
        self._free_places = list(range(groups + spares))
        self._places: dict[WorkerId, int] = {}
        self._waiting: list[WorkerId] = []
        self._groups: dict[WorkerId, _Group] = {}
        self._silent: set[WorkerId] = set()
        self._probing: set[WorkerId] = set()
        self._noticed_s = 0.0
        self._heard = -1
        self._numbers: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._now_s = 0.0
        self._serving: list[tuple[float, int]] = []

    def run(self, rows: Sequence[Row]) -> Outcome:
        """All of `rows`; about half-way through the run's time the group is lost that has most to do."""
        self._begin()
        requests = [Request(row.arrival_s, row.input_tokens, row.output_tokens) for row in rows]
        for request in requests:
            self._at(request.arrival_s, lambda r=request: self._arrive(r))  # type: ignore[misc]
        self._at(self._lost_s, self._lose)
        end_s = self._spec.duration_s + DRAIN_S
        self._at(self._rules.heartbeat_interval_s, self._tick)
        while self._events and self._events[0][0] <= end_s:
            self._now_s, _, happens = heapq.heappop(self._events)
            happens()
        return Outcome(requests, self._serving, self._lost_s)

    def _at(self, at_s: float, happens: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, happens))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        self._budget.began()
        self._send(request)

    def _send(self, request: Request) -> None:
        """Choose a group and queue there; what was streamed already is part of the prompt."""
        prompt, left = request.input_tokens + request.sent_tokens, request.output_tokens - request.sent_tokens
        route = self._router.choose((SoloGoal(exclude=request.exclude),), self._now_s, Ask(tokens=prompt))
        if isinstance(route, Refusal):
            request.failed = True
            return
        assert isinstance(route, SoloRoute)
        group = self._groups.get(route.worker.worker_id)
        request.attempts += 1
        if group is None:
            # Its node is away, and the gateway does not know it yet.
            incarnation = route.worker.incarnation
            self._at(self._noticed_s, lambda: self._broken(request, incarnation))
            return
        begin_s = max(self._now_s, group.free_s)
        first_s = begin_s + prompt / self._spec.prefill_tokens_per_s
        group.free_s = begin_s + self._spec.work_s(prompt, left)
        leg = _Leg(request, prompt + left, first_s, first_s + (left - 1) * self._spec.token_s)
        group.legs.append(leg)
        self._router.load.charge(group.incarnation, leg.tokens)
        self._at(leg.last_s, lambda: self._finish(group, leg))

    def _finish(self, group: _Group, leg: _Leg) -> None:
        if leg not in group.legs:
            return  # it was lost with its group
        group.legs.remove(leg)
        self._router.load.discharge(group.incarnation, leg.tokens)
        request = leg.request
        if request.first_s is None:
            request.first_s = leg.first_s
        request.last_s = leg.last_s
        request.failed = request.first_s - request.arrival_s > self._spec.deadline_s

    def _broken(self, request: Request, incarnation: Incarnation) -> None:
        """The gateway sees that the stream is down."""
        request.exclude |= {incarnation}
        if request.attempts <= self._retries and self._budget.take():
            self._send(request)
        else:
            request.failed = True

    # -- the loss ------------------------------------------------------------------------------------------------------

    def _lose(self) -> None:
        group = max((g for g in self._groups.values() if not self._is_spare(g)), key=lambda g: (g.free_s, g.worker_id))
        del self._groups[group.worker_id]
        self._count()
        self._noticed_s = self._now_s + self._notice_s
        for leg in group.legs:
            self._router.load.discharge(group.incarnation, leg.tokens)
            self._cut(leg)
            self._at(self._noticed_s, lambda r=leg.request: self._broken(r, group.incarnation))  # type: ignore[misc]
        group.legs.clear()
        self._at(self._noticed_s, lambda: self._router.load.set_reachable(group.incarnation, False))
        if self._loss == "process":
            self._fleet.died(group.worker_id, "its process ended", self._now_s)
            self._pass()
        else:
            self._silent.add(group.worker_id)
            self._places.pop(group.worker_id)
            self._at(self._now_s + self._spec.repair_s, lambda: self._free(group.place))

    def _cut(self, leg: _Leg) -> None:
        """What the client has had of it."""
        request = leg.request
        if leg.first_s <= self._now_s:
            if request.first_s is None:
                request.first_s = leg.first_s
            have = 1 + int((self._now_s - leg.first_s) / self._spec.token_s)
            request.sent_tokens = min(request.output_tokens - 1, request.sent_tokens + have)

    # -- the control plane ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """All that is wanted is there and serves."""
        self._pass()
        for group in self._groups.values():
            group.ready = True
        self._events.clear()
        self._beats()
        self._pass()
        self._pass()

    def _tick(self) -> None:
        self._beats()
        self._pass()
        self._at(self._now_s + self._rules.heartbeat_interval_s, self._tick)

    def _beats(self) -> None:
        for group in self._groups.values():
            self._fleet.heard(self._beat(group), self._now_s)

    def _pass(self) -> None:
        """One pass of reconcile, carried out."""
        actual = Actual(
            workers=self._fleet.records(), backoff=self._fleet.backoff, silent_nodes=frozenset(self._fleet.silent_nodes)
        )
        for action in reconcile([self._target], actual, self._now_s, self._rules):
            self._carry_out(action)
        self._heed()
        self._count()

    def _heed(self) -> None:
        """Gateways hear of the membership."""
        if self._fleet.last_change != self._heard:
            self._heard = self._fleet.last_change
            self._router.update(self._fleet.views(self._now_s))

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartWorker(_, spare):
                self._new(spare)
            case PromoteWorker(worker_id):
                placed = self._fleet.members[worker_id].record.state is WorkerState.PLACED
                self._fleet.stand_by(worker_id, False, self._now_s)
                if placed:
                    self._load(worker_id)
            case StandByWorker(worker_id):
                self._fleet.stand_by(worker_id, True, self._now_s)
            case ReservePlace(worker_id):
                node = f"node {self._places[worker_id]}" if worker_id in self._places else None
                self._fleet.reserved(worker_id, node, self._now_s)
            case ProbeWorker(worker_id):
                self._probe(worker_id)
            case FenceWorker(worker_id, reason) | ForgetWorker(worker_id, reason):
                self._fleet.died(worker_id, reason, self._now_s)
                self._fleet.forget(worker_id)
                if worker_id in self._places:
                    self._free(self._places.pop(worker_id))
                self._at(self._now_s, self._pass)
            case DrainWorker() | StopWorker() | RelabelWorker():
                raise AssertionError(f"nobody asked for it: {action}")

    def _probe(self, worker_id: WorkerId) -> None:
        """One at a time; a silent node is known by the probe's time-out."""
        if worker_id in self._probing:
            return
        self._probing.add(worker_id)

        def answered() -> None:
            self._probing.discard(worker_id)
            silent = worker_id in self._silent
            self._fleet.probed(worker_id, not silent, self._now_s, host_silent=silent)
            self._heed()

        self._at(self._now_s + (self._probe_timeout_s if worker_id in self._silent else 0.0), answered)

    def _new(self, spare: bool) -> None:
        self._numbers[POOL] += 1
        worker_id = WorkerId(f"{POOL}-{self._numbers[POOL]}")
        placed = spare and self._target.spare_kind is SpareKind.PLACED
        self._fleet.created(
            worker_id, POOL, Role.COLOCATED, 0, self._now_s, engine="", start_timeout_s=self._target.start_timeout_s,
            spare=spare, placed=placed,
        )  # fmt: skip
        self._waiting.append(worker_id)
        self._place()

    def _place(self) -> None:
        """Those that wait get the places that are free, in turn."""
        while self._waiting and self._free_places:
            worker_id = self._waiting.pop(0)
            self._places[worker_id] = self._free_places.pop(0)
            if self._fleet.members[worker_id].record.state is not WorkerState.PLACED:
                self._load(worker_id)

    def _free(self, place: int) -> None:
        self._free_places.append(place)
        self._place()

    def _load(self, worker_id: WorkerId) -> None:
        if worker_id not in self._places:
            return  # it waits for its place
        group = self._groups[worker_id] = _Group(worker_id, self._places[worker_id], free_s=self._now_s)
        self._at(self._now_s + self._spec.start_s, lambda: self._serves(group))

    def _serves(self, group: _Group) -> None:
        group.ready = True
        self._fleet.heard(self._beat(group), self._now_s)
        self._pass()

    def _is_spare(self, group: _Group) -> bool:
        return self._fleet.members[group.worker_id].record.spare

    def _count(self) -> None:
        serving = sum(group.ready and not self._is_spare(group) for group in self._groups.values())
        if not self._serving or self._serving[-1][1] != serving:
            self._serving.append((self._now_s, serving))

    def _beat(self, group: _Group) -> Beat:
        view = WorkerView(
            worker_id=group.worker_id,
            incarnation=group.incarnation,
            pool=POOL,
            role=Role.COLOCATED,
            state=WorkerState.READY if group.ready else WorkerState.STARTING,
            address="",
            pid=0,
            fingerprint=b"",
            ranks=(),
            max_transfer_tokens=1 << 40,
            transports=("ucx",),
        )
        return Beat(view=view, slot=0, node_id=f"node {group.place}", processes=(), refusing=False, uptime_s=0.0)
