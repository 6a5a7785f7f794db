"""Open-loop load over the public gRPC API: each request is sent when it is due, whatever became of those before.

TTFT counts from `due`, so a client that falls behind cannot hide a queue; how far it fell behind is measured too, and a
probe in which that is no longer small is void.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import grpc
import grpc.aio

from coordinator.compare.quantile import percentile
from coordinator.compare.workload import PlannedRequest, Workload
from protos.splitpoint.v1 import common_pb2, generation_pb2, generation_pb2_grpc

MAX_SEND_LAG_SHARE = 0.01
"""Of the TTFT that the objective allows the request, at p99."""
KEPT_GAPS = 4000
"""Of one probe in a record."""
TIMER_TICK_S = 0.001
"""The event loop's timers round up to this; the last tick before a request is due is polled."""
PATHS = ("split", "colocated")


class RequestFailedError(Exception):
    """The service refused or broke off; the text is its own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a reply: how many tokens are new. The last also brings the ledger."""

    new_tokens: int
    cached_tokens: int = 0
    ledger: dict[str, Any] | None = None


class Client(Protocol):
    """One way to ask the service."""

    def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        """Make a request ready; it is sent when the reply is first asked for. The reply raises `RequestFailedError`.

        `path` is a path, or the name of an arm that the client knows.
        """


@dataclass(frozen=True, slots=True)
class Sending:
    """One request of a schedule: its place in the workload, and when it is due, seconds from the schedule's start."""

    index: int
    due_s: float
    request: PlannedRequest


@runtime_checkable
class ScheduleSender(Protocol):
    """A client that sends a whole schedule by itself, by several processes (`ClientProcesses`)."""

    async def send(
        self, sendings: Sequence[Sending], path: str, deadline_s: float, on_done: Callable[[], None]
    ) -> tuple[float, list[Outcome]]:
        """As the function `send`, every outcome in the order of `sendings`."""

    def fell_behind(self) -> None:
        """The last schedule was sent late."""


@dataclass(frozen=True, slots=True)
class ArmTarget:
    """How the requests of an arm are marked: their path, the only pools that may serve them (none: all), the KV transport.

    `slo` is what path `auto` is told to meet; None: what the gateway asks of requests that bring no objective.
    """

    path: str
    pools: tuple[str, ...] = ()
    transport: str = ""
    slo: Slo | None = None

    def headers(self, prompt_tokens: int = 0) -> tuple[tuple[str, str], ...]:
        """The public headers, or gRPC metadata, that say so of a request with a prompt of this length."""
        found = [("x-splitpoint-path", self.path)]
        if self.pools:
            found.append(("x-splitpoint-pools", ",".join(self.pools)))
        if self.transport:
            found.append(("x-splitpoint-transport", self.transport))
        if self.slo is not None:
            ttft_s = self.slo.ttft_for_s(prompt_tokens)
            found.append(("x-splitpoint-slo-ttft-ms", f"{ttft_s * 1e3:.6g}"))
            found.append(("x-splitpoint-slo-tpot-ms", f"{self.slo.tpot_s * 1e3:.6g}"))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet. `tpot_s` is not asked of one-token outputs; `itl_p99_s` only when given.

    TTFT may take `ttft_s` and `ttft_s_per_token` for each token of the prompt.
    """

    ttft_s: float
    tpot_s: float
    itl_p99_s: float | None = None
    ttft_s_per_token: float = 0.0

    def ttft_for_s(self, prompt_tokens: int) -> float:
        """What TTFT may be for a prompt of so many tokens, seconds."""
        return self.ttft_s + self.ttft_s_per_token * prompt_tokens

    def allows_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """How long a request may take that just meets it, seconds."""
        return self.ttft_for_s(prompt_tokens) + self.tpot_s * (output_tokens - 1)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request; times in seconds, TTFT and E2E from `due_s`.

    `itl_p99_s` and `itl_largest_s` are of all gaps between its tokens; the gaps themselves a record keeps of some requests only.
    """

    index: int
    due_s: float
    lag_s: float
    wanted_tokens: int
    prompt_tokens: int = 0
    tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    itl_p99_s: float | None = None
    itl_largest_s: float | None = None
    cached_tokens: int = 0
    failure: str = ""
    ledger: dict[str, Any] | None = None

    @property
    def tpot_s(self) -> float | None:
        """None below two tokens: judged on TTFT alone."""
        if self.tokens < 2 or self.ttft_s is None or self.e2e_s is None:
            return None
        return (self.e2e_s - self.ttft_s) / (self.tokens - 1)

    def meets(self, slo: Slo) -> bool:
        """Failed, refused, late and wrong-length requests do not."""
        if self.failure or self.ttft_s is None or self.ttft_s > slo.ttft_for_s(self.prompt_tokens):
            return False
        tpot_s = self.tpot_s
        if tpot_s is not None and tpot_s > slo.tpot_s:
            return False
        if slo.itl_p99_s is None:
            return True
        itl_p99_s = self.itl_p99_s
        if itl_p99_s is None and self.gaps_s:
            itl_p99_s = percentile(self.gaps_s, 0.99)
        return itl_p99_s is None or itl_p99_s <= slo.itl_p99_s


