"""What the state machine of a request is told and what it answers. Pure values.

Reports of workers reach it as the `LegEvent` messages they are; everything else that can happen to a request is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.routing.goals import Goal, Route
from coordinator.routing.views import Role, WorkerView
from engine.sampling import SamplingParams
from protos.errors import SplitpointError
from protos.ids import AttemptId, Capability, TransferId, new_attempt_id, new_capability, new_transfer_id
from protos.splitpoint.v1 import common_pb2, kv_transfer_pb2, worker_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One choice, as submitted. `strict` refuses every computation of a split request's prompt but prefill's.

    `extra_attempts` is how often another route may be taken, before and after the first token together. `pools`, where not empty,
    are the only ones that may serve it, whatever fails. `solo_role`: the label of the worker that a whole request is meant for.
    """

    prompt_token_ids: Sequence[int]
    prompt_hash: bytes
    sampling: SamplingParams
    path: str
    transport: str | None = None
    pools: frozenset[str] = frozenset()
    strict: bool = False
    extra_attempts: int = 2
    solo_role: Role | None = None


@dataclass(frozen=True, slots=True)
class Mint:
    """Where new ids come from; tests bring predictable ones."""

    attempt: Callable[[], AttemptId] = new_attempt_id
    transfer: Callable[[], TransferId] = new_transfer_id
    capability: Callable[[], Capability] = new_capability


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The client waits for tokens."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The answer to `ChooseRoute`."""

    route: Route


@dataclass(frozen=True, slots=True)
class NoRoute:
    """The other answer: no worker can take it."""

    error: SplitpointError


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The one deadline of the request."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The front end ends it: "stop" (a stop string matched), "client_left", "failed" (another choice did)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fault:
    """The shell ends the request with this error, not retried: it found a fault of ours, or the gateway stops."""

    error: SplitpointError


Event = Start | Routed | NoRoute | worker_pb2.LegEvent | DeadlinePassed | Closed | Fault


# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChooseRoute:
    """Ask routing; answer with `Routed` or `NoRoute`."""

    goals: tuple[Goal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPrefill:
    """`grant` None: the answer ends with this token, nothing is staged."""

    attempt_id: AttemptId
    worker: WorkerView
    sampling: SamplingParams
    grant: kv_transfer_pb2.TransferGrant | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPrepare:
    attempt_id: AttemptId
    worker: WorkerView
    grant: kv_transfer_pb2.TransferGrant
    prefill: WorkerView
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDecode:
    attempt_id: AttemptId
    worker: WorkerView
    seal: kv_transfer_pb2.Seal
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    allow_recompute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendColocated:
    """`sent_token_ids` are appended to the prompt: the client has them already."""

    attempt_id: AttemptId
    worker: WorkerView
    sent_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class AbortLeg:
    """End a live attempt."""

    attempt_id: AttemptId
    worker: WorkerView
    reason: str


@dataclass(frozen=True, slots=True)
class LegOver:
    """An attempt ended by itself; what was charged for it is free."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class ReleaseTransfer:
    """End a transfer on one of its two workers."""

    transfer_id: TransferId
    worker: WorkerView
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Tokens for the client. Each token of the answer is emitted exactly once, in order."""

    token_ids: Sequence[int]
    logprobs: Sequence[common_pb2.PositionLogprobs]
    prompt_logprobs: Sequence[common_pb2.PositionLogprobs]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Terminal: the answer is complete."""

    finish_reason: str
    matched_token_id: int | None


@dataclass(frozen=True, slots=True)
class Fail:
    """Terminal: the error the client sees, `tokens_sent` set."""

    error: SplitpointError


@dataclass(frozen=True, slots=True)
class Ended:
    """Terminal: closed by the front end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something that must not stay silent: a counter and a log event. `detail` is for people."""

    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Blame:
    """A fault for the breakers. One worker, or the two of a pair and the transport between them."""

    workers: tuple[WorkerView, ...]
    code: str
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Credit:
    """This worker, or this pair over this transport, did its part: forget its earlier faults."""

    workers: tuple[WorkerView, ...]
    transport: str = ""


Action = (
    ChooseRoute
    | SendPrefill
    | SendPrepare
    | SendDecode
    | SendColocated
    | AbortLeg
    | LegOver
    | ReleaseTransfer
    | Emit
    | Finish
    | Fail
    | Ended
    | Note
    | Blame
    | Credit
)
