"""Two simulated engines in virtual time behind the real routing: every request by split, colocated or `auto`.

The engines are those of `splitpoint compare proof --engine`, with other costs. One carries the label prefill, the other decode; a
colocated request takes the less loaded of both, as where there is no pool of colocated workers. Routes, loads and decisions are
those of a gateway.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import cast

from coordinator.compare.load import Piece
from coordinator.compare.proof import engine_arms as arms
from coordinator.compare.workload import PlannedRequest
from coordinator.routing.auto import AUTO, COLOCATED, SPLIT, AutoPath, Decision, Objective, StepTimes, Times
from coordinator.routing.config import RoutingSettings
from coordinator.routing.goals import PairRoute, Refusal, SoloRoute, first_goals
from coordinator.routing.path_choice import PathChooser
from coordinator.routing.router import Router
from coordinator.routing.views import Role, WorkerState, WorkerView
from engine.config import EngineSettings
from engine.protocol import EngineOutput, EngineRequest
from engine.sampling import SamplingParams
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One engine's: all its times swing by `swing` to either side, as a logarithm, once in `period_s`."""

    swing: float
    period_s: float
    phase: float

    def at(self, now_s: float) -> float:
        """The factor on durations."""
        return math.exp(self.swing * math.sin(2 * math.pi * (now_s / self.period_s + self.phase)))


class DriftingClock:
    """The time of one engine (`engine.simulated.Clock`): every step varies, and drifts."""

    def __init__(self, drift: Drift, seed: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._drift, self._random = drift, random.Random(seed)

    def now(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        factor = self._drift.at(self._loop.time() - self._began_s) * math.exp(arms.JITTER * self._random.gauss(0, 1))
        await asyncio.sleep(seconds * factor)


class RoutedClient:
    """`coordinator.compare.load.Client` over both engines, an async context manager; `path` is split, colocated or auto."""

    def __init__(self, drifts: Mapping[Role, Drift], auto: AutoPath, objective: Objective, seed: str) -> None:
        self._loop = asyncio.get_running_loop()
        clocks = [DriftingClock(drifts[role], f"{seed}/{role}") for role in ROLES]
        self._pair = arms.Split(clocks, speed=LINK_SPEED, chunk_tokens=CHUNK_TOKENS, settings=_settings())
        router = Router(RoutingSettings(), random.Random(f"{seed}/router"), transports=("grpc",))
        router.update([_view(role) for role in ROLES])
        self.chooser = PathChooser(router, auto)
        self._engines = {_view(role).incarnation: engine for role, engine in zip(ROLES, self._pair.engines, strict=True)}
        self._objective, self._seed = objective, seed
        self._numbers = itertools.count()

    async def __aenter__(self) -> RoutedClient:
        for engine in self._pair.engines:
            await engine.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        for engine in self._pair.engines:
            await engine.stop()

    def now(self) -> float:
        """The virtual time, seconds."""
        return self._loop.time()

    async def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        """See `coordinator.compare.load.Client`."""
        began_s, name = self._loop.time(), f"{self._seed}/{next(self._numbers)}"
        router, prompt_tokens = self.chooser.router, len(request.prompt_token_ids)
        asked, decision = router.ask(request.prompt_token_ids), None
        if path == AUTO:
            decision = self.chooser.decide(name, asked, self._objective, max_tokens=request.output_tokens, now_s=began_s)
            assert decision is not None
            path = decision.path
        goals = first_goals(path, prompt_tokens=prompt_tokens, transport=None, strict=path == SPLIT)
        route = router.choose(goals, began_s, asked)
        assert not isinstance(route, Refusal), route
        pieces = self._split(name, request, route) if isinstance(route, PairRoute) else self._solo(name, request, route)
        first_s, tokens = None, 0
        async with aclosing(pieces):
            async for piece in pieces:
                first_s = first_s if first_s is not None else self._loop.time()
                tokens += piece.new_tokens
                yield piece
        if decision is not None and first_s is not None and tokens > 1:
            self._answered(decision, Times(first_s - began_s, (self._loop.time() - first_s) / (tokens - 1)), request, tokens)

    def _answered(self, decision: Decision, times: Times, request: PlannedRequest, tokens: int) -> None:
        self.chooser.answered(decision, times, max_tokens=request.output_tokens, output_tokens=tokens)

    async def _solo(self, name: str, request: PlannedRequest, route: SoloRoute) -> AsyncGenerator[Piece, None]:
        who, prompt_tokens = route.worker.incarnation, len(request.prompt_token_ids)
        phases, load = self.chooser.phases, self.chooser.router.load
        load.charge(who, prompt_tokens + request.output_tokens)
        phases.prompt_sent(name, who, prompt_tokens, decodes=True)
        sampling = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        wanted = EngineRequest(request_id=name, prompt_token_ids=list(request.prompt_token_ids), sampling=sampling)
        try:
            async with aclosing(cast("AsyncGenerator[EngineOutput, None]", self._engines[who].generate(wanted))) as outputs:
                async for output in outputs:
                    phases.computed(name, self._loop.time())
                    yield Piece(len(output.token_ids), output.cached_tokens)
        finally:
            phases.over(name)
            load.discharge(who, prompt_tokens + request.output_tokens)

    async def _split(self, name: str, request: PlannedRequest, route: PairRoute) -> AsyncGenerator[Piece, None]:
        prefill, decode = route.prefill.incarnation, route.decode.incarnation
        prompt_tokens, phases, load = len(request.prompt_token_ids), self.chooser.phases, self.chooser.router.load
        charges = {prefill: prompt_tokens, decode: prompt_tokens + request.output_tokens}
        for who, tokens in charges.items():
            load.charge(who, tokens)
        phases.prompt_sent(name, prefill, prompt_tokens, decodes=False)
        phases.prepare_sent(f"{name}/p", decode)
        try:
            async with aclosing(self._pair.ask(name, request)) as pieces:
                async for piece in pieces:
                    if prefill in charges:
                        phases.computed(name, self._loop.time())
                        load.discharge(prefill, charges.pop(prefill))
                        phases.over(f"{name}/p")
                        phases.decode_sent(f"{name}/d", decode)
                    yield piece
        finally:
            phases.over(name)
            phases.over(f"{name}/p")
            phases.over(f"{name}/d")
            for who, tokens in charges.items():
                load.discharge(who, tokens)


def _settings() -> EngineSettings:
    base = arms.engine_settings(1.0, CHUNK_TOKENS)
    costs = {"step_base_s": STEP_BASE_S, "prefill_token_s": PREFILL_TOKEN_S, "decode_sequence_s": DECODE_SEQUENCE_S}
    return base.model_copy(update={"simulated": base.simulated.model_copy(update=costs)})


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