@dataclass(slots=True, kw_only=True)
class Probe:
    """One workload sent once through one path, or arm, at one rate. `void` says why it does not count, "" when it does.

    The first `warm_up` and the last `cool_down` requests are sent and not judged. `half` is 0 for the arm's first probe of its
    block, 1 for its second.
    `began_s` is the load generator's clock.
    """

    path: str
    seed: int
    rate_per_s: float
    workload_digest: str
    outcomes: list[Outcome]
    void: str = ""
    warm_up: int = 0
    half: int = 0
    began_s: float = 0.0
    cool_down: int = 0

    @property
    def judged(self) -> list[Outcome]:
        return self.outcomes[self.warm_up : len(self.outcomes) - self.cool_down]

    def attainment(self, slo: Slo) -> float:
        return sum(outcome.meets(slo) for outcome in self.judged) / len(self.judged)

    def thin(self) -> None:
        """Keep the gaps between tokens of evenly chosen requests, about `KEPT_GAPS` of them: what figures need.

        Whatever is judged request by request has its own field. Gaps and ledgers are kept to the microsecond.
        """
        every = max(1, math.ceil(sum(len(outcome.gaps_s) for outcome in self.outcomes) / KEPT_GAPS))
        for number, outcome in enumerate(self.outcomes):
            outcome.gaps_s = [] if number % every else [round(gap, 6) for gap in outcome.gaps_s]
            if outcome.ledger:
                outcome.ledger = {k: round(v, 6) if isinstance(v, float) else v for k, v in outcome.ledger.items()}

    @property
    def ended_s(self) -> float:
        """When its last answer had come, on the clock of `began_s`."""
        return self.began_s + max(outcome.due_s + (outcome.e2e_s or 0.0) for outcome in self.outcomes)

    @property
    def lag_p99_s(self) -> float:
        return percentile([outcome.lag_s for outcome in self.outcomes], 0.99)

    def lag_share(self, slo: Slo) -> float:
        """The p99 of what each request's send lag is of the TTFT that the objective allows it."""
        return percentile([outcome.lag_s / slo.ttft_for_s(outcome.prompt_tokens) for outcome in self.outcomes], 0.99)


