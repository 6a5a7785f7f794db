"""Arithmetic of blocks at its edges, room that is waited for without spinning, and time on the wire (docs/failure-cases.md)."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.connector.parameters import ReceiveParameters
from kvtransfer.connector.scheduler import SchedulerHalf
from kvtransfer.plan import blocks_for
from kvtransfer.staging import Slot, Staging
from kvtransfer.waiting import RoomQueue
from protos.ids import TransferId
from protos.splitpoint.v1 import common_pb2, kv_transfer_pb2, worker_pb2

BLOCK = 16
TRANSFER = TransferId(b"t" * 16)


class Decode:
    """A decode request as vLLM's scheduler shows it."""

    def __init__(self, prompt_tokens: int, forwarded: int) -> None:
        self.request_id = "another id than prefill's"
        self.num_prompt_tokens = self.num_tokens = prompt_tokens + forwarded
        self.num_preemptions = 0
        self.kv_transfer_params: dict[str, Any] = ReceiveParameters(TRANSFER, prompt_tokens).to_extra_args()["kv_transfer_params"]


NOTHING = SimpleNamespace(scheduled_new_reqs=(), scheduled_cached_reqs=SimpleNamespace(req_ids=()), num_scheduled_tokens={})
"""A step that schedules nothing new."""


@pytest.mark.parametrize("forwarded", [0, 1])
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("blocks", range(1, 9))
def test_around_every_multiple_of_a_block_the_load_fits_both_sides(blocks: int, edge: int, forwarded: int) -> None:
    """Decode may have a block that prefill has not (the forwarded token opens it) or one that it does not need. Whatever is
    cached here, what is loaded lies within the staged blocks and within the engine's, and only what is left is computed."""
    prompt_tokens = blocks * BLOCK + edge
    staged_blocks = blocks_for(prompt_tokens, BLOCK)
    for cached_tokens in range(0, prompt_tokens + forwarded, BLOCK):
        half, request = SchedulerHalf(BLOCK), Decode(prompt_tokens, forwarded)
        half.started(request)
        external = half.matched_tokens(request, cached_tokens)
        assert cached_tokens + external + (1 - forwarded) >= prompt_tokens, "all but the last token comes from somewhere"
        assert cached_tokens + external < request.num_tokens, "one token is left to compute"
        engine_blocks = list(range(100, 100 + blocks_for(request.num_tokens, BLOCK)))
        half.allocated(request, engine_blocks, external)
        plan = half.plan_step(NOTHING)
        if external == 0:
            assert (plan.scatters, plan.releases) == ((), (TRANSFER,))
            continue
        (scatter,) = plan.scatters
        end_block = scatter.first_block + len(scatter.block_ids)
        assert scatter.first_block == cached_tokens // BLOCK
        assert end_block <= min(staged_blocks, len(engine_blocks))
        assert end_block * BLOCK >= cached_tokens + external > (end_block - 1) * BLOCK
        assert list(scatter.block_ids) == engine_blocks[scatter.first_block : end_block]


class CountingStaging(Staging):
    tries = 0

    def allocate(self, num_bytes: int) -> Slot | None:
        self.tries += 1
        return super().allocate(num_bytes)


async def test_who_waits_for_room_tries_again_only_when_something_became_free() -> None:
    staging = CountingStaging(4 * 4096)
    room = RoomQueue(staging, contextlib.nullcontext())
    held = staging.allocate(4 * 4096)
    assert held is not None
    waiting = [asyncio.create_task(room.acquire(bytes([n]), 2 * 4096, timeout_s=20)) for n in range(8)]
    await asyncio.sleep(0)
    assert len(room) == 8
    before = staging.tries
    for _ in range(1000):
        room.pump()
        await asyncio.sleep(0)
    assert staging.tries == before, "nothing was freed, so nothing was tried"
    staging.free(held)
    room.pump()
    for first, second in zip(waiting[::2], waiting[1::2], strict=True):
        for slot in (await first, await second):
            staging.free(slot)
        room.pump()
    assert staging.idle
    assert staging.tries - before <= 8 + 8 + 5, "one success each, and one look for each wait that ended and each freeing"


@pytest.mark.parametrize("file", [common_pb2, kv_transfer_pb2, worker_pb2], ids=lambda file: file.__name__.rpartition(".")[2])
def test_no_point_in_time_crosses_a_process(file: Any) -> None:
    """Remaining time travels (rule 2): two hosts' clocks need not agree. Durations say so by their unit."""
    words = ("expires", "expiry", "deadline", "timestamp", "until", "unix", "epoch_s")
    fields = [
        f"{message.name}.{field.name}"
        for message in file.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if any(word in field.name for word in words) or field.name.endswith(("_at", "_at_s", "_time"))
    ]
    assert fields == []
    remaining = [m.name for m in file.DESCRIPTOR.message_types_by_name.values() if "remaining_s" in m.fields_by_name]
    assert remaining or file is common_pb2
