"""A worker's own actor to its rank. Serves `KvControlService`; every call needs the worker's control token."""

from __future__ import annotations

import asyncio
from typing import Any

from kvtransfer.lease import Action, Lease
from kvtransfer.machine import Refusal
from kvtransfer.pull import Puller
from kvtransfer.rpc import require_control_token
from kvtransfer.runtime import NodeRuntime
from protos.errors import Code, SplitpointError
from protos.grpc_errors import abort
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc


class KvControlServicer(pb_grpc.KvControlServiceServicer):
    def __init__(self, runtime: NodeRuntime, control_token: str) -> None:
        self._rt = runtime
        self._token = control_token
        self._puller = Puller(runtime)

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:  # noqa: N802
        await require_control_token(context, self._token)
        try:
            lease = await self._reserve(request)
        except SplitpointError as error:
            await abort(context, error)
        self._rt.bell.ring(lease.transfer_id)
        return pb.ReserveResponse(generation=lease.slot.generation)

    async def Pull(self, request: pb.PullRequest, context: Any) -> pb.PullResponse:  # noqa: N802
        await require_control_token(context, self._token)
        try:
            return await self._puller.pull(request)
        except SplitpointError as error:
            await abort(context, error)

    async def PreparePull(self, request: pb.PreparePullRequest, context: Any) -> pb.PreparePullResponse:  # noqa: N802
        await require_control_token(context, self._token)
        try:
            await self._puller.prepare(request.pull)
        except SplitpointError as error:
            await abort(context, error)
        return pb.PreparePullResponse()

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:  # noqa: N802
        await require_control_token(context, self._token)
        rt = self._rt
        transfer_id = request.transfer_id
        with rt.lock:
            sends, receives = rt.leases.live(transfer_id) is not None, rt.sessions.live(transfer_id) is not None
            actions: list[Action] = []
            if sends or not receives:
                _, actions = rt.leases.release(transfer_id, request.reason, rt.now())
            if receives or not sends:
                rt.sessions.release(transfer_id, request.reason, rt.now())
        rt.send_room.abandon(transfer_id)
        rt.cancel_pull(transfer_id)
        rt.follow(transfer_id, actions)
        rt.bell.ring(transfer_id)  # a fetch that waits for this reservation hears that it will not come
        return pb.ReleaseResponse(known=sends or receives)

    async def GetNodeStatus(self, request: pb.GetNodeStatusRequest, context: Any) -> pb.GetNodeStatusResponse:  # noqa: N802
        await require_control_token(context, self._token)
        status = self._rt.status()
        if request.metrics:
            status.metrics_text = self._rt.metrics.exposition()
        return status

    async def FencePeer(self, request: pb.FencePeerRequest, context: Any) -> pb.FencePeerResponse:  # noqa: N802
        await require_control_token(context, self._token)
        if request.incarnation == self._rt.incarnation:
            await abort(context, SplitpointError(Code.CONFLICT, "a rank cannot declare itself dead"))
        self._rt.metrics.event("peer_fenced")
        for transport in self._rt.transports.values():
            transport.peer_died(request.incarnation)
        await self._rt.peers.forget(request.incarnation)
        return pb.FencePeerResponse()

    async def _reserve(self, request: pb.ReserveRequest) -> Lease:
        rt = self._rt
        grant = request.grant
        if len(grant.transfer_id) != 16 or len(grant.capability) != 16:
            raise rt.refused("grant", "transfer_id and capability are 16 bytes each")
        try:
            num_bytes = rt.leases.slot_bytes(request.prompt_tokens)
        except ValueError as exc:
            raise rt.refused("prompt_tokens", str(exc)) from exc
        if not rt.send.fits(num_bytes):
            raise rt.refused("too_large", f"{num_bytes} bytes can never fit {rt.send.capacity_bytes} bytes of send staging")
        with rt.lock:
            refusal = rt.leases.refuses(grant.transfer_id)
        if refusal is not None:
            raise rt.refusal(refusal)
        expires_at = rt.now() + request.remaining_s + rt.settings.lease_grace_s
        wait_s = request.remaining_s
        if request.HasField("staging_wait_s"):
            wait_s = min(wait_s, request.staging_wait_s)
        try:
            slot = await rt.send_room.acquire(grant.transfer_id, num_bytes, wait_s)
        except TimeoutError:
            text = f"no {num_bytes} bytes of send staging in {wait_s:.3f} s; {rt.send.free_bytes} are free"
            raise rt.refused("staging_full", text, Code.STAGING_FULL) from None
        except asyncio.CancelledError:
            with rt.lock:
                over = rt.leases.tombstones.get(grant.transfer_id)
            if over is None:
                raise
            raise rt.refused("late_reserve", f"this transfer is already over: {over}") from None
        with rt.lock:
            lease = rt.leases.reserve(
                grant.transfer_id,
                grant.capability,
                prompt_tokens=request.prompt_tokens,
                token_hash=request.token_hash,
                slot=slot,
                expires_at=expires_at,
                now=rt.now(),
            )
        if isinstance(lease, Refusal):
            rt.follow(grant.transfer_id, ())
            raise rt.refusal(lease)
        return lease
