"""The life of one choice of a request. Pure: events in, actions out, in one literal table of transitions.

A split request is `PREFILLING` from its two legs (prefill and prepare) until prefill's seal, then `DECODING`. A colocated
request, a recompute and a resumption are all `COMPUTING`: one leg on one worker. `ROUTING` is the moment between
`ChooseRoute` and its answer. Three states are terminal, and each is entered with exactly one terminal action.

Reports of attempts that are over (late, duplicate, unknown) are counted and have no effect: peers may say anything at any
time (rule 4). Everything else that is not in the table is a fault of this gateway and raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

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
    Mint,
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
from coordinator.request_checks import end_fault, protocol_fault, recovery_kind, seal_fault, tokens_fault
from coordinator.request_states import LIVE, REPORTS, TERMINAL, InvalidTransition, Leg, LegKind, State, Transfer
from coordinator.routing.goals import (
    PAIR_FAULTS,
    WORKER_FAULTS,
    FailedRoute,
    Goal,
    PairRoute,
    Route,
    SoloGoal,
    SoloRoute,
    failed_worker,
    first_goals,
    goals_after_failure,
    with_last_resort,
    workers_of,
)
from coordinator.routing.views import Role, WorkerView
from engine.handover import decode_params, forwarding_refusal, prefill_params
from protos.errors import Code, SplitpointError
from protos.ids import AttemptId, Incarnation
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2

STORY_LINES = 64
UNASKED = frozenset({Code.CANCELLED, Code.NO_WORKER})


class Request:
    """One choice. Feed every event to `handle` and carry out the actions it returns, in order."""

    def __init__(self, spec: RequestSpec, mint: Mint | None = None) -> None:
        self.spec = spec
        self.state = State.NEW
        self.route: Route | None = None
        self.first_token_forwarded = False
        self.recomputed = False
        self.rounds = 0
        """Routes taken so far."""
        self._mint = mint or Mint()
        self._live: dict[str, Leg] = {}
        self._transfer: Transfer | None = None
        self._verified = False
        """The decode side said that it staged and verified the present transfer."""
        self._pair_blamed = False
        self._sent: list[int] = []
        self._prompt_report: worker_pb2.TokensEvent | None = None
        self._exclude: frozenset[Incarnation] = frozenset()
        self._lost: frozenset[Incarnation] = frozenset()
        """Those of `_exclude` that did nothing wrong but break their stream."""
        self._cause: SplitpointError | None = None
        self._story: deque[str] = deque(maxlen=STORY_LINES)

    @property
    def tokens_sent(self) -> int:
        """Tokens emitted so far."""
        return len(self._sent)

    @property
    def live_attempts(self) -> list[str]:
        """Ids of the attempts that may still report."""
        return list(self._live)

    def story(self) -> list[str]:
        """The last events, oldest first, for the log line of a fault."""
        return list(self._story)

    def take_path(self, path: str, solo_role: Role | None = None) -> None:
        """Of a request that has not started: it is to take this path, as a whole on a worker of `solo_role` where there is one.

        Raises:
            InvalidTransition: it has.
        """
        if self.state is not State.NEW:
            raise InvalidTransition(self.state, f"take_path {path}", self._story)
        self.spec = replace(self.spec, path=path, solo_role=solo_role)

    def handle(self, event: Event) -> list[Action]:
        """Take one event.

        Raises:
            InvalidTransition: the shell sent an event that cannot happen in this state.
        """
        if isinstance(event, worker_pb2.LegEvent):
            return self._report(event)
        kind = EVENT_KINDS[type(event)]
        self._tell(kind)
        return self._transition(kind)(self, event)

    # Reports of workers ---------------------------------------------------------------------------------------------------

    def _report(self, event: worker_pb2.LegEvent) -> list[Action]:
        leg = self._live.get(event.attempt_id)
        what = event.WhichOneof("event")
        if leg is None:
            return [Note("late_event", f"{what} of {event.attempt_id}")]
        kind = f"{leg.kind}.{what}"
        if what != "tokens":
            self._tell(f"{kind} by {leg.worker.worker_id}")
        if what not in REPORTS[leg.kind]:
            return self._leg_failed(leg, protocol_fault(f"{leg.kind} leg reported {what}"))
        return self._transition(kind)(self, leg, event)

    def _transition(self, kind: str) -> Callable[..., list[Action]]:
        handler = TABLE.get((self.state, kind))
        if handler is None:
            raise InvalidTransition(self.state, kind, self._story)
        return handler

    def _tell(self, line: str) -> None:
        self._story.append(f"{self.state}: {line}")

    # Routing --------------------------------------------------------------------------------------------------------------

    def _start(self, _: Start) -> list[Action]:
        spec = self.spec
        return self._choose(
            first_goals(
                spec.path,
                prompt_tokens=len(spec.prompt_token_ids),
                transport=spec.transport,
                strict=spec.strict,
                pools=spec.pools,
                solo_role=spec.solo_role,
            )
        )

    def _choose(self, goals: tuple[Goal, ...]) -> list[Action]:
        self.state = State.ROUTING
        return [ChooseRoute(goals)]

    def _routed(self, event: Routed) -> list[Action]:
        actions: list[Action] = [Note(name) for name in event.route.notes]
        if self._cause is not None:
            actions.append(Note("recovery", recovery_kind(event.route, self.tokens_sent)))
        if any(view.incarnation in self._lost for view in workers_of(event.route)):
            actions.append(Note("lost_worker_tried_again"))
        self.rounds += 1
        self.route = event.route
        if isinstance(event.route, PairRoute):
            return actions + self._begin_split(event.route)
        return actions + self._begin_computing(event.route)

    def _begin_split(self, route: PairRoute) -> list[Action]:
        self.state = State.PREFILLING
        self._verified = self._pair_blamed = False
        grant: kv_transfer_pb2.TransferGrant | None = None
        if self.spec.sampling.max_tokens > 1:
            transfer_id = self._mint.transfer()
            grant = kv_transfer_pb2.TransferGrant(transfer_id=transfer_id, capability=self._mint.capability())
            self._transfer = Transfer(transfer_id, route.prefill, route.decode)
        prefill = self._open(LegKind.PREFILL, route.prefill)
        sampling = prefill_params(self.spec.sampling)
        actions: list[Action] = [SendPrefill(attempt_id=prefill, worker=route.prefill, sampling=sampling, grant=grant)]
        if grant is not None:
            prepare = self._open(LegKind.PREPARE, route.decode)
            actions.append(
                SendPrepare(
                    attempt_id=prepare, worker=route.decode, grant=grant, prefill=route.prefill, transport=route.transport
                )
            )
        return actions

    def _begin_computing(self, route: SoloRoute) -> list[Action]:
        self.state = State.COMPUTING
        if self.spec.path == "split" and self._cause is not None:
            self.recomputed = True
        # Before the first token the parameters stay whole, prompt log-probabilities included.
        sampling = decode_params(self.spec.sampling, forwarded_tokens=self.tokens_sent) if self._sent else self.spec.sampling
        attempt_id = self._open(LegKind.COLOCATED, route.worker)
        return [SendColocated(attempt_id=attempt_id, worker=route.worker, sent_token_ids=tuple(self._sent), sampling=sampling)]

    def _open(self, kind: LegKind, worker: WorkerView) -> AttemptId:
        attempt_id = self._mint.attempt()
        self._live[attempt_id] = Leg(attempt_id, kind, worker)
        return attempt_id

    def _no_route(self, event: NoRoute) -> list[Action]:
        # The failure that led here says more than "no worker": overload stays 429, a lost worker stays 503.
        if self._cause is None:
            return self._fail(event.error)
        return self._give_up(self._cause, event.error.message)

    # The split path -------------------------------------------------------------------------------------------------------

    def _sealed(self, leg: Leg, event: worker_pb2.LegEvent) -> list[Action]:
        route, transfer = self.route, self._transfer
        assert isinstance(route, PairRoute)
        fault = seal_fault(event.sealed, self.spec, route, transfer)
        if fault is not None or transfer is None:
            return self._leg_failed(leg, fault or protocol_fault("sealed without a grant"))
        actions: list[Action] = [*self._over(leg), Credit((route.prefill,))]
        self.state = State.DECODING
        forwarded: tuple[int, ...] = ()
        if forwarding_refusal(self.spec.sampling) is None:
            forwarded = tuple(event.sealed.first.token_ids)
            self.first_token_forwarded = True
        decode = SendDecode(
            attempt_id=self._open(LegKind.DECODE, route.decode),
            worker=route.decode,
            seal=event.sealed.seal,
            output_token_ids=forwarded,
            sampling=decode_params(self.spec.sampling, forwarded_tokens=len(forwarded)),
            allow_recompute=not self.spec.strict,
        )
        self._prompt_report = event.sealed.first
        # Decode is told first: its wait for KV begins while the client's token is still being written.
        actions.append(decode)
        if forwarded:
            actions += self._emit(event.sealed.first)
        return actions

    def _staged(self, leg: Leg, event: worker_pb2.LegEvent) -> list[Action]:
        actions = self._over(leg)
        self._verified = True
        route = self.route
        if isinstance(route, PairRoute):
            actions.append(Credit((route.prefill, route.decode), route.transport))
            if event.staged.transport and event.staged.transport != route.transport:
                actions.append(Note("transport_fallback", f"{route.transport} became {event.staged.transport}"))
        return actions

    def _prepare_failed_late(self, leg: Leg, event: worker_pb2.LegEvent) -> list[Action]:
        # The decode leg is out and decides by itself whether it recomputes or fails; here the fault is only laid.
        error = SplitpointError.from_proto(event.failed)
        return [*self._over(leg), Note("transfer_failed", str(error)), *self._blame(leg, error.code)]

    # Tokens and ends ------------------------------------------------------------------------------------------------------

    def _tokens(self, leg: Leg, event: worker_pb2.LegEvent) -> list[Action]:
        tokens = event.tokens
        fault = tokens_fault(tokens, self.spec, sent=self.tokens_sent)
        return self._emit(tokens) if fault is None else self._leg_failed(leg, fault)

    def _emit(self, tokens: worker_pb2.TokensEvent) -> list[Action]:
        if not tokens.token_ids:
            return []
        first = not self._sent
        # A decode worker has no log-probabilities of the prompt, and counts loaded KV as cached: prefill's word stands.
        prompt = (self._prompt_report or tokens) if first else None
        self._sent.extend(tokens.token_ids)
        return [
            Emit(
                token_ids=tokens.token_ids,
                logprobs=tokens.logprobs,
                prompt_logprobs=prompt.prompt_logprobs if prompt is not None else (),
                cached_tokens=prompt.cached_tokens if prompt is not None else 0,
            )
        ]

    def _finished(self, leg: Leg, event: worker_pb2.LegEvent) -> list[Action]:
        finished = event.finished
        fault = end_fault(finished, self.spec, sent=self.tokens_sent)
        if fault is not None:
            return self._leg_failed(leg, fault)
        actions = self._over(leg)
        actions += self._emit(finished.last)
        if leg.kind is LegKind.DECODE:
            if finished.recomputed:
                self.recomputed = True
                actions.append(Note("recovery", "recompute"))
            elif self._verified:
                # Verified, then scattered: both slots are free already.
                self._transfer = None
        actions.append(Credit((leg.worker,)))
        matched = finished.matched_token_id if finished.HasField("matched_token_id") else None
        return [*actions, *self._clear("superseded"), *self._finish(finished.finish_reason, matched)]

    def _finish(self, finish_reason: str, matched_token_id: int | None) -> list[Action]:
        self.state = State.FINISHED
        return [Finish(finish_reason, matched_token_id)]

    # Failures -------------------------------------------------------------------------------------------------------------

    def _leg_reported_failure(self, leg: Leg, event: worker_pb2.LegEvent) -> list[Action]:
        error = SplitpointError.from_proto(event.failed)
        if error.code in UNASKED:
            # What this gateway aborts is no longer live: the worker ends the attempt for reasons of its own, it stops or starts.
            error = SplitpointError(Code.WORKER_LOST, f"worker {leg.worker.worker_id} ended the leg: {error.message}")
        return self._leg_failed(leg, error)

    def _leg_failed(self, leg: Leg, error: SplitpointError) -> list[Action]:
        actions: list[Action] = self._over(leg)
        actions += self._blame(leg, error.code)
        if not error.status.retryable:
            return actions + self._fail(error)
        assert self.route is not None
        self._cause = error
        on_decode = leg.kind in (LegKind.PREPARE, LegKind.DECODE)
        failing = failed_worker(self.route, error.code, on_decode=on_decode)
        self._exclude |= {failing}
        self._lost = self._lost | {failing} if error.code is Code.WORKER_LOST else self._lost - {failing}
        actions += self._clear("superseded")
        if self._sent and self.tokens_sent >= self.spec.sampling.max_tokens:
            # Every token is out; only the word "finished" was lost.
            return actions + self._finish("length", None)
        refusal = self._retry_refusal()
        if refusal is not None:
            return actions + self._give_up(error, refusal)
        actions.append(Note("retry", error.code.value))
        if self._sent:
            return actions + self._choose(with_last_resort((SoloGoal(exclude=self._exclude, pools=self.spec.pools),), self._lost))
        failed = FailedRoute(route=self.route, code=error.code, on_decode=on_decode, exclude=self._exclude)
        goals = goals_after_failure(
            failed,
            prompt_tokens=len(self.spec.prompt_token_ids),
            transport=self.spec.transport,
            pools=self.spec.pools,
            strict=self.spec.strict and self.spec.path == "split",
        )
        return actions + self._choose(with_last_resort(goals, self._lost))

    def _retry_refusal(self) -> str | None:
        """Why no further attempt may be made."""
        if self.rounds > self.spec.extra_attempts:
            return f"{self.rounds} attempts failed"
        if not self._sent:
            return None
        if self.spec.strict and self.spec.path == "split":
            return "strict mode refuses to recompute"
        refusal = forwarding_refusal(self.spec.sampling)
        return f"cannot be resumed: {refusal}" if refusal is not None else None

    def _give_up(self, cause: SplitpointError, why: str) -> list[Action]:
        code = Code.STREAM_BROKEN if self._sent else cause.code
        return self._fail(
            SplitpointError(
                code, f"{cause.message} ({why})", param=cause.param, retry_after_s=cause.retry_after_s, error_id=cause.error_id
            )
        )

    def _blame(self, leg: Leg, code: Code) -> list[Action]:
        if code in PAIR_FAULTS and isinstance(self.route, PairRoute):
            # The prepare leg and the decode leg may both report the one transfer.
            if self._pair_blamed:
                return []
            self._pair_blamed = True
            return [Blame((self.route.prefill, self.route.decode), code.value, self.route.transport)]
        return [Blame((leg.worker,), code.value)] if code in WORKER_FAULTS else []

    def _fail(self, error: SplitpointError) -> list[Action]:
        actions = self._clear("deadline" if error.code is Code.DEADLINE_EXCEEDED else "superseded")
        self.state = State.FAILED
        error.tokens_sent = self.tokens_sent
        return [*actions, Fail(error)]

    def _deadline(self, _: DeadlinePassed) -> list[Action]:
        return self._fail(SplitpointError(Code.DEADLINE_EXCEEDED, f"the deadline passed while {self.state}"))

    def _fault(self, event: Fault) -> list[Action]:
        return self._fail(event.error)

    def _closed(self, event: Closed) -> list[Action]:
        actions = self._clear(event.reason)
        self.state = State.CLOSED
        return [*actions, Ended(event.reason)]

    def _nothing(self, _: Event) -> list[Action]:
        return []

    # Ends of legs and transfers -------------------------------------------------------------------------------------------

    def _over(self, leg: Leg) -> list[Action]:
        del self._live[leg.attempt_id]
        return [LegOver(leg.attempt_id)]

    def _clear(self, reason: str) -> list[Action]:
        """Abort every live attempt and release the transfer on both its workers, unless it is known to be over."""
        actions: list[Action] = [AbortLeg(leg.attempt_id, leg.worker, reason) for leg in self._live.values()]
        self._live.clear()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            actions += [ReleaseTransfer(transfer.transfer_id, w, reason) for w in (transfer.prefill, transfer.decode)]
        self._prompt_report = None
        return actions


EVENT_KINDS: dict[type, str] = {
    Start: "start",
    Routed: "routed",
    NoRoute: "no_route",
    DeadlinePassed: "deadline",
    Closed: "closed",
    Fault: "fault",
}

# Every live request can be ended from outside; a terminal one stays as it is, however often it is ended.
ENDINGS: dict[str, Callable[..., list[Action]]] = {
    "closed": Request._closed,
    "deadline": Request._deadline,
    "fault": Request._fault,
}

TABLE: dict[tuple[State, str], Callable[..., list[Action]]] = {
    (State.NEW, "start"): Request._start,
    (State.ROUTING, "routed"): Request._routed,
    (State.ROUTING, "no_route"): Request._no_route,
    (State.PREFILLING, "prefill.sealed"): Request._sealed,
    (State.PREFILLING, "prefill.finished"): Request._finished,  # the first token was the last: no decode follows
    (State.PREFILLING, "prefill.failed"): Request._leg_reported_failure,
    (State.PREFILLING, "prepare.staged"): Request._staged,
    (State.PREFILLING, "prepare.failed"): Request._leg_reported_failure,
    (State.DECODING, "prepare.staged"): Request._staged,
    (State.DECODING, "prepare.failed"): Request._prepare_failed_late,
    (State.DECODING, "decode.tokens"): Request._tokens,
    (State.DECODING, "decode.finished"): Request._finished,
    (State.DECODING, "decode.failed"): Request._leg_reported_failure,
    (State.COMPUTING, "colocated.tokens"): Request._tokens,
    (State.COMPUTING, "colocated.finished"): Request._finished,
    (State.COMPUTING, "colocated.failed"): Request._leg_reported_failure,
    **{(state, kind): handler for state in LIVE for kind, handler in ENDINGS.items()},
    **{(state, kind): Request._nothing for state in TERMINAL for kind in ENDINGS},
}
