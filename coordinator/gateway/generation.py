"""One running choice: carries out what its state machine (`coordinator.request`) says.

No task belongs to a choice. Workers' events reach `_on_leg_event` on their stream's reader, the deadline is one timer of
the loop, and the front end's iteration only takes what lies ready. So a slow client delays nobody, and nothing can be left
running: every end goes through `_end`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import structlog

from coordinator.gateway.api import Finished, Submission, Tokens
from coordinator.gateway.ledger import LedgerRecorder, Window, log_fields
from coordinator.gateway.legs import LegBuilder
from coordinator.gateway.prompt_route import PromptRoute
from coordinator.gateway.unread import Unread
from coordinator.request import Request
from coordinator.request_actions import (
    AbortLeg,
    Action,
    Blame,
    ChooseRoute,
    Closed,
    Credit,
    DeadlinePassed,
    Emit,
    Ended,
    Event,
    Fail,
    Fault,
    Finish,
    LegOver,
    NoRoute,
    Note,
    ReleaseTransfer,
    RequestSpec,
    Routed,
    SendColocated,
    SendDecode,
    SendPrefill,
    SendPrepare,
    Start,
)
from coordinator.request_states import TERMINAL
from coordinator.routing.auto import AUTO, SPLIT, Decision
from coordinator.routing.goals import PairRoute, Refusal, Route
from coordinator.routing.pairs import TRANSPORT_DOWNGRADED
from coordinator.routing.placement import PLACEMENT_MISSED
from coordinator.routing.views import WorkerView
from protos.errors import Code, SplitpointError
from protos.ids import AttemptId, Incarnation, token_hash
from protos.splitpoint.v1 import common_pb2, worker_pb2

if TYPE_CHECKING:
    from coordinator.gateway.core import GatewayCore

log = structlog.get_logger(__name__)


class RunningChoice:
    """Implements `coordinator.gateway.api.Generation`. Belongs to the core's event loop; iterate it once."""

    def __init__(self, core: GatewayCore, submission: Submission) -> None:
        self._core = core
        self.submission = submission
        self._clock = core.clock
        self._deadline_s = core.clock() + submission.deadline_s
        prompt_hash = token_hash(submission.prompt_token_ids)
        settings = core.settings
        path = submission.path or settings.default_path
        self._request = Request(
            RequestSpec(
                prompt_token_ids=submission.prompt_token_ids,
                prompt_hash=prompt_hash,
                sampling=submission.sampling,
                path=path,
                transport=submission.transport,
                pools=submission.pools,
                strict=not settings.allow_recompute,
                extra_attempts=settings.retry_budget,
            )
        )
        self._legs = LegBuilder(submission.request_id, submission.prompt_token_ids, prompt_hash)
        self._prompt = PromptRoute(
            core.router,
            submission.prompt_token_ids,
            submission.session,
            # Log-probabilities of the prompt need every position computed.
            reads_cache=submission.sampling.prompt_logprobs is None,
        )
        self._ledger = LedgerRecorder(received_s=submission.received_s, path=path)
        self._decision: Decision | None = None
        self._answer = core.paths.answer(submission)
        self._charges: dict[AttemptId, tuple[Incarnation, int]] = {}
        self._events: deque[Event] = deque()
        self._handling = False
        self._unread = Unread()
        self._timer: asyncio.TimerHandle | None = None
        self._started = False
        self._arrived_s = 0.0
        self.prompt_pool = self.output_pool = ""
        """The pools of the workers that were last given its prompt and its output; empty before."""
        self._log = log.bind(request_id=submission.request_id, client_request_id=submission.client_request_id)

    # The front end's side -------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Tokens | Finished]:
        """Starts the choice. Raises `SplitpointError` at the point of the failure, after all tokens before it."""
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Tokens | Finished]:
        self._start()
        try:
            while True:
                while not self._unread:
                    if self._request.state in TERMINAL:
                        return
                    await self._unread.wait()
                item = self._unread.take()
                if isinstance(item, SplitpointError):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
        finally:
            # Cancelled, closed by the consumer or garbage: the client is gone, and its legs go with it.
            self._feed(Closed("client_left"))

    async def close(self, reason: str) -> None:
        """End it early. Aborts and releases are on their way when this returns."""
        self.end(reason)

    def end(self, reason: str) -> None:
        """`close` without the coroutine."""
        self._started = True
        self._feed(Closed(reason))

    def cut_off(self) -> None:
        """The gateway stops. The reader gets an error: an answer that just ended would pass for a whole one."""
        code = Code.STREAM_BROKEN if self._request.tokens_sent else Code.DRAINING
        self._feed(Fault(SplitpointError(code, "this gateway stops", retry_after_s=1.0)))

    def ledger(self) -> common_pb2.StageLedger:
        """The stages so far; final after the end."""
        return self._ledger.build(self._clock())

    @property
    def has_tokens(self) -> bool:
        """Its first token is there."""
        return self._ledger.first_token_s is not None

    def _start(self) -> None:
        if self._started:
            if self._request.state in TERMINAL:
                return
            raise RuntimeError("a generation can be iterated once")
        self._started = True
        self._core.began(self)
        remaining_s = self._deadline_s - self._clock()
        if remaining_s <= 0:
            self._feed(DeadlinePassed())
            return
        self._timer = asyncio.get_running_loop().call_later(remaining_s, self._feed, DeadlinePassed())
        if self._request.spec.path == AUTO:
            self._take_path()
        self._feed(Start())

    def _take_path(self) -> None:
        decision = self._decision = self._core.paths.decide(self.submission, self._prompt.ask, self._clock())
        # Where no worker can take it on either path, routing says why.
        path = self._ledger.path = decision.path if decision is not None else SPLIT
        self._request.take_path(path, decision.solo_role if decision is not None else None)
        if decision is not None:
            predicted = decision.predicted[path]
            self._ledger.path_reason, self._ledger.objective_source = decision.why, decision.objective.source
            self._ledger.predicted_ttft_s, self._ledger.predicted_tpot_s = predicted.ttft_s, predicted.tpot_s

    # Events in, actions out -----------------------------------------------------------------------------------------------

    def _on_leg_event(self, event: worker_pb2.LegEvent, arrived_s: float) -> None:
        self._arrived_s = arrived_s
        self._feed(event)

    def _feed(self, event: Event) -> None:
        """Take an event and all that follow from it. Actions may add events; they are taken in order."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                try:
                    self._stamp(event)
                    for action in self._request.handle(event):
                        self._carry_out(action)
                except Exception as fault:
                    self._on_fault(fault, again=isinstance(event, Fault))
        finally:
            self._handling = False

    def _on_fault(self, fault: Exception, *, again: bool) -> None:
        """A bug of ours ends its own request, with an error id, and no other."""
        error = SplitpointError(Code.INTERNAL, "the gateway failed while it handled this request")
        error.tokens_sent = self._request.tokens_sent
        self._core.metrics.event("gateway_fault")
        self._log.error("gateway_fault", error_id=error.error_id, story=self._request.story(), exc_info=fault)
        if not again:
            self._events.appendleft(Fault(error))
            return
        # Not even the orderly end works: the client is told all the same, and the workers; transfers run out by their leases.
        for attempt_id, (incarnation, _) in list(self._charges.items()):
            self._abort(attempt_id, incarnation, "gateway_fault")
        self._stop_timer()
        self._unread.put(error)
        self._core.ended(self)
        self._unread.wake()

    def _stamp(self, event: Event) -> None:
        """The ledger's and routing's view of a worker's report, before the machine changes state."""
        if not isinstance(event, worker_pb2.LegEvent) or event.attempt_id not in self._charges:
            return
        match event.WhichOneof("event"):
            case "sealed":
                self._tokens_came(event.attempt_id, event.sealed.first)
                self._ledger.leg_ended(self._arrived_s, event.sealed.times)
            case "staged":
                self._ledger.staged(self._arrived_s, event.staged)
            case "tokens":
                self._tokens_came(event.attempt_id, event.tokens)
            case "finished":
                self._tokens_came(event.attempt_id, event.finished.last)
                self._ledger.leg_ended(self._arrived_s, event.finished.times)
            case "failed" if event.failed.code.startswith("transfer_"):
                self._core.metrics.transfer_failed(event.failed.code)

    def _tokens_came(self, attempt_id: str, tokens: worker_pb2.TokensEvent) -> None:
        self._core.paths.phases.computed(attempt_id, self._arrived_s)
        if self._answer is not None:
            self._answer.came(self._arrived_s, len(tokens.token_ids))
        self._prompt.computed(tokens.cached_tokens)
        self._ledger.tokens_arrived(self._arrived_s)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Emit():
                self._emit(action)
            case SendPrefill() | SendPrepare() | SendDecode() | SendColocated():
                self._send(action)
            case LegOver():
                self._discharge(action.attempt_id)
            case AbortLeg():
                self._abort(action.attempt_id, action.worker.incarnation, action.reason)
            case ReleaseTransfer():
                client = self._core.membership.client(action.worker.incarnation)
                if client is not None:
                    client.release(action.transfer_id, action.reason)
            case ChooseRoute():
                self._choose(action)
            case Finish():
                self._unread.put(Finished(finish_reason=action.finish_reason, matched_token_id=action.matched_token_id))
                self._end("ok", "")
            case Fail():
                self._unread.put(action.error)
                self._end("error", action.error.code.value)
            case Ended():
                self._unread.clear()
                self._end("ok" if action.reason == "stop" else "cancelled", "")
            case Note():
                self._note(action)
            case Blame():
                self._core.blame(action.workers, action.code, action.transport)
            case Credit():
                self._core.credit(action.workers, action.transport)

    def _choose(self, action: ChooseRoute) -> None:
        now_s = self._clock()
        if self._request.rounds:
            self._ledger.route_failed(now_s)
            if not self._core.retries.take():
                self._note(Note("retry_budget_spent"))
                self._events.append(NoRoute(SplitpointError(Code.NO_WORKER, "this gateway's budget for retries is spent")))
                return
        route = self._prompt.choose(action.goals, now_s)
        if not self._request.rounds and not isinstance(route, PairRoute):
            self._core.pool_loads.lacking.update(self._core.router.lacking(action.goals))
        if isinstance(route, Refusal):
            self._events.append(NoRoute(route.to_error()))
            return
        self._note_route(route)
        self._events.append(Routed(route))

    def _note_route(self, route: Route) -> None:
        if isinstance(route, PairRoute):
            self._ledger.transport = route.transport
            self._ledger.transport_downgraded = TRANSPORT_DOWNGRADED in route.notes
            self._ledger.placement_missed = PLACEMENT_MISSED in route.notes
            self._core.metrics.route_taken("split")
            return
        self._core.metrics.route_taken("local" if route.local else "colocated")
        if not self._request.rounds:
            # A split request that never had a pair is a colocated one; one that lost its pair stays a split one.
            self._ledger.path = "colocated"

    def _send(self, action: SendPrefill | SendPrepare | SendDecode | SendColocated) -> None:
        now_s = self._clock()
        remaining_s = self._deadline_s - now_s
        worker = action.worker
        prompt_tokens = len(self.submission.prompt_token_ids)
        uncached_tokens = prompt_tokens - self._prompt.expected_cached_tokens
        output_tokens = self.submission.sampling.max_tokens
        phases = self._core.paths.phases
        match action:
            case SendPrefill():
                request, tokens = self._legs.prefill(action, remaining_s), uncached_tokens
                phases.prompt_sent(action.attempt_id, worker.incarnation, tokens, decodes=False)
                self._ledger.leg_sent(Window.PREFILL, worker.worker_id, now_s)
                self.prompt_pool = worker.pool
            case SendPrepare():
                # Charged already here: from now on this worker is going to have the request.
                request, tokens = self._legs.prepare(action, remaining_s), prompt_tokens + output_tokens
                phases.prepare_sent(action.attempt_id, worker.incarnation, self._answer)
            case SendDecode():
                request, tokens = self._legs.decode(action, remaining_s), prompt_tokens + output_tokens
                self._hand_over_charge(worker)
                phases.decode_sent(action.attempt_id, worker.incarnation, self._answer)
                self._ledger.leg_sent(Window.DECODE, worker.worker_id, now_s)
                self.output_pool = worker.pool
            case SendColocated():
                request, tokens = self._legs.colocated(action, remaining_s), uncached_tokens + output_tokens
                phases.prompt_sent(action.attempt_id, worker.incarnation, uncached_tokens, decodes=True, answer=self._answer)
                self._ledger.leg_sent(Window.SOLO, worker.worker_id, now_s)
                self.prompt_pool = self.output_pool = worker.pool
        if not isinstance(action, SendPrepare):
            self._core.pool_loads.sent(worker.pool)
        self._ledger.attempts += 1
        self._charges[action.attempt_id] = (worker.incarnation, tokens)
        self._core.router.load.charge(worker.incarnation, tokens)
        self._open(action.attempt_id, worker, request)

    def _open(self, attempt_id: AttemptId, worker: WorkerView, request: worker_pb2.StreamRequest) -> None:
        client = self._core.membership.client(worker.incarnation)
        try:
            if client is None:
                raise SplitpointError(Code.WORKER_LOST, f"worker {worker.worker_id} is gone")
            client.open(attempt_id, request, self._on_leg_event)
        except SplitpointError as error:
            self._events.append(worker_pb2.LegEvent(attempt_id=attempt_id, failed=error.to_proto()))

    def _abort(self, attempt_id: AttemptId, incarnation: Incarnation, reason: str) -> None:
        self._discharge(attempt_id)
        client = self._core.membership.client(incarnation)
        if client is not None:
            client.abort(attempt_id, reason)

    def _emit(self, action: Emit) -> None:
        now_s = self._clock()
        path = self._ledger.path
        if self._ledger.last_token_s is not None:
            self._core.metrics.token_gap(path, now_s - self._ledger.last_token_s)
        self._ledger.emitted(now_s, len(action.token_ids))
        self._unread.put(
            Tokens(
                token_ids=list(action.token_ids),
                logprobs=list(action.logprobs) or None,
                prompt_logprobs=list(action.prompt_logprobs) or None,
                cached_tokens=action.cached_tokens,
            )
        )
        self._unread.wake()

    def _note(self, action: Note) -> None:
        match action.name:
            case "retry":
                self._core.metrics.retry(action.detail)
            case "recovery":
                self._core.metrics.recovery(action.detail)
            case _:
                self._core.metrics.event(action.name)
        self._log.info("request_event", event_name=action.name, detail=action.detail, state=self._request.state.value)

    def _hand_over_charge(self, worker: WorkerView) -> None:
        """The decode leg takes over what its prepare leg was charged, which may live a little longer."""
        for attempt_id, (incarnation, tokens) in self._charges.items():
            if incarnation == worker.incarnation:
                self._core.router.load.discharge(incarnation, tokens)
                self._charges[attempt_id] = (incarnation, 0)

    def _discharge(self, attempt_id: AttemptId) -> None:
        self._core.paths.phases.over(attempt_id)
        charge = self._charges.pop(attempt_id, None)
        if charge is not None:
            self._core.router.load.discharge(*charge)

    # The end --------------------------------------------------------------------------------------------------------------

    def _end(self, status: str, error_type: str) -> None:
        now_s = self._clock()
        self._stop_timer()
        self._prompt.failed()
        ledger = self._ledger
        ledger.recomputed = self._request.recomputed
        ledger.first_token_forwarded = self._request.first_token_forwarded
        if status == "error":
            ledger.route_failed(now_s)
        ledger.finished(now_s)
        message = ledger.build(now_s)
        self._core.ended(self)
        if self._decision is not None and status == "ok" and self._request.rounds == 1:
            self._core.paths.answered(self._decision, self.submission, ledger, self._request.tokens_sent)
        self._core.metrics.choice_ended(
            message,
            status=status,
            error_type=error_type,
            prompt_tokens=len(self.submission.prompt_token_ids),
            output_tokens=self._request.tokens_sent,
        )
        self._core.pool_loads.ended(
            self.prompt_pool,
            self.output_pool,
            message,
            status,
            prompt_tokens=len(self.submission.prompt_token_ids),
            output_tokens=self._request.tokens_sent,
        )
        self._log.info(
            "request_finished",
            status=status,
            error_type=error_type,
            output_tokens=self._request.tokens_sent,
            **log_fields(message),
        )
        self._unread.wake()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
