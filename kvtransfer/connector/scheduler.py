"""The connector's scheduler half: which blocks move in which engine step. Pure: no vLLM, no I/O, no clock.

It lives in the engine core beside vLLM's scheduler and is called by it, in this order, within one step:
`matched_tokens` (any number of times, also for requests that are not admitted), `allocated` (once per admission),
`plan_step` (once). `started` and `finished` come between steps. Everything a rank must do travels in the step's plan, so
every rank of the engine sees the same decision.

Exactly once: a transfer belongs to the first request that names it; a receive is consumed by its first admission; a block
of a send is gathered by one step. All state of a request ends with `finished`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtransfer.connector.parameters import ReceiveParameters, SendParameters, parse
from protos.ids import TransferId

logger = logging.getLogger(__name__)


class Request(Protocol):
    """What is read of vLLM's request."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_preemptions: int
    kv_transfer_params: dict[str, Any] | None


class NewRequest(Protocol):
    """What is read of a request's first (or, on the V2 runner, resumed) entry in a step."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequests(Protocol):
    """What is read of the requests that ran before; lists are parallel to `req_ids`."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


class SchedulerOutput(Protocol):
    """What is read of one scheduled step."""

    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Gather:
    """After this step's forward pass, copy engine blocks `block_ids` to blocks `first_block...` of the send slot."""

    transfer_id: TransferId
    first_block: int
    block_ids: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Scatter:
    """Before this step's forward pass, copy blocks `first_block...` of the receive slot to engine blocks `block_ids`.
    Blocks before `first_block` were found in the engine's own prefix cache."""

    transfer_id: TransferId
    request_id: str
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that one engine step asks of every rank. `releases` are receive slots that nobody will read."""

    gathers: tuple[Gather, ...] = ()
    scatters: tuple[Scatter, ...] = ()
    releases: tuple[TransferId, ...] = ()


@dataclass(slots=True)
class _Send:
    transfer_id: TransferId
    prompt_tokens: int
    block_ids: list[int] = field(default_factory=list)
    gathered_blocks: int = 0


@dataclass(slots=True)
class _Receive:
    transfer_id: TransferId
    staged_tokens: int
    consumed: bool = False


class SchedulerHalf:
    """State of the live requests that send or receive KV. One per engine; belongs to the scheduler's thread.

    `counters` name what was decided: `gathers`, `scatters`, `scattered_blocks`, `full_local_hits`, `unread_receives`,
    `recomputed_after_preemption`, `malformed`, `duplicate_transfers`.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        self._transfers: set[TransferId] = set()
        self._scatters: list[Scatter] = []
        self._releases: list[TransferId] = []
        self.counters: Counter[str] = Counter()

    @property
    def live_transfers(self) -> int:
        """Transfers of requests that have not finished."""
        return len(self._transfers)

    def started(self, request: Request) -> None:
        """A request entered the queue. One that cannot be understood or names a transfer in use runs as an ordinary one."""
        try:
            parameters = parse(request.kv_transfer_params)
        except ValueError as error:
            self.counters["malformed"] += 1
            logger.error("request %s: %s; its KV will neither be sent nor loaded", request.request_id, error)
            return
        if parameters is None:
            return
        if parameters.transfer_id in self._transfers:
            self.counters["duplicate_transfers"] += 1
            logger.error("request %s names transfer %s of a live request", request.request_id, parameters.transfer_id.hex())
            return
        self._transfers.add(parameters.transfer_id)
        match parameters:
            case SendParameters(transfer_id):
                self._sends[request.request_id] = _Send(transfer_id, request.num_prompt_tokens)
            case ReceiveParameters(transfer_id, staged_tokens):
                self._receives[request.request_id] = _Receive(transfer_id, staged_tokens)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int:
        """Prompt tokens beyond `computed_tokens` that staging holds for this request. Has no side effects.

        At least the last token is left to compute, for its logits. After the first admission the answer is 0: a preempted
        request computes prompt and output again, because its slot went with the first load.
        """
        receive = self._receives.get(request.request_id)
        if receive is None or receive.consumed:
            return 0
        return max(0, self._loadable_tokens(receive, request) - computed_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """The request is admitted in this step with `block_ids`, of which the last loaded `external_tokens` come from staging."""
        receive = self._receives.get(request.request_id)
        if receive is None:
            return
        if receive.consumed:
            if request.num_preemptions > 0:
                self.counters["recomputed_after_preemption"] += 1
            return
        receive.consumed = True
        if external_tokens == 0:
            self.counters["full_local_hits"] += 1
            self._releases.append(receive.transfer_id)
            return
        end_tokens = self._loadable_tokens(receive, request)
        first_block = (end_tokens - external_tokens) // self._block_tokens
        wanted = tuple(block_ids[first_block : self._blocks(end_tokens)])
        self._scatters.append(Scatter(receive.transfer_id, request.request_id, first_block, wanted))
        self.counters["scatters"] += 1
        self.counters["scattered_blocks"] += len(wanted)

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """What the ranks must do in this step. Called once per step; resets what the step carries."""
        gathers: list[Gather] = []
        for new in output.scheduled_new_reqs:
            self._schedule_send(gathers, new.req_id, new.block_ids, True, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            replaced = request_id in cached.resumed_req_ids
            blocks = cached.new_block_ids[index]
            self._schedule_send(gathers, request_id, blocks, replaced, cached.num_computed_tokens[index], output)
        plan = StepPlan(tuple(gathers), tuple(self._scatters), tuple(self._releases))
        self._scatters = []
        self._releases = []
        return plan

    def finished(self, request: Request) -> None:
        """The request ended, in whatever way. Its blocks may be freed at once: nothing outside a step touches them.

        A receive that was never admitted gives its slot back with the next step; a send's slot is its actor's to release.
        """
        send = self._sends.pop(request.request_id, None)
        if send is not None:
            self._transfers.discard(send.transfer_id)
        receive = self._receives.pop(request.request_id, None)
        if receive is not None:
            self._transfers.discard(receive.transfer_id)
            if not receive.consumed:
                self.counters["unread_receives"] += 1
                self._releases.append(receive.transfer_id)

    def _schedule_send(
        self,
        gathers: list[Gather],
        request_id: str,
        block_ids: tuple[list[int], ...] | None,
        replaced: bool,
        computed_tokens: int,
        output: SchedulerOutput,
    ) -> None:
        send = self._sends.get(request_id)
        if send is None:
            return
        # Also without a gather: block ids are told once, and only in the step that allocates them.
        if replaced:
            send.block_ids = []
        if block_ids is not None:
            send.block_ids.extend(block_ids[0])
        complete_tokens = computed_tokens + output.num_scheduled_tokens[request_id]
        last = complete_tokens >= send.prompt_tokens
        # Only whole blocks are final before the prompt's end. A resumed request starts over, maybe behind what is already
        # staged; staged blocks are never written again, because the peer may have read them.
        complete_blocks = self._blocks(send.prompt_tokens) if last else complete_tokens // self._block_tokens
        if complete_blocks <= send.gathered_blocks:
            return
        chunk = tuple(send.block_ids[send.gathered_blocks : complete_blocks])
        gathers.append(Gather(send.transfer_id, send.gathered_blocks, chunk, last))
        send.gathered_blocks = complete_blocks
        self.counters["gathers"] += 1

    def _loadable_tokens(self, receive: _Receive, request: Request) -> int:
        return min(receive.staged_tokens, request.num_tokens - 1)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)