async def run_probe(
    client: Client,
    workload: Workload,
    *,
    path: str,
    rate_per_s: float,
    deadline_s: float,
    slo: Slo | None = None,
    now: Callable[[], float] = time.perf_counter,
    on_done: Callable[[], None] = lambda: None,
    warm_up: int = 0,
    cool_down: int = 0,
    half: int = 0,
) -> Probe:
    """Send the workload and wait for every reply. Without `slo` the send lag is reported, not judged.

    Of its requests the first `warm_up` find the system filling, the last `cool_down` emptying; neither is judged. Cancelling it
    cancels what is outstanding.
    """
    sendings = [
        Sending(index, due_s, request)
        for index, (due_s, request) in enumerate(zip(workload.due_s(rate_per_s), workload.requests, strict=True))
    ]
    if isinstance(client, ScheduleSender):
        start, outcomes = await client.send(sendings, path, deadline_s, on_done)
    else:
        start, outcomes = await send(client, sendings, path, deadline_s, now=now, on_done=on_done)
    probe = Probe(
        path=path,
        seed=workload.spec.seed,
        rate_per_s=rate_per_s,
        workload_digest=workload.digest,
        outcomes=outcomes,
        warm_up=warm_up,
        cool_down=cool_down,
        half=half,
        began_s=start,
    )
    if slo is not None and (share := probe.lag_share(slo)) > MAX_SEND_LAG_SHARE:
        late = f"p99 send lag {probe.lag_p99_s * 1e3:.1f} ms, {share:.1%} of the TTFT objective"
        probe.void = f"the client fell behind: {late} (allowed {MAX_SEND_LAG_SHARE:.0%})"
        if isinstance(client, ScheduleSender):
            client.fell_behind()
    return probe


