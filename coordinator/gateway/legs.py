"""Actions of a request as messages to a worker. Pure; a leg is built from a whitelist of fields (rule 6)."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.request_actions import SendColocated, SendDecode, SendPrefill, SendPrepare
from coordinator.routing.views import WorkerView
from protos.ids import AttemptId, RequestId
from protos.splitpoint.v1 import kv_transfer_pb2, worker_pb2


class LegBuilder:
    """The legs of one choice."""

    def __init__(self, request_id: RequestId, prompt_token_ids: Sequence[int], prompt_hash: bytes) -> None:
        self._request_id = request_id
        self._prompt = prompt_token_ids
        self._hash = prompt_hash

    def header(self, attempt_id: AttemptId, remaining_s: float) -> worker_pb2.LegHeader:
        return worker_pb2.LegHeader(request_id=self._request_id, attempt_id=attempt_id, remaining_s=max(0.0, remaining_s))

    def prefill(self, action: SendPrefill, remaining_s: float) -> worker_pb2.StreamRequest:
        leg = worker_pb2.PrefillLeg(
            header=self.header(action.attempt_id, remaining_s),
            prompt_token_ids=self._prompt,
            sampling_params=action.sampling.to_proto(),
            grant=action.grant,
        )
        return worker_pb2.StreamRequest(prefill=leg)

    def prepare(self, action: SendPrepare, remaining_s: float) -> worker_pb2.StreamRequest:
        leg = worker_pb2.PrepareLeg(
            header=self.header(action.attempt_id, remaining_s),
            grant=action.grant,
            prefill_ranks=rank_endpoints(action.prefill),
            prefill_incarnation=action.prefill.incarnation,
            prompt_tokens=len(self._prompt),
            transport=action.transport,
            token_hash=self._hash,
        )
        return worker_pb2.StreamRequest(prepare=leg)

    def decode(self, action: SendDecode, remaining_s: float) -> worker_pb2.StreamRequest:
        leg = worker_pb2.DecodeLeg(
            header=self.header(action.attempt_id, remaining_s),
            transfer_id=action.seal.transfer_id,
            seal=action.seal,
            prompt_token_ids=self._prompt,
            output_token_ids=action.output_token_ids,
            sampling_params=action.sampling.to_proto(),
            allow_recompute=action.allow_recompute,
        )
        return worker_pb2.StreamRequest(decode=leg)

    def colocated(self, action: SendColocated, remaining_s: float) -> worker_pb2.StreamRequest:
        leg = worker_pb2.ColocatedLeg(
            header=self.header(action.attempt_id, remaining_s),
            prompt_token_ids=[*self._prompt, *action.sent_token_ids],
            sampling_params=action.sampling.to_proto(),
        )
        return worker_pb2.StreamRequest(colocated=leg)


def rank_endpoints(view: WorkerView) -> list[kv_transfer_pb2.RankEndpoint]:
    """A worker's ranks in rank order."""
    return [
        kv_transfer_pb2.RankEndpoint(
            rank=rank.rank,
            address=rank.address,
            host_id=rank.host_id,
            incarnation=view.incarnation,
            ucx_worker_address=rank.ucx_worker_address,
        )
        for rank in sorted(view.ranks, key=lambda r: r.rank)
    ]
