"""Drives the pure state machine of a request by hand: keeps what it sent, answers in the words of a worker."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from coordinator.request import Request
from coordinator.request_actions import (
    AbortLeg,
    Action,
    ChooseRoute,
    Emit,
    Ended,
    Event,
    Fail,
    Finish,
    LegOver,
    Mint,
    Note,
    ReleaseTransfer,
    RequestSpec,
    SendColocated,
    SendDecode,
    SendPrefill,
    SendPrepare,
)
from engine.sampling import SamplingParams
from protos.errors import Code, SplitpointError
from protos.ids import AttemptId, Capability, TransferId, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2

PROMPT = [7, 8, 9, 10]
SENDS = (SendPrefill, SendPrepare, SendDecode, SendColocated)


def counting_mint() -> Mint:
    """Ids that are counted up, so that a failure reads well."""
    attempts, transfers = itertools.count(1), itertools.count(1)
    return Mint(
        attempt=lambda: AttemptId(f"a{next(attempts)}"),
        transfer=lambda: TransferId(next(transfers).to_bytes(16, "big")),
        capability=lambda: Capability(bytes(16)),
    )


class Driver:
    """One request. Every action ever returned is in `actions`; helpers look the latest ones up."""

    def __init__(self, *, path: str = "split", strict: bool = False, extra_attempts: int = 2, **sampling: Any) -> None:
        sampling.setdefault("max_tokens", 4)
        self.spec = RequestSpec(
            prompt_token_ids=PROMPT,
            prompt_hash=token_hash(PROMPT),
            sampling=SamplingParams(**sampling),
            path=path,
            strict=strict,
            extra_attempts=extra_attempts,
        )
        self.request = Request(self.spec, counting_mint())
        self.actions: list[Action] = []
        self.last: list[Action] = []

    def feed(self, event: Event) -> list[Action]:
        self.last = self.request.handle(event)
        self.actions += self.last
        return self.last

    def sent(self, kind: type) -> Any:
        """The latest leg of this kind."""
        return next(a for a in reversed(self.actions) if isinstance(a, kind))

    def goals(self) -> tuple[Any, ...]:
        return self.sent(ChooseRoute).goals

    def of(self, kind: type) -> list[Any]:
        return [a for a in self.actions if isinstance(a, kind)]

    @property
    def emitted(self) -> list[int]:
        return [token for action in self.of(Emit) for token in action.token_ids]

    @property
    def terminals(self) -> list[Action]:
        return [a for a in self.actions if isinstance(a, Finish | Fail | Ended)]

    @property
    def error(self) -> SplitpointError:
        (fail,) = self.of(Fail)
        error: SplitpointError = fail.error
        return error

    def notes(self) -> list[tuple[str, str]]:
        return [(n.name, n.detail) for n in self.of(Note)]

    def open_attempts(self) -> set[str]:
        """Sent, not over and not aborted."""
        opened: set[str] = {a.attempt_id for a in self.actions if isinstance(a, SENDS)}
        ended = {a.attempt_id for a in self.actions if isinstance(a, LegOver | AbortLeg)}
        return opened - ended

    def released(self) -> set[tuple[bytes, str]]:
        return {(r.transfer_id, r.worker.worker_id) for r in self.of(ReleaseTransfer)}

    # Reports ----------------------------------------------------------------------------------------------------------

    def tokens(self, send: Any, *token_ids: int, **extra: Any) -> list[Action]:
        return self.feed(
            worker_pb2.LegEvent(attempt_id=send.attempt_id, tokens=worker_pb2.TokensEvent(token_ids=token_ids, **extra))
        )

    def finished(self, send: Any, *token_ids: int, reason: str = "length", **extra: Any) -> list[Action]:
        last = worker_pb2.TokensEvent(token_ids=token_ids)
        event = worker_pb2.FinishedEvent(finish_reason=reason, last=last, **extra)
        return self.feed(worker_pb2.LegEvent(attempt_id=send.attempt_id, finished=event))

    def failed(self, send: Any, code: Code, message: str = "no") -> list[Action]:
        error = SplitpointError(code, message)
        return self.feed(worker_pb2.LegEvent(attempt_id=send.attempt_id, failed=error.to_proto()))

    def sealed(self, first: Sequence[int] = (1,), **changes: Any) -> list[Action]:
        send = self.sent(SendPrefill)
        tokens = changes.pop("tokens", None) or worker_pb2.TokensEvent(token_ids=first, cached_tokens=2)
        event = worker_pb2.SealedEvent(first=tokens, seal=self.seal(**changes))
        return self.feed(worker_pb2.LegEvent(attempt_id=send.attempt_id, sealed=event))

    def seal(self, **changes: Any) -> kv_transfer_pb2.Seal:
        send = self.sent(SendPrefill)
        fields: dict[str, Any] = {
            "transfer_id": send.grant.transfer_id if send.grant is not None else b"",
            "prompt_tokens": len(PROMPT),
            "token_hash": self.spec.prompt_hash,
            "incarnation": send.worker.incarnation,
        }
        return kv_transfer_pb2.Seal(**(fields | changes))

    def staged(self, transport: str = "ucx") -> list[Action]:
        send = self.sent(SendPrepare)
        staged = worker_pb2.StagedEvent(bytes=10, seconds=0.1, transport=transport)
        return self.feed(worker_pb2.LegEvent(attempt_id=send.attempt_id, staged=staged))
