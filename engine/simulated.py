"""An engine without a model: the same protocol as vLLM's, a step model instead of matrices, real KV transfer. No torch.

    engine = SimulatedEngine(settings)                           # colocated only
    engine = SimulatedEngine(settings, kv=KvEngineConfig(...))   # with one transfer node per rank

`clock` is injectable: tests hold a step with it and let it go; `crash` makes the engine die as a killed process would.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.config import EngineSettings, KvEngineConfig
from engine.protocol import EngineDeadError, EngineInfo, EngineLoad, EngineOutput, EngineRequest, KvReceive, KvSend, Logprob
from engine.sim_blocks import BlockPool
from engine.sim_kv import NodeFactory, SendProgress, SimKv, kv_node_factory
from engine.sim_model import Sequence, SimScheduler, StepPlan, step_time_s
from engine.sim_tokens import History, Sampler, prompt_block_digests, prompt_logprobs

_log = logging.getLogger(__name__)

DEFAULT_BLOCK_TOKENS = 16


class Clock(Protocol):
    """The engine's time."""

    def now(self) -> float:
        """Seconds, monotonic."""

    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    """Wall time."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(slots=True, eq=False)
class _Running:
    """One request: its sequence in the model and the outputs nobody has fetched yet."""

    request: EngineRequest
    sequence: Sequence
    sampler: Sampler
    send: SendProgress | None
    receive: KvReceive | None
    prompt_digests: list[bytes]
    outputs: list[EngineOutput] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    first_token_s: float | None = None
    last_token_s: float = 0.0


class SimulatedEngine:
    """Satisfies `engine.protocol.Engine`."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        kv: KvEngineConfig | None = None,
        clock: Clock | None = None,
        node_factory: NodeFactory | None = None,
    ) -> None:
        """Raises `ValueError` when the KV blocks cannot hold one request of `max_model_len` tokens."""
        simulated = settings.simulated
        self._settings = settings
        self._simulated = simulated
        self._clock = clock or RealClock()
        self._block_tokens = settings.block_tokens or DEFAULT_BLOCK_TOKENS
        if simulated.num_kv_blocks * self._block_tokens < settings.max_model_len:
            raise ValueError(
                f"engine.simulated.num_kv_blocks: {simulated.num_kv_blocks} blocks of {self._block_tokens} tokens "
                f"cannot hold max_model_len {settings.max_model_len}"
            )
        self._pool = BlockPool(simulated.num_kv_blocks, caching=settings.enable_prefix_caching)
        self._scheduler = SimScheduler(
            self._pool,
            block_tokens=self._block_tokens,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
        )
        self._kv: SimKv | None = None
        if kv is not None:
            factory = node_factory or kv_node_factory(kv)
            self._kv = SimKv(kv, settings, self._block_tokens, factory)
        self._requests: dict[str, _Running] = {}
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._dead: EngineDeadError | None = None
        self._events: Counter[str] = Counter()

    async def start(self) -> EngineInfo:
        if self._kv is not None:
            await self._kv.start()
        self._loop_task = asyncio.create_task(self._run(), name="simulated-engine")
        settings = self._settings
        return EngineInfo(
            model=settings.served_model_name,
            max_model_len=settings.max_model_len,
            vocab_size=self._simulated.vocab_size,
            block_tokens=self._block_tokens,
            num_kv_blocks=self._simulated.num_kv_blocks,
            world_size=settings.world_size,
            start_arguments={"kind": "simulated", **settings.model_dump(mode="json", exclude={"kind"})},
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self._raise_if_dead()
        running = self._accept(request)
        try:
            while True:
                await running.wake.wait()
                running.wake.clear()
                outputs, running.outputs = running.outputs, []
                if outputs:
                    merged = _merge(outputs)
                    if merged.finish_reason is not None:
                        merged = replace(merged, returning_s=self._clock.now() - running.last_token_s)
                    yield merged
                    if merged.finish_reason is not None:
                        return
                self._raise_if_dead()
        finally:
            self._leave(running)

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_usage=self._pool.held / self._pool.num_blocks,
        )

    async def reset_prefix_cache(self) -> bool:
        return self._pool.reset_cache()

    async def check_health(self) -> None:
        self._raise_if_dead()
        if self._loop_task is None or self._loop_task.done():
            raise EngineDeadError("the simulated engine is not running")

    async def stop(self) -> None:
        self._die(EngineDeadError("the simulated engine was stopped"))
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        if self._kv is not None:
            await self._kv.stop()

    def crash(self, message: str = "the simulated engine crashed") -> None:
        """Die as if the engine's process had been killed: every running iterator raises `EngineDeadError`. The ranks' nodes
        die with their worker, at `stop`."""
        self._die(EngineDeadError(message))

    def counters(self) -> dict[str, int]:
        """Events since the start: preemptions, recomputed admissions, blocks loaded, and the nodes' own counters."""
        return {**self._events, **(self._kv.counters() if self._kv is not None else {})}

    # -- requests -------------------------------------------------------------------------------------------------------

    def _accept(self, request: EngineRequest) -> _Running:
        self._validate(request)
        tokens = list(request.prompt_token_ids)
        history = History(tokens, self._block_tokens)
        digests: list[bytes] = []
        if request.kv is not None:
            staged = len(tokens) if isinstance(request.kv, KvSend) else request.kv.staged_tokens
            staged_history = history if staged == len(tokens) else History(tokens[:staged], self._block_tokens)
            digests = prompt_block_digests(staged_history, staged, self._block_tokens)
        running = _Running(
            request=request,
            sequence=Sequence(
                request_id=str(request.request_id),
                tokens=tokens,
                history=history,
                prompt_tokens=len(tokens),
                arrived_s=self._clock.now(),
                # Log-probabilities of cached positions were never computed.
                use_cache=self._settings.enable_prefix_caching and request.sampling.prompt_logprobs is None,
            ),
            sampler=Sampler(
                request.sampling,
                vocab_size=self._simulated.vocab_size,
                eos_token_id=self._simulated.eos_token_id,
                model_seed=self._settings.seed,
                nonce=str(request.request_id),
            ),
            send=SendProgress(request.kv.transfer_id, digests, len(tokens)) if isinstance(request.kv, KvSend) else None,
            receive=request.kv if isinstance(request.kv, KvReceive) else None,
            prompt_digests=digests,
        )
        self._requests[running.sequence.request_id] = running
        self._scheduler.add(running.sequence)
        self._work.set()
        return running

    def _validate(self, request: EngineRequest) -> None:
        sampling, limit = request.sampling, self._settings.max_model_len
        if str(request.request_id) in self._requests:
            raise ValueError(f"request_id: {request.request_id} is already running")
        if not request.prompt_token_ids:
            raise ValueError("prompt_token_ids: empty")
        if len(request.prompt_token_ids) >= limit:
            raise ValueError(f"prompt_token_ids: {len(request.prompt_token_ids)} tokens leave no room in max_model_len {limit}")
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self._simulated.vocab_size:
            raise ValueError(f"prompt_token_ids: outside the vocabulary of {self._simulated.vocab_size}")
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens: {sampling.max_tokens} is below 1")
        if sampling.min_tokens > sampling.max_tokens:
            raise ValueError(f"min_tokens: {sampling.min_tokens} is above max_tokens {sampling.max_tokens}")
        if sampling.constraint is not None:
            raise ValueError("constraint: the simulated engine has no grammar")
        if request.kv is not None and self._kv is None:
            raise ValueError("kv: this engine was started without KV transfer")
        if isinstance(request.kv, KvReceive) and not 0 < request.kv.staged_tokens <= len(request.prompt_token_ids):
            raise ValueError(f"kv: {request.kv.staged_tokens} staged tokens for a prompt of {len(request.prompt_token_ids)}")

    def _leave(self, running: _Running) -> None:
        self._requests.pop(running.sequence.request_id, None)
        self._scheduler.leave(running.sequence)

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _die(self, error: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = error
        for running in self._requests.values():
            running.wake.set()

    # -- steps ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._dead is None:
                if not self._requests:
                    self._work.clear()
                    await self._work.wait()
                await self._step()
        except EngineDeadError as error:
            _log.error("simulated engine died: %s", error)
            self._die(error)
        except Exception as error:
            _log.exception("simulated engine failed")
            self._die(EngineDeadError(f"step failed: {error!r}"))
            raise

    async def _step(self) -> None:
        plan = self._scheduler.plan(self._clock.now(), self._external_tokens)
        self._events["preemptions"] += len(plan.preempted)
        for load in plan.loads:
            assert self._kv is not None
            running = self._requests[load.sequence.request_id]
            assert running.receive is not None
            # Whole blocks only: the last one holds all that was staged, also where one token less is taken from it.
            blocks = -(-load.tokens // self._block_tokens)
            self._kv.load(running.receive.transfer_id, running.prompt_digests[:blocks])
        await self._clock.sleep(step_time_s(self._simulated, plan.work) * self._simulated.time_scale)
        if self._dead is None:
            self._finish_step(plan)

    def _external_tokens(self, sequence: Sequence) -> int:
        running = self._requests[sequence.request_id]
        if running.receive is None or self._kv is None:
            return 0
        if self._kv.staged(running.receive.transfer_id):
            return running.receive.staged_tokens
        self._events["staging_missing"] += 1
        _log.warning(
            "staged KV is gone, computing the prompt request_id=%s transfer_id=%s",
            sequence.request_id,
            running.receive.transfer_id.hex(),
        )
        return 0

    def _finish_step(self, plan: StepPlan) -> None:
        for work in self._scheduler.complete(plan):
            running = self._requests[work.sequence.request_id]
            if running.send is not None and self._kv is not None:
                self._kv.gather(running.send, work.sequence.computed)
            if work.samples:
                self._emit(running, self._clock.now())

    def _emit(self, running: _Running, now: float) -> None:
        sequence, sampling = running.sequence, running.request.sampling
        token, entries = running.sampler.sample(sequence.history, sequence.output_tokens)
        self._scheduler.append(sequence, token)
        reason: str | None = None
        matched: int | None = None
        if running.sampler.stops(token):
            reason, matched = "stop", token
        elif sequence.output_tokens >= sampling.max_tokens or len(sequence.tokens) >= self._settings.max_model_len:
            reason = "length"
        first = running.first_token_s is None
        if running.first_token_s is None:
            running.first_token_s = now
        running.last_token_s = now
        scheduled = sequence.scheduled_s if sequence.scheduled_s is not None else now
        running.outputs.append(
            EngineOutput(
                token_ids=[token],
                logprobs=None if sampling.logprobs is None else [entries],
                prompt_logprobs=self._prompt_logprobs(running) if first else None,
                finish_reason=reason,
                matched_token_id=matched,
                cached_tokens=sequence.cached_tokens if first else 0,
                queued_s=scheduled - sequence.arrived_s if first else 0.0,
                computing_s=now - scheduled if first else 0.0,
                decoding_s=now - running.first_token_s if reason is not None else 0.0,
            )
        )
        if reason is not None:
            self._leave(running)
        running.wake.set()

    def _prompt_logprobs(self, running: _Running) -> list[list[Logprob]] | None:
        wanted = running.request.sampling.prompt_logprobs
        if wanted is None:
            return None
        return prompt_logprobs(running.request.prompt_token_ids, wanted, self._simulated.vocab_size)


def _merge(outputs: list[EngineOutput]) -> EngineOutput:
    """Several steps' outputs of one request, for a caller that was slower than the engine."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return EngineOutput(
        token_ids=[t for o in outputs for t in o.token_ids],
        logprobs=None if first.logprobs is None else [row for o in outputs for row in o.logprobs or []],
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        matched_token_id=last.matched_token_id,
        cached_tokens=first.cached_tokens,
        queued_s=first.queued_s,
        computing_s=first.computing_s,
        decoding_s=last.decoding_s,
    )