async def send(
    client: Client,
    sendings: Sequence[Sending],
    path: str,
    deadline_s: float,
    *,
    now: Callable[[], float] = time.perf_counter,
    begin: Callable[[], Awaitable[float]] | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[float, list[Outcome]]:
    """Send each request when it is due and wait for every reply. Gives the start, by the clock `now`, and the outcomes.

    `begin` is asked for the start once all requests are ready: they may be a part of a schedule that others send too. Without it
    the start is at once.
    """
    # Whatever can be done before is: while it is sent, nothing else delays the workload.
    all_replies = [client.ask(sending.request, path, deadline_s) for sending in sendings]
    tasks: list[asyncio.Task[Outcome]] = []
    start = now() if begin is None else await begin()
    async with asyncio.TaskGroup() as group:
        for sending, replies in zip(sendings, all_replies, strict=True):
            await _until(start + sending.due_s, now)
            task = group.create_task(_one(replies, sending.request, sending.index, start, sending.due_s, deadline_s, now))
            task.add_done_callback(lambda _: on_done())
            tasks.append(task)
    return start, [task.result() for task in tasks]


async def run_one_at_a_time(
    client: Client,
    requests: Sequence[PlannedRequest],
    *,
    path: str,
    deadline_s: float,
    now: Callable[[], float] = time.perf_counter,
) -> list[Outcome]:
    """Unloaded: each request is due when the one before has ended."""
    outcomes = []
    for index, request in enumerate(requests):
        replies = client.ask(request, path, deadline_s)
        start = now()
        outcomes.append(await _one(replies, request, index, start, 0.0, deadline_s, now))
    return outcomes


async def _until(at_s: float, now: Callable[[], float]) -> None:
    # Linux lets a wait run over by a thousandth of its length, 10 ms of 10 s, so a long one stops short of its end.
    await asyncio.sleep(max(0.0, 0.99 * (at_s - now()) - TIMER_TICK_S))
    await asyncio.sleep(max(0.0, at_s - now() - TIMER_TICK_S))
    # Replies are taken meanwhile; a timer cannot hit the moment.
    while now() < at_s:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def _one(
    replies: AsyncIterator[Piece],
    request: PlannedRequest,
    index: int,
    start: float,
    due_s: float,
    deadline_s: float,
    now: Callable[[], float],
) -> Outcome:
    due = start + due_s
    wanted_tokens = request.output_tokens
    outcome = Outcome(
        index=index,
        due_s=due_s,
        lag_s=now() - due,
        wanted_tokens=wanted_tokens,
        prompt_tokens=len(request.prompt_token_ids),
    )
    last = due
    try:
        async with asyncio.timeout(deadline_s):
            async for piece in replies:
                arrived = now()
                if piece.new_tokens:
                    # Tokens of one message arrive together: one gap, then none.
                    gaps = [arrived - last] + [0.0] * (piece.new_tokens - 1)
                    if outcome.ttft_s is None:
                        outcome.ttft_s = arrived - due
                        gaps = gaps[1:]
                    outcome.gaps_s += gaps
                    outcome.tokens += piece.new_tokens
                    last = arrived
                outcome.cached_tokens = max(outcome.cached_tokens, piece.cached_tokens)
                outcome.ledger = piece.ledger or outcome.ledger
        outcome.e2e_s = last - due
        if outcome.gaps_s:
            outcome.itl_p99_s, outcome.itl_largest_s = percentile(outcome.gaps_s, 0.99), max(outcome.gaps_s)
        if outcome.tokens != wanted_tokens:
            outcome.failure = f"{outcome.tokens} tokens came where {wanted_tokens} were forced"
    except RequestFailedError as error:
        outcome.failure = str(error)
    except TimeoutError:
        outcome.failure = f"not finished {deadline_s:.1f} s after it was sent"
    return outcome


class GrpcClient:
    """`GenerationService` of one gateway. Use it as an async context manager."""

    def __init__(self, target: str, *, model: str = "", api_key: str = "", arms: Mapping[str, ArmTarget] | None = None) -> None:
        """`arms`: what a name given to `ask` stands for; other names are paths. It may be changed later by `know`."""
        # The proxy of the environment is for the outside, not for the system under test.
        self._channel = grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._model = model
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._arms = dict(arms or {})

    async def __aenter__(self) -> GrpcClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def know(self, name: str, target: ArmTarget) -> None:
        """From now on `ask` sends an arm's requests there."""
        self._arms[name] = target

    async def model(self, timeout_s: float) -> str:
        """The served model's id. Raises `RequestFailedError`."""
        try:
            reply = await self._stub.ListModels(generation_pb2.ListModelsRequest(), metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise RequestFailedError(f"{exc.code().name}: {exc.details()}") from exc
        if not reply.models:
            raise RequestFailedError("the service serves no model")
        self._model = reply.models[0].id
        return self._model

    def ask(self, request: PlannedRequest, path: str, deadline_s: float) -> AsyncIterator[Piece]:
        """See `Client`."""
        message = generation_pb2.GenerateRequest(
            model=self._model,
            tokenized=generation_pb2.TokenizedInput(input_ids=request.prompt_token_ids),
            sampling_params=common_pb2.SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True),
            stream=True,
        )
        target = self._arms.get(path) or ArmTarget(path)
        return self._replies(message, (*self._metadata, *target.headers(len(request.prompt_token_ids))), deadline_s)

    async def _replies(
        self, message: generation_pb2.GenerateRequest, metadata: tuple[tuple[str, str], ...], deadline_s: float
    ) -> AsyncIterator[Piece]:
        try:
            # Counts are read from the running total, so tokens whose text is held back are not lost.
            seen = 0
            async for reply in self._stub.Generate(message, metadata=metadata, timeout=deadline_s):
                if reply.HasField("chunk"):
                    total = reply.chunk.completion_tokens
                    yield Piece(max(0, total - seen), reply.chunk.cached_tokens)
                else:
                    total = reply.complete.completion_tokens
                    yield Piece(max(0, total - seen), reply.complete.cached_tokens, _ledger(reply.complete))
                seen = max(seen, total)
        except grpc.aio.AioRpcError as exc:
            raise RequestFailedError(f"{exc.code().name}: {exc.details()}") from exc


def _ledger(complete: generation_pb2.GenerateComplete) -> dict[str, Any] | None:
    if not complete.HasField("metrics"):
        return None
    return {spec.name: getattr(complete.metrics, spec.name) for spec in complete.metrics.DESCRIPTOR.fields}
