"""What is in flight at one gateway, as operators see it."""

from __future__ import annotations

from coordinator.gateway.core import GatewayCore
from coordinator.gateway.generation import RunningChoice
from protos.splitpoint.v1 import admin_pb2


def in_flight(core: GatewayCore) -> list[admin_pb2.RequestStatus]:
    """Every choice that has started and not ended, the oldest first."""
    return [_status(choice) for choice in sorted(core.running, key=lambda c: c.submission.received_s)]


def _status(choice: RunningChoice) -> admin_pb2.RequestStatus:
    submission, ledger = choice.submission, choice.ledger()
    return admin_pb2.RequestStatus(
        request_id=submission.request_id,
        client_request_id=submission.client_request_id,
        path=ledger.path,
        transport=ledger.transport,
        prefill_worker=ledger.prefill_worker,
        decode_worker=ledger.decode_worker,
        prompt_tokens=len(submission.prompt_token_ids),
        attempts=ledger.attempts,
        age_s=ledger.e2e_s,
        ttft_s=ledger.ttft_s,
    )
