"""Two simulated engines in virtual time behind the real routing: every request by split, colocated or `auto`.

The engines are those of `splitpoint compare proof --engine`, with other costs and without tokens' contents. One carries the label
prefill, the other decode; a colocated request takes the less loaded of both, as where there is no pool of colocated workers.
Routes, loads and decisions are those of a gateway.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.bench.auto_engine import Drift, StepEngine
from coordinator.bench.auto_engine import Sequence as EngineSequence
from coordinator.compare.proof import engine_arms as arms
from coordinator.compare.workload import PlannedRequest
from coordinator.routing.auto import AUTO, COLOCATED, SPLIT, AutoPath, Decision, Objective, StepTimes, Times
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import PairRoute, Refusal, first_goals
from coordinator.routing.path_choice import PathChooser
from coordinator.routing.phases import Answer
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerState, WorkerView
from engine.config import SimulatedSettings
from protos.ids import Incarnation, WorkerId

ROLES = (Role.PREFILL, Role.DECODE)
CHUNK_TOKENS = 64
STEP_BASE_S = 0.03
PREFILL_TOKEN_S = 0.001
DECODE_SEQUENCE_S = 0.002
LINK_SPEED = 4.0
"""Coarse as in the proof: a token stands for many. Decoding batches well, as on a GPU, and a prompt is worth several steps."""


def calibrated() -> dict[str, StepTimes]:
    """What the engines take when nothing drifts: what a careful calibration finds."""
    colocated = StepTimes(
        first_token_s=1.5 * STEP_BASE_S,  # half a step is waited for
        prompt_token_s=PREFILL_TOKEN_S,
        step_s=STEP_BASE_S + DECODE_SEQUENCE_S,
        running_s=DECODE_SEQUENCE_S,
        chunk_tokens=CHUNK_TOKENS,
    )
    split = replace(
        colocated,
        handover_s=arms.LINK_LATENCY_S / LINK_SPEED + STEP_BASE_S,
        handover_token_s=arms.LINK_BLOCK_S / LINK_SPEED / arms.BLOCK_TOKENS,
    )
    return {SPLIT: split, COLOCATED: colocated}


def scaled(times: StepTimes, factor: float) -> StepTimes:
    """All of them `factor` times as long."""
    return replace(
        times,
        first_token_s=times.first_token_s * factor,
        prompt_token_s=times.prompt_token_s * factor,
        step_s=times.step_s * factor,
        running_s=times.running_s * factor,
        handover_s=times.handover_s * factor,
        handover_token_s=times.handover_token_s * factor,
    )


@dataclass(slots=True, eq=False)
class _Request:
    """One under way. `leg` is the book's name of what is computed for it now."""

    name: str
    planned: PlannedRequest
    due_s: float
    decision: Decision | None = None
    leg: str = ""
    answer: Answer | None = None
    charges: dict[Incarnation, int] | None = None
    decode: Incarnation | None = None
    first_s: float = 0.0
    tokens: int = 0
    times: Times | None = None


