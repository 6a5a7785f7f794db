"""What a worker's report must satisfy before a request believes it, and the name of a recovery. Pure."""

from __future__ import annotations

from coordinator.request_actions import RequestSpec
from coordinator.request_states import Transfer
from coordinator.routing.goals import PairRoute, Route
from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import worker_pb2


def protocol_fault(what: str) -> SplitpointError:
    """A worker said what no worker may say."""
    return SplitpointError(Code.INTERNAL, f"a worker broke the protocol: {what}")


def seal_fault(
    sealed: worker_pb2.SealedEvent, spec: RequestSpec, route: PairRoute, transfer: Transfer | None
) -> SplitpointError | None:
    """Why this is not the seal of the request's prompt over `transfer`, or None."""
    seal = sealed.seal
    if len(sealed.first.token_ids) != 1:
        return protocol_fault(f"sealed with {len(sealed.first.token_ids)} tokens")
    if transfer is None or seal.transfer_id != transfer.transfer_id:
        return protocol_fault("sealed another transfer")
    if seal.incarnation != route.prefill.incarnation:
        return SplitpointError(Code.TRANSFER_REFUSED, "sealed by another incarnation of the prefill worker")
    if seal.prompt_tokens != len(spec.prompt_token_ids) or seal.token_hash != spec.prompt_hash:
        return protocol_fault("sealed another prompt")
    return None


def tokens_fault(tokens: worker_pb2.TokensEvent, spec: RequestSpec, *, sent: int) -> SplitpointError | None:
    """Why these tokens cannot follow the `sent` ones, or None."""
    too_many = sent + len(tokens.token_ids) > spec.sampling.max_tokens
    return protocol_fault("more tokens than max_tokens") if too_many else None


def end_fault(finished: worker_pb2.FinishedEvent, spec: RequestSpec, *, sent: int) -> SplitpointError | None:
    """Why this is no end of an answer with `sent` tokens so far, or None."""
    if finished.finish_reason not in ("stop", "length"):
        return protocol_fault(f"ended with {finished.finish_reason!r} without being asked")
    return tokens_fault(finished.last, spec, sent=sent)


def recovery_kind(route: Route, tokens_sent: int) -> str:
    """How a further route makes good a failed one, for the metric."""
    if isinstance(route, PairRoute):
        return "prefill_retry"
    if tokens_sent:
        return "migrate"
    return "recompute" if route.local else "colocated"