class World:
    """Both engines and one gateway. Time goes on from one `send` to the next, and so does what `auto` has learned."""

    def __init__(self, drifts: Mapping[Role, Drift], auto: AutoPath, objective: Objective, seed: str) -> None:
        router = Router(RoutingSettings(), random.Random(f"{seed}/router"), transports=("grpc",))
        router.update([_view(role) for role in ROLES])
        self.chooser = PathChooser(router, auto)
        self.now_s = 0.0
        self._objective, self._seed = objective, seed
        self._engines = {
            _view(role).incarnation: StepEngine(
                _costs(),
                chunk_tokens=CHUNK_TOKENS,
                max_seqs=arms.engine_settings(1.0, CHUNK_TOKENS).max_num_seqs or 0,
                drift=drifts[role],
                rng=random.Random(f"{seed}/{role}"),
            )
            for role in ROLES
        }
        self._link_free_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._under_way: dict[str, _Request] = {}

    def send(self, requests: Sequence[PlannedRequest], path: str, rate_per_s: float) -> list[Times]:
        """All of them at this rate, by split, colocated or auto, until every answer is there; their times, TTFT from when due."""
        due_s, sent = self.now_s, []
        for planned in requests:
            due_s += planned.gap / rate_per_s
            request = _Request(f"{self._seed}/{next(self._numbers)}", planned, due_s)
            sent.append(request)
            self._at(due_s, lambda request=request: self._arrived(request, path))  # type: ignore[misc]
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        assert all(request.times is not None for request in sent)
        return [request.times for request in sent if request.times is not None]

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    # A request ----------------------------------------------------------------------------------------------------------

    def _arrived(self, request: _Request, path: str) -> None:
        router, phases, prompt_tokens = self.chooser.router, self.chooser.phases, len(request.planned.prompt_token_ids)
        output_tokens, role = request.planned.output_tokens, None
        asked = router.ask(request.planned.prompt_token_ids)
        if path == AUTO:
            request.decision = self.chooser.decide(
                request.name, asked, self._objective, max_tokens=output_tokens, now_s=self.now_s
            )
            assert request.decision is not None
            path, role = request.decision.path, request.decision.solo_role
        goals = first_goals(path, prompt_tokens=prompt_tokens, transport=None, strict=path == SPLIT, solo_role=role)
        route = router.choose(goals, self.now_s, asked)
        assert not isinstance(route, Refusal), route
        request.leg = request.name
        request.answer = answer = self.chooser.answer(self._objective, max_tokens=output_tokens)
        if isinstance(route, PairRoute):
            first, request.decode = route.prefill.incarnation, route.decode.incarnation
            request.charges = {first: prompt_tokens, request.decode: prompt_tokens + output_tokens}
            phases.prompt_sent(request.leg, first, prompt_tokens, decodes=False)
            phases.prepare_sent(f"{request.name}/p", request.decode, answer)
        else:
            first = route.worker.incarnation
            request.charges = {first: prompt_tokens + output_tokens}
            phases.prompt_sent(request.leg, first, prompt_tokens, decodes=True, answer=answer)
        for who, tokens in request.charges.items():
            router.load.charge(who, tokens)
        self._compute(
            first, EngineSequence(request.name, prompt_tokens, 1 if request.decode is not None else output_tokens), request
        )

    def _token(self, request: _Request, who: Incarnation) -> None:
        phases = self.chooser.phases
        assert request.answer is not None
        request.tokens += 1
        request.answer.came(self.now_s, 1)
        phases.computed(request.leg, self.now_s)
        if request.tokens == 1:
            request.first_s = self.now_s
        last = request.tokens == request.planned.output_tokens
        if request.tokens == 1 and request.decode is not None and not last:
            assert request.charges is not None
            phases.over(request.leg)
            self.chooser.router.load.discharge(who, request.charges.pop(who))
            blocks = -(-len(request.planned.prompt_token_ids) // arms.BLOCK_TOKENS)
            self._link_free_s = max(self._link_free_s, self.now_s) + blocks * arms.LINK_BLOCK_S / LINK_SPEED
            self._at(self._link_free_s + arms.LINK_LATENCY_S / LINK_SPEED, lambda: self._handed_over(request))
        if last:
            self._ended(request)

    def _handed_over(self, request: _Request) -> None:
        assert request.decode is not None
        phases, prompt_tokens = self.chooser.phases, len(request.planned.prompt_token_ids)
        phases.over(f"{request.name}/p")
        request.leg = f"{request.name}/d"
        phases.decode_sent(request.leg, request.decode, request.answer)
        sequence = EngineSequence(request.name, prompt_tokens + 1, request.planned.output_tokens - 1, computed=prompt_tokens)
        self._compute(request.decode, sequence, request)

    def _ended(self, request: _Request) -> None:
        phases, load = self.chooser.phases, self.chooser.router.load
        phases.over(request.leg)
        phases.over(f"{request.name}/p")
        for who, tokens in (request.charges or {}).items():
            load.discharge(who, tokens)
        tpot_s = (self.now_s - request.first_s) / (request.tokens - 1) if request.tokens > 1 else 0.0
        request.times = Times(request.first_s - request.due_s, tpot_s)
        if request.decision is not None and request.tokens > 1:
            self.chooser.answered(
                request.decision, request.times, max_tokens=request.planned.output_tokens, output_tokens=request.tokens
            )

    # The engines --------------------------------------------------------------------------------------------------------

    def _compute(self, who: Incarnation, sequence: EngineSequence, request: _Request) -> None:
        self._under_way[sequence.name] = request
        self._engines[who].add(sequence)
        if not self._engines[who].busy:
            self._step(who)

    def _step(self, who: Incarnation) -> None:
        seconds = self._engines[who].begin(self.now_s)
        if seconds is not None:
            self._at(self.now_s + seconds, lambda: self._stepped(who))

    def _stepped(self, who: Incarnation) -> None:
        for sequence in self._engines[who].end():
            request = self._under_way[sequence.name]
            if not sequence.left:
                del self._under_way[sequence.name]
            self._token(request, who)
        if not self._engines[who].busy:
            self._step(who)


def _costs() -> SimulatedSettings:
    costs = {"step_base_s": STEP_BASE_S, "prefill_token_s": PREFILL_TOKEN_S, "decode_sequence_s": DECODE_SEQUENCE_S}
    return arms.engine_settings(1.0, CHUNK_TOKENS).simulated.model_copy(update=costs)


def _view(role: Role) -> WorkerView:
    return WorkerView(
        worker_id=WorkerId(role.value),
        incarnation=Incarnation(role.value),
        pool=role.value,
        role=role,
        state=WorkerState.READY,
        address="",
        pid=0,
        fingerprint=b"",
        ranks=(),
        max_transfer_tokens=arms.MAX_MODEL_LEN,
        transports=("grpc",),
    )
